"""The programs of decoding, each compiled once a shape. The only `jit` of decoding is here."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Bool, Float32, Int, Key

from jaxformer.config import DecodeConfig
from jaxformer.decode import beam, growing, int8, sample
from jaxformer.decode.growing import Room, Search
from jaxformer.decode.sample import Hypotheses
from jaxformer.nn.cache import place
from jaxformer.parallel.rules import constrain
from jaxformer.types import Array, Batch, Collecting, PyTree, State

METHODS = {"greedy": sample, "sample": sample, "beam": beam}


@dataclass(frozen=True)
class Vocabulary:
    """What decoding must know of the target tokens.

    Attributes:
      eos: tokens that end an output.
      pad: fills empty places (never read).
      start: prompt of a seq2seq model when none is given; None: prompts always come with a target.
      size: real tokens; models have rows beyond (padding for even shards), which are never chosen. None: all are real.
    """

    eos: tuple[int, ...]
    pad: int
    start: int | None = None
    size: int | None = None


@dataclass(frozen=True)
class Bound:
    """A Linen module with its variables, as a `Decodable` that never proposes tokens from `size` on."""

    module: nn.Module
    variables: PyTree
    size: int | None = None

    def start(self, batch: Batch, length: int) -> tuple[Float32[Array, "B V"], State]:
        return self._real(self.module.apply(self.variables, batch, length, method="start"))

    def step(self, tokens: Int[Array, "B N"], state: State) -> tuple[Float32[Array, "R V"], State]:
        return self._real(self.module.apply(self.variables, tokens, state, method="step"))

    def _real(self, result: tuple[Float32[Array, "B V"], State]) -> tuple[Float32[Array, "B V"], State]:
        logits, state = result
        if self.size is not None and self.size < logits.shape[-1]:
            logits = jnp.where(jnp.arange(logits.shape[-1]) < self.size, logits, -jnp.inf)
        return logits, state


class Now(NamedTuple):
    """A batch of B prompts on its way."""

    search: Search
    state: State


class Status(NamedTuple):
    """Which prompts are done, `[B]`, how many passes that took, and how many slots are needed for the others, `[]`."""

    done: Array
    passes: Array
    needed: Array


@dataclass(frozen=True)
class Programs:
    """What is compiled for a module and a way to decode. Variables are as `variables` gives them.

    Attributes:
      config: with all that a program does not depend on at its default.
    """

    module: nn.Module
    config: DecodeConfig
    vocabulary: Vocabulary

    @property
    def method(self) -> ModuleType:
        return METHODS[self.config.method]

    def variables(self, variables: PyTree) -> PyTree:
        """The variables as `config.weights` wants them and as a loop over `step` reads them best, where the module has
        an `unstack` for that."""
        return _prepared(self.module, self.config.weights == "int8", variables)

    @functools.partial(jax.jit, static_argnums=(0,), static_argnames=("width",))
    def begin(
        self,
        variables: PyTree,
        batch: Batch,
        limit: Int[Array, " B"],
        rows: Int[Array, " B"],
        key: Key[Array, ""],
        width: int | None = None,
    ) -> Now:
        """Reads prompts and chooses the first tokens. `width`: the columns that a batch keeps for its prompts."""
        model, method, config = Bound(self.module, variables, self.vocabulary.size), self.method, self.config
        outputs, branches = method.outputs(config), method.branches(config)
        logits, state = growing.start(model, batch, config.max_length, outputs, branches)
        eos, pad = self.vocabulary.eos, self.vocabulary.pad
        return Now(method.begin(logits, batch, config, eos, pad, limit, rows, key, width), state)

    @functools.partial(jax.jit, static_argnums=(0,), donate_argnames=("now",))
    def advance(
        self, variables: PyTree, now: Now, enough: Int[Array, ""], passes: Int[Array, ""]
    ) -> tuple[Now, Status]:
        """Adds a token a pass until `enough` prompts are done, or so many passes are."""
        model, method, config = Bound(self.module, variables, self.vocabulary.size), self.method, self.config
        eos, pad = self.vocabulary.eos, self.vocabulary.pad
        search, state, count = growing.loop(
            lambda search, state: method.advance(model, search, state, config, eos, pad),
            *now,
            passes,
            lambda search: jnp.sum(self.method.finished(search, self.config)) >= enough,
        )
        needed = state.needed(self._active(search, state)) if isinstance(state, Collecting) else jnp.int32(0)
        return Now(search, state), everywhere(Status(self.method.finished(search, self.config), count, needed))

    @functools.partial(jax.jit, static_argnums=(0, 2, 3))
    def collect(self, now: Now, room: Room, size: int) -> State:
        """The state without slots that nobody reads any more, with room for `size` new tokens of an empty one."""
        return now.state.collect(self._active(*now), room.total(size))

    @functools.partial(jax.jit, static_argnums=(0, 2, 3))
    def grow(self, state: State, room: Room, size: int) -> State:
        """The state with room for `size` new tokens."""
        return room.grow(state, size)

    @functools.partial(jax.jit, static_argnums=(0,), donate_argnames=("now",))
    def put(self, now: Now, index: Int[Array, " R"], other: Now) -> Now:
        """A batch in which the prompts of `other` have the places `index`; those beyond the batch are left out."""
        search = jax.tree.map(lambda x, new: place(x, self._spread(index, len(new)), new), now.search, other.search)
        rows = len(index) * self._rows(other.state)
        return Now(search, now.state.put(self._spread(index, rows), other.state))

    @functools.partial(jax.jit, static_argnums=(0,))
    def found(self, search: Search) -> Hypotheses:
        """What there is of every prompt."""
        return everywhere(self.method.found(search, self.config))

    def room(self, state: State, prompt: int) -> Room:
        """How a state that `begin` gave for prompts of so many slots is to grow."""
        return growing.room(state, prompt, self.config.max_length, self.method.branches(self.config))

    def _rows(self, state: State) -> int:
        """Of a state, for each prompt."""
        return self.method.outputs(self.config) // max(growing.branches(state, self.method.branches(self.config)), 1)

    def _active(self, search: Search, state: State) -> Bool[Array, " R"]:
        """The state's rows whose prompts are not done."""
        return jnp.repeat(~self.method.finished(search, self.config), self._rows(state))

    @staticmethod
    def _spread(index: Int[Array, " R"], rows: int) -> Int[Array, " R_each"]:
        """The rows of some prompts, where there are `rows` of all, several for each."""
        each = rows // len(index)
        return (index[:, None] * each + jnp.arange(each)).reshape(-1)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _prepared(module: nn.Module, rounded: bool, variables: PyTree) -> PyTree:
    variables = int8.quantized(module, variables) if rounded else variables
    return module.unstack(variables) if hasattr(module, "unstack") else variables


def everywhere(found: PyTree) -> PyTree:
    """Results whole on every device, so that each of several processes can read them."""
    return jax.tree.map(lambda x: constrain(x, *(None,) * x.ndim), found)


@functools.partial(jax.jit, static_argnames=("module", "method", "finish"))
def forward(
    module: nn.Module,
    variables: PyTree,
    batch: Batch,
    method: str | None = None,
    finish: Callable[[Any, Batch], Array] | None = None,
) -> Any:
    """The module applied without decoding, compiled once a shape: for classes, scores and hidden states.

    Args:
      method: one of the module's, or None for its call. "encode" is given the source alone.
      finish: what to make of the output `(output, batch) -> array`, in the same program; a function of a module, since
        each new one is a compilation.
    """
    output = module.apply(variables, batch.source if method == "encode" else batch, method=method)
    return everywhere(output if finish is None else finish(output, batch))
