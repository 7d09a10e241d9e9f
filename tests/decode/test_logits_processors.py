import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_toys import PrefixModel, TableModel, batch_of, decode

from jaxformer.config import Config, ConfigError, DecodeConfig, ModelConfig, StackConfig
from jaxformer.config.overrides import check
from jaxformer.decode import logits_processors
from jaxformer.types import Batch, Slots, Stream

VOCAB, PAD = 6, 9
PROMPTS = ([1], [2, 3], [1, 1, 2], [3, 4, 3, 4])
WORDS = ((3,), (1, 2), (4, 4), (2, 1, 4), (1, 2, 4, 2, 4, 1, 5, 5, 1, 1, 1, 1))
ALL = DecodeConfig(
    repetition_penalty=1.3, no_repeat_ngram=2, bad_words=((1, 2), (2, 1, 4)), min_length=2, suppress=(5,),
    forced_first=4, forced_last=(0,),
)  # fmt: skip
OPTIONS = (
    DecodeConfig(),
    DecodeConfig(repetition_penalty=1.5),
    *(DecodeConfig(no_repeat_ngram=size) for size in (1, 2, 3, 20)),
    DecodeConfig(bad_words=WORDS),
    DecodeConfig(min_length=2),
    DecodeConfig(forced_first=4, suppress=(1, 5)),
    DecodeConfig(forced_last=(0,)),
    DecodeConfig(forced_last=(3, 0)),
    ALL,
)


def processed(config, scores, history, step, is_last, eos):
    """Reference: the processed scores `[V]` of one row, one rule and one token at a time."""
    scores, history = np.array(scores, np.float64), list(history)
    if config.repetition_penalty != 1.0:
        for token in set(history):
            scores[token] *= 1 / config.repetition_penalty if scores[token] > 0 else config.repetition_penalty
    size = config.no_repeat_ngram
    for i in range(len(history) - size + 1 if size else 0):
        if history[i : i + size - 1] == history[len(history) - size + 1 :]:
            scores[history[i + size - 1]] = -np.inf
    for *before, final in config.bad_words:
        if len(history) >= len(before) and history[len(history) - len(before) :] == before:
            scores[final] = -np.inf
    if step < config.min_length:
        scores[list(eos)] = -np.inf
    first = () if config.forced_first is None else (config.forced_first,)
    for tokens, is_forced in ((first, step == 0), (config.forced_last, is_last)):
        if tokens and is_forced:
            scores[:] = -np.inf
            scores[list(tokens)] = 0.0
    scores[list(config.suppress)] = -np.inf
    return scores


def padded_left(*prompts):
    """Like `batch_of`, with padding on the left."""
    length = max(len(prompt) for prompt in prompts)
    valid = np.arange(length) >= length - np.array([[len(prompt)] for prompt in prompts])
    tokens = np.array(
        [[1] * (length - len(prompt)) + list(prompt) for prompt in prompts]
    )  # 1 is a token of prompts too
    position = np.maximum(np.cumsum(valid, axis=1) - 1, 0)
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), Batch(None, Stream(tokens, Slots(position, valid))))


@functools.partial(jax.jit, static_argnames="options")
def process(scores, stream, output, step, max_length, options):
    prompt = logits_processors.right_align(stream)
    history = logits_processors.token_history(prompt, output, step, max_length)
    return [logits_processors.process(config, scores, history, (0, 2)) for config in options]


@pytest.mark.parametrize("pad", [batch_of, padded_left])
def test_each_rule_equals_the_reference_after_prompts_of_any_length(pad):
    rng, stream = np.random.default_rng(0), pad(*PROMPTS).target
    for steps in ([0, 1, 3, 6], [1, 3, 6, 0], [3, 6, 0, 1], [6, 0, 1, 3]):
        scores = rng.normal(size=(4, VOCAB)).astype(np.float32)
        output, max_lengths = rng.integers(0, 5, (4, 7)), np.array([1, 2, 4, 7])
        results = process(scores, stream, output, jnp.asarray(steps), max_lengths, OPTIONS)
        for config, rows in zip(OPTIONS, results, strict=True):
            for row, (prompt, step) in enumerate(zip(PROMPTS, steps, strict=True)):
                history, is_last = [*prompt, *output[row, :step]], step + 1 >= max_lengths[row]
                expected = processed(config, scores[row], history, step, is_last, (0, 2))
                np.testing.assert_allclose(rows[row], expected, rtol=1e-5, err_msg=f"{config} {history}")


def test_rules_do_the_same_outside_of_jit():
    stream, options = padded_left([3, 3], [2]).target, (ALL,)
    arguments = jnp.ones((2, VOCAB)), stream, jnp.array([[1, 3, 0], [4, 4, 0]]), jnp.array([2, 1]), jnp.array([5, 5])
    np.testing.assert_array_equal(process.__wrapped__(*arguments, options)[0], process(*arguments, options)[0])


def test_the_default_options_have_no_processors():
    assert [logits_processors.has_processors(config) for config in OPTIONS] == [False] + [True] * (len(OPTIONS) - 1)


# --- beam search ------------------------------------------------------------------------------------------------------

BEAM = DecodeConfig(method="beam", beams=3, hypotheses=3, max_length=6, length_norm="power", length_penalty=1.0)
SEARCHES = {
    "first": (dataclasses.replace(BEAM, stopping="first"), (0,)),
    "exact": (dataclasses.replace(BEAM, stopping="exact", length_penalty=1.5, hypotheses=1, no_repeat_ngram=2), (0,)),
    "estimate": (
        dataclasses.replace(
            ALL, method="beam", beams=3, hypotheses=3, max_length=6, length_norm="power", length_penalty=1.0
        ),
        (0, 2),
    ),
    "negative": (dataclasses.replace(BEAM, stopping="exact", length_penalty=-0.5, min_length=1), (0, 2)),
}


def beam_search_by_hand(model, prompt, config, eos, max_length):
    """Reference beam search for one prompt, on lists."""
    width, alpha, live, pool = config.beams, config.length_penalty, [(0.0, ())], []
    for size in range(1, max_length + 1):
        ranked = []
        for score, out in live:
            gains = model.log_probs(prompt, [*out, 0])[-1]
            gains = processed(config, gains, [*prompt, *out], size - 1, size == max_length, eos)
            ranked += [(score + gains[t], (*out, t)) for t in range(VOCAB) if np.isfinite(gains[t])]
        ranked.sort(key=lambda pair: -pair[0])
        live = [pair for pair in ranked if pair[1][-1] not in eos][:width]
        pool += [(s / size**alpha, out) for s, out in ranked[:width] if out[-1] in eos or size == max_length]
        pool = sorted(pool, key=lambda pair: -pair[0])[:width]
        reach = max_length if config.stopping == "exact" and alpha > 0 else size
        is_beaten = live and len(pool) == width and pool[-1][0] >= live[0][0] / reach**alpha
        if not live or is_beaten or (config.stopping == "first" and len(pool) == width):
            break
    return pool[: config.hypotheses]


@functools.lru_cache
def compiled(config, eos):
    return jax.jit(lambda table, batch, lengths: decode(TableModel(table), batch, config, eos, PAD, lengths))


@pytest.mark.parametrize("name", SEARCHES)
def test_beam_search_equals_the_reference(name):
    (config, eos), max_lengths = SEARCHES[name], np.array([6, 4, 6, 5])
    for seed in range(8):
        model = PrefixModel(vocab=VOCAB, seed=seed)
        batch = (batch_of if seed % 2 else padded_left)(*PROMPTS)
        result = jax.device_get(compiled(config, eos)(model.table, batch, max_lengths))
        for row, prompt in enumerate(PROMPTS):
            expected = beam_search_by_hand(model, prompt, config, eos, max_lengths[row])
            outputs = [tuple(t[:n].tolist()) for t, n in zip(result.tokens[row], result.lengths[row], strict=True) if n]
            assert outputs == [out for _, out in expected]
            np.testing.assert_allclose(result.scores[row, : len(expected)], [s for s, _ in expected], rtol=1e-4)


def test_stopping_first_takes_the_fewest_steps_and_stopping_exact_the_most():
    class Counting(PrefixModel):
        def step(self, tokens, state):
            jax.debug.callback(lambda: steps.append(1))
            return super().step(tokens, state)

    counts = {}
    for stopping in ("first", "estimate", "exact"):
        steps = []
        config = dataclasses.replace(BEAM, stopping=stopping, max_length=12, length_penalty=2.0, hypotheses=3)
        run = jax.jit(functools.partial(decode, Counting(VOCAB), config=config, eos=(0, 2), pad=PAD))
        jax.block_until_ready(run(batch_of([1])))
        jax.effects_barrier()
        counts[stopping] = len(steps)
    assert counts["first"] < counts["estimate"] < counts["exact"]


# --- greedy search and sampling ---------------------------------------------------------------------------------------


def test_greedy_search_and_draws_obey_all_rules_and_score_by_processed_logits():
    model, eos = PrefixModel(vocab=VOCAB, seed=5), (0, 2)
    greedy = dataclasses.replace(ALL, max_length=7)
    sampled = dataclasses.replace(greedy, method="sample", hypotheses=30)
    for config in (greedy, sampled):
        run = jax.jit(functools.partial(decode, model, config=config, eos=eos, pad=PAD))
        result = jax.device_get(run(padded_left(*PROMPTS)))
        for row, prompt in enumerate(PROMPTS):
            for tokens, length, score in zip(result.tokens[row], result.lengths[row], result.scores[row], strict=True):
                total = 0.0
                for step, token in enumerate(tokens[:length]):
                    history = [*prompt, *tokens[:step]]
                    logits = processed(config, model.logits[code(model, history)], history, step, step == 6, eos)
                    total += logits[token] - np.log(np.exp(logits).sum())
                    assert config is sampled or token == logits.argmax()
                assert score == pytest.approx(total, rel=1e-4, abs=1e-4)
    assert len({tuple(tokens) for tokens in result.tokens[0].tolist()}) > 1


def code(model, history):
    value = 0
    for token in history:
        value = (value * 31 + int(token) + 7) % model.buckets
    return value


def test_if_all_tokens_are_banned_a_row_continues_with_log_probability_minus_infinity():
    config = DecodeConfig(max_length=2, suppress=tuple(range(VOCAB)))
    result = decode(PrefixModel(vocab=VOCAB), batch_of([1]), config, (), PAD)
    assert np.isneginf(result.scores[0, 0])
    assert result.lengths[0, 0] == 2


# --- options that are rejected ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"length_norm": "sum"}, "length_norm: got 'sum', expected one of gnmt, power"),
        ({"stopping": "never"}, "stopping: got 'never', expected one of first, estimate, exact"),
        ({"min_length": 65}, "min_length: got 65, expected at most decode.max_length"),
        ({"no_repeat_ngram": -1}, "no_repeat_ngram: got -1, expected at least 0"),
        ({"bad_words": ((1,), ())}, "bad_words: .* none of them empty"),
        ({"bad_words": ((1, -2),)}, "bad_words"),
        ({"suppress": (-1,)}, "suppress"),
        ({"forced_last": (3,), "suppress": (3,)}, "forced_last: got .3,."),
        ({"forced_last": (-3,)}, "forced_last: got .-3,., expected token ids"),
        ({"forced_first": 3, "suppress": (3,)}, "forced_first: got 3"),
    ],
)
def test_invalid_options_are_rejected(options, words):
    config = Config(model=ModelConfig(encoder=StackConfig(), decoder=StackConfig()), decode=DecodeConfig(**options))
    with pytest.raises(ConfigError, match=words):
        check(config)
