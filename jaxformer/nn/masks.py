"""Attention masks as position and segment ids. A kernel turns them into booleans, for all pairs or tile by tile."""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
from jaxtyping import Bool, Int

from jaxformer.types import Array, Slots


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
    """

    query: Slots
    key: Slots
    causal: bool = flax.struct.field(pytree_node=False, default=False)
    window: Array | int | None = None
    hidden_pairs: Array | None = None
    same_slots: bool = flax.struct.field(pytree_node=False, default=False)

    def dense(self) -> Bool[Array, "B T S"]:
        """The mask as booleans, True where the query sees the key."""
        see = visible(self.query, self.key, self.causal, self.window)
        return see if self.hidden_pairs is None else see & ~self.hidden_pairs


def visible(query: Slots, key: Slots, causal: bool, window: Int[Array, ""] | int | None) -> Bool[Array, "B T S"]:
    """True where query slot t sees key slot s by segment and order.

    A query of segment -n sees the keys of segment n, but no query sees its slot: padding whose output is used.
    """
    see = (jnp.abs(query.segment)[:, :, None] == key.segment[:, None, :]) & (key.segment[:, None, :] > 0)
    back = query.position[:, :, None] - key.position[:, None, :]
    if causal:
        see &= key.position[:, None, :] <= last_visible(query)[:, :, None]
    if window is not None:
        see &= back < window
        if sees_ahead(query, causal):
            see &= back > -window
    return see


def last_visible(query: Slots) -> Int[Array, "*batch"]:
    """The last position that each query sees under a causal mask: its own, or the last one of its prefix."""
    return query.position if query.prefix is None else jnp.maximum(query.position, query.prefix - 1)


def sees_ahead(query: Slots, causal: bool) -> bool:
    """True if a query may see keys at later positions."""
    return not causal or query.prefix is not None


def slots_from_segments(segment: Int[Array, "B T"]) -> Slots:
    """Slots whose positions count from 0 within each run of equal segment ids; padding (segment 0) has position 0."""
    index = jnp.arange(segment.shape[1])[None, :]
    starts = jnp.concatenate([jnp.ones_like(segment[:, :1], bool), segment[:, 1:] != segment[:, :-1]], axis=1)
    first = jnp.maximum.accumulate(jnp.where(starts, index, 0), axis=1)
    return Slots(position=jnp.where(segment == 0, 0, index - first), segment=segment)
