"""Capped scores and logits, and RoPE bases of layers with a window: equal to slow formulas, in every kernel."""

from __future__ import annotations

import dataclasses

import builders
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import chunks, testing
from jaxformer.config import (
    AttentionConfig,
    Config,
    ConfigError,
    EncodingConfig,
    HeadConfig,
    MeshConfig,
    RopeScalingConfig,
    checks,
)
from jaxformer.models import build
from jaxformer.nn import kernels
from jaxformer.nn.encodings import rope
from jaxformer.nn.kernels import AttentionBias
from jaxformer.nn.masks import Mask, slots_from_segments
from jaxformer.parallel import mesh as meshes

CAP = 0.7
DRAW = np.random.default_rng(0).standard_normal
Q, K, V = (DRAW((1, 6, heads, 4)).astype(np.float32) for heads in (4, 2, 2))
MASK = Mask(*[slots_from_segments(jnp.ones((1, 6), jnp.int32))] * 2, causal=True, same_slots=True)


def slow_attention(q, k, v, cap):
    """Capped attention, one query at a time."""
    o = np.zeros(q.shape, np.float64)
    for head in range(q.shape[2]):
        for t in range(q.shape[1]):
            scores = k[0, : t + 1, head // 2].astype(np.float64) @ q[0, t, head]
            scores = cap * np.tanh(scores / cap)
            probs = np.exp(scores - scores.max())
            o[0, t, head] = probs / probs.sum() @ v[0, : t + 1, head // 2]
    return o


@pytest.mark.parametrize("name", ["dense", "blockwise", "splash"])
def test_every_kernel_caps_scores_in_value_and_gradient(name):
    config = AttentionConfig(heads=4, kv_heads=2, block=4, soft_cap=CAP)

    def total(q, k, v, name):
        o = kernels.get(name).apply(q, k, v, MASK, None, None, config)
        return jnp.sum(o * jnp.cos(jnp.arange(o.size).reshape(o.shape))), o

    grads = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True), static_argnums=3)
    got, o = grads(Q, K, V, name)
    np.testing.assert_allclose(o, slow_attention(Q, K, V, CAP), rtol=1e-4, atol=1e-5)
    if name != "dense":
        for ours, dense in zip(got, grads(Q, K, V, "dense")[0], strict=True):
            np.testing.assert_allclose(ours, dense, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["dense", "blockwise"])
def test_a_bias_is_added_to_capped_scores(name):
    rising = lambda args, q, k, query, key: args * key[:, None, None, :].astype(jnp.float32)  # noqa: E731
    config = AttentionConfig(heads=4, kv_heads=2, block=4, soft_cap=CAP)
    o = kernels.get(name).apply(Q, K, V, MASK, AttentionBias(rising, jnp.float32(3.0)), None, config)
    scores = np.einsum("tk,sk->ts", Q[0, :, 0], K[0, :, 0])
    scores = np.where(np.tri(6) > 0, CAP * np.tanh(scores / CAP) + 3.0 * np.arange(6), -np.inf)
    probs = np.exp(scores - scores.max(axis=1, keepdims=True))
    np.testing.assert_allclose(o[0, :, 0], probs / probs.sum(axis=1, keepdims=True) @ V[0, :, 0], rtol=1e-4, atol=1e-5)


def stack(**attention):
    own = AttentionConfig(heads=2, window=2, window_layers=(1, 2), scale_width=9.0, soft_cap=CAP, **attention)
    scaling = RopeScalingConfig("linear", factor=4.0)
    return builders.stack(
        layers=3, attention=own, encoding=EncodingConfig(kind="rope", base=500.0, window_base=7.0, scaling=scaling)
    )


def test_layers_with_a_window_have_their_own_base_without_scaling():
    config = stack().encoding
    slots = slots_from_segments(jnp.ones((1, 5), jnp.int32))
    made = rope.Angles(config, stack().attention, 4).apply({}, slots)
    for banded, base, factor in ((False, 500.0, 4.0), (True, 7.0, 1.0)):
        angle = np.arange(5)[:, None] * base ** (-np.arange(2) * 2 / 4) / factor
        got = made.of_layer(jnp.asarray(banded))
        np.testing.assert_allclose(got.cos[0], np.cos(angle), rtol=1e-5)
        np.testing.assert_allclose(got.sin[0], np.sin(angle), rtol=1e-5)


@pytest.fixture(scope="module")
def capped():
    """A model with all of it, its variables and a batch."""
    config = dataclasses.replace(
        builders.decoder(), decoder=stack(), head=HeadConfig(tied=False, soft_cap=1.5, chunk=4)
    )
    return config, *builders.make(config), builders.batch(config, [6, 6])


def test_decoding_with_a_cache_equals_the_whole_pass(capped):
    config, module, variables, batch = capped
    whole = np.asarray(testing.apply(module)(variables, batch))
    assert np.abs(whole).max() < 1.5
    uncapped = build.build(dataclasses.replace(config, head=HeadConfig(tied=False)))
    raw = np.asarray(testing.apply(uncapped)(variables, batch))
    np.testing.assert_allclose(whole, 1.5 * np.tanh(raw / 1.5), rtol=1e-5, atol=1e-5)
    for edits in ({"soft_cap": None}, {"scale_width": None}, {"window_layers": (0, 1)}):
        other = stack()
        other = dataclasses.replace(other, attention=dataclasses.replace(other.attention, **edits))
        differs = testing.apply(build.build(dataclasses.replace(config, decoder=other)))(variables, batch)
        assert np.abs(np.asarray(differs) - whole).max() > 1e-4, edits
    testing.assert_steps_equal_forward(module, variables, batch, prompt=3)


@pytest.mark.parametrize("sizes", [{"stage": 2, "tensor": 2}, {"context": 2, "fsdp": 2}])
def test_a_mesh_changes_nothing(sizes):
    """Stages pass both rotations on, the ring caps its scores."""
    half = dataclasses.replace(stack(), layers=4)
    config = dataclasses.replace(builders.decoder(), decoder=half, head=HeadConfig(tied=False, soft_cap=1.5))
    mesh = meshes.make(MeshConfig(**{"data": 1, **sizes}), jax.devices()[:4])
    testing.assert_sharded_equals_single(*builders.make(config), builders.batch(config, [6, 4, 5, 6]), mesh)


def test_chunks_of_capped_logits_have_the_gradient_of_all_at_once(capped):
    _, module, variables, batch = capped

    def squares(logits, data, part):
        return 2.0 * logits

    deferred = jax.jit(lambda v, b: module.apply(v, b, full_logits=False))(variables, batch)
    got = chunks.chunked_gradient(squares, deferred, batch.labels)

    def total(hidden, table):
        logits = 1.5 * jnp.tanh(jnp.einsum("btd,vd->btv", hidden, table) / 1.5)
        return jnp.sum(logits**2)

    dx, dtable = jax.jit(jax.grad(total, argnums=(0, 1)))(deferred.hidden, deferred.table)
    np.testing.assert_allclose(got.hidden, dx, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got.table, dtable, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"attention": AttentionConfig(heads=2, scale=False, scale_width=4.0)}, "scale_width: got 4.0, expected None"),
        ({"encoding": EncodingConfig(kind="rope", window_base=9.0)}, "window_base: got 9.0, expected None where"),
        (
            {"encoding": EncodingConfig(window_base=9.0), "attention": AttentionConfig(heads=2, window=2)},
            "window_base: got 9.0, expected None with encoding.kind sinusoidal",
        ),
        ({"attention": AttentionConfig(heads=2, kernel="cudnn", soft_cap=1.0)}, "attention.soft_cap None"),
    ],
)
def test_what_cannot_be_honoured_is_refused(edits, message):
    with pytest.raises(ConfigError, match=message):
        checks.check(Config(model=builders.decoder(**edits)))


def test_heads_without_an_output_matrix_have_no_cap():
    model = dataclasses.replace(builders.classifier(), head=HeadConfig(kind="classes", classes=3, soft_cap=1.0))
    with pytest.raises(ConfigError, match="soft_cap: got 1.0, expected None: only logits of tokens"):
        checks.check(Config(model=model))
