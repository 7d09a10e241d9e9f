import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.decode import top


@settings(max_examples=12, deadline=None)
@given(
    shape=st.sampled_from([(2, 40, 5), (3, 600, 2), (2, 611, 4), (1, 128, 1), (2, 640, 5)]),
    levels=st.sampled_from([2, 20, 100000]),
    seed=st.integers(0, 1000),
)
def test_equals_the_reference_ties_included(shape, levels, seed):
    rows, width, k = shape
    x = np.random.default_rng(seed).integers(0, levels, (rows, width)).astype(np.float32)
    values, index = top.top_k(x, k)
    wanted_values, wanted_index = jax.lax.top_k(x, k)
    np.testing.assert_array_equal(values, wanted_values)
    np.testing.assert_array_equal(index, wanted_index)


@pytest.mark.parametrize("at", [0, 63, 64, 639, 640, 644])
def test_finds_the_largest_wherever_it_stands(at):
    x = np.zeros((1, 645), np.float32)
    x[0, at] = 1.0
    assert top.top_k(x, 2)[1].tolist() == [[at, 0 if at else 1]]


def test_ruled_out_tokens_come_last():
    x = np.full((1, 645), -np.inf, np.float32)
    x[0, [3, 641]] = [1.0, 2.0]
    values, index = top.top_k(x, 3)
    assert values.tolist() == [[2.0, 1.0, -np.inf]]
    assert index.tolist() == [[641, 3, 0]]


@pytest.mark.parametrize("width", [40, 600, 613])  # too few, divided evenly, prime
def test_the_largest_sums_of_several_parts_are_those_of_all_of_them(width):
    rng = np.random.default_rng(0)
    add, x, less = (rng.integers(0, 9, shape).astype(np.float32) for shape in ((3, 4), (3, 4, width), (3, 4)))
    values, index = top.of_sums(add, x, less, 5)
    wanted = jax.lax.top_k((add[:, :, None] + (x - less[:, :, None])).reshape(3, -1), 5)
    np.testing.assert_array_equal(values, wanted[0])
    np.testing.assert_array_equal(index, wanted[1])
