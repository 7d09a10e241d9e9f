"""The structures that travel between rooms. No computation beyond what a field's meaning needs.

Axis letters, used in annotations and einsums everywhere:

    B batch         T query/target length   S key/source length   D model width
    H query heads   G key/value heads       K head width          F feed-forward width
    V vocabulary    L layers                N beams               C classes
    R relative buckets   M microbatches     E experts

Signatures carry them as jaxtyping annotations, `Float[Array, "B T D"]`. Within one call a letter means one size;
`*batch` is any number of axes, `_` one axis and `...` any that do not matter, `#B` is B or 1. A letter alone has a
blank before it, `" B"`, or linters take it for a name. As in jax itself, numpy's arrays do for jax's. The tests check
all this (tests/shapes.py), a run does not. Fields of structures keep their shapes in words: under `tree.map`, `vmap`
and shardings they hold other things.
"""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Protocol, Self, runtime_checkable

import flax.struct
import jax
from jaxtyping import ArrayLike, Bool, Float32, Int

Array = jax.Array
PyTree = Any


class Slots(NamedTuple):
    """Who sits where: `position` and `segment`, both int32 `[B, T]`.

    Segment 0 means that nothing is there (padding). Two slots may see each other only inside one segment, so the
    same two arrays express padding, packing and the valid part of a cache. A segment -n reads segment n and is never
    read: padding whose outputs matter all the same.
    """

    position: Array
    segment: Array


class Stream(NamedTuple):
    """One side of an example: `tokens` int32 `[B, T]`, their `slots`, and token types `kind` `[B, T]` or None."""

    tokens: Array
    slots: Slots
    kind: Array | None = None


class Batch(NamedTuple):
    """What a step consumes. Which stream is None is what makes a model an encoder, a decoder or both.

    `labels` (int32; float32 where they are scores) and `weights` (float32) are aligned with the logits: `[B, T]` for
    token-level tasks, `[B]` for sequence-level ones. Losses never shift. A weight of 0 removes an entry from every sum.
    For decoding, `target` holds the prompt.
    """

    source: Stream | None
    target: Stream | None
    labels: Array | None = None
    weights: Array | None = None


@flax.struct.dataclass
class Projection:
    """Logits that nobody has computed: float32 `hidden @ table.T + bias`. What a loss reads some tokens at a time.

    Attributes:
      hidden: `[B, T, D]`, in the compute precision.
      table: `[V, D]`.
      bias: `[V]` or None.
      chunk: how many tokens' logits may exist at a time, on each device.
    """

    hidden: Array
    table: Array
    bias: Array | None
    chunk: int = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class TrainState:
    """Everything a step changes, and nothing else: no callables, so that it can be saved and sharded as it is.

    Attributes:
      step: int32 scalar, the number of completed optimizer updates.
      params: parameter pytree, float32.
      opt_state: optax state.
      key: the run's PRNG key. It never changes; a step draws from `fold_in(key, step)`.
      variables: other collections: batch-norm statistics under "batch_stats", the weight average under "ema".
    """

    step: Array
    params: PyTree
    opt_state: PyTree
    key: Array
    variables: Mapping[str, PyTree]


Sums = Mapping[str, tuple[ArrayLike, ArrayLike]]
"""Measures as name -> (numerator, denominator). Added over microbatches, devices, hosts and batches; divided once."""


@runtime_checkable
class State(Protocol):
    """Decoding state: a pytree of per-sequence rows."""

    def rows(self, index: Int[Array, " B"]) -> Self:
        """The state whose row `i` is this one's row `index[i]`; there may be more or fewer of them than before."""
        ...


@runtime_checkable
class Refilling(State, Protocol):
    """A state in which other prompts can take the place of rows that have ended, while the rest go on."""

    def put(self, index: Int[Array, " R"], other: Self) -> Self:
        """The state whose row `index[i]` is row i of `other`, which has read no more than its prompt.

        Indices beyond the rows are left out. Prompts and sources of `other` may be shorter than this one's.
        """
        ...


@runtime_checkable
class Growing(State, Protocol):
    """A state that holds slots, and can be begun with few of them."""

    def grow(self, length: int) -> Self:
        """The state with room for `length` slots, those that it has included."""
        ...


@runtime_checkable
class Collecting(Growing, Protocol):
    """A state some of whose slots nobody reads any more, after a while, and that can drop them."""

    def needed(self, active: Bool[Array, " B"]) -> Int[Array, ""]:
        """The most slots that an active row still reads."""
        ...

    def collect(self, active: Bool[Array, " B"], length: int) -> Self:
        """The state with `needed(active)` slots in use and room for `length`, not fewer.

        Rows that are not active may lose all of theirs.
        """
        ...


@runtime_checkable
class Branching(Growing, Protocol):
    """A state whose rows can have branches that share what they have in common: nothing is copied to follow one."""

    def branch(self, count: int) -> Self:
        """The state with `count` branches of every row, all with the row's past.

        From then on `step` takes `[B, N]` tokens, one a branch, gives logits `[B N, V]`, and takes N slots.
        """
        ...

    def follow(self, parent: Int[Array, "B N"]) -> Self:
        """The state whose branch n is this one's branch `parent[:, n]` of the same row."""
        ...


@runtime_checkable
class Decodable(Protocol):
    """What a decoder needs of a model, whatever its family."""

    def start(self, batch: Batch, length: int) -> tuple[Float32[Array, "B V"], State]:
        """Reads `batch` (prompt in `batch.target`), with room for `length` slots. Logits of the next token."""
        ...

    def step(self, tokens: Int[Array, "B 1"], state: State) -> tuple[Float32[Array, "B V"], State]:
        """Appends `tokens`. Logits of the token after them."""
        ...
