"""The one predicate of visibility, against a plain loop, and the positions made from segment ids."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.nn.masks import Mask, slots_from_segments, visible
from jaxformer.types import Slots


def slow(query: Slots, key: Slots, causal: bool, window: int | None) -> np.ndarray:
    batch, rows = query.segment.shape
    see = np.zeros((batch, rows, key.segment.shape[1]), bool)
    for b, t, s in np.ndindex(see.shape):
        back = int(query.position[b, t]) - int(key.position[b, s])
        see[b, t, s] = (
            abs(query.segment[b, t]) == key.segment[b, s] > 0
            and not (causal and back < 0)
            and (window is None or abs(back) < window or (causal and back < 0))
        )
    return see


@settings(max_examples=25, deadline=None)
@given(
    data=st.data(),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 5),
)
def test_visible_is_the_loop(data, causal, window):
    def side(length):
        ids = st.lists(st.lists(st.integers(-2, 3), min_size=length, max_size=length), min_size=2, max_size=2)
        return Slots(position=np.array(data.draw(ids)) * 2, segment=np.array(data.draw(ids)))

    query, key = side(4), side(5)
    np.testing.assert_array_equal(visible(query, key, causal, window), slow(query, key, causal, window))


@pytest.mark.parametrize(
    ("segment", "position"),
    [
        ([1, 1, 1, 1], [0, 1, 2, 3]),
        ([1, 1, 0, 0], [0, 1, 0, 0]),
        ([0, 0, 1, 1], [0, 0, 0, 1]),
        ([1, 1, 2, 2], [0, 1, 0, 1]),
        ([1, 2, 2, 0], [0, 0, 1, 0]),
        ([1, 0, 1, 1], [0, 0, 0, 1]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),
    ],
)
def test_slots_count_from_zero_in_each_run(segment, position):
    made = slots_from_segments(jnp.array([segment], jnp.int32))
    assert made.position.tolist() == [position]
    assert made.segment.tolist() == [segment]
    chex.assert_type([made.position, made.segment], jnp.int32)


def test_rows_are_independent_under_jit():
    made = jax.jit(slots_from_segments)(jnp.array([[1, 2, 2], [3, 3, 0]], jnp.int32))
    np.testing.assert_array_equal(made.position, [[0, 0, 1], [0, 1, 0]])


def test_packed_causal_mask_is_block_triangular():
    side = slots_from_segments(jnp.array([[1, 1, 2, 2, 0]]))
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]]
    np.testing.assert_array_equal(Mask(side, side, causal=True).dense()[0], np.array(expected, bool))


def test_window_counts_positions_and_includes_the_query_itself():
    side = slots_from_segments(jnp.ones((1, 4), jnp.int32))
    band = np.abs(np.subtract.outer(np.arange(4), np.arange(4))) < 2
    np.testing.assert_array_equal(Mask(side, side, window=2).dense()[0], band)
    np.testing.assert_array_equal(Mask(side, side, causal=True, window=2).dense()[0], np.tril(band))
    np.testing.assert_array_equal(Mask(side, side, causal=True, window=1).dense()[0], np.eye(4, dtype=bool))


def test_one_query_against_a_cache_sees_all_earlier_keys():
    query = Slots(position=jnp.array([[3]]), segment=jnp.array([[1]]))
    cache = Slots(position=jnp.array([[0, 1, 2, 3, 4, 0]]), segment=jnp.array([[1, 1, 1, 1, 1, 0]]))
    np.testing.assert_array_equal(Mask(query, cache, causal=True).dense()[0, 0], [True] * 4 + [False] * 2)


def test_mask_crosses_jit_with_its_rules_static():
    side = slots_from_segments(jnp.array([[1, 1, 0]]))
    mask = Mask(side, side, causal=True, window=1)
    np.testing.assert_array_equal(jax.jit(lambda m: m.dense())(mask), mask.dense())
    assert len(jax.tree.leaves(mask)) == 5  # two sides' ids, and the window, which may differ from layer to layer
