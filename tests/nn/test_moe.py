"""Mixture of experts against a loop over tokens in numpy: what is chosen, dropped, computed and added to the loss."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import builders
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec

from jaxformer.config import FeedForwardConfig, MeshConfig, MoEConfig
from jaxformer.nn import moe as mixtures
from jaxformer.nn.layers import ACTIVATIONS
from jaxformer.nn.moe import MoE
from jaxformer.parallel import mesh as meshes
from jaxformer.parallel import rules

WIDTH, INNER, EXPERTS = 8, 12, 4
FORMS = {
    "gated": (
        FeedForwardConfig(width=INNER, activation="silu", gated=True, bias=False),
        MoEConfig(EXPERTS, 3, shared=2),
    ),
    "plain": (FeedForwardConfig(width=INNER, activation="relu"), MoEConfig(EXPERTS, 2, normalise=False)),
    "switch": (FeedForwardConfig(width=INNER), MoEConfig(EXPERTS, 1, normalise=False)),
}


def layer(config: FeedForwardConfig, moe: MoEConfig, rows: int = 3, length: int = 7):
    """A layer, its parameters (none of them at a symmetric start), an input and which of its slots are real."""
    module, rng = MoE(config, moe, WIDTH), np.random.default_rng(0)
    x = rng.normal(size=(rows, length, WIDTH)).astype(np.float32)
    visible = np.arange(length) < np.arange(length - rows + 1, length + 1)[:, None]
    shapes = nn.meta.unbox(jax.eval_shape(module.init, jax.random.key(1), x, visible))["params"]
    return module, jax.tree.map(lambda p: (rng.normal(size=p.shape) * 0.4).astype(np.float32), shapes), x, visible


@functools.partial(jax.jit, static_argnames=("module", "training"))
def apply(module: MoE, params, x, visible, training: bool = False):
    """Output and `Load`."""
    rngs = {"dropout": jax.random.key(2)} if training else {}
    y, sown = module.apply({"params": params}, x, visible, rngs=rngs, mutable=[mixtures.COLLECTION])
    return y, sown[mixtures.COLLECTION]["load"][0]


def decide(moe: MoEConfig, params, x, visible, limit: bool = False):
    """Token by token, in numpy: which experts were chosen, and which serve, bool `[B, T, E]`."""
    logits = np.asarray(x) @ np.asarray(params["router"])
    chosen, served = np.zeros(logits.shape, bool), np.zeros(logits.shape, bool)
    for b in range(x.shape[0]):
        taken = np.zeros(moe.experts, int)
        room = np.ceil(moe.capacity * moe.top_k * int(visible[b].sum()) / moe.experts) if limit else np.inf
        for t in np.flatnonzero(visible[b]):
            for e in np.argsort(-logits[b, t])[: moe.top_k]:
                chosen[b, t, e], served[b, t, e] = True, taken[e] < room
                taken[e] += 1
    return chosen, served


@functools.partial(jax.jit, static_argnames=("config", "moe"))
def reference(config: FeedForwardConfig, moe: MoEConfig, params, x, decided):
    """Every expert on every token, and then the sum that was decided."""
    chosen, served = decided
    probs = jax.nn.softmax(x @ params["router"])
    total = jnp.sum(probs * chosen, -1, keepdims=True) if moe.normalise else 1.0
    gates = jnp.where(served, probs / jnp.where(total == 0, 1.0, total), 0.0)
    y = jnp.zeros_like(x)
    for e in range(moe.experts):
        part = {
            name: jax.tree.map(lambda p, e=e: p[e], params[name]) for name in params if name in ("in", "gate", "out")
        }
        y += gates[..., e : e + 1] * dense_layer(config, part, x)
    return y + dense_layer(config, params["shared"], x) if moe.shared else y


def dense_layer(config: FeedForwardConfig, params, x):
    dense = lambda x, name: x @ params[name]["kernel"] + (params[name]["bias"] if config.bias else 0.0)  # noqa: E731
    y, act = dense(x, "in"), ACTIVATIONS[config.activation]
    return dense(act(dense(x, "gate")) * y if config.gated else act(y), "out")


@pytest.mark.parametrize("form", ["gated", "plain"])
def test_both_dispatches_equal_a_loop_over_tokens_in_value_and_gradient(form):
    config, moe = FORMS[form]
    _, params, x, visible = layer(config, moe)
    weight = np.random.default_rng(3).standard_normal(x.shape).astype(np.float32)
    decided = decide(moe, params, x, visible)
    plain = lambda p, x: jnp.sum(reference(config, moe, p, x, decided) * weight)  # noqa: E731
    losses = [plain]
    for capacity in (None, float(EXPERTS)):
        roomy = MoE(config, dataclasses.replace(moe, capacity=capacity), WIDTH)
        losses.append(lambda p, x, roomy=roomy: jnp.sum(apply(roomy, p, x, visible, training=True)[0] * weight))
    value, *found = jax.jit(lambda p, x: [jax.value_and_grad(loss, (0, 1))(p, x) for loss in losses])(params, x)
    for each in found:
        chex.assert_trees_all_close(each, value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["switch", "plain"])
def test_capacity_drops_the_later_tokens_and_no_others_and_only_in_training(form):
    config, moe = FORMS[form]
    moe = dataclasses.replace(moe, capacity=0.6)
    module, params, x, visible = layer(config, moe)
    chosen, served = decided = decide(moe, params, x, visible, limit=True)
    full = int((chosen & ~served).sum())
    assert 2 < full < chosen.sum() / 2
    y, load = apply(module, params, x, visible, training=True)
    chex.assert_trees_all_close(y, reference(config, moe, params, x, decided), rtol=1e-5, atol=1e-5)
    assert float(load.dropped) == pytest.approx(full / chosen.sum())
    y, load = apply(module, params, x, visible)
    chex.assert_trees_all_close(y, reference(config, moe, params, x, (chosen, chosen)), rtol=1e-5, atol=1e-5)
    assert float(load.dropped) == 0.0


def test_losses_equal_their_formulas():
    config, moe = FORMS["plain"]
    module, params, x, visible = layer(config, moe)
    _, load = apply(module, params, x, visible)
    real = np.asarray(visible)
    logits = np.asarray(x, np.float64)[real] @ np.asarray(params["router"], np.float64)
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    best = np.argsort(-logits, axis=-1)[:, : moe.top_k]
    share = np.bincount(best.ravel(), minlength=EXPERTS) / best.size
    balance, z = EXPERTS * np.sum(share * probs.mean(0)), np.mean(np.log(np.exp(logits).sum(-1)) ** 2)
    got = (load.balance, load.z, load.max_load, load.min_load, load.penalty)
    expected = (balance, z, share.max(), share.min(), moe.balance_loss * balance + moe.z_loss * z)
    chex.assert_trees_all_close(got, jax.tree.map(np.float32, expected), rtol=1e-5)
    even = jax.tree.map(np.zeros_like, params)
    assert float(apply(module, even, x, visible)[1].balance) == pytest.approx(1.0)


@pytest.mark.parametrize("capacity", [None, 0.6])
def test_padding_is_routed_nowhere_counted_nowhere_and_takes_nobodys_place(capacity):
    config, moe = FORMS["plain"]
    module, params, x, _ = layer(config, dataclasses.replace(moe, capacity=capacity), rows=1)
    short, load = jax.device_get(apply(module, params, x, np.ones((1, 7), bool), training=True))
    fill = np.full((1, 2, WIDTH), 3.0, np.float32)
    padded = np.concatenate([fill, x, fill], axis=1)
    seen = np.isin(np.arange(11), range(2, 9))[None]
    long, other = jax.device_get(apply(module, params, padded, seen, training=True))
    chex.assert_trees_all_close(long[:, 2:9], short, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(other, load, rtol=1e-5, atol=1e-6)
    assert not long[:, :2].any() and not long[:, 9:].any()


def test_no_token_depends_on_a_later_one_even_when_experts_are_full():
    config, moe = FORMS["plain"]
    module, params, x, _ = layer(config, dataclasses.replace(moe, capacity=0.5))
    visible = np.ones(x.shape[:2], bool)
    before, _ = apply(module, params, x, visible, training=True)
    after, _ = apply(module, params, np.concatenate([x[:, :4], -x[:, 4:]], axis=1), visible, training=True)
    np.testing.assert_array_equal(np.asarray(after)[:, :4], np.asarray(before)[:, :4])


def test_hidden_dropout_scales_and_is_one_of_its_own_for_every_assignment():
    config, moe = dataclasses.replace(FORMS["plain"][0], dropout=0.5), FORMS["plain"][1]
    _, params, *_ = layer(config, moe)
    x, visible = np.ones((1, 400, WIDTH), np.float32), np.ones((1, 400), bool)
    modules = [MoE(config, dataclasses.replace(moe, capacity=capacity), WIDTH) for capacity in (None, float(EXPERTS))]
    y, other = (np.asarray(apply(module, params, x, visible, training=True)[0]) for module in modules)
    chex.assert_trees_all_close(y, other, rtol=1e-5, atol=1e-5)
    plain = np.asarray(reference(config, moe, params, x[:, :1], decide(moe, params, x[:, :1], visible[:, :1])))
    deviation = y.std(axis=(0, 1))
    assert deviation.min() > 0.01
    assert (np.abs(y.mean(axis=(0, 1)) - plain[0, 0]) < 4 * deviation / 400**0.5).all()


def test_prefill_and_step_equal_forward():
    config = builders.decoder(moe=MoEConfig(EXPERTS, 2, capacity=0.5))
    module, variables = builders.make(config)
    assert set(variables) == {"params"}
    batch = builders.batch(config, [6, 6])
    cut = jax.tree.map(lambda x: x[:, :3], batch.target)

    @jax.jit
    def both(variables):
        logits, state = module.apply(variables, batch._replace(target=cut), 6, method=module.start)
        step = lambda state, tokens: module.apply(variables, tokens, state, method=module.step)[::-1]  # noqa: E731
        _, steps = jax.lax.scan(step, state, batch.target.tokens.T[3:, :, None])
        return module.apply(variables, batch), logits, steps

    whole, logits, steps = jax.device_get(both(variables))
    chex.assert_trees_all_close(logits, whole[:, 2], rtol=2e-5, atol=2e-6)
    chex.assert_trees_all_close(steps.swapaxes(0, 1), whole[:, 3:], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("capacity", [None, 0.6])
def test_bfloat16_routes_in_float32(capacity):
    config, moe = FORMS["gated"]
    moe = dataclasses.replace(moe, capacity=capacity)
    module, params, x, visible = layer(config, moe)
    x = x.astype(jnp.bfloat16)
    found = (apply(module, params, each, visible, True) for each in (x, x.astype(np.float32)))
    (y, load), (exact, other) = jax.device_get(tuple(found))
    assert y.dtype == jnp.bfloat16
    chex.assert_trees_all_equal(load, other)
    chex.assert_trees_all_close(y.astype(np.float32), exact, atol=0.05)


class Laid(NamedTuple):
    """A mesh, what it does to rows, and what one device then holds of a kernel of the experts."""

    mesh: MeshConfig
    capacity: float | None
    share: float
    rows: int = 8


MESHES = {  # with capacity on expert x fsdp x tensor: tests/train/test_moe_step.py
    "dropless-expert-fsdp-tensor": Laid(MeshConfig(data=1, expert=2, fsdp=2, tensor=2), None, 1 / 8),
    "capacity-expert-context": Laid(MeshConfig(data=1, expert=4, context=2), 0.6, 1 / 4),
    "rows-that-do-not-divide": Laid(MeshConfig(data=1, expert=4, fsdp=2), 0.6, 1 / 8, rows=3),
}


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_changes_nothing_but_where_experts_lie(name, capfd):
    laid = MESHES[name]
    mesh = meshes.make(laid.mesh)
    config = dataclasses.replace(FORMS["plain"][0], gated=True, dropout=0.2)
    module, params, x, visible = layer(config, dataclasses.replace(FORMS["plain"][1], capacity=laid.capacity),
                                       laid.rows, 8)  # fmt: skip

    def loss(params, x):
        y, load = apply(module, params, x, visible, training=True)
        return jnp.sum(jnp.sin(y)) + load.balance + load.z, load

    both = jax.value_and_grad(loss, (0, 1), has_aux=True)
    alone = jax.jit(both)(params, x)
    boxed = jax.eval_shape(module.init, jax.random.key(0), x, visible)["params"]
    with jax.set_mesh(mesh):
        places = rules.shardings(boxed, mesh), rules.batch_sharding(mesh, x.shape)
        everywhere = NamedSharding(mesh, PartitionSpec())
        params, x = jax.device_put((params, x), places)
        compiled = jax.jit(both, out_shardings=(everywhere, places)).lower(params, x).compile()
        found = compiled(params, x)
    chex.assert_trees_all_close(jax.device_get(found), jax.device_get(alone), rtol=2e-5, atol=2e-5)
    for kernel in (params["in"]["kernel"], found[1][0]["out"]["kernel"]):
        assert kernel.addressable_shards[0].data.nbytes == kernel.nbytes * laid.share
    assert "rematerialization" not in capfd.readouterr().err
    exchanged = laid.capacity is not None and laid.rows % laid.mesh.expert == 0
    assert ("all-to-all" in compiled.as_text()) == exchanged
