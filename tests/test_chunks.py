"""Losses and measures of logits that never exist equal those of the logits, in value and gradient, on every mesh."""

import builders
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxformer import losses, metrics
from jaxformer.config import EmbedConfig, HeadConfig, MeshConfig
from jaxformer.nn.heads import Head
from jaxformer.nn.layers import Embed
from jaxformer.parallel import mesh as meshes
from jaxformer.types import DeferredLogits

BATCH, LENGTH, WIDTH, VOCAB = 4, 6, 8, 16
MESHES = {
    "one device": MeshConfig(),
    "fsdp, context, tensor": MeshConfig(data=1, fsdp=2, context=2, tensor=2),
    "data, uneven context": MeshConfig(data=2, context=4),
}


def example(bias=True, dtype=jnp.float32, chunk=4):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.float32(rng.standard_normal(shape))  # noqa: E731
    hidden, table = draw(BATCH, LENGTH, WIDTH).astype(dtype), draw(VOCAB, WIDTH)
    labels = jnp.int32(rng.integers(VOCAB - 2, size=(BATCH, LENGTH)))
    weights = jnp.float32(rng.random((BATCH, LENGTH))).at[1, 2:].set(0.0)
    return DeferredLogits(hidden, table, draw(VOCAB) if bias else None, chunk), labels.at[1, 2:].set(-100), weights


def multiplied(projection):
    table = projection.table.astype(projection.hidden.dtype)
    logits = jnp.einsum("btd,vd->btv", projection.hidden, table, preferred_element_type=jnp.float32)
    return logits if projection.bias is None else logits + projection.bias


def loss(whole, projection, labels, weights, *options):
    return losses.cross_entropy(multiplied(projection) if whole else projection, labels, weights, *options)[0]


def measured(whole, given, mesh, *options):
    run = jax.jit(jax.value_and_grad(lambda projection, *rest: loss(whole, projection, *rest, *options)))
    with jax.set_mesh(mesh):
        return jax.device_get(run(*given))


def mesh_of(name):
    return meshes.make(MESHES[name], jax.devices()[: 1 if name == "one device" else 8])


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("options", [(), (0.1, 1e-2, VOCAB - 2)], ids=["plain", "smoothed, z, padded"])
def test_cross_entropy_is_that_of_the_logits(name, options):
    given = example(bias=bool(options))
    expected = measured(True, given, mesh_of("one device"), *options)
    chex.assert_trees_all_close(measured(False, given, mesh_of(name), *options), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["one device", "fsdp, context, tensor"])
def test_accuracy_is_that_of_the_logits(name):
    projection, labels, weights = example()
    tied = projection.replace(table=projection.table.at[9].set(projection.table[2]), bias=None)
    expected = metrics.accuracy(multiplied(tied), labels, weights)
    with jax.set_mesh(mesh_of(name)):
        got = jax.device_get(jax.jit(metrics.accuracy)(tied, labels, weights))
    assert expected[0] > 0
    chex.assert_trees_all_close(got, expected, rtol=1e-6)


def test_bfloat16_keeps_a_float32_loss():
    given = example(dtype=jnp.bfloat16)
    value, slope = measured(False, given, mesh_of("one device"))
    assert value.dtype == np.float32
    assert (slope.hidden.dtype, slope.table.dtype) == (jnp.bfloat16, jnp.float32)
    wanted = measured(True, given, mesh_of("one device"))
    np.testing.assert_allclose(value, wanted[0], rtol=1e-5)
    chex.assert_trees_all_close(slope.table, wanted[1].table, rtol=2e-2, atol=2e-2)


HEADS = {
    "tied": (HeadConfig(chunk=3), EmbedConfig(vocab=16)),
    "factorised": (HeadConfig(chunk=3, bias=True), EmbedConfig(vocab=16, width=4)),
    "untied": (HeadConfig(chunk=3, tied=False, bias=True, scale=True), EmbedConfig(vocab=16)),
}


class Model(nn.Module):
    head: HeadConfig
    embed: EmbedConfig

    @nn.compact
    def __call__(self, stream, full_logits):
        embed = Embed(self.embed, WIDTH)
        return Head(self.head, WIDTH, 16)(jnp.tanh(embed(stream)), stream.slots, embed, full_logits)


@pytest.mark.parametrize("name", HEADS)
def test_heads_give_losses_what_their_logits_are_made_of(name):
    model, batch = Model(*HEADS[name]), builders.batch(builders.decoder())
    variables = nn.meta.unbox(jax.jit(model.init, static_argnums=2)(jax.random.key(0), batch.target, True))

    def total(variables, full_logits):
        logits = model.apply(variables, batch.target, full_logits)
        assert isinstance(logits, DeferredLogits) != full_logits
        return losses.cross_entropy(logits, batch.labels, batch.weights, 0.1, 1e-3, 13)[0]

    run = jax.jit(jax.value_and_grad(total), static_argnums=1)
    chex.assert_trees_all_close(run(variables, False), run(variables, True), rtol=1e-5, atol=1e-6)


def test_memory_does_not_grow_with_vocabulary_times_length():
    def temporary(length, vocab):
        shape = lambda *size: jax.ShapeDtypeStruct(size, jnp.float32)  # noqa: E731
        projection = DeferredLogits(shape(1, length, 16), shape(vocab, 16), None, 64)
        ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
        run = jax.jit(jax.grad(lambda *given: loss(False, *given))).lower(projection, ids, shape(1, length)).compile()
        return run.memory_analysis().temp_size_in_bytes

    small, long = temporary(512, 4096), temporary(4096, 4096)
    assert long - small < 8 * 4096 * 16 * 4  # some arrays of hidden states, [T, D]
    assert long < 4096 * 4096 * 4 / 4  # a quarter of the logits
