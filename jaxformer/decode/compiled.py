"""The compiled programs of decoding. This is the only place in decoding that calls `jit`; see `CompiledDecoder`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Bool, Float, Float32, Int

from jaxformer.config import DecodeConfig
from jaxformer.decode import cache_schedule, int8
from jaxformer.decode.cache_schedule import CacheSchedule
from jaxformer.decode.cropped_context import CroppingModel, drop_cache
from jaxformer.decode.draft import DraftedModel, SelfDraftedModel
from jaxformer.decode.search.base import Hypotheses, RowSettings, Search, SearchState, decode_loop
from jaxformer.decode.search.beam import BeamSearch
from jaxformer.decode.search.per_row import PerRowSearch
from jaxformer.decode.search.sample import SampleSearch
from jaxformer.nn.cache import TransformerState, scatter_rows
from jaxformer.parallel.rules import constrain
from jaxformer.runtime import programs
from jaxformer.types import Array, Batch, CompactableState, Decodable, PyTree, RefillableState, State

SEARCHES: dict[str, Callable[[DecodeConfig, tuple[int, ...], int], Search[Any]]] = {
    "greedy": SampleSearch,
    "sample": SampleSearch,
    "beam": BeamSearch,
}
"""Search strategies by `DecodeConfig.method`, made from options, end tokens and padding token."""

Finish = Callable[[Any, Batch], Array]
"""Function of a module's output and its batch, part of the same compiled program: `(output, batch) -> array`."""


@dataclass(frozen=True)
class Vocabulary:
    """The target tokens as decoding sees them: special ids and size.

    Attributes:
      eos: tokens that end an output.
      pad: token that fills padding; never read.
      start: prompt of a seq2seq model if none is given; None: every prompt has a target.
      size: number of tokens. A model may have more rows, as padding for even shards, which are never chosen. None: all
        rows are tokens.
    """

    eos: tuple[int, ...]
    pad: int
    start: int | None = None
    size: int | None = None


@dataclass(frozen=True)
class BoundModel:
    """A Linen module with its variables, as a `Decodable` that never chooses tokens from `vocab_size` on."""

    module: nn.Module
    variables: PyTree
    vocab_size: int | None = None

    def start(self, batch: Batch, length: int) -> tuple[Float32[Array, "B V"], State]:
        """Reads prompts into a state of `length` slots; logits of the next token."""
        logits, state = self._apply("start", batch, length)
        return self._exclude_padding(logits), state

    def step(self, tokens: Int[Array, "B N"], state: State) -> tuple[Float32[Array, "R V"], State]:
        """Appends tokens; logits of the next token."""
        logits, state = self._apply("step", tokens, state)
        return self._exclude_padding(logits), state

    def extend(self, tokens: Int[Array, "B N"], state: State) -> tuple[Float32[Array, "B N V"], State]:
        """Appends N tokens to every row; logits of the token after each."""
        logits, state = self._apply("extend", tokens, state)
        return self._exclude_padding(logits), state

    def start_further(
        self, batch: Batch, length: int
    ) -> tuple[Float32[Array, "B V"], TransformerState, TransformerState, Float[Array, "B D"]]:
        """`start` for model and module of `multi_token`, and the hidden state of the last token."""
        logits, *rest = self._apply("start_further", batch, length)
        return self._exclude_padding(logits), *rest

    def extend_with_hidden(
        self, tokens: Int[Array, "B N"], state: State
    ) -> tuple[Float32[Array, "B N V"], Float[Array, "B N D"], State]:
        """`extend`, and the hidden states of the tokens."""
        logits, hidden, state = self._apply("extend_with_hidden", tokens, state)
        return self._exclude_padding(logits), hidden, state

    def predict_further(
        self, x: Float[Array, "B N D"], tokens: Int[Array, "B N"], index: Int[Array, " B"], state: TransformerState
    ) -> tuple[Float32[Array, "B V"], TransformerState]:
        """Logits of the module of `multi_token` from hidden states and the tokens after them."""
        logits, state = self._apply("predict_further", x, tokens, index, state)
        return self._exclude_padding(logits), state

    def _apply(self, method: str, *arguments: PyTree) -> PyTree:
        return self.module.apply(self.variables, *arguments, method=method)

    def _exclude_padding(self, logits: Float32[Array, "... V"]) -> Float32[Array, "... V"]:
        """The logits, -inf for rows that only pad the vocabulary."""
        if self.vocab_size is not None and self.vocab_size < logits.shape[-1]:
            logits = jnp.where(jnp.arange(logits.shape[-1]) < self.vocab_size, logits, -jnp.inf)
        return logits


class DecodeState(NamedTuple):
    """A batch of B prompts in progress: the arrays of the search, and the model's state."""

    search: SearchState
    model: State


class DecodeStatus(NamedTuple):
    """The outcome of a decode loop, read by the host.

    Attributes:
      finished: bool `[B]`, prompts whose hypotheses are final.
      steps: int32 `[]`, slots that the loop took in the state: its steps, or more where steps add several tokens.
      used_slots: int32 `[]`, most slots that an unfinished row reads; 0 if the state cannot drop slots.
      tokens: int32 `[]`, tokens that the loop has chosen.
      passes: int32 `[]`, in how many steps each row was not done, summed over the rows.
    """

    finished: Array
    steps: Array
    used_slots: Array
    tokens: Array
    passes: Array


@dataclass(frozen=True)
class CompiledDecoder:
    """The programs that decode with one module and one set of options, each compiled once per shape.

    A batch goes through `prefill`, then `decode_steps` until its prompts are finished. Between two loops, `compact` or
    `grow` resize its state and `refill_rows` replaces finished prompts by new ones. Variables are those that
    `prepare_variables` returns.

    Attributes:
      config: the options. Those that programs do not depend on should have one value for all calls (see
        `generate.compiled_options`), since each new value compiles all programs again.
      context_length: number of tokens that the model reads of a longer text, its last ones (see `CroppingModel`). None:
        all texts fit into the model's positions.
      per_row: True if every row has sampling settings of its own (`search/per_row.py`) in place of those of `config`.
      draft: a module that proposes tokens (`draft.py`); its variables are "draft" then, those of `module` "model".
    """

    module: nn.Module
    config: DecodeConfig
    vocabulary: Vocabulary
    context_length: int | None = None
    per_row: bool = False
    draft: nn.Module | None = None

    @property
    def search(self) -> Search[Any]:
        """The search strategy that the options choose."""
        strategy = PerRowSearch if self.per_row else SEARCHES[self.config.method]
        return strategy(self.config, self.vocabulary.eos, self.vocabulary.pad)

    def prepare_variables(self, variables: PyTree) -> PyTree:
        """Rounds the variables as `config.weights` says, and unstacks layers if the module does that.

        Variables that stay as they are are returned themselves: a program would copy them.
        """
        if self.draft is None:
            return self._prepare(self.module, variables)
        modules = {"model": self.module, "draft": self.draft}
        return {name: self._prepare(module, variables[name]) for name, module in modules.items()}

    def schedule_for(self, state: State, prompt_slots: int) -> CacheSchedule:
        """The schedule of a state from `prefill` with prompts of `prompt_slots` slots."""
        return cache_schedule.schedule_for(state, prompt_slots, self.config.max_length, self.search)

    @functools.partial(programs.jit, static_argnums=(0,), static_argnames=("prompt_width",))
    def prefill(
        self, variables: PyTree, batch: Batch, rows: RowSettings, prompt_width: int | None = None
    ) -> DecodeState:
        """Reads prompts and chooses the first tokens.

        Args:
          prompt_width: columns that the search keeps for prompts; None: those of the batch.
        """
        search = self.search
        logits, state = cache_schedule.prefill(self._bind(variables), batch, self.config.max_length, search)
        return DecodeState(search.init(logits, batch, rows, prompt_width), state)

    @functools.partial(programs.jit, static_argnums=(0,), donate_argnames=("state",))
    def decode_steps(
        self, variables: PyTree, state: DecodeState, min_finished: Int[Array, ""], max_steps: Int[Array, ""]
    ) -> tuple[DecodeState, DecodeStatus]:
        """Adds to every output, until `min_finished` prompts are finished or `max_steps` slots are taken (`base`)."""
        search = self.search
        new, model_state, steps, passes = decode_loop(search, self._bind(variables), *state, max_steps, min_finished)
        tokens = jnp.sum(new.step - state.search.step)
        state = DecodeState(new, model_state)
        used_slots = jnp.int32(0)
        if isinstance(model_state, CompactableState):
            used_slots = model_state.max_used_slots(self._active_rows(state))
        return state, replicate(DecodeStatus(search.is_finished(new), steps, used_slots, tokens, passes))

    @functools.partial(programs.jit, static_argnums=(0, 2, 3))
    def compact(self, state: DecodeState, schedule: CacheSchedule, capacity: int) -> State:
        """The model's state with slots for `capacity` new tokens and without those that no active row reads.

        A state that cannot drop slots is returned unchanged.
        """
        if not isinstance(state.model, CompactableState):
            return state.model
        return state.model.compact(self._active_rows(state), schedule.total_slots(capacity))

    @functools.partial(programs.jit, static_argnums=(0, 2, 3))
    def grow(self, state: State, schedule: CacheSchedule, capacity: int) -> State:
        """The model's state with slots for `capacity` new tokens."""
        return schedule.grow(state, capacity)

    @functools.partial(programs.jit, static_argnums=(0,))
    def drop_cache(self, state: State) -> State:
        """The model's state for texts that do not fit any more (see `cropped_context.drop_cache`)."""
        return drop_cache(state)

    @functools.partial(programs.jit, static_argnums=(0,), donate_argnames=("state",))
    def refill_rows(self, state: DecodeState, indices: Int[Array, " R"], new: DecodeState) -> DecodeState:
        """Replaces prompts `indices` of the batch by those of `new`; indices beyond the batch are ignored."""
        if not (isinstance(state.model, RefillableState) and isinstance(new.model, RefillableState)):
            raise TypeError(f"refill: got a {type(state.model).__name__}, expected a RefillableState")
        search = jax.tree.map(
            lambda x, x_new: scatter_rows(x, _expand_indices(indices, len(x_new)), x_new), state.search, new.search
        )
        model_rows = _expand_indices(indices, len(indices) * self._rows_per_prompt(new.model))
        return DecodeState(search, state.model.replace_rows(model_rows, new.model))

    @functools.partial(programs.jit, static_argnums=(0,))
    def hypotheses(self, search_state: SearchState) -> Hypotheses:
        """The best outputs of every prompt so far, on all devices."""
        return replicate(self.search.hypotheses(search_state))

    def _prepare(self, module: nn.Module, variables: PyTree) -> PyTree:
        """The variables of one module; see `prepare_variables`."""
        rounds_to_int8, unstack = self.config.weights == "int8", getattr(module, "unstack", None)
        if not rounds_to_int8:
            shapes = variables if unstack is None else jax.eval_shape(unstack, variables)
            if jax.tree.structure(shapes) == jax.tree.structure(variables):
                return variables
        return _prepare_variables(module, rounds_to_int8, variables)

    def _bind(self, variables: PyTree) -> Decodable:
        size = self.vocabulary.size
        if self.draft is not None:
            return DraftedModel(
                BoundModel(self.module, variables["model"], size), BoundModel(self.draft, variables["draft"], size)
            )
        model = BoundModel(self.module, variables, size)
        if self.config.speculate and self.config.proposals == "multi_token":
            return SelfDraftedModel(model)
        return model if self.context_length is None else CroppingModel(model, self.context_length)

    def _rows_per_prompt(self, state: State) -> int:
        """Rows of the model's state for each prompt."""
        branches = cache_schedule.supported_branches(state, self.search.branches)
        return self.search.outputs_per_prompt // max(branches, 1)

    def _active_rows(self, state: DecodeState) -> Bool[Array, " R"]:
        """True for the rows of the model's state whose prompts are not finished."""
        return jnp.repeat(~self.search.is_finished(state.search), self._rows_per_prompt(state.model))


@functools.partial(jax.jit, static_argnames=("module", "method", "finish"))
def forward(
    module: nn.Module,
    variables: PyTree,
    batch: Batch,
    method: str | None = None,
    finish: Finish | None = None,
) -> PyTree:
    """Applies the module without decoding, compiled once per shape: for classes, scores and hidden states.

    Args:
      method: name of the module's method; None: its call. "encode" gets the source stream alone.
      finish: function of `(output, batch)` to run in the same program. Each new function object is compiled.
    """
    output = module.apply(variables, batch.source if method == "encode" else batch, method=method)
    return replicate(output if finish is None else finish(output, batch))


def replicate(tree: PyTree) -> PyTree:
    """Arrays replicated on all devices, so that each process can read them in full."""
    return jax.tree.map(lambda x: constrain(x, *(None,) * x.ndim), tree)


@functools.partial(programs.jit, static_argnums=(0, 1))
def _prepare_variables(module: nn.Module, rounds_to_int8: bool, variables: PyTree) -> PyTree:
    variables = int8.quantize(module, variables) if rounds_to_int8 else variables
    unstack = getattr(module, "unstack", None)
    return variables if unstack is None else unstack(variables)


def _expand_indices(indices: Int[Array, " R"], rows: int) -> Int[Array, " R_expanded"]:
    """Row indices of prompts `indices` in an array with `rows` rows for these prompts, several for each."""
    per_prompt = rows // len(indices)
    return (indices[:, None] * per_prompt + jnp.arange(per_prompt)).reshape(-1)
