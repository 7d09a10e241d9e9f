"""What a decoding transformer remembers: an explicit pytree with positions, never a hidden collection."""

from __future__ import annotations

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jaxformer.parallel import mesh
from jaxformer.types import Array, Slots


def precision(dtype: jnp.dtype) -> jnp.dtype:
    """In which keys and values are kept for queries of `dtype`: on a CPU products of few rows are slow in 16 bits."""
    return jnp.dtype(jnp.float32) if mesh.platform() == "cpu" else jnp.dtype(dtype)


@flax.struct.dataclass
class KeyValues:
    """Projected keys `[B, G, K, S]` and values `[B, G, S, K]` of a layer, as products with them read them in a row.

    Those of a whole stack are one array `[L, ...]` each, or a tuple of L, where each layer is a part of the program of
    its own: then nothing is cut out of a large array before it is read. Kernels take `[B, S, G, K]`; that is a
    transpose of which nothing is left in the compiled program.
    """

    k: Array | tuple[Array, ...]
    v: Array | tuple[Array, ...]

    def by_slot(self) -> tuple[Float[Array, "B S G K"], Float[Array, "B S G K"]]:
        """One layer's keys and values as kernels take them."""
        return jnp.moveaxis(self.k, 3, 1), jnp.moveaxis(self.v, 1, 2)

    @classmethod
    def by_head(cls, k: Float[Array, "B S G K"], v: Float[Array, "B S G K"]) -> KeyValues:
        """One layer's keys and values as they are kept."""
        dtype = precision(k.dtype)
        return cls(jnp.moveaxis(k, 1, 3).astype(dtype), jnp.moveaxis(v, 2, 1).astype(dtype))

    def layer(self, number: int) -> KeyValues:
        """One layer's, of a stack's tuples."""
        return KeyValues(self.k[number], self.v[number])

    @classmethod
    def of_layers(cls, layers: Sequence[KeyValues]) -> KeyValues:
        """A stack's tuples."""
        return cls(tuple(each.k for each in layers), tuple(each.v for each in layers))

    def grow(self, more: int) -> KeyValues:
        """With empty slots after those there are."""

        def pad(x: Array, axis: int) -> Array:
            return jnp.pad(x, [(0, more if i == x.ndim + axis else 0) for i in range(x.ndim)])

        return KeyValues(jax.tree.map(lambda x: pad(x, -1), self.k), jax.tree.map(lambda x: pad(x, -2), self.v))


@flax.struct.dataclass
class Cache:
    """The keys and values that one layer reads and writes.

    Attributes:
      held: the layer's own, or the stack's in one array each: then only the new slots are written, in place, where the
        compiler sees that it may.
      layer: the layer's number among the stack's, int32 scalar; None: `held` is its own.
      index: the slot where the next ones go, int32 scalar, the same for all rows.
    """

    held: KeyValues
    layer: Array | None
    index: Array

    def write(self, k: Float[Array, "B T G K"], v: Float[Array, "B T G K"]) -> Cache:
        """The cache with new keys and values in slots `index : index + T`."""

        def put(old: Array, new: Array, *at: Array | int) -> Array:
            if self.layer is not None:
                new, at = new[None], (self.layer, *at)
            return jax.lax.dynamic_update_slice(old, new, tuple(jnp.int32(i) for i in at))

        new = KeyValues.by_head(k, v)
        held = KeyValues(put(self.held.k, new.k, 0, 0, 0, self.index), put(self.held.v, new.v, 0, 0, self.index, 0))
        return self.replace(held=held)

    def read(self) -> tuple[Float[Array, "B S G K"], Float[Array, "B S G K"]]:
        """All keys and values of this layer."""
        pick = lambda x: jax.lax.dynamic_index_in_dim(x, self.layer, keepdims=False)  # noqa: E731
        return (self.held if self.layer is None else jax.tree.map(pick, self.held)).by_slot()


@flax.struct.dataclass
class TransformerState:
    """The decoding state of a transformer of L layers with room for S slots.

    Attributes:
      held: keys and values of self-attention, rotated if the encoding rotates.
      slots: position and segment of each held slot, `[B, S]`; segment 0 where nothing was written or padding was.
      index: int32 scalar, the next free slot.
      position: int32 `[B]`, the position of the next token.
      memory: projected keys and values of the encoder's output for cross-attention, or None.
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
        pick = lambda axis: lambda x: jnp.take(x, index, axis=axis)  # noqa: E731
        flat = pick(0)
        return TransformerState(
            held=jax.tree.map(pick(-4), self.held),
            slots=jax.tree.map(flat, self.slots),
            index=self.index,
            position=flat(self.position),
            memory=jax.tree.map(pick(-4), self.memory),
            memory_slots=jax.tree.map(flat, self.memory_slots),
            seen=jax.tree.map(flat, self.seen),
        )

    def grow(self, length: int) -> TransformerState:
        """The state with room for `length` slots, the new ones empty."""
        more = length - self.slots.segment.shape[1]
        pad = lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)])  # noqa: E731
        return self.replace(
            held=self.held.grow(more), slots=jax.tree.map(pad, self.slots), seen=jax.tree.map(pad, self.seen)
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
