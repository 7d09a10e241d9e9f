"""Structures and protocols that all packages share.

Axis letters, used in annotations and einsums everywhere:

    B batch         T query/target length   S key/source length   D model width
    H query heads   G key/value heads       K head width          F feed-forward width
    V vocabulary    L layers                N beams               C classes
    R relative buckets   M microbatches     E experts

Signatures carry them as jaxtyping annotations, `Float[Array, "B T D"]`. Within one call a letter stands for one size.
`*batch` is any number of axes, `_` one axis of any size, `...` any axes, and `#B` is B or 1. A single letter is written
with a leading blank, `" B"`, since linters take it for a name otherwise. Numpy arrays are accepted where jax arrays are
annotated. The tests check these annotations (tests/shapes.py); a run does not. Fields of structures describe their
shapes in words, because under `tree.map`, `vmap` and shardings they hold other things.
"""

from __future__ import annotations

from typing import Any, Literal, Mapping, NamedTuple, Protocol, Self, runtime_checkable

import flax.struct
import jax
from jaxtyping import ArrayLike, Bool, Float32, Int

Array = jax.Array
PyTree = Any

Rate = float | Float32[Array, ""]
"""A number of the config: known when a program is traced, or, where one program trains several runs, its argument."""

EMA = "ema"
"""Key in `TrainState.variables` of the exponential moving average of the parameters."""
MEMORY = "memory"
"""Key in `TrainState.variables` of what a model keeps of the text before, row by row of the batch, in training."""


def is_zero(rate: Rate) -> bool:
    """True if `rate` is known to be 0 when the program is traced, so that what it scales can be left out."""
    return isinstance(rate, float | int) and rate == 0


def leaf_path(keys: tuple[Any, ...]) -> tuple[str, ...]:
    """Path of a leaf as words, from JAX's key path: `("encoder", "blocks", "attention", "query", "kernel")`."""
    return tuple(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in keys)


class Slots(NamedTuple):
    """Position id and segment id of each token slot, both int32 `[B, T]`.

    Segment 0 is padding. Slots attend to each other only within one segment, so the two arrays express padding,
    packing and the valid part of a cache. Segment -n attends to segment n and is never attended to: padding whose
    output is used.

    `prefix`, int32 `[B, T]`, is the number of leading positions of a slot's segment that all of the segment's slots
    see, whatever a causal mask says (prefix language models); None: there are none. Only that of queries is read.
    """

    position: Array
    segment: Array
    prefix: Array | None = None


class Stream(NamedTuple):
    """One side of an example: `tokens` int32 `[B, T]`, their `slots`, and `token_type` `[B, T]` or None."""

    tokens: Array
    slots: Slots
    token_type: Array | None = None


class Permutation(NamedTuple):
    """Factorisation order of each row, for permutation language models: which slots are predicted, and from which.

    Attributes:
      order: int32 `[B, T]`, 0 for slots that are visible to all slots of their segment. Slots with numbers from 1 on
        are predicted in that order: a slot is visible to those of higher numbers only.
      targets: int32 `[B, M]`, the predicted slots, in any order; -1 fills the rows up. Logits, labels and weights are
        `[B, M]` then.
    """

    order: Array
    targets: Array


class Batch(NamedTuple):
    """The input of a training, evaluation or decoding step.

    An encoder reads `source`, a decoder reads `target`; the stream that a model does not read is None. For decoding,
    `target` holds the prompt. `labels` (int32; float32 for scores) and `weights` (float32) are aligned with the
    logits: `[B, T]` for token-level tasks, `[B]` for sequence-level ones, `[B, T, C]` for C candidates a slot. Losses
    never shift. A weight of 0 removes an entry from every sum. `relation` (int32 `[B]`, -1 for none) is a label of the
    row beside those of its slots.

    `permutation` is that of the source, or None where all slots see each other. `continues` (bool `[B]`) is True for
    rows whose text goes on from the same row of the batch before, and None where no memory is carried between batches.
    `component` (int32, aligned with the labels) is the number of the component of a mixture that an entry belongs to,
    among their sorted names; None without a mixture. `reference` (float32 `[B, 2]`) are log-likelihoods of a row's two
    segments under the model that training started from; None for tasks that do not compare with it. `teacher` are the
    logits of a teacher, which a train step adds to the batch that it was given; None without distillation.
    """

    source: Stream | None
    target: Stream | None
    labels: Array | None = None
    weights: Array | None = None
    relation: Array | None = None
    permutation: Permutation | None = None
    continues: Array | None = None
    component: Array | None = None
    reference: Array | None = None
    teacher: Array | None = None

    def side(self, name: Literal["source", "target"]) -> Stream:
        """The stream `name`.

        Raises:
          ValueError: the batch does not have it.
        """
        stream = self.source if name == "source" else self.target
        if stream is None:
            raise ValueError(f"batch.{name}: got None, expected a stream; the model reads it")
        return stream


class DeferredLogits(flax.struct.PyTreeNode):
    """Logits `hidden @ table.T + bias` (float32) that losses and measures compute for some tokens at a time.

    Attributes:
      hidden: `[B, T, D]`, in the compute precision.
      table: `[V, D]`.
      bias: `[V]` or None.
      chunk: number of tokens whose logits exist at the same time on each device.
      soft_cap: logits x become soft_cap * tanh(x / soft_cap); None: as they are.
    """

    hidden: Array
    table: Array
    bias: Array | None
    chunk: int = flax.struct.field(pytree_node=False)
    soft_cap: float | None = flax.struct.field(pytree_node=False, default=None)


class RelationLogits(NamedTuple):
    """Output of a token head with `relation`: `tokens` `[B, T, V]`, and `relation` `[B, 2]` of the whole row."""

    tokens: Array | DeferredLogits
    relation: Array


class MultiTokenLogits(NamedTuple):
    """Output for losses and measures of a model with `multi_token`.

    Attributes:
      tokens: logits of the next token, `[B, T, V]`.
      further: entry k - 1 has those of the token k slots after it.
    """

    tokens: Array | DeferredLogits
    further: tuple[Array | DeferredLogits, ...]


class TrainState(flax.struct.PyTreeNode):
    """Everything that a training step changes. It holds no callables, so it can be saved and sharded directly.

    Attributes:
      step: int32 scalar, the number of completed optimizer updates.
      params: parameter pytree, float32.
      opt_state: optax state.
      key: the run's PRNG key, constant; a step draws from `fold_in(key, step)`.
      variables: other collections: batch-norm statistics under "batch_stats"; if the run keeps them, the moving average
        of the parameters that are trained under `EMA`, and under `MEMORY` what each row of the next batch remembers.
    """

    step: Array
    params: PyTree
    opt_state: PyTree
    key: Array
    variables: Mapping[str, PyTree]

    def collections(self) -> dict[str, PyTree]:
        """The variables that the model reads beside its parameters: all but the moving average."""
        return {name: value for name, value in self.variables.items() if name != EMA}

    def evaluation_variables(self) -> dict[str, PyTree]:
        """The variables to evaluate and decode with: moving averages in place of the parameters that have one.

        Memories are left out: they belong to the rows of the training batches.
        """
        params = overlaid(self.params, self.variables[EMA]) if EMA in self.variables else self.params
        others = {name: value for name, value in self.collections().items() if name != MEMORY}
        return {"params": params, **others}


def overlaid(base: PyTree, changes: PyTree) -> PyTree:
    """Nested dicts with the leaves of `changes` in place of, or beside, those of `base`."""
    if not isinstance(changes, Mapping):
        return changes
    return {**base, **{name: overlaid(base.get(name, {}), value) for name, value in changes.items()}}


Sums = Mapping[str, tuple[ArrayLike, ArrayLike]]
"""Measures by name as (numerator, denominator): added over microbatches, devices, hosts and batches, divided once."""


@runtime_checkable
class State(Protocol):
    """Decoding state: a pytree of per-sequence rows."""

    def rows(self, index: Int[Array, " B"]) -> Self:
        """The state whose row `i` is this one's row `index[i]`; there may be more or fewer of them than before."""
        ...


@runtime_checkable
class RefillableState(State, Protocol):
    """A state in which other prompts can take the place of rows that have ended, while the rest go on."""

    def replace_rows(self, index: Int[Array, " R"], other: Self) -> Self:
        """The state whose row `index[i]` is row i of `other`, which has read no more than its prompt.

        Indices beyond the rows are left out. Prompts and sources of `other` may be shorter than this one's.
        """
        ...


@runtime_checkable
class GrowableState(State, Protocol):
    """A state that holds slots, and can be begun with few of them."""

    def grow(self, length: int) -> Self:
        """The state with room for `length` slots, those that it has included."""
        ...


@runtime_checkable
class CompactableState(GrowableState, Protocol):
    """A state some of whose slots nobody reads any more, after a while, and that can drop them."""

    def max_used_slots(self, active: Bool[Array, " B"]) -> Int[Array, ""]:
        """The most slots that an active row still reads."""
        ...

    def compact(self, active: Bool[Array, " B"], length: int) -> Self:
        """The state with `max_used_slots(active)` slots in use and room for `length`, not fewer.

        Rows that are not active may lose all of theirs.
        """
        ...


@runtime_checkable
class BranchingState(GrowableState, Protocol):
    """A state whose rows can have branches that share what they have in common: nothing is copied to follow one."""

    def branch(self, count: int) -> Self:
        """The state with `count` branches of every row, all with the row's past.

        From then on `step` takes `[B, N]` tokens, one a branch, gives logits `[B N, V]`, and takes N slots.
        """
        ...

    def select_branches(self, parent: Int[Array, "B N"]) -> Self:
        """The state whose branch n is this one's branch `parent[:, n]` of the same row."""
        ...


@runtime_checkable
class RewindableState(State, Protocol):
    """A state that can give back the last tokens that it has included, some for each row."""

    def keep(self, count: Int[Array, " B"], of: int) -> Self:
        """The state in which row b has included the first `count[b]` of its last `of` tokens, and not the others."""
        ...


@runtime_checkable
class Decodable(Protocol):
    """The interface of a model that can be decoded, whatever its family."""

    def start(self, batch: Batch, length: int) -> tuple[Float32[Array, "B V"], State]:
        """Reads `batch` (prompt in `batch.target`), with room for `length` slots. Logits of the next token."""
        ...

    def step(self, tokens: Int[Array, "B 1"], state: State) -> tuple[Float32[Array, "B V"], State]:
        """Appends `tokens`. Logits of the token after them."""
        ...


@runtime_checkable
class Extendable(Decodable, Protocol):
    """A model that reads several tokens of every row at once, as speculative decoding needs."""

    def extend(self, tokens: Int[Array, "B N"], state: State) -> tuple[Float32[Array, "B N V"], State]:
        """Appends N tokens to every row, one after the other. Logits of the token after each of them."""
        ...
