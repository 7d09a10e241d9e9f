"""What a decoding transformer remembers: an explicit pytree with positions, never a hidden collection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Shaped

from jaxformer.parallel import mesh
from jaxformer.types import Array, Slots


def precision(dtype: jnp.dtype) -> jnp.dtype:
    """In which keys and values are kept for queries of `dtype`: on a CPU products of few rows are slow in 16 bits."""
    return jnp.dtype(jnp.float32) if mesh.platform() == "cpu" else jnp.dtype(dtype)


def place(
    held: Shaped[Array, "..."], index: Int[Array, " R"], new: Shaped[Array, "..."], axis: int = 0
) -> Shaped[Array, "..."]:
    """`held` with row i of `new` in the place of its row `index[i]`; rows are along `axis`.

    `new` may be smaller along the other axes: zeros come after what it has. Indices beyond the rows are left out.
    """
    if jnp.issubdtype(held.dtype, jax.dtypes.prng_key):
        data = place(jax.random.key_data(held), index, jax.random.key_data(new), axis)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(held))
    rows = axis % held.ndim
    room = [(0, 0 if i == rows else a - b) for i, (a, b) in enumerate(zip(held.shape, new.shape))]
    return held.at[(slice(None),) * rows + (index,)].set(jnp.pad(new, room), mode="drop")


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

    All rows write the same slot at a time, whenever they began. Of a row that came late, or of branches that were
    given up, slots are left that nobody reads: `collect` drops them.

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
        return self._each(lambda axis, x: jnp.take(x, index, axis=axis))

    def grow(self, length: int) -> TransformerState:
        """The state with room for `length` slots, the new ones empty."""
        more = length - self.slots.segment.shape[1]
        return self._slots(lambda axis, x: jnp.pad(x, [(0, more if i == x.ndim + axis else 0) for i in range(x.ndim)]))

    def put(self, index: Int[Array, " R"], other: TransformerState) -> TransformerState:
        """The state whose row `index[i]` is row i of `other`, which has read no more than its prompt.

        Indices beyond the rows are left out. Prompts and sources of `other` may be shorter.
        """
        other = other.grow(self.slots.segment.shape[1])
        state = self._each(lambda axis, x, new: place(x, index, new, axis), other)
        return state.replace(index=jnp.maximum(self.index, other.index))

    def needed(self, active: Bool[Array, " B"]) -> Int[Array, ""]:
        """The most slots that an active row still reads."""
        return jnp.max(jnp.sum(self._read() & active[:, None], axis=1))

    def collect(self, active: Bool[Array, " B"], length: int) -> TransformerState:
        """The state without slots that nobody reads, in all `length` slots, which those that are read must fit in.

        Rows that are not active may lose all of theirs.
        """
        order = jnp.argsort(~self._read(), axis=1, stable=True)[:, :length]

        def pick(axis: int, x: Array) -> Array:
            rows = max(x.ndim - 4, 0)  # keys and values may be those of a stack
            others = [i for i in range(x.ndim) if i not in (rows, x.ndim + axis)]
            return jnp.take_along_axis(x, jnp.expand_dims(order, others), axis=axis)

        return self._slots(pick).grow(length).replace(index=self.needed(active))

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

    def _read(self) -> Bool[Array, "B S"]:
        """The slots that a row still reads."""
        return self.slots.segment != 0 if self.seen is None else jnp.any(self.seen, axis=1)

    def _slots(self, function: Callable[[int, Array], Array]) -> TransformerState:
        """`function(axis of the slots, array)` of all that has slots."""
        k, v = (jax.tree.map(partial(function, axis), held) for axis, held in ((-1, self.held.k), (-2, self.held.v)))
        flat = lambda tree: jax.tree.map(partial(function, -1), tree)  # noqa: E731
        return self.replace(held=KeyValues(k, v), slots=flat(self.slots), seen=flat(self.seen))

    def _each(self, function: Callable[..., Array], *others: TransformerState) -> TransformerState:
        """`function(axis of the rows, array, ...)` of all that has rows."""
        cached = lambda *arrays: jax.tree.map(partial(function, -4), *arrays)  # noqa: E731
        flat = lambda *arrays: jax.tree.map(partial(function, 0), *arrays)  # noqa: E731
        each = {name: cached for name in ("held", "memory")}
        each |= {name: flat for name in ("slots", "position", "memory_slots", "seen")}
        return self.replace(
            **{name: act(*(getattr(state, name) for state in (self, *others))) for name, act in each.items()}
        )
