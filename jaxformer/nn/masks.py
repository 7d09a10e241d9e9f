"""Attention masks as position and segment ids. A kernel turns them into booleans, for all pairs or tile by tile."""

from __future__ import annotations

from typing import NamedTuple

import flax.struct
import jax.numpy as jnp
from jaxtyping import Bool, Float32, Int

from jaxformer.config import SparseConfig
from jaxformer.types import Array, Slots


class Blocks(NamedTuple):
    """Which blocks of a row's slots see each other (BigBird, Zaheer et al. 2020). Slot t is in block t // size.

    Queries of the first and the last block see all blocks; others see these two, and blocks at most one away.

    Attributes:
      size: slots of a block.
      last: number from 0 of the last block.
      repeats: how many times the keys of the first block count beyond once, for queries that do not see all blocks.
    """

    size: int
    last: int
    repeats: int

    @classmethod
    def of(cls, config: SparseConfig | None, length: int) -> Blocks | None:
        """The blocks of rows of `length` slots; None where every query sees all keys."""
        if config is None or (config.short == "full" and length <= (5 + 2 * config.random) * config.size):
            return None
        return cls(config.size, (length - 1) // config.size, config.random)

    def visible(self, query: Int[Array, "B T"], key: Int[Array, "B S"]) -> Bool[Array, "B T S"]:
        """True where the query's block sees the key's, for slots by their numbers."""
        query_block, key_block = query[:, :, None] // self.size, key[:, None, :] // self.size
        return self.sees_all(query_block) | self.sees_all(key_block) | (jnp.abs(query_block - key_block) <= 1)

    def sees_all(self, block: Int[Array, "*shape"]) -> Bool[Array, "*shape"]:
        """True for blocks that see all others, and that all others see."""
        return (block == 0) | (block == self.last)

    def bias(self, query: Int[Array, "B T"], key: Int[Array, "B S"]) -> Float32[Array, "B 1 T S"]:
        """Added to the scores: log(1 + repeats) where a key of the first block counts so many times."""
        repeated = (key < self.size)[:, None, :] & ~self.sees_all(query // self.size)[:, :, None]
        return jnp.where(repeated, jnp.log1p(jnp.float32(self.repeats)), 0.0)[:, None]


class Mask(flax.struct.PyTreeNode):
    """Which key slots each query slot attends to.

    Query slot t sees key slot s if both are in the same segment, that segment is not 0, and the order rules `causal`
    and `window` allow the pair. With `query.prefix`, the keys in a segment's prefix are ahead of none of its queries
    (Raffel et al. 2020, figure 3), and a window reaches as far ahead as back. `hidden_pairs` hides further single
    pairs, for what no rule expresses (the order of a permutation). It is a full table, so only the dense kernel
    supports it; the other kernels raise ConfigError.

    Attributes:
      query, key: `Slots` of the two sides, `[B, T]` and `[B, S]`.
      causal: only keys at positions up to the query's, or in the prefix.
      window: only keys less than `window` positions back (and, where not causal, ahead). An int, or an int32 scalar
        in stacks whose layers differ.
      hidden_pairs: bool `[B, T, S]`, True where the pair is not visible; None for the rules alone.
      same_slots: the keys are the query slots themselves: self-attention without a cache.
      blocks: which blocks of slots see each other; positions are then numbers of slots. None for all.
      summaries: keys at negative positions stand for blocks of slots, and no window hides them.
    """

    query: Slots
    key: Slots
    causal: bool = flax.struct.field(pytree_node=False, default=False)
    window: Array | int | None = None
    hidden_pairs: Array | None = None
    same_slots: bool = flax.struct.field(pytree_node=False, default=False)
    blocks: Blocks | None = flax.struct.field(pytree_node=False, default=None)
    summaries: bool = flax.struct.field(pytree_node=False, default=False)

    def dense(self) -> Bool[Array, "B T S"]:
        """The mask as booleans, True where the query sees the key."""
        see = visible(self.query, self.key, self.causal, self.window, self.blocks, self.summaries)
        return see if self.hidden_pairs is None else see & ~self.hidden_pairs


def visible(
    query: Slots,
    key: Slots,
    causal: bool,
    window: Int[Array, ""] | int | None,
    blocks: Blocks | None = None,
    summaries: bool = False,
) -> Bool[Array, "B T S"]:
    """True where query slot t sees key slot s by segment, order and block; arguments as in `Mask`.

    A query of segment -n sees the keys of segment n, but no query sees its slot: padding whose output is used. With
    `blocks` it sees none.
    """
    see = (jnp.abs(query.segment)[:, :, None] == key.segment[:, None, :]) & (key.segment[:, None, :] > 0)
    back = query.position[:, :, None] - key.position[:, None, :]
    if causal:
        see &= key.position[:, None, :] <= last_visible(query)[:, :, None]
    if window is not None:
        near = back < window
        if sees_ahead(query, causal):
            near &= back > -window
        see &= near | (key.position < 0)[:, None, :] if summaries else near
    if blocks is not None:
        see &= blocks.visible(query.position, key.position) & (query.segment > 0)[:, :, None]
    return see


def last_visible(query: Slots) -> Int[Array, "*batch"]:
    """The last position that each query sees under a causal mask: its own, or the last one of its prefix."""
    return query.position if query.prefix is None else jnp.maximum(query.position, query.prefix - 1)


def sees_ahead(query: Slots, causal: bool) -> bool:
    """True if a query may see keys at later positions."""
    return not causal or query.prefix is not None


def full_blocks(slots: Slots, size: int) -> Int[Array, " B"]:
    """Number of blocks of `size` positions, counted from 0, whose last position has a slot that is not padding."""
    is_last = slots.position % size == size - 1
    return jnp.sum(is_last & (slots.segment > 0), axis=1, dtype=jnp.int32)


def block_of_slot(position: Int[Array, "B T"], full: Int[Array, " B"], size: int) -> Int[Array, "B T"]:
    """Number of the block that each slot is summed in; slots after the last full block are in that one.

    -1 where there is no full block (Guo et al. 2022, LongT5, section 3.1; its code assigns the rest so).
    """
    return jnp.minimum(position // size, full[:, None] - 1)


def slots_from_segments(segment: Int[Array, "B T"]) -> Slots:
    """Slots whose positions count from 0 within each run of equal segment ids; padding (segment 0) has position 0."""
    index = jnp.arange(segment.shape[1])[None, :]
    starts = jnp.concatenate([jnp.ones_like(segment[:, :1], bool), segment[:, 1:] != segment[:, :-1]], axis=1)
    first = jnp.maximum.accumulate(jnp.where(starts, index, 0), axis=1)
    return Slots(position=jnp.where(segment == 0, 0, index - first), segment=segment)
