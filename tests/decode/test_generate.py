import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_toys import PrefixModule
from flax import linen as nn

from jaxformer.config import (
    AttentionConfig,
    ConfigError,
    DecodeConfig,
    EmbedConfig,
    FeedForwardConfig,
    ModelConfig,
    RecurrentConfig,
    StackConfig,
)
from jaxformer.decode import cache_schedule, scheduler
from jaxformer.decode.batching import pad_batch
from jaxformer.decode.cache_schedule import CacheSchedule, doubling_capacities
from jaxformer.decode.compiled import CompiledDecoder, Vocabulary, forward
from jaxformer.decode.runner import Runner
from jaxformer.decode.scheduler import ActiveBatch
from jaxformer.models import build

VOCAB, SIZE = 16, 13
VOCABULARY = Vocabulary(eos=(2,), pad=0, start=1, size=SIZE)
STACK = StackConfig(
    layers=1,
    width=8,
    embed=EmbedConfig(vocab=VOCAB),
    attention=AttentionConfig(heads=2),
    ffn=FeedForwardConfig(width=16),
)
CELL = RecurrentConfig(cell="gru", width=8, embed=EmbedConfig(vocab=VOCAB))
MODELS = {
    "seq2seq": ModelConfig(encoder=STACK, decoder=STACK),
    "decoder": ModelConfig(decoder=STACK),
    "recurrent": ModelConfig(
        recurrent_encoder=dataclasses.replace(CELL, bidirectional=True),
        recurrent_decoder=dataclasses.replace(CELL, attention="additive"),
    ),
}
SEEDS = {"seq2seq": 7, "decoder": 3, "recurrent": 8}
METHODS = {
    "greedy": DecodeConfig(max_length=8),
    "beam": DecodeConfig(method="beam", beams=3, hypotheses=2, max_length=8),
    "sample": DecodeConfig(method="sample", max_length=8, top_p=0.9, repetition_penalty=1.2),
}


@functools.lru_cache
def model(name):
    """A module and weights large enough that outputs differ and some end before the limit."""
    if name == "toy":
        table = np.random.default_rng(0).normal(size=(97, VOCAB)).astype(np.float32)
        return PrefixModule(), {"params": {"table": table}}
    module, rng = build.build(MODELS[name]), np.random.default_rng(SEEDS[name])
    shapes = nn.meta.unbox(build.shapes(module))
    return module, jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)


def make_prompts(name, count=6):
    rng = np.random.default_rng(4)
    side = "target" if name in ("decoder", "toy") else "source"
    return [{side: rng.integers(1, SIZE, 1 + 2 * i % 7).astype(np.int32)} for i in range(count)]


def generate(name, prompts, options, row_indices=None, progress=None, vocabulary=VOCABULARY, **fields):
    return Runner(*model(name), vocabulary, **fields).generate(prompts, options, row_indices, progress)


def assert_same(results, expected):
    assert len(results) == len(expected)
    for a, b in zip(results, expected, strict=True):
        assert [h.tokens.tolist() for h in a] == [h.tokens.tolist() for h in b]
        np.testing.assert_allclose([h.score for h in a], [h.score for h in b], rtol=2e-4, atol=2e-4)


PAIRS = [("seq2seq", "beam"), ("decoder", "greedy"), ("decoder", "sample"), ("recurrent", "beam")]


def test_capacities_double_up_to_the_maximum_length():
    assert doubling_capacities(64, 64) == (64,)
    assert doubling_capacities(10, 64) == (10,)
    assert doubling_capacities(300, 64) == (64, 128, 256, 300)


@pytest.mark.parametrize(("initial", "slots"), [(1, 3), (2, 5), (16, 5), (64, 1)])
def test_the_chosen_capacity_fits_another_token_and_is_the_smallest_with_free_slots(initial, slots):
    schedule = CacheSchedule(7, doubling_capacities(100, initial), slots)
    chosen = [schedule.smallest_capacity(used) for used in range(7, schedule.total_slots(100) - slots + 1)]
    assert chosen == sorted(chosen) and set(chosen) == set(schedule.capacities)
    for used, capacity in enumerate(chosen, 7):
        assert schedule.total_slots(capacity) - used >= slots
        assert schedule.max_steps(capacity, used) == (schedule.total_slots(capacity) - used) // slots >= 1
        if capacity > initial and capacity < 100:  # half of it would leave less than a quarter, or no token
            assert schedule.total_slots(capacity // 2) - used < max(capacity // 2 / 4, 1) * slots


def generate_together(name, method):
    return generate(name, make_prompts(name), dataclasses.replace(METHODS[method], batch=8), buckets=(12,))


@pytest.mark.parametrize(("name", "method"), [pair for pair in PAIRS if "sample" not in pair])
def test_scores_are_the_log_probabilities_of_one_forward_pass(name, method):
    module, variables = model(name)
    for prompt, hypotheses in zip(make_prompts(name), generate_together(name, method), strict=True):
        for hypothesis in hypotheses:
            before = prompt.get("target", np.array([1]))
            text = np.concatenate([before, hypothesis.tokens])
            logits = forward(module, variables, pad_batch([{**prompt, "target": text[:-1]}], 1, (0, 0), (14,)))[0]
            log_probs = np.asarray(logits)[:, :SIZE]  # rows that pad the vocabulary do not count
            log_probs = log_probs - np.log(np.exp(log_probs).sum(axis=1, keepdims=True))
            slots = np.arange(len(before) - 1, len(text) - 1)
            total = log_probs[slots, hypothesis.tokens].sum()
            penalty = ((5 + len(hypothesis.tokens)) / 6) ** 0.6 if method == "beam" else 1.0
            assert hypothesis.score == pytest.approx(float(total) / penalty, abs=1e-3)


def test_rows_that_pad_the_vocabulary_are_never_chosen():
    options = DecodeConfig(method="sample", temperature=50.0, max_length=8, hypotheses=40)
    for vocabulary, largest in ((VOCABULARY, SIZE - 1), (dataclasses.replace(VOCABULARY, size=None), VOCAB - 1)):
        results = generate("toy", make_prompts("toy", 1), options, vocabulary=vocabulary)
        assert np.concatenate([h.tokens for hypotheses in results for h in hypotheses]).max() == largest


def test_lengths_are_limited_by_max_ratio_and_by_target_positions():
    def lengths(prompts, options, **fields):
        endless = dataclasses.replace(VOCABULARY, eos=())
        return [len(h[0].tokens) for h in generate("toy", prompts, options, vocabulary=endless, **fields)]

    prompts = [{"source": np.full(size, 3, np.int32)} for size in (1, 4, 2)]
    assert lengths(prompts, DecodeConfig(max_length=13, max_ratio=0.5)) == [10, 12, 11]
    prompts = [{"target": np.full(size, 3, np.int32)} for size in (1, 4, 6)]
    stop = DecodeConfig(max_length=5, past_positions="stop")
    assert lengths(prompts, stop, max_target_length=6) == [5, 3, 1]
    with pytest.raises(ConfigError, match="got 6 tokens, expected at most the model's 5 positions"):
        generate("toy", prompts, stop, max_target_length=5)


def test_prompts_without_a_target_start_from_the_start_token():
    prompts = make_prompts("seq2seq")
    explicit = [{**prompt, "target": np.array([1], np.int32)} for prompt in prompts]
    options = dataclasses.replace(METHODS["beam"], batch=8)
    assert_same(generate("seq2seq", explicit, options, buckets=(12,)), generate_together("seq2seq", "beam"))
    no_start = dataclasses.replace(VOCABULARY, start=None)
    with pytest.raises(ConfigError, match="begin it with a token"):
        generate("seq2seq", prompts, METHODS["greedy"], vocabulary=no_start)


def test_no_prompts_give_no_results():
    assert generate("toy", [], METHODS["greedy"]) == []


def test_one_program_serves_all_seeds_and_batches_of_a_shape():
    calls, before = [], CompiledDecoder.decode_steps.jitted._cache_size()
    options = dataclasses.replace(METHODS["sample"], batch=2, top_k=5)  # not those of another test
    draws = []
    for seed in (0, 1):
        options = dataclasses.replace(options, seed=seed)
        progress = lambda *numbers: calls.append(numbers)  # noqa: E731
        draws.append(generate("toy", make_prompts("toy"), options, progress=progress, buckets=(16,)))
    assert CompiledDecoder.decode_steps.jitted._cache_size() == before + 1
    assert calls == [(2, 6), (4, 6), (6, 6)] * 2
    assert [h[0].tokens.tolist() for h in draws[0]] != [h[0].tokens.tolist() for h in draws[1]]


def test_tokens_outside_the_vocabulary_are_rejected():
    for options in ({"forced_first": 13}, {"forced_last": (2, 13)}, {"bad_words": ((1, 13),)}, {"suppress": (13,)}):
        with pytest.raises(ConfigError, match="got token 13 .* below the vocabulary's 13"):
            generate("toy", [], DecodeConfig(**options))
    for options in ({"forced_last": (-1,)}, {"bad_words": ((1, -1),)}, {"suppress": (-1,)}):
        with pytest.raises(ConfigError, match="got token -1 .* expected ids from 0"):
            generate("toy", [], DecodeConfig(**options))
    with pytest.raises(ConfigError, match="an empty sequence in bad_words"):
        generate("toy", [], DecodeConfig(bad_words=((),)))


def test_forward_calls_a_method():
    module, variables = model("seq2seq")
    batch = jax.tree.map(jnp.asarray, pad_batch(make_prompts("seq2seq", 2), 2, (0, 0)))
    assert forward(module, variables, batch, "encode").shape == (2, 8, 8)


@pytest.mark.parametrize(("name", "method"), [pair for pair in PAIRS if "greedy" not in pair])  # "sample" is its search
def test_results_do_not_depend_on_batch_mates_padding_order_or_cache_growth(name, method, monkeypatch):
    """23 prompts with outputs of different lengths share 4 rows. Each row is refilled as soon as it is free, and the
    cache grows and shrinks while it holds rows of all ages."""
    # Those of a single token have a width, and so programs, of their own.
    prompts = [prompt for prompt in make_prompts(name, 27) if len(next(iter(prompt.values()))) > 1]
    # No token occurs twice, so that outputs do end and the tokens so far matter.
    options = dataclasses.replace(METHODS[method], max_length=12, no_repeat_ngram=1)
    vocabulary = dataclasses.replace(VOCABULARY, eos=(2, 6))
    alone = [
        generate(name, [prompt], options, [i], vocabulary=vocabulary, buckets=(12,))[0]
        for i, prompt in enumerate(prompts)
    ]
    assert len({len(hypotheses[0].tokens) for hypotheses in alone}) > 2
    assert len({tuple(hypotheses[0].tokens) for hypotheses in alone}) > 2
    monkeypatch.setattr(cache_schedule, "INITIAL_NEW_TOKENS", 8 if method == "beam" else 3)
    capacities, resize = [], ActiveBatch._resize_cache
    monkeypatch.setattr(
        ActiveBatch, "_resize_cache", lambda batch, needed: resize(batch, needed) or capacities.append(batch.capacity)
    )
    refills, refill_rows = [], CompiledDecoder.refill_rows
    monkeypatch.setattr(CompiledDecoder, "refill_rows", lambda *arguments: refills.append(1) or refill_rows(*arguments))
    # One prompt per refill: all but the first ones of a batch.
    for count, order in ((1, np.arange(23)), (2, np.random.default_rng(1).permutation(23))):
        monkeypatch.setattr(scheduler, "CONCURRENT_BATCHES", count)
        refills.clear()
        shuffled = [prompts[i] for i in order]
        small_batches = dataclasses.replace(options, batch=4)
        results = generate(name, shuffled, small_batches, order, vocabulary=vocabulary, buckets=(8,))
        assert_same(results, [alone[i] for i in order])
        assert len(refills) >= 23 - 4 * count
    changes = {bool(after > before) for before, after in itertools.pairwise(capacities) if after != before}
    assert changes == (set() if name == "recurrent" else {True, False})  # the capacity grew, and shrank
