"""Running a kernel on each device's own part: rows over the data axes, heads over `tensor`, length over `context`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Float, Key, Shaped

from jaxformer.config import ConfigError
from jaxformer.nn.kernels import Keys, Queries, Score
from jaxformer.nn.masks import Mask
from jaxformer.parallel import shards
from jaxformer.types import Array, PyTree, Slots


class Layout(NamedTuple):
    """Mesh axes of size > 1, by what they divide: rows, heads, slots."""

    batch: tuple[str, ...]
    heads: tuple[str, ...]
    length: tuple[str, ...]

    @property
    def divides(self) -> tuple[str, ...]:
        """Every axis over which parts of one attention lie."""
        return (*self.batch, *self.heads, *self.length)

    @property
    def tensor(self) -> PartitionSpec:
        """Of `[B, T, H, K]`."""
        return PartitionSpec(self.batch, self.length, self.heads, None)

    @property
    def ids(self) -> PartitionSpec:
        """Of `[B, T]`."""
        return PartitionSpec(self.batch, self.length)

    @property
    def sums(self) -> PartitionSpec:
        """Of `[B, H, T]`."""
        return PartitionSpec(self.batch, self.heads, self.length)


def layout(batch: int, heads: int) -> Layout | None:
    """Where `[B, T, H, K]` lies on the current mesh; None where there is nothing to divide.

    Among axes of which some are taken over, those of size 1 are too: the partitioner refuses a kernel of the TPU even
    where it would have nothing to divide.
    """
    if shards.alone() and not shards.inside():
        return None
    return Layout(shards.fitting("batch", batch), shards.fitting("act_heads", heads), shards.fitting("length", 0))


def spread(
    k: Keys, v: Keys, score: Score | None, heads: int, ways: int
) -> tuple[Float[Array, "B S _ K"], Float[Array, "B S _ K"], Score | None]:
    """Keys and values whose heads `ways` devices can divide: repeated where they are fewer, or do not come out even.

    `heads` is that of the queries, a multiple of `ways`; each device's queries then meet the keys they belong to.
    """
    groups = k.shape[2]
    times = math.lcm(groups, ways) // groups
    if times == 1:
        return k, v, score

    def repeat(x: Array, axis: int) -> Array:
        return jnp.repeat(x, times, axis=axis) if axis >= 0 and x.shape[axis] == groups else x

    if score is not None and score.heads is not None and groups < heads:
        score = score._replace(args=jax.tree.map(repeat, score.args, score.heads))
    return jnp.repeat(k, times, axis=2), jnp.repeat(v, times, axis=2), score


def score_specs(score: Score | None, axes: tuple[str, ...]) -> PyTree:
    """How `axes`, which divide the heads, divide the score's arguments.

    Raises:
      ConfigError: the encoding does not say which of its arguments' axes are heads.
    """
    if score is None:
        return None
    if not axes:
        return jax.tree.map(lambda leaf: PartitionSpec(), score.args)
    if score.heads is None:
        raise ConfigError(
            "encoding.kind: got a score that does not name its axes of heads, expected one that does where the mesh "
            "divides heads; set config.mesh.tensor to 1, or attention.kernel to dense or blockwise"
        )
    spec = lambda leaf, axis: PartitionSpec(*(None,) * axis, axes) if axis >= 0 else PartitionSpec()  # noqa: E731
    return jax.tree.map(spec, score.args, score.heads)


def pad(x: Shaped[Array, "B T *rest"], multiple: int) -> Shaped[Array, "B _ *rest"]:
    """`x` filled up with zeros (for ids: segment 0, nothing there) to a multiple of so many slots."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % multiple)] + [(0, 0)] * (x.ndim - 2))


def pad_slots(slots: Slots, multiple: int) -> Slots:
    return Slots(*(pad(ids, multiple) for ids in slots))


def rows_and_heads(function: Callable, q: Queries, k: Keys, v: Keys, query: Slots, key: Slots) -> Queries:
    """`function(q, k, v, query, key)` on each device's rows and heads, of whole sequences.

    For kernels that the partitioner cannot divide. What the function closes over must be the same on all devices.
    """
    where = layout(q.shape[0], q.shape[2])
    if where is None:
        return function(q, k, v, query, key)
    k, v, _ = spread(k, v, None, q.shape[2], shards.parts(where.heads))
    where = where._replace(length=())
    return shards.shard(function, (*(where.tensor,) * 3, where.ids, where.ids), where.tensor)(q, k, v, query, key)


def own(where: Layout, key: Key[Array, ""] | None) -> Key[Array, ""] | None:
    """A random key that differs between the devices that hold different parts."""
    if key is None or not where.divides:
        return key
    return jax.random.fold_in(key, jax.lax.axis_index(where.divides))


def refuse_table(name: str, mask: Mask) -> None:
    """Raises ConfigError at a mask that hides single pairs: a table of all of them, which this kernel never makes."""
    if mask.hidden is not None:
        raise ConfigError(f"attention.kernel: got {name} with a mask of single pairs, expected dense; set it to auto")
