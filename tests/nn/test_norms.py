"""Norms, dropout and the scale of embeddings by their formulas, where nothing has the value that it begins with."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import EmbedConfig, NormConfig
from jaxformer.nn.layers import Dropout, Embed, Norm
from jaxformer.types import Slots, Stream


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "offset"), [("layer", 0.0), ("rms", 0.0), ("rms", 1.0)])
def test_a_norm_is_its_formula_with_float32_statistics(kind, offset, dtype):
    """The epsilon is as large as the variance, scale and bias are not those that a norm begins with."""
    x, parts = (normal(4, 8, 64) + 1.0).astype(jnp.dtype(dtype)), normal(2, 64)
    params = {"scale": parts[0], "bias": parts[1]} if kind == "layer" else {"scale": parts[0]}
    norm = Norm(NormConfig(kind=kind, epsilon=0.5, offset=offset))
    got = np.asarray(jax.jit(norm.apply)({"params": params}, x))
    wide = np.asarray(x, np.float64)
    centred = wide - wide.mean(axis=-1, keepdims=True) if kind == "layer" else wide
    wanted = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 0.5) * (parts[0] + offset)
    wanted = (wanted + params.get("bias", 0.0)).astype(np.float32).astype(x.dtype)
    assert got.dtype == x.dtype
    chex.assert_trees_all_close(got, wanted, rtol=2**-7 if dtype == "bfloat16" else 1e-5, atol=1e-5)
    assert dtype == "float32" or np.mean(got == wanted) > 0.99, "rounded more than once"


def test_batch_norm_follows_the_batch_by_its_momentum_and_is_evaluated_with_what_it_followed():
    x = np.asarray(normal(2, 5, 3)) * [1.0, 2.0, 3.0] + [0.0, 5.0, -5.0]
    x, visible = x.astype(np.float32), np.arange(5) < np.array([[5], [2]])
    norm = Norm(NormConfig(kind="batch", momentum=0.9, epsilon=0.1))

    @jax.jit
    def both(x):
        variables = norm.init(jax.random.key(0), x)
        rngs = {"dropout": jax.random.key(1)}
        y, changed = norm.apply(variables, x, visible, rngs=rngs, mutable=["batch_stats"])
        return y, changed, norm.apply({**variables, **changed}, x, visible)

    y, changed, evaluated = both(x)
    mean, var = x[visible].mean(axis=0), x[visible].var(axis=0)
    chex.assert_trees_all_close(y, (x - mean) / np.sqrt(var + 0.1), rtol=1e-4, atol=1e-5)
    running = {"mean": 0.1 * mean, "var": 0.9 + 0.1 * var}  # from 0 and 1
    chex.assert_trees_all_close(changed["batch_stats"]["batch"], running, rtol=1e-5)
    wanted = (x - running["mean"]) / np.sqrt(running["var"] + 0.1)
    chex.assert_trees_all_close(evaluated, wanted, rtol=1e-4, atol=1e-5)


def test_dropout_zeroes_its_rate_and_scales_the_rest():
    y = jax.jit(lambda key: Dropout(0.25).apply({}, jnp.ones((64, 1000)), rngs={"dropout": key}))(jax.random.key(0))
    np.testing.assert_allclose(np.unique(y), [0.0, 4 / 3], rtol=1e-6)
    assert np.mean(np.asarray(y) == 0.0) == pytest.approx(0.25, abs=0.01)


def test_embeddings_are_multiplied_by_the_root_of_the_width():
    config, tokens = EmbedConfig(vocab=5, scale=True), np.array([[3, 1]], np.int32)
    table = normal(5, 16)
    slots = Slots(np.arange(2, dtype=np.int32)[None], np.ones((1, 2), np.int32))
    got = jax.jit(Embed(config, 16).apply)({"params": {"table": table}}, Stream(tokens, slots))
    chex.assert_trees_all_close(got, 4.0 * table[tokens], rtol=1e-6)
