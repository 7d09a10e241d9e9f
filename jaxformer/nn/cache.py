"""What a decoding transformer remembers: an explicit pytree with positions, never a hidden collection."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jaxformer.types import Array, Slots


@flax.struct.dataclass
class KeyValues:
    """Projected keys and values, `[B, S, G, K]`, or `[L, B, S, G, K]` for a whole stack."""

    k: Array
    v: Array


@flax.struct.dataclass
class Cache:
    """The keys and values of one layer, and the slot where the next ones go (int32 scalar, the same for all rows)."""

    held: KeyValues
    index: Array

    def write(self, k: Float[Array, "B T G K"], v: Float[Array, "B T G K"]) -> Cache:
        """The cache with new keys and values in slots `index : index + T`."""

        def put(old: Array, new: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), self.index, axis=1)

        return Cache(KeyValues(put(self.held.k, k), put(self.held.v, v)), self.index + k.shape[1])


@flax.struct.dataclass
class TransformerState:
    """The decoding state of a transformer of L layers with room for S slots.

    Attributes:
      held: keys and values of self-attention, `[L, B, S, G, K]`, rotated if the encoding rotates.
      slots: position and segment of each held slot, `[B, S]`; segment 0 where nothing was written or padding was.
      index: int32 scalar, the next free slot.
      position: int32 `[B]`, the position of the next token.
      memory: projected keys and values of the encoder's output for cross-attention, or None.
      memory_slots: their slots, or None.
    """

    held: KeyValues
    slots: Slots
    index: Array
    position: Array
    memory: KeyValues | None = None
    memory_slots: Slots | None = None

    def rows(self, index: Int[Array, " B"]) -> TransformerState:
        """The state whose row i is this one's row `index[i]`."""
        layered, flat = (lambda x: jnp.take(x, index, axis=1)), (lambda x: jnp.take(x, index, axis=0))
        return TransformerState(
            held=jax.tree.map(layered, self.held),
            slots=jax.tree.map(flat, self.slots),
            index=self.index,
            position=flat(self.position),
            memory=jax.tree.map(layered, self.memory),
            memory_slots=jax.tree.map(flat, self.memory_slots),
        )

    def grow(self, length: int) -> TransformerState:
        """The state with room for `length` slots, the new ones empty."""
        more = length - self.slots.segment.shape[1]
        held = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, more), (0, 0), (0, 0))), self.held)
        return self.replace(held=held, slots=jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, more))), self.slots))
