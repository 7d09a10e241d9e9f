"""The key-value cache and the decoding state of a transformer, as explicit pytrees."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Shaped

from jaxformer.config import DeltaConfig
from jaxformer.nn.copying import CopySource
from jaxformer.parallel import mesh
from jaxformer.types import Array, Slots


def cache_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Dtype of cached keys and values for queries of `dtype`: float32 on a CPU, whose 16-bit products are slow."""
    return jnp.dtype(jnp.float32) if mesh.platform() == "cpu" else jnp.dtype(dtype)


def scatter_rows(
    array: Shaped[Array, "..."], index: Int[Array, " R"], new: Shaped[Array, "..."], axis: int = 0
) -> Shaped[Array, "..."]:
    """`array` with row `index[i]` replaced by row i of `new`; rows lie along `axis`.

    Where `new` is shorter along other axes, zeros are appended. Indices beyond the last row are ignored.
    """
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = scatter_rows(jax.random.key_data(array), index, jax.random.key_data(new), axis)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    rows = axis % array.ndim
    padding = [(0, 0 if i == rows else a - b) for i, (a, b) in enumerate(zip(array.shape, new.shape))]
    return array.at[(slice(None),) * rows + (index,)].set(jnp.pad(new, padding), mode="drop")


class KeyValues(flax.struct.PyTreeNode):
    """Cached keys `k` `[B, G, K, S]` and values `v` `[B, G, S, K]`, or `[L, ...]` for the layers of a stack.

    Of latent attention `k` is the latent vector and `v` the rotated key, G = 1, of unlike widths.

    In these layouts the products with queries and probabilities read memory in order. Kernels take `[B, S, G, K]`; the
    compiler fuses the transposes.
    """

    k: Array
    v: Array

    @property
    def stacked(self) -> bool:
        """True if the arrays hold all layers of a stack."""
        return self.k.ndim == 5

    def to_kernel_layout(self) -> tuple[Float[Array, "B S G K"], Float[Array, "B S G _"]]:
        """Keys and values of one layer in the layout of the kernels."""
        return jnp.moveaxis(self.k, 3, 1), jnp.moveaxis(self.v, 1, 2)

    @classmethod
    def from_kernel_layout(cls, k: Float[Array, "B S G K"], v: Float[Array, "B S G _"]) -> KeyValues:
        """Keys and values of one layer in the layout and dtype of the cache."""
        dtype = cache_dtype(k.dtype)
        return cls(jnp.moveaxis(k, 1, 3).astype(dtype), jnp.moveaxis(v, 2, 1).astype(dtype))


class DeltaState(flax.struct.PyTreeNode):
    """Memory of a layer with the gated delta rule (`nn/gated_delta.py`), of the same size after any number of slots.

    Attributes:
      state: the matrices `[B, H, K, V]`, float32.
      inputs: the last inputs of the convolution `[B, 1, W - 1, C]`, in the dtype of the cache. The axis of 1 makes rows
        the fourth axis from the end, as in `KeyValues`.
    """

    state: Array
    inputs: Array

    @property
    def stacked(self) -> bool:
        """False: every layer has arrays of its own."""
        return False

    @classmethod
    def empty(cls, config: DeltaConfig, rows: int, dtype: jnp.dtype) -> DeltaState:
        """The memory of no slots; `dtype` is that of the cache."""
        state = (rows, config.heads, config.key_width, config.value_width)
        return cls(jnp.zeros(state, jnp.float32), jnp.zeros((rows, 1, config.conv_kernel - 1, config.channels), dtype))


class DeltaSteps(DeltaState):
    """The memories before N slots and after each of them, `[N + 1, B, ...]`, until it is known which slots stay."""

    @classmethod
    def recording(cls, before: DeltaState) -> DeltaSteps:
        """The memory of no slots, to which a layer adds those of the slots that it reads."""
        return cls(before.state[None], before.inputs[None])

    def after(self, count: Int[Array, " B"]) -> DeltaState:
        """The memory of row b after the first `count[b]` slots."""
        index = count[None, :, None, None, None]
        return DeltaState(*(jnp.take_along_axis(x, index, axis=0)[0] for x in (self.state, self.inputs)))


MemoryKeyValues = KeyValues | tuple[KeyValues, ...]
"""Keys and values of an encoder's output for a stack, in the layouts of `StackKeyValues`."""

LayerMemory = KeyValues | DeltaState
"""The memory of one layer."""

StackKeyValues = KeyValues | tuple[LayerMemory, ...]
"""Keys and values of a stack: `[L, ...]` arrays, or the memory of each layer where decoding is unrolled.

Unrolled, each layer is a separate part of the program, and nothing has to be sliced out of a large array."""


class LayerCache(flax.struct.PyTreeNode):
    """The keys and values that one layer reads and writes.

    Attributes:
      keys_values: those of this layer, or `[L, ...]` of the whole stack. In a stack's array only the new slots are
        written, in place where the compiler can.
      layer: index of this layer in the stack's arrays, int32 scalar; None if `keys_values` is this layer's alone.
      index: first slot to write to, int32 scalar, the same for all rows.
    """

    keys_values: KeyValues
    layer: Array | None
    index: Array

    def write(self, k: Float[Array, "B T G K"], v: Float[Array, "B T G _"]) -> LayerCache:
        """The cache with new keys and values in slots `index : index + T`."""

        def update(old: Array, new: Array, *start: Array | int) -> Array:
            if self.layer is not None:
                new, start = new[None], (self.layer, *start)
            return jax.lax.dynamic_update_slice(old, new, tuple(jnp.int32(i) for i in start))

        old, new = self.keys_values, KeyValues.from_kernel_layout(k, v)
        written = KeyValues(update(old.k, new.k, 0, 0, 0, self.index), update(old.v, new.v, 0, 0, self.index, 0))
        return self.replace(keys_values=written)

    def read(self) -> tuple[Float[Array, "B S G K"], Float[Array, "B S G _"]]:
        """All keys and values of this layer."""
        layer = self.layer
        if layer is None:
            return self.keys_values.to_kernel_layout()
        select = lambda x: jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)  # noqa: E731
        return KeyValues(select(self.keys_values.k), select(self.keys_values.v)).to_kernel_layout()


State = TypeVar("State", bound="SlotState")


class SlotState(flax.struct.PyTreeNode):
    """Decoding state of a transformer with L layers and space for S slots, some of which may have a `DeltaState`.

    Rows with such a state have no branches, which `TransformerState` adds. A token is taken back by what the layers had
    before it: `append_sequence` makes them keep that.

    All rows write to the same slot index at a time, whenever they started. Rows that started late and discarded
    branches leave unused slots behind; `compact` removes them.

    Attributes:
      keys_values: keys and values of self-attention, rotated if the encoding rotates.
      slots: position and segment of each cached slot, `[B, S]`; segment 0 where nothing is written, or padding.
      index: int32 scalar, the next free slot.
      position: int32 `[B]`, the position of the next token.
      memory: keys and values of the encoder's output for cross-attention, or None.
      memory_slots: the slots of the encoder's output, or None.
      branch_slots: bool `[B, N, S]`, the slots that belong to each of a row's N branches; None before `branch`.
        Branches share all arrays, those of the prompt and the source included; a step writes one slot a branch.
      copied: what the head may copy from the source; None for a head that does not copy.
    """

    keys_values: StackKeyValues
    slots: Slots
    index: Array
    position: Array
    memory: MemoryKeyValues | None = None
    memory_slots: Slots | None = None
    branch_slots: Array | None = None
    copied: CopySource | None = None

    def rows(self: State, index: Int[Array, " B"]) -> State:
        """The state whose row i is row `index[i]` of this one."""
        return self._map_rows(lambda axis, x: jnp.take(x, index, axis=axis))

    def grow(self: State, length: int) -> State:
        """The state extended to `length` slots, the new ones empty."""
        more = length - self.slots.segment.shape[1]
        return self._map_slots(
            lambda axis, x: jnp.pad(x, [(0, more if i == x.ndim + axis else 0) for i in range(x.ndim)])
        )

    def replace_rows(self: State, index: Int[Array, " R"], other: State) -> State:
        """The state with row `index[i]` replaced by row i of `other`, which has read nothing beyond its prompt.

        Indices beyond the last row are ignored. Prompts and sources of `other` may be shorter.
        """
        other = other.grow(self.slots.segment.shape[1])
        state = self._map_rows(lambda axis, x, new: scatter_rows(x, index, new, axis), other)
        return state.replace(index=jnp.maximum(self.index, other.index))

    def max_used_slots(self, active: Bool[Array, " B"]) -> Int[Array, ""]:
        """Largest number of used slots over the active rows."""
        return jnp.max(jnp.sum(self._used() & active[:, None], axis=1))

    def compact(self: State, active: Bool[Array, " B"], length: int) -> State:
        """The state without unused slots, in `length` slots, at least `max_used_slots(active)`.

        Rows that are not active may lose slots.
        """
        order = jnp.argsort(~self._used(), axis=1, stable=True)[:, :length]

        def gather(axis: int, x: Array) -> Array:
            rows = max(x.ndim - 4, 0)  # axis 1 in the arrays of a stack, else 0
            others = [i for i in range(x.ndim) if i not in (rows, x.ndim + axis)]
            return jnp.take_along_axis(x, jnp.expand_dims(order, others), axis=axis)

        return self._map_slots(gather).grow(length).replace(index=self.max_used_slots(active))

    def append(self: State, count: int) -> tuple[Slots, State]:
        """Slots `[B, T]` of the next T = `count` tokens, one a branch, and the state that includes them."""
        rows = self.position.shape[0]
        new = Slots(jnp.broadcast_to(self.position[:, None], (rows, count)), jnp.ones((rows, count), jnp.int32))
        state = self._write_slots(new)
        if self.branch_slots is not None:
            same_branch = jnp.broadcast_to(jnp.eye(count, dtype=bool), (rows, count, count))
            branch_slots = jax.lax.dynamic_update_slice_in_dim(self.branch_slots, same_branch, self.index, axis=-1)
            state = state.replace(branch_slots=branch_slots)
        return new, state.replace(position=self.position + 1)

    def append_sequence(self: State, count: int, positions: int | None) -> tuple[Slots, State]:
        """Slots `[B, T]` of the next T = `count` tokens of every row, and the state that includes them.

        Layers with a `DeltaState` then keep one for each slot, until `keep` selects.

        Args:
          positions: number of positions that the model has. Tokens beyond them are padding at the last one: their
            logits mean nothing, but without a position their keys and values would be NaN, which counts even where
            nothing attends to them. None: no limit.

        Raises:
          ValueError: the state has branches, or a sequence of which `keep` has selected no part yet.
        """
        if self.branch_slots is not None:
            raise ValueError("append_sequence: got a state with branches, expected one without")
        if isinstance(self.keys_values, tuple) and any(isinstance(part, DeltaSteps) for part in self.keys_values):
            raise ValueError("append_sequence: got a state after append_sequence, expected one after keep")
        position = self.position[:, None] + jnp.arange(count)
        new = Slots(position, jnp.ones_like(position))
        if positions is not None:
            new = Slots(jnp.minimum(position, positions - 1), (position < positions).astype(jnp.int32))
        recording = lambda part: DeltaSteps.recording(part) if isinstance(part, DeltaState) else part  # noqa: E731
        return new, self._write_slots(new)._map_layers(recording).replace(position=self.position + count)

    def keep(self: State, count: Int[Array, " B"], of: int) -> State:
        """The state in which row b has included the first `count[b]` of its last `of` tokens, and not the others.

        Slots behind the row that keeps most are free again.
        """
        selected = lambda part: part.after(count) if isinstance(part, DeltaSteps) else part  # noqa: E731
        first = self.index - of
        given_back = jnp.arange(self.slots.segment.shape[1]) - first >= count[:, None]
        return self._map_layers(selected).replace(
            slots=self.slots._replace(segment=jnp.where(given_back, 0, self.slots.segment)),
            position=self.position - of + count,
            index=first + jnp.max(count),
        )

    def _write_slots(self: State, new: Slots) -> State:
        """The state in whose next slots `new` `[B, T]` stand."""
        write = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, self.index, axis=-1)  # noqa: E731
        return self.replace(slots=jax.tree.map(write, self.slots, new))

    def _used(self) -> Bool[Array, "B S"]:
        """True for slots that later steps still attend to."""
        return self.slots.segment != 0 if self.branch_slots is None else jnp.any(self.branch_slots, axis=1)

    def _map_layers(self: State, function: Callable[[LayerMemory], LayerMemory]) -> State:
        """The state with `function` of each layer's memory, where the layers have a memory each."""
        stack = self.keys_values
        return self.replace(keys_values=tuple(map(function, stack)) if isinstance(stack, tuple) else stack)

    def _map_slots(self: State, function: Callable[[int, Array], Array]) -> State:
        """`function(axis of the slots, array)` for every array with an axis of slots."""

        def cached(part: LayerMemory) -> LayerMemory:
            if isinstance(part, DeltaState):
                return part
            return KeyValues(function(-1, part.k), function(-2, part.v))

        stack = self.keys_values
        flat = lambda tree: jax.tree.map(partial(function, -1), tree)  # noqa: E731
        return self.replace(
            keys_values=tuple(cached(part) for part in stack) if isinstance(stack, tuple) else cached(stack),
            slots=flat(self.slots),
            branch_slots=flat(self.branch_slots),
        )

    def _map_rows(self: State, function: Callable[..., Array], *others: State) -> State:
        """`function(axis of the rows, array, ...)` for every array with an axis of rows."""
        cached = lambda *arrays: jax.tree.map(partial(function, -4), *arrays)  # noqa: E731
        flat = lambda *arrays: jax.tree.map(partial(function, 0), *arrays)  # noqa: E731
        maps = {name: cached for name in ("keys_values", "memory")}
        maps |= {name: flat for name in ("slots", "position", "memory_slots", "branch_slots", "copied")}
        return self.replace(
            **{name: run(*(getattr(state, name) for state in (self, *others))) for name, run in maps.items()}
        )


class TransformerState(SlotState):
    """Decoding state of a transformer whose memory is keys and values alone."""

    def branch(self, count: int) -> TransformerState:
        """The state with `count` branches of every row, all with the same past."""
        rows, length = self.slots.segment.shape
        return self.replace(branch_slots=jnp.broadcast_to(jnp.arange(length) < self.index, (rows, count, length)))

    def select_branches(self, parent: Int[Array, "B N"]) -> TransformerState:
        """The state whose branch n is branch `parent[:, n]` of the same row.

        Raises:
          ValueError: the state has no branches.
        """
        if self.branch_slots is None:
            raise ValueError("select_branches: got a state without branches, expected one; call branch first")
        return self.replace(branch_slots=jnp.take_along_axis(self.branch_slots, parent[:, :, None], axis=1))
