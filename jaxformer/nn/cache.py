"""What a decoding transformer remembers: an explicit pytree with positions, never a hidden collection."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jaxformer.types import Array, Slots


@flax.struct.dataclass
class KeyValues:
    """Projected keys and values, `[L, B, G, S, K]` for a whole stack, `[B, G, S, K]` for a layer of it.

    A head's slots lie in a row, as products over them read them. Kernels take the slots before the heads; that is a
    transpose of which nothing is left in the compiled program.
    """

    k: Array
    v: Array

    def by_slot(self, dtype: jnp.dtype) -> tuple[Float[Array, "B S G K"], Float[Array, "B S G K"]]:
        """One layer's keys and values as kernels take them."""
        return tuple(jnp.moveaxis(x, 1, 2).astype(dtype) for x in (self.k, self.v))

    @classmethod
    def by_head(cls, k: Float[Array, "B S G K"], v: Float[Array, "B S G K"]) -> KeyValues:
        """One layer's keys and values as they are kept."""
        return cls(jnp.moveaxis(k, 2, 1), jnp.moveaxis(v, 2, 1))


@flax.struct.dataclass
class Cache:
    """The keys and values of a stack, where one of its layers reads and writes them.

    All layers share the arrays: each writes only its new slots, in place, where the compiler sees that it may.

    Attributes:
      held: of the stack.
      layer: int32 scalar.
      index: the slot where the next ones go, int32 scalar, the same for all rows.
    """

    held: KeyValues
    layer: Array
    index: Array

    def write(self, k: Float[Array, "B T G K"], v: Float[Array, "B T G K"]) -> Cache:
        """The cache with new keys and values of this layer in slots `index : index + T`."""
        zero = jnp.zeros((), jnp.int32)

        def put(old: Array, new: Array) -> Array:
            return jax.lax.dynamic_update_slice(
                old, new[None].astype(old.dtype), (self.layer, zero, zero, self.index, zero)
            )

        new = KeyValues.by_head(k, v)
        return self.replace(held=KeyValues(put(self.held.k, new.k), put(self.held.v, new.v)))

    def read(self, dtype: jnp.dtype) -> tuple[Float[Array, "B S G K"], Float[Array, "B S G K"]]:
        """All keys and values of this layer."""
        pick = lambda x: jax.lax.dynamic_index_in_dim(x, self.layer, keepdims=False)  # noqa: E731
        return jax.tree.map(pick, self.held).by_slot(dtype)


@flax.struct.dataclass
class TransformerState:
    """The decoding state of a transformer of L layers with room for S slots.

    Attributes:
      held: keys and values of self-attention, `[L, B, G, S, K]`, rotated if the encoding rotates.
      slots: position and segment of each held slot, `[B, S]`; segment 0 where nothing was written or padding was.
      index: int32 scalar, the next free slot.
      position: int32 `[B]`, the position of the next token.
      memory: projected keys and values of the encoder's output for cross-attention, `[L, B, G, S, K]`, or None.
      memory_slots: their slots, or None.
      seen: bool `[B, N, S]`, once every row has N branches: the slots that each of them has in its past. Branches
        share all arrays, the prompt and the source too; a step writes N slots to a row, one a branch. None: none.
    """

    held: KeyValues
    slots: Slots
    index: Array
    position: Array
    memory: KeyValues | None = None
    memory_slots: Slots | None = None
    seen: Array | None = None

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
            seen=jax.tree.map(flat, self.seen),
        )

    def grow(self, length: int) -> TransformerState:
        """The state with room for `length` slots, the new ones empty."""
        more = length - self.slots.segment.shape[1]

        def pad(x: Array, axis: int) -> Array:
            return jnp.pad(x, [(0, more if i == axis % x.ndim else 0) for i in range(x.ndim)])

        return self.replace(
            held=jax.tree.map(lambda x: pad(x, -2), self.held),
            slots=jax.tree.map(lambda x: pad(x, -1), self.slots),
            seen=jax.tree.map(lambda x: pad(x, -1), self.seen),
        )

    def branch(self, count: int) -> TransformerState:
        """The state with `count` branches of every row, all with the row's past."""
        rows, length = self.slots.segment.shape
        return self.replace(seen=jnp.broadcast_to(jnp.arange(length) < self.index, (rows, count, length)))

    def follow(self, parent: Int[Array, "B N"]) -> TransformerState:
        """The state whose branch n is this one's branch `parent[:, n]` of the same row."""
        return self.replace(seen=jnp.take_along_axis(self.seen, parent[:, :, None], axis=1))

    def append(self, count: int) -> tuple[Slots, TransformerState]:
        """The slots `[B, T]` of the next T = `count` tokens, one a branch, and the state that knows of them."""
        rows = self.position.shape[0]
        here = Slots(jnp.broadcast_to(self.position[:, None], (rows, count)), jnp.ones((rows, count), jnp.int32))
        put = lambda all, new: jax.lax.dynamic_update_slice_in_dim(all, new, self.index, axis=-1)  # noqa: E731
        state = self.replace(slots=jax.tree.map(put, self.slots, here), position=self.position + 1)
        if self.seen is not None:
            own = jnp.broadcast_to(jnp.eye(count, dtype=bool), (rows, count, count))
            state = state.replace(seen=put(self.seen, own))
        return here, state
