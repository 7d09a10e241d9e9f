"""Who may look at whom, as data. A mask is ids until the kernel turns it into booleans, whole or tile by tile."""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
from jaxtyping import Bool, Int

from jaxformer.types import Array, Slots


@flax.struct.dataclass
class Mask:
    """Query slot `t` sees key slot `s` iff they share a segment other than 0, and the order rules allow it.

    `hidden` takes more away, pair by pair: what no rule expresses, such as the order of a permutation. It is a whole
    table, so only the dense kernel honours it; the others refuse it.

    Attributes:
      query, key: the two sides' `Slots`, `[B, T]` and `[B, S]`.
      causal: only keys at positions up to the query's.
      window: only keys less than `window` positions back (and, where not causal, ahead). A number or, in stacks whose
        layers differ, an int32 scalar.
      hidden: bool `[B, T, S]`, True: not visible; None: the rules alone.
      own: the keys are the query slots themselves: self-attention, and not against a cache.
    """

    query: Slots
    key: Slots
    causal: bool = flax.struct.field(pytree_node=False, default=False)
    window: Array | int | None = None
    hidden: Array | None = None
    own: bool = flax.struct.field(pytree_node=False, default=False)

    def dense(self) -> Bool[Array, "B T S"]:
        """True where visible."""
        see = visible(self.query, self.key, self.causal, self.window)
        return see if self.hidden is None else see & ~self.hidden


def visible(query: Slots, key: Slots, causal: bool, window: Int[Array, ""] | int | None) -> Bool[Array, "B T S"]:
    """The one predicate, for slots `[B, T]` and `[B, S]`.

    A query of segment -n reads segment n and nobody reads it: padding whose output counts.
    """
    see = (jnp.abs(query.segment)[:, :, None] == key.segment[:, None, :]) & (key.segment[:, None, :] > 0)
    back = query.position[:, :, None] - key.position[:, None, :]
    if causal:
        see &= back >= 0
    if window is not None:
        see &= back < window
        if not causal:
            see &= back > -window
    return see


def slots(segment: Int[Array, "B T"]) -> Slots:
    """Slots whose positions count from 0 inside each run of equal segment ids.

    Padding (segment 0) gets position 0.
    """
    index = jnp.arange(segment.shape[1])[None, :]
    starts = jnp.concatenate([jnp.ones_like(segment[:, :1], bool), segment[:, 1:] != segment[:, :-1]], axis=1)
    first = jnp.maximum.accumulate(jnp.where(starts, index, 0), axis=1)
    return Slots(position=jnp.where(segment == 0, 0, index - first), segment=segment)
