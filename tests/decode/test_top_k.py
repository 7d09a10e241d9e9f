import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.decode import top_k as module

top_k = jax.jit(module.top_k, static_argnums=1)
top_k_of_sums = jax.jit(module.top_k_of_sums, static_argnums=3)


@settings(max_examples=12, deadline=None)
@given(
    shape=st.sampled_from([(2, 40, 5), (3, 600, 2), (2, 611, 4), (1, 128, 1), (2, 640, 5)]),
    levels=st.sampled_from([2, 20, 100000]),
    seed=st.integers(0, 1000),
)
def test_top_k_equals_the_reference_with_ties(shape, levels, seed):
    rows, width, k = shape
    x = np.random.default_rng(seed).integers(0, levels, (rows, width)).astype(np.float32)
    values, index = top_k(x, k)
    expected_values, expected_index = jax.lax.top_k(x, k)
    np.testing.assert_array_equal(values, expected_values)
    np.testing.assert_array_equal(index, expected_index)


@pytest.mark.parametrize("index", [0, 63, 64, 639, 640, 644])
def test_top_k_finds_the_largest_at_any_index(index):
    x = np.zeros((1, 645), np.float32)
    x[0, index] = 1.0
    assert top_k(x, 2)[1].tolist() == [[index, 0 if index else 1]]


def test_minus_infinity_comes_last():
    x = np.full((1, 645), -np.inf, np.float32)
    x[0, [3, 641]] = [1.0, 2.0]
    values, index = top_k(x, 3)
    assert values.tolist() == [[2.0, 1.0, -np.inf]]
    assert index.tolist() == [[641, 3, 0]]


@pytest.mark.parametrize("width", [40, 600, 613])  # too few, divided evenly, prime
def test_top_k_of_sums_is_over_all_parts(width):
    rng = np.random.default_rng(0)
    add, x, subtract = (rng.integers(0, 9, shape).astype(np.float32) for shape in ((3, 4), (3, 4, width), (3, 4)))
    values, index = top_k_of_sums(add, x, subtract, 5)
    expected = jax.lax.top_k((add[:, :, None] + (x - subtract[:, :, None])).reshape(3, -1), 5)
    np.testing.assert_array_equal(values, expected[0])
    np.testing.assert_array_equal(index, expected[1])
