"""Ring attention: every device keeps its queries, and the keys and values pass from device to device.

Sequences are divided over the mesh's axis `context` (Liu et al. 2023, Ring Attention with Blockwise Transformers). In
step r a device holds the keys of the device r places before it, and goes on with the online softmax of `blockwise`.
The backward passes keys and values round once more, together with the float32 sums of their gradients, which are home
after as many steps. With c devices each array makes c - 1 steps of 1/c of its size; nothing is ever gathered, and
memory is linear in the length held by one device.

Masks are ids, which travel with the keys, so the order of the slots is free: the permutation of
`parallel.rules.zigzag` gives every device as much of a causal mask to do as the others. Tiles in which nothing is
visible are skipped.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Float32, Int

from jaxformer.config import AttentionConfig
from jaxformer.nn.kernels import Kernel, Keys, Noise, Queries, Score, _sharding, blockwise
from jaxformer.nn.kernels._sharding import Layout
from jaxformer.nn.kernels.blockwise import Gradients, Ids, Rule
from jaxformer.nn.masks import Mask
from jaxformer.parallel import shards
from jaxformer.types import Array, PyTree, Slots

AXIS = "context"


class Data(NamedTuple):
    """What has no gradient: whole slots of both sides, the mask's window, the score's integers, the dropout key."""

    query: Slots
    key: Slots
    window: Array | None
    score: PyTree
    noise: Array | None


class Plan(NamedTuple):
    """What is fixed when the program is traced. Specs are tuples of leaves: a plan must be hashable."""

    rule: Rule
    layout: Layout
    devices: int
    block: int
    real: tuple[PartitionSpec, ...]
    fixed: tuple[PartitionSpec, ...]


def attend(
    q: Queries,
    k: Keys,
    v: Keys,
    mask: Mask,
    score: Score | None,
    noise: Noise | None,
    config: AttentionConfig,
) -> Queries:
    """Equals the dense kernel. Lengths that the devices do not divide are filled up; one device alone is `blockwise`.

    Raises:
      ConfigError: the mask hides single pairs, or the score's heads cannot be divided.
    """
    _sharding.refuse_table("ring", mask)
    where = _sharding.layout(q.shape[0], q.shape[2])
    if where is None or not where.length:
        return blockwise.attend(q, k, v, mask, score, noise, config)
    devices, length = shards.parts(where.length), q.shape[1]
    k, v, score = _sharding.spread(k, v, score, q.shape[2], shards.parts(where.heads))
    q, k, v = (_sharding.pad(x, devices) for x in (q, k, v))
    query, key = (_sharding.pad_slots(side, devices) for side in (mask.query, mask.key))
    rule, real, fixed = blockwise.split(mask, score, noise)
    specs = _sharding.score_specs(score, where.heads)
    plan = Plan(rule, where, devices, config.block, _leaves(real, specs), _leaves(fixed, specs))
    window = None if mask.window is None else jnp.asarray(mask.window, jnp.int32)
    data = Data(query, key, window, fixed, None if noise is None else noise.key)
    return _attention(plan, q, k, v, real, data)[:, :length]


def _leaves(tree: PyTree, specs: PyTree) -> tuple[PartitionSpec, ...]:
    """The specs of the leaves that `tree` has: of the score's arguments it holds only some, and None for the others."""
    flat = jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None)
    every = jax.tree.leaves(specs, is_leaf=lambda spec: spec is None or isinstance(spec, PartitionSpec))
    return tuple(spec for leaf, spec in zip(flat, every, strict=True) if leaf is not None)


def _specs(plan: Plan, real: PyTree, data: Data) -> tuple[PyTree, ...]:
    """Of q, k, v, `real` and `data`."""
    layout, everywhere = plan.layout, PartitionSpec()
    of_data = Data(
        Slots(layout.ids, layout.ids),
        Slots(layout.ids, layout.ids),
        None if data.window is None else everywhere,
        jax.tree.unflatten(jax.tree.structure(data.score), plan.fixed),
        None if data.noise is None else everywhere,
    )
    return *(layout.tensor,) * 3, jax.tree.unflatten(jax.tree.structure(real), plan.real), of_data


def _shift(devices: int, tree: PyTree) -> PyTree:
    """What the device before holds."""
    ring = [(i, (i + 1) % devices) for i in range(devices)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, ring), tree)


def _tiled(plan: Plan, *arrays: PyTree) -> tuple[PyTree, ...]:
    """A device's `[B, T, ...]` as tiles; trees of arrays of one length."""
    cut = lambda x: blockwise.tiles(x, min(plan.block, x.shape[1]))  # noqa: E731
    return tuple(jax.tree.map(cut, each) for each in arrays)


def _ids(plan: Plan, data: Data, query: Slots, key: Slots, step: Int[Array, ""] | int) -> Ids:
    """The tiles' integers when the keys have made so many steps. Every pair of parts has a dropout key of its own."""
    active = blockwise.active(query, key, plan.rule.causal, data.window)
    noise = None if data.noise is None else jax.random.fold_in(_sharding.own(plan.layout, data.noise), step)
    return Ids(query, key, data.window, active, data.score, noise)


def _read(
    plan: Plan, q: Queries, k: Keys, v: Keys, real: PyTree, data: Data
) -> tuple[Queries, Float32[Array, "B H T"]]:
    """On one device: its part of the output, and of the log-sums."""
    length = q.shape[1]
    (q, k, v), query, key = _tiled(plan, (q, k, v), data.query, data.key)

    def read(held: tuple, running: blockwise.Running, step: Array | int) -> blockwise.Running:
        k, v, key = held
        return blockwise.read(plan.rule, q, k, v, real, _ids(plan, data, query, key, step), running)

    def turn(carry: tuple, step: Array) -> tuple[tuple, None]:
        held, running = carry
        following = _shift(plan.devices, held)  # does not wait for this step's tiles, nor they for it
        return (following, read(held, running, step)), None

    start = ((k, v, key), blockwise.start(q, v.shape[-1]))
    (held, running), _ = jax.lax.scan(turn, start, jnp.arange(plan.devices - 1))
    o, log_sum = blockwise.finish(read(held, running, plan.devices - 1), q.dtype)
    log_sum = blockwise.whole(jnp.swapaxes(log_sum, 2, 3), length)
    return blockwise.whole(o, length), jnp.swapaxes(log_sum, 1, 2)


def _pull(
    plan: Plan,
    q: Queries,
    k: Keys,
    v: Keys,
    real: PyTree,
    data: Data,
    o: Queries,
    log_sum: Float32[Array, "B H T"],
    do: Queries,
) -> tuple[Queries, Keys, Keys, PyTree]:
    """On one device: its parts of the gradients; those of the score's arguments summed over all devices."""
    queries, keys, inputs = q.shape[1], k.shape[1], Gradients(q, k, v, real)
    (q, k, v), (o, do), query, key = _tiled(plan, (q, k, v), (o, do), data.query, data.key)
    (log_sum,) = _tiled(plan, jnp.swapaxes(log_sum, 1, 2))
    known = blockwise.given(do, o, jnp.swapaxes(log_sum, 2, 3))

    def pull(held: tuple, sums: Gradients, step: Array | int) -> Gradients:
        k, v, key = held
        return blockwise.pull(plan.rule, q, k, v, real, _ids(plan, data, query, key, step), known, sums)

    def turn(carry: tuple, step: Array) -> tuple[tuple, None]:
        held, sums = carry
        held = _shift(plan.devices, held)
        sums = pull(held, sums, step)
        dk, dv = _shift(plan.devices, (sums.k, sums.v))  # they are always one place ahead: home after the last step
        return (held, sums._replace(k=dk, v=dv)), None

    zeros = blockwise.no_gradients(q, k, v, real)
    mine = pull((k, v, key), zeros, 0)
    start = ((k, v, key), mine._replace(k=zeros.k, v=zeros.v))
    (_, sums), _ = jax.lax.scan(turn, start, jnp.arange(1, plan.devices))
    sums = Gradients(
        blockwise.whole(sums.q, queries),
        blockwise.whole(sums.k + mine.k, keys),
        blockwise.whole(sums.v + mine.v, keys),
        _summed(plan, sums.real),
    )
    return tuple(blockwise.like(sums, inputs))


def _summed(plan: Plan, real: PyTree) -> PyTree:
    """Gradients of the score's arguments, added over the devices that hold the same part of them."""
    leaves, tree = jax.tree.flatten(real)
    shared = tuple(axis for axis in plan.layout.divides if axis not in plan.layout.heads)
    axes = [shared if any(spec) else plan.layout.divides for spec in plan.real]
    return tree.unflatten([jax.lax.psum(leaf, over) for leaf, over in zip(leaves, axes, strict=True)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(plan: Plan, q: Queries, k: Keys, v: Keys, real: PyTree, data: Data) -> Queries:
    return _attention_forward(plan, q, k, v, real, data)[0]


def _attention_forward(plan: Plan, q: Queries, k: Keys, v: Keys, real: PyTree, data: Data):
    specs = _specs(plan, real, data)
    read = shards.shard(functools.partial(_read, plan), specs, (plan.layout.tensor, plan.layout.sums))
    o, log_sum = read(q, k, v, real, data)
    return o, (q, k, v, real, data, o, log_sum)


def _attention_backward(plan: Plan, saved: tuple, do: Queries):
    specs, layout = _specs(plan, saved[3], saved[4]), plan.layout
    inputs = (*specs, layout.tensor, layout.sums, layout.tensor)
    return *shards.shard(functools.partial(_pull, plan), inputs, specs[:4])(*saved, do), None


_attention.defvjp(_attention_forward, _attention_backward)

KERNEL = Kernel(attend)
