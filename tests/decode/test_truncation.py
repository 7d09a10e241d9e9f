import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.config import DecodeConfig
from jaxformer.decode.logits_processors import (
    has_processors,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    process_for_sampling,
    scale_by_temperature,
)

PROBS = np.array([[0.4, 0.1, 0.3, 0.2]], np.float32)
LOGITS = np.log(PROBS) + 1.7  # a constant changes no probability


def kept_tokens(logits) -> list[int]:
    return np.flatnonzero(np.isfinite(np.asarray(logits)[0])).tolist()


@pytest.mark.parametrize(
    ("k", "expected"), [(1, [0]), (2, [0, 2]), (3, [0, 2, 3]), (4, [0, 1, 2, 3]), (9, [0, 1, 2, 3])]
)
def test_top_k_keeps_the_k_most_probable(k, expected):
    out = keep_top_k(jnp.asarray(LOGITS), k)
    assert kept_tokens(out) == expected
    np.testing.assert_array_equal(out[0, expected], LOGITS[0, expected])


def test_top_k_breaks_ties_by_lowest_id():
    assert kept_tokens(keep_top_k(jnp.zeros((1, 5)), 2)) == [0, 1]


@pytest.mark.parametrize(
    ("p", "expected"),
    [(0.01, [0]), (0.39, [0]), (0.41, [0, 2]), (0.69, [0, 2]), (0.71, [0, 2, 3]), (0.95, [0, 1, 2, 3])],
)
def test_top_p_keeps_the_smallest_set_of_that_mass(p, expected):
    assert kept_tokens(keep_top_p(jnp.asarray(LOGITS), p)) == expected


def test_top_p_of_equal_tokens_keeps_only_as_many_as_needed():
    assert kept_tokens(keep_top_p(jnp.zeros((1, 10)), 0.45)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("p", "expected"), [(0.2, [0, 1, 2, 3]), (0.3, [0, 2, 3]), (0.6, [0, 2]), (0.8, [0]), (1.0, [0])]
)
def test_min_p_compares_with_the_most_probable(p, expected):
    assert kept_tokens(keep_min_p(jnp.asarray(LOGITS), p)) == expected


@settings(max_examples=20, deadline=None)
@given(p=st.floats(0.05, 0.99), seed=st.integers(0, 10_000))
def test_nucleus_is_minimal(p, seed):
    logits = np.random.default_rng(seed).normal(size=(3, 17)).astype(np.float32) * 2
    probs = np.asarray(jax.nn.softmax(logits), np.float64)
    for row, keep in zip(probs, np.isfinite(np.asarray(keep_top_p(jnp.asarray(logits), p))), strict=True):
        assert row[keep].sum() >= p - 1e-5
        assert row[keep].sum() - row[keep].min() < p + 1e-5
        assert row[keep].min() >= row[~keep].max(initial=0.0)


def test_temperature_divides():
    np.testing.assert_allclose(scale_by_temperature(jnp.asarray(LOGITS), 0.5), LOGITS * 2, rtol=1e-6)


class Variants(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_the_order_is_temperature_top_k_top_p_min_p(self):
        config = DecodeConfig(temperature=0.5, top_k=4, top_p=0.9, min_p=0.1, method="sample")
        logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 9)) * 2, jnp.float32)
        out = self.variant(functools.partial(process_for_sampling, config))(logits)
        step = keep_min_p(
            keep_top_p(keep_top_k(scale_by_temperature(logits, 0.5), 4), 0.9),
            0.1,
        )
        chex.assert_trees_all_close(out, step, rtol=1e-6)


def test_the_default_changes_nothing():
    assert not has_processors(DecodeConfig())
    chex.assert_trees_all_equal(process_for_sampling(DecodeConfig(), jnp.asarray(LOGITS)), jnp.asarray(LOGITS))


def test_min_p_is_applied_after_top_p():
    # A mass of 0.5 needs 0.4 and 0.3. If min-p dropped those below 0.6 * 0.4 first, 0.4 would be 0.571 of the rest,
    # and enough.
    assert kept_tokens(process_for_sampling(DecodeConfig(top_p=0.5, min_p=0.6), jnp.asarray(LOGITS))) == [
        0,
        2,
    ]


def test_top_p_is_applied_after_top_k():
    # Of all four tokens, a mass of 0.55 needs 0.4 + 0.3. Of the two that top-k keeps, 0.4 / 0.7 = 0.571 is enough.
    both = process_for_sampling(DecodeConfig(top_k=2, top_p=0.55), jnp.asarray(LOGITS))
    alone = process_for_sampling(DecodeConfig(top_p=0.55), jnp.asarray(LOGITS))
    assert (kept_tokens(both), kept_tokens(alone)) == ([0], [0, 2])


def test_top_p_uses_the_mass_before_min_p():
    # Of all four tokens, a mass of 0.55 needs 0.4 + 0.3, and both are at least 0.6 times as probable as the best. If
    # min-p came first, 0.4 / 0.7 = 0.571 would be enough.
    both = process_for_sampling(DecodeConfig(top_p=0.55, min_p=0.6), jnp.asarray(LOGITS))
    first = keep_top_p(keep_min_p(jnp.asarray(LOGITS), 0.6), 0.55)
    assert (kept_tokens(both), kept_tokens(first)) == ([0, 2], [0])
