"""Ring attention (Liu et al. 2023): each device keeps its queries; keys and values rotate from device to device.

Sequences are sharded over c devices, the mesh axis `context`. In step r a device holds the keys of the device r before
it, and continues the online softmax of `blockwise`. The backward pass rotates keys and values once more, together with
the float32 sums of their gradients. Each array makes c - 1 steps of 1/c of its size. Nothing is gathered, and memory is
linear in the length on one device.

Masks are ids, which rotate with the keys, so slots may be in any order. The permutation of `parallel.rules.zigzag`
gives all devices an equal share of a causal mask. Tiles in which nothing is visible are skipped.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Float32, Int

from jaxformer.config import AttentionConfig
from jaxformer.nn.kernels import AttentionBias, AttentionDropout, Kernel, Keys, Queries, _sharding, blockwise
from jaxformer.nn.kernels._sharding import Layout
from jaxformer.nn.kernels.blockwise import Gradients, StaticArgs, TileIds
from jaxformer.nn.masks import Mask
from jaxformer.parallel import shards
from jaxformer.types import Array, PyTree, Slots

AXIS = "context"


class IntegerArgs(NamedTuple):
    """Arguments without a gradient: slots of both sides, window, integer arguments of the bias, dropout key."""

    query: Slots
    key: Slots
    window: Array | None
    int_args: PyTree
    dropout: Array | None


class RingSpec(NamedTuple):
    """Static properties of a traced call. Specs are tuples of leaves, since it must be hashable.

    Attributes:
      static: mask rules, bias function and dropout rate.
      layout: sharding of the arrays.
      devices: number of devices c in the ring.
      block: slots of a tile.
      float_specs, int_specs: specs of the bias arguments with a gradient, and without.
    """

    static: StaticArgs
    layout: Layout
    devices: int
    block: int
    float_specs: tuple[PartitionSpec, ...]
    int_specs: tuple[PartitionSpec, ...]


def attend(
    q: Queries,
    k: Keys,
    v: Keys,
    mask: Mask,
    bias: AttentionBias | None,
    dropout: AttentionDropout | None,
    config: AttentionConfig,
) -> Queries:
    """Attention output `[B, T, H, K]`, equal to the dense kernel's. On a single device this is `blockwise`.

    Lengths are padded to a multiple of the number of devices.

    Raises:
      ConfigError: the mask hides single pairs, or the bias's heads cannot be divided.
    """
    _sharding.refuse_hidden_pairs("ring", mask)
    _sharding.refuse_whole_rows("ring", mask)
    where = _sharding.layout(q.shape[0], q.shape[2])
    if where is None or not where.length:
        return blockwise.attend(q, k, v, mask, bias, dropout, config)
    devices, length = shards.shard_count(where.length), q.shape[1]
    k, v, bias = _sharding.repeat_key_heads(k, v, bias, q.shape[2], shards.shard_count(where.heads))
    q, k, v = (_sharding.pad(x, devices) for x in (q, k, v))
    query, key = (_sharding.pad_slots(side, devices) for side in (mask.query, mask.key))
    static, float_args, int_args = blockwise.split_args(mask, bias, dropout, config)
    specs = _sharding.bias_specs(bias, where.heads)
    ring = RingSpec(
        static, where, devices, config.block, _present_specs(float_args, specs), _present_specs(int_args, specs)
    )
    window = None if mask.window is None else jnp.asarray(mask.window, jnp.int32)
    data = IntegerArgs(query, key, window, int_args, None if dropout is None else dropout.key)
    return _attention(ring, q, k, v, float_args, data)[:, :length]


def _present_specs(tree: PyTree, specs: PyTree) -> tuple[PartitionSpec, ...]:
    """Specs of the leaves of `tree` that are not None: it holds some of the bias arguments, and `specs` has all."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None)
    all_specs = jax.tree.leaves(specs, is_leaf=lambda spec: spec is None or isinstance(spec, PartitionSpec))
    return tuple(spec for leaf, spec in zip(leaves, all_specs, strict=True) if leaf is not None)


def _specs(ring: RingSpec, float_args: PyTree, data: IntegerArgs) -> tuple[PyTree, ...]:
    """Specs of q, k, v, the float arguments and `data`."""
    layout, window, dropout = ring.layout, data.window, data.dropout
    leaves = [layout.ids] * len(jax.tree.leaves((data.query, data.key)))
    leaves += [] if window is None else [PartitionSpec()]
    leaves += ring.int_specs
    leaves += [] if dropout is None else [PartitionSpec()]
    of_data = jax.tree.unflatten(jax.tree.structure(data), leaves)
    return *(layout.tensor,) * 3, jax.tree.unflatten(jax.tree.structure(float_args), ring.float_specs), of_data


def _rotate(devices: int, tree: PyTree) -> PyTree:
    """`tree` of the preceding device in the ring."""
    neighbours = [(i, (i + 1) % devices) for i in range(devices)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, neighbours), tree)


def _tile_all(ring: RingSpec, *arrays: PyTree) -> tuple[PyTree, ...]:
    """Tiles of a device's arrays `[B, T, ...]`, for each tree of arrays of equal length."""
    tile = lambda x: blockwise.tile(x, min(ring.block, x.shape[1]))  # noqa: E731
    return tuple(jax.tree.map(tile, tree) for tree in arrays)


def _tile_ids(ring: RingSpec, data: IntegerArgs, query: Slots, key: Slots, step: Int[Array, ""] | int) -> TileIds:
    """Integer data of the tiles after `step` rotations of the keys, with a dropout key for each pair of parts."""
    active = blockwise.active_tiles(query, key, ring.static.causal, data.window)
    key_of_device = _sharding.shard_key(ring.layout, data.dropout)
    dropout = None if key_of_device is None else jax.random.fold_in(key_of_device, step)
    return TileIds(query, key, data.window, active, data.int_args, dropout)


def _local_forward(
    ring: RingSpec, q: Queries, k: Keys, v: Keys, float_args: PyTree, data: IntegerArgs
) -> tuple[Queries, Float32[Array, "B H T"]]:
    """Output and log-sums on one device."""
    length = q.shape[1]
    (q, k, v), query, key = _tile_all(ring, (q, k, v), data.query, data.key)

    def accumulate(rotating: tuple, running: blockwise.OnlineSoftmax, step: Array | int) -> blockwise.OnlineSoftmax:
        k, v, key = rotating
        return blockwise.accumulate(ring.static, q, k, v, float_args, _tile_ids(ring, data, query, key, step), running)

    def ring_step(carry: tuple, step: Array) -> tuple[tuple, None]:
        rotating, running = carry
        following = _rotate(ring.devices, rotating)  # independent of this step's tiles, so both can overlap
        return (following, accumulate(rotating, running, step)), None

    start = ((k, v, key), blockwise.init(q, v.shape[-1]))
    (rotating, running), _ = jax.lax.scan(ring_step, start, jnp.arange(ring.devices - 1))
    o, log_sum = blockwise.finalize(accumulate(rotating, running, ring.devices - 1), q.dtype)
    log_sum = blockwise.untile(jnp.swapaxes(log_sum, 2, 3), length)
    return blockwise.untile(o, length), jnp.swapaxes(log_sum, 1, 2)


def _local_backward(
    ring: RingSpec,
    q: Queries,
    k: Keys,
    v: Keys,
    float_args: PyTree,
    data: IntegerArgs,
    o: Queries,
    log_sum: Float32[Array, "B H T"],
    do: Queries,
) -> tuple[Queries, Keys, Keys, PyTree]:
    """Gradients on one device; those of the bias arguments are summed over devices."""
    queries, keys, inputs = q.shape[1], k.shape[1], Gradients(q, k, v, float_args)
    (q, k, v), (o, do), query, key = _tile_all(ring, (q, k, v), (o, do), data.query, data.key)
    (log_sum,) = _tile_all(ring, jnp.swapaxes(log_sum, 1, 2))
    known = blockwise.output_gradient(do, o, jnp.swapaxes(log_sum, 2, 3))

    def backward(rotating: tuple, sums: Gradients, step: Array | int) -> Gradients:
        k, v, key = rotating
        return blockwise.backward(
            ring.static, q, k, v, float_args, _tile_ids(ring, data, query, key, step), known, sums
        )

    def ring_step(carry: tuple, step: Array) -> tuple[tuple, None]:
        rotating, sums = carry
        rotating = _rotate(ring.devices, rotating)
        sums = backward(rotating, sums, step)
        dk, dv = _rotate(ring.devices, (sums.k, sums.v))  # one device ahead of k and v: back home after the last step
        return (rotating, sums._replace(k=dk, v=dv)), None

    zeros = blockwise.zero_gradients(q, k, v, float_args)
    own = backward((k, v, key), zeros, 0)
    start = ((k, v, key), own._replace(k=zeros.k, v=zeros.v))
    (_, sums), _ = jax.lax.scan(ring_step, start, jnp.arange(1, ring.devices))
    sums = Gradients(
        blockwise.untile(sums.q, queries),
        blockwise.untile(sums.k + own.k, keys),
        blockwise.untile(sums.v + own.v, keys),
        _sum_bias_gradients(ring, sums.float_args),
    )
    return tuple(blockwise.cast_like(sums, inputs))


def _sum_bias_gradients(ring: RingSpec, float_args: PyTree) -> PyTree:
    """Gradients of the bias arguments, summed over the devices that share a part of them."""
    leaves, tree = jax.tree.flatten(float_args)
    shared = tuple(axis for axis in ring.layout.divides if axis not in ring.layout.heads)
    axes = [shared if any(spec) else ring.layout.divides for spec in ring.float_specs]
    return tree.unflatten([jax.lax.psum(leaf, over) for leaf, over in zip(leaves, axes, strict=True)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(ring: RingSpec, q: Queries, k: Keys, v: Keys, float_args: PyTree, data: IntegerArgs) -> Queries:
    return _attention_forward(ring, q, k, v, float_args, data)[0]


def _attention_forward(ring: RingSpec, q: Queries, k: Keys, v: Keys, float_args: PyTree, data: IntegerArgs):
    specs = _specs(ring, float_args, data)
    read = shards.shard(functools.partial(_local_forward, ring), specs, (ring.layout.tensor, ring.layout.sums))
    o, log_sum = read(q, k, v, float_args, data)
    return o, (q, k, v, float_args, data, o, log_sum)


def _attention_backward(ring: RingSpec, saved: tuple, do: Queries):
    specs, layout = _specs(ring, saved[3], saved[4]), ring.layout
    inputs = (*specs, layout.tensor, layout.sums, layout.tensor)
    return *shards.shard(functools.partial(_local_backward, ring), inputs, specs[:4])(*saved, do), None


_attention.defvjp(_attention_forward, _attention_backward)

KERNEL = Kernel(attend, lambda config, bias, dropout: _sharding.whole_rows(config))
