"""What the layers keep for the backward pass, and in which precision they compute."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import NormConfig
from jaxformer.nn.layers import ACTIVATIONS, Norm

LEAN = ("gelu", "gelu_tanh", "gelu_sigmoid", "silu", "mish")


def kept(function, *arguments) -> list[jax.Array]:
    """The arrays that wait for the backward pass of `function`."""
    _, pull = jax.vjp(function, *arguments)
    return [leaf for leaf in jax.tree.leaves(pull) if isinstance(leaf, jax.Array)]


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("kind", LEAN)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_activation_keeps_its_argument(kind, dtype):
    x = normal(8, 64).astype(dtype)
    assert sum(leaf.nbytes for leaf in kept(ACTIVATIONS[kind], x)) == x.nbytes


@pytest.mark.parametrize("kind", LEAN)
def test_an_activation_rounds_once(kind):
    x = normal(4096).astype(jnp.bfloat16)
    act, wide = ACTIVATIONS[kind], lambda x: ACTIVATIONS[kind](x.astype(jnp.float32))
    chex.assert_trees_all_equal(act(x), wide(x).astype(jnp.bfloat16))
    slope = jax.grad(lambda x: jnp.sum(act(x).astype(jnp.float32)))(x)
    assert slope.dtype == jnp.bfloat16
    wanted = jax.grad(lambda x: jnp.sum(wide(x)))(x.astype(jnp.float32))
    chex.assert_trees_all_close(slope.astype(jnp.float32), wanted, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("kind", LEAN)
def test_the_slope_of_an_activation_is_that_of_its_values(kind):
    x, step = jnp.linspace(-4.0, 4.0, 81), 1e-2
    act = ACTIVATIONS[kind]
    chex.assert_trees_all_close(jax.vmap(jax.grad(act))(x), (act(x + step) - act(x - step)) / (2 * step), atol=2e-4)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_norm_keeps_its_argument(kind, dtype):
    norm, x = Norm(NormConfig(kind=kind)), normal(2, 8, 64).astype(dtype)
    params = norm.init(jax.random.key(0), x)
    scale_and_bias = 2 * 64 * 4
    assert sum(leaf.nbytes for leaf in kept(norm.apply, params, x)) <= x.nbytes + scale_and_bias
