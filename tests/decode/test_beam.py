import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_toys import PrefixModel, TableModel, batch_of, decode, outputs
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.config import DecodeConfig
from jaxformer.decode.search.beam import gnmt_length_penalty

PROMPTS = ([1], [2, 3], [1, 1, 2], [3])
MODEL = PrefixModel(vocab=4, seed=1)
BEAM = DecodeConfig(method="beam", beams=3, max_length=7, hypotheses=3)


@functools.lru_cache
def compiled(config, eos):
    return jax.jit(lambda table, batch, lengths: decode(TableModel(table), batch, config, eos, 9, lengths))


def run(batch, config, max_lengths=None, eos=(0,), model=MODEL):
    return jax.device_get(compiled(config, eos)(model.table, batch, max_lengths))


def listed(hypotheses, row):
    return [
        (float(score), tuple(tokens[:length].tolist()))
        for score, tokens, length in zip(
            hypotheses.scores[row], hypotheses.tokens[row], hypotheses.lengths[row], strict=True
        )
    ]


def penalty(size, alpha, norm="gnmt"):
    return size**alpha if norm == "power" else ((5 + size) / 6) ** alpha


def best(model, prompt, length, alpha, eos, count, norm="gnmt"):
    """The best outputs, result by enumeration."""
    scored = [(model.score(prompt, out) / penalty(len(out), alpha, norm), out) for out in outputs(4, length, eos)]
    return sorted(scored, reverse=True)[:count]


def assert_same(actual, expected):
    assert [out for _, out in actual] == [out for _, out in expected]
    np.testing.assert_allclose([s for s, _ in actual], [s for s, _ in expected], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("eos", "norm", "alpha", "stopping"),
    [
        ((0,), "gnmt", 0.0, "estimate"),
        ((0,), "gnmt", 0.6, "exact"),
        ((0, 2), "gnmt", 2.0, "exact"),
        ((0, 2), "power", 1.0, "exact"),
        ((0, 2), "gnmt", 0.6, "estimate"),
    ],
)
def test_a_wide_enough_beam_is_exact(eos, norm, alpha, stopping):
    shared = DecodeConfig(method="beam", beams=64, max_length=3, hypotheses=6)
    config = dataclasses.replace(shared, length_norm=norm, length_penalty=alpha, stopping=stopping)
    result = run(batch_of(*PROMPTS), config, eos=eos)
    for row, prompt in enumerate(PROMPTS):
        assert_same(listed(result, row), best(MODEL, prompt, 3, alpha, eos, 6, norm))


def test_maximum_lengths_are_per_row():
    config = DecodeConfig(method="beam", beams=64, max_length=3, hypotheses=2)
    result = run(batch_of([1], [1], [1], [1]), config, max_lengths=jnp.array([0, 1, 2, 3]))
    assert result.lengths[0].tolist() == [0, 0]
    assert np.isneginf(result.scores[0]).all()
    for row in (1, 2, 3):
        assert_same(listed(result, row), best(MODEL, [1], row, 0.6, (0,), 2))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_one_beam_is_greedy_with_processors_that_keep_the_order(seed):
    """Bans keep the order of the other tokens, so both choose the same; only greedy search normalises again."""
    model = PrefixModel(vocab=4, seed=seed)
    shared = DecodeConfig(max_length=7, no_repeat_ngram=3, min_length=2, bad_words=((1, 2),))
    one = run(batch_of(*PROMPTS), dataclasses.replace(shared, method="beam", beams=1), model=model)
    greedy = jax.device_get(compiled_greedy(shared)(model.table, batch_of(*PROMPTS)))
    assert one.tokens.tolist() == greedy.tokens.tolist()
    assert one.lengths.tolist() == greedy.lengths.tolist()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), alpha=st.sampled_from([0.0, 0.6]))
def test_one_beam_is_greedy(seed, alpha):
    model = PrefixModel(vocab=4, seed=seed)
    shared = DecodeConfig(max_length=7)
    config = dataclasses.replace(shared, method="beam", beams=1, length_penalty=alpha)
    one = run(batch_of(*PROMPTS), config, model=model)
    greedy = jax.device_get(compiled_greedy(shared)(model.table, batch_of(*PROMPTS)))
    assert one.tokens.tolist() == greedy.tokens.tolist()
    assert one.lengths.tolist() == greedy.lengths.tolist()
    np.testing.assert_allclose(one.scores * penalty(one.lengths, alpha), greedy.scores, rtol=1e-4, atol=1e-5)


@functools.lru_cache
def compiled_greedy(config):
    return jax.jit(lambda table, batch: decode(TableModel(table), batch, config, (0,), 9))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_hypotheses_are_sorted_distinct_finished_and_score_what_the_model_says(seed):
    model = PrefixModel(vocab=4, seed=seed)
    result = run(batch_of(*PROMPTS), BEAM, model=model)
    for row, prompt in enumerate(PROMPTS):
        hypotheses = listed(result, row)
        scores = [score for score, _ in hypotheses]
        assert scores == sorted(scores, reverse=True)
        assert len({out for _, out in hypotheses}) == len(hypotheses)
        for score, out in hypotheses:
            assert 0 not in out[:-1]
            assert out[-1] == 0 or len(out) == 7
            assert score == pytest.approx(model.score(prompt, out) / penalty(len(out), 0.6), rel=1e-4, abs=1e-5)
        assert (result.tokens[row, 0, result.lengths[row, 0] :] == 9).all()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_stopping_by_estimate_is_exact_without_a_length_penalty(seed):
    model = PrefixModel(vocab=4, seed=seed)
    exact = dataclasses.replace(BEAM, length_penalty=0.0, stopping="exact")
    slow = run(batch_of(*PROMPTS), exact, model=model)
    fast = run(batch_of(*PROMPTS), dataclasses.replace(exact, stopping="estimate"), model=model)
    assert fast.tokens.tolist() == slow.tokens.tolist()
    np.testing.assert_allclose(fast.scores, slow.scores, rtol=1e-5)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_exact_stopping_finds_what_a_search_without_stopping_finds(seed):
    """The reference search runs to the maximum length."""
    model = PrefixModel(vocab=4, seed=seed)
    bounded = run(batch_of(*PROMPTS), dataclasses.replace(BEAM, length_penalty=2.0, stopping="exact"), model=model)
    for row, prompt in enumerate(PROMPTS):
        expected = search_by_hand(model, prompt, beams=3, length=7, alpha=2.0)
        assert_same(listed(bounded, row), expected)


BOUNDS = [("power", 2.0, 1), ("power", 3.0, 3), ("gnmt", 0.6, 2), ("power", -1.0, 1), ("power", -0.5, 3)]


@pytest.mark.parametrize(("norm", "alpha", "count"), BOUNDS)
def test_exact_stopping_holds_for_all_length_penalties(norm, alpha, count):
    """The n best equal those of a search that runs to the maximum length, for penalties of either sign."""
    config = dataclasses.replace(
        BEAM, length_norm=norm, length_penalty=alpha, hypotheses=count, stopping="exact", max_length=6
    )
    for seed in range(12):
        model = PrefixModel(vocab=4, seed=seed)
        result = run(batch_of(*PROMPTS), config, model=model)
        for row, prompt in enumerate(PROMPTS):
            expected = search_by_hand(model, prompt, beams=3, length=6, alpha=alpha, norm=norm)[:count]
            assert_same([pair for pair in listed(result, row) if pair[1]], expected)


def search_by_hand(model, prompt, beams, length, alpha, norm="gnmt"):
    live, pool = [(0.0, ())], []
    for size in range(1, length + 1):
        ranked = []
        for score, out in live:
            row = model.log_probs(prompt, [*out, 0])[-1]
            ranked += [(score + row[token], (*out, token)) for token in range(4)]
        ranked.sort(reverse=True)
        live = [(score, out) for score, out in ranked if out[-1] != 0][:beams]
        ends = [(s, out) for s, out in ranked[:beams] if out[-1] == 0 or size == length]
        pool += [(score / penalty(size, alpha, norm), out) for score, out in ends]
    return sorted(pool, reverse=True)[:beams]


def test_a_larger_length_penalty_prefers_longer_outputs():
    lengths = []
    for alpha in (0.0, 2.0):
        config = DecodeConfig(method="beam", beams=16, max_length=7, length_penalty=alpha, stopping="exact")
        lengths.append(run(batch_of(*PROMPTS), config).lengths[:, 0])
    assert (lengths[0] <= lengths[1]).all()
    assert lengths[0].sum() < lengths[1].sum()


def test_the_gnmt_length_penalty_is_equation_14():
    np.testing.assert_allclose(gnmt_length_penalty(jnp.array([1, 7, 13]), 0.6), [1.0, 2**0.6, 3**0.6], rtol=1e-6)
    np.testing.assert_allclose(gnmt_length_penalty(jnp.array([1, 7]), 0.0), [1.0, 1.0])


def test_results_do_not_depend_on_batch_mates_or_padding():
    config = dataclasses.replace(BEAM, repetition_penalty=1.3)
    together = run(batch_of(*PROMPTS), config)
    order = (2, 0, 3, 1)
    shuffled = run(batch_of(*(PROMPTS[i] for i in order)), config)
    padded = run(batch_of(PROMPTS[1], rows=4, buckets=(5,)), config, max_lengths=jnp.array([7, 0, 0, 0]))
    for row, i in enumerate(order):
        assert_same(listed(shuffled, row), listed(together, i))
    assert_same(listed(padded, 0), listed(together, 1))


def test_missing_hypotheses_have_length_0_and_score_minus_infinity():
    config = DecodeConfig(method="beam", beams=8, max_length=1, hypotheses=8)
    result = run(batch_of([1]), config)
    assert result.lengths[0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert np.isneginf(result.scores[0, 4:]).all()
    assert sorted(result.tokens[0, :4, 0].tolist()) == [0, 1, 2, 3]
