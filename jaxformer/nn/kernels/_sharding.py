"""Running a kernel on shards: rows over the data axes, heads over `tensor`, slots over `context`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Float, Key, Shaped

from jaxformer.config import AttentionConfig
from jaxformer.errors import ConfigError
from jaxformer.nn.kernels import AttentionBias, Keys, Queries
from jaxformer.nn.masks import Mask
from jaxformer.parallel import shards
from jaxformer.types import Array, PyTree, Slots


class Layout(NamedTuple):
    """Mesh axes of size > 1 that shard rows, heads and slots."""

    batch: tuple[str, ...]
    heads: tuple[str, ...]
    length: tuple[str, ...]

    @property
    def divides(self) -> tuple[str, ...]:
        """All axes that shard the attention."""
        return (*self.batch, *self.heads, *self.length)

    @property
    def tensor(self) -> PartitionSpec:
        """Spec of `[B, T, H, K]`."""
        return PartitionSpec(self.batch, self.length, self.heads, None)

    @property
    def ids(self) -> PartitionSpec:
        """Spec of `[B, T]`."""
        return PartitionSpec(self.batch, self.length)

    @property
    def sums(self) -> PartitionSpec:
        """Spec of `[B, H, T]`."""
        return PartitionSpec(self.batch, self.heads, self.length)


def layout(batch: int, heads: int) -> Layout | None:
    """Sharding of `[B, T, H, K]` on the current mesh; None on a single device outside a `shard_map`.

    Inside a `shard_map` over some axes the others are taken too, even if their size is 1: the partitioner rejects a TPU
    kernel although there is nothing to shard.
    """
    if shards.is_unsharded() and not shards.is_inside_shard_map():
        return None
    return Layout(
        shards.dividing_axes("batch", batch),
        shards.dividing_axes("act_heads", heads),
        shards.dividing_axes("length", 0),
    )


def repeat_key_heads(
    k: Keys, v: Keys, bias: AttentionBias | None, heads: int, ways: int
) -> tuple[Float[Array, "B S _ K"], Float[Array, "B S _ K"], AttentionBias | None]:
    """Keys, values and bias with key heads repeated until `ways` devices divide them.

    `heads`, the number of query heads, is a multiple of `ways`. Each device then has the key heads of its query heads.
    """
    groups = k.shape[2]
    times = math.lcm(groups, ways) // groups
    if times == 1:
        return k, v, bias

    def repeat(x: Array, axis: int) -> Array:
        return jnp.repeat(x, times, axis=axis) if axis >= 0 and x.shape[axis] == groups else x

    if bias is not None and bias.heads is not None and groups < heads:
        bias = bias._replace(args=jax.tree.map(repeat, bias.args, bias.heads))
    return jnp.repeat(k, times, axis=2), jnp.repeat(v, times, axis=2), bias


def bias_specs(bias: AttentionBias | None, axes: tuple[str, ...]) -> PyTree:
    """Specs of the bias arguments where `axes` shard the heads; None without a bias.

    Raises:
      ConfigError: the encoding does not say which axes of its arguments are heads.
    """
    if bias is None:
        return None
    if not axes:
        return jax.tree.map(lambda leaf: PartitionSpec(), bias.args)
    if bias.heads is None:
        raise ConfigError(
            "encoding.kind: got a bias that does not name its axes of heads, expected one that does where the mesh "
            "divides heads; set config.mesh.tensor to 1, or attention.kernel to dense or blockwise"
        )
    spec = lambda leaf, axis: PartitionSpec(*(None,) * axis, axes) if axis >= 0 else PartitionSpec()  # noqa: E731
    return jax.tree.map(spec, bias.args, bias.heads)


def pad(x: Shaped[Array, "B T *rest"], multiple: int) -> Shaped[Array, "B _ *rest"]:
    """`x` padded with zeros to a multiple of `multiple` slots; for ids that is segment 0, padding."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % multiple)] + [(0, 0)] * (x.ndim - 2))


def pad_slots(slots: Slots, multiple: int) -> Slots:
    """`slots` padded to a multiple of `multiple`."""
    return jax.tree.map(lambda ids: pad(ids, multiple), slots)


def shard_rows_and_heads(function: Callable, q: Queries, k: Keys, v: Keys, query: Slots, key: Slots) -> Queries:
    """`function(q, k, v, query, key)` run on each device's rows and heads, with full sequences.

    For kernels that the partitioner cannot shard. Values that the function closes over must be equal on all devices.
    """
    where = layout(q.shape[0], q.shape[2])
    if where is None:
        return function(q, k, v, query, key)
    k, v, _ = repeat_key_heads(k, v, None, q.shape[2], shards.shard_count(where.heads))
    where = where._replace(length=())
    return shards.shard(function, (*(where.tensor,) * 3, where.ids, where.ids), where.tensor)(q, k, v, query, key)


def shard_key(where: Layout, key: Key[Array, ""] | None) -> Key[Array, ""] | None:
    """`key` folded with the device's index, so that shards draw differently; None without a key."""
    if key is None or not where.divides:
        return key
    return jax.random.fold_in(key, jax.lax.axis_index(where.divides))


def refuse_hidden_pairs(name: str, mask: Mask) -> None:
    """Raises ConfigError if `mask` hides single pairs: this kernel never builds the full table."""
    if mask.hidden_pairs is not None:
        raise ConfigError(f"attention.kernel: got {name} with a mask of single pairs, expected dense; set it to auto")


def refuse_whole_rows(name: str, mask: Mask) -> None:
    """Raises ConfigError if `mask` has blocks or summaries, whose slots are numbered in whole rows."""
    if mask.blocks is not None or mask.summaries:
        raise ConfigError(
            f"attention.kernel: got {name} with attention.sparse or attention.summary, expected dense or blockwise; "
            "set config.mesh.context to 1"
        )


def whole_rows(config: AttentionConfig) -> str | None:
    """The refusal of a kernel that knows neither blocks nor summaries; None if the config has neither."""
    return None if config.sparse is None and config.summary is None else "attention.sparse and attention.summary None"
