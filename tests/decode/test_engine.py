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
from jaxformer.decode import engine, growing, lanes, programs
from jaxformer.decode.batching import stack
from jaxformer.models import build

VOCAB, SIZE = 16, 13
END = engine.Vocabulary(eos=(2,), pad=0, start=1, size=SIZE)
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


def prompts(name, count=6):
    rng = np.random.default_rng(4)
    side = "target" if name in ("decoder", "toy") else "source"
    return [{side: rng.integers(1, SIZE, 1 + 2 * i % 7).astype(np.int32)} for i in range(count)]


def run(name, given, config, **options):
    return engine.run(*model(name), given, config, options.pop("vocabulary", END), **options)


def assert_same(found, wanted):
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert [h.tokens.tolist() for h in a] == [h.tokens.tolist() for h in b]
        np.testing.assert_allclose([h.score for h in a], [h.score for h in b], rtol=2e-4, atol=2e-4)


PAIRS = [("seq2seq", "beam"), ("decoder", "greedy"), ("decoder", "sample"), ("recurrent", "beam")]


def test_room_doubles_up_to_the_length():
    assert growing.sizes(64, 64) == (64,)
    assert growing.sizes(10, 64) == (10,)
    assert growing.sizes(300, 64) == (64, 128, 256, 300)


@pytest.mark.parametrize(("first", "slots"), [(1, 3), (2, 5), (16, 5), (64, 1)])
def test_a_room_always_fits_another_token_and_is_no_larger_than_it_must(first, slots):
    room = growing.Room(7, growing.sizes(100, first), slots)
    chosen = [room.size(needed) for needed in range(7, room.total(100) - slots + 1)]
    assert chosen == sorted(chosen) and set(chosen) == set(room.sizes)
    for needed, size in enumerate(chosen, 7):
        assert room.total(size) - needed >= slots
        if size > first and size < 100:  # half of it would have less than a quarter left, and one token
            assert room.total(size // 2) - needed < max(size // 2 / 4, 1) * slots


def whole(name, method):
    return run(name, prompts(name), dataclasses.replace(METHODS[method], batch=8), buckets=(12,))


@pytest.mark.parametrize(("name", "method"), [pair for pair in PAIRS if "sample" not in pair])
def test_scores_are_the_log_probabilities_of_one_forward_pass(name, method):
    module, variables = model(name)
    for prompt, hypotheses in zip(prompts(name), whole(name, method), strict=True):
        for hypothesis in hypotheses:
            before = prompt.get("target", np.array([1]))
            text = np.concatenate([before, hypothesis.tokens])
            logits = engine.forward(module, variables, stack([{**prompt, "target": text[:-1]}], 1, (0, 0), (14,)))[0]
            log_probs = jax.nn.log_softmax(logits[:, :SIZE])  # rows beyond the vocabulary do not take part
            places = np.arange(len(before) - 1, len(text) - 1)
            total = log_probs[places, hypothesis.tokens].sum()
            penalty = ((5 + len(hypothesis.tokens)) / 6) ** 0.6 if method == "beam" else 1.0
            assert hypothesis.score == pytest.approx(float(total) / penalty, abs=1e-3)


def test_rows_beyond_the_vocabulary_are_never_chosen():
    given = prompts("toy", 1)
    config = DecodeConfig(method="sample", temperature=50.0, max_length=8, hypotheses=40)
    sampled = run("toy", given, config)
    chosen = np.concatenate([h.tokens for hypotheses in sampled for h in hypotheses])
    assert chosen.max() == SIZE - 1
    free = dataclasses.replace(END, size=None)
    sampled = run("toy", given, config, vocabulary=free)
    assert np.concatenate([h.tokens for hypotheses in sampled for h in hypotheses]).max() == VOCAB - 1


def test_lengths_are_limited_by_max_ratio_and_by_room():
    forever = dataclasses.replace(END, eos=())
    given = [{"source": np.full(size, 3, np.int32)} for size in (1, 4, 2)]
    config = DecodeConfig(max_length=13, max_ratio=0.5)
    assert [len(h[0].tokens) for h in run("toy", given, config, vocabulary=forever)] == [10, 12, 11]
    given = [{"target": np.full(size, 3, np.int32)} for size in (1, 4, 6)]
    config = DecodeConfig(max_length=5)
    assert [len(h[0].tokens) for h in run("toy", given, config, vocabulary=forever, room=6)] == [5, 3, 1]
    with pytest.raises(ConfigError, match="got 6 tokens, expected at most the model's 5 positions"):
        run("toy", given, config, room=5)


def test_prompts_without_a_target_start_from_the_start_token():
    given = prompts("seq2seq")
    explicit = [{**prompt, "target": np.array([1], np.int32)} for prompt in given]
    config = dataclasses.replace(METHODS["beam"], batch=8)
    assert_same(run("seq2seq", explicit, config, buckets=(12,)), whole("seq2seq", "beam"))
    with pytest.raises(ConfigError, match="begin it with a token"):
        run("seq2seq", given, METHODS["greedy"], vocabulary=dataclasses.replace(END, start=None))


def test_no_prompts_no_results():
    assert run("toy", [], METHODS["greedy"]) == []


def test_one_program_serves_seeds_and_batches_of_a_shape():
    calls, before = [], programs.Programs.advance._cache_size()
    config = dataclasses.replace(METHODS["sample"], batch=2, top_k=5)  # no other test's
    draws = []
    for seed in (0, 1):
        config = dataclasses.replace(config, seed=seed)
        given = prompts("toy")
        draws.append(run("toy", given, config, buckets=(16,), progress=lambda *numbers: calls.append(numbers)))
    assert programs.Programs.advance._cache_size() == before + 1
    assert calls == [(2, 6), (4, 6), (6, 6)] * 2
    assert [h[0].tokens.tolist() for h in draws[0]] != [h[0].tokens.tolist() for h in draws[1]]


def test_forward_calls_a_method():
    module, variables = model("seq2seq")
    batch = jax.tree.map(jnp.asarray, stack(prompts("seq2seq", 2), 2, (0, 0)))
    assert engine.forward(module, variables, batch, "encode").shape == (2, 8, 8)


@pytest.mark.parametrize(("name", "method"), PAIRS)
def test_results_do_not_depend_on_batch_mates_padding_order_or_the_cache_s_growth(name, method, monkeypatch):
    """23 prompts whose outputs end at different lengths, in 4 places, each taken by another as soon as it is free; a
    cache that grows and shrinks while rows of all ages read it."""
    given = prompts(name, 23)
    # No token twice, so that they do end, and what was said before counts.
    config = dataclasses.replace(METHODS[method], max_length=12, no_repeat_ngram=1)
    ends = dataclasses.replace(END, eos=(2, 6))
    alone = [run(name, [x], config, buckets=(12,), rows=[i], vocabulary=ends)[0] for i, x in enumerate(given)]
    assert len({len(hypotheses[0].tokens) for hypotheses in alone}) > 2
    assert len({tuple(hypotheses[0].tokens) for hypotheses in alone}) > 2
    monkeypatch.setattr(growing, "FIRST", 8 if method == "beam" else 3)
    rooms, make = [], lanes.Lane._make_room
    monkeypatch.setattr(lanes.Lane, "_make_room", lambda lane, needed: make(lane, needed) or rooms.append(lane.size))
    calls, put = [], programs.Programs.put
    monkeypatch.setattr(programs.Programs, "put", lambda *given: calls.append(1) or put(*given))
    # One at a time, all but those that began a lane, and those of one token, which wait for batches of their own.
    short = sum(len(next(iter(prompt.values()))) == 1 for prompt in given)
    for count, order in ((1, np.arange(23)), (2, np.random.default_rng(1).permutation(23))):
        monkeypatch.setattr(engine, "LANES", count)
        calls.clear()
        moved = [given[i] for i in order]
        options = {"buckets": (16,), "rows": order, "vocabulary": ends}
        assert_same(run(name, moved, dataclasses.replace(config, batch=4), **options), [alone[i] for i in order])
        assert len(calls) >= 23 - 4 * count - short
    changes = {bool(after > before) for before, after in itertools.pairwise(rooms) if after != before}
    assert changes == (set() if name == "recurrent" else {True, False})  # the room grew, and was small again
