"""The interface of a search strategy, the structures that all strategies share, and the decoding loop."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float32, Int

from jaxformer.types import Array, Batch, Decodable, State


class Hypotheses(NamedTuple):
    """Outputs of B prompts, n per prompt, best first or in the order of the draws.

    Attributes:
      tokens: int32 `[B, n, T]`, the new tokens, with the end token if one was reached, then padding.
      lengths: int32 `[B, n]`, number of new tokens; 0 if the hypothesis does not exist.
      scores: float32 `[B, n]`, log-probability of those tokens (natural log). Greedy search and sampling take it after
        `logits_processors.process` (a forced token counts 0) and before temperature and truncation. Beam search sums
        the processed log-probabilities and divides by the length penalty.
    """

    tokens: Array
    lengths: Array
    scores: Array


class RowSampling(NamedTuple):
    """Settings by which each row of a batch chooses its tokens; the fields are those of `DecodeConfig`.

    Attributes:
      temperature: float32 `[B]`; 0: the most probable token, as greedy search.
      top_k: int32 `[B]`; 0: all tokens.
      top_p: float32 `[B]`; 1: all tokens.
      min_p: float32 `[B]`; 0: all tokens.
      seeds: uint32 `[B]`, seed of the row's draws.
    """

    temperature: Array | np.ndarray
    top_k: Array | np.ndarray
    top_p: Array | np.ndarray
    min_p: Array | np.ndarray
    seeds: Array | np.ndarray


class RowSettings(NamedTuple):
    """Settings of the rows of a batch, as arrays, so that one compiled program serves all values.

    Attributes:
      max_lengths: int32 `[B]`, new tokens that a row may have; 0 for an empty row.
      row_indices: int32 `[B]`, numbers that random draws depend on beside the key.
      key: PRNG key of the run.
      sampling: the rows' own settings, for a search that has them by row; else None.
    """

    max_lengths: Array | np.ndarray
    row_indices: Array | np.ndarray
    key: Array
    sampling: RowSampling | None = None


@runtime_checkable
class SearchState(Protocol):
    """Arrays of a search in progress. The first axis of each is the prompts' rows, or a multiple of them."""

    @property
    def step(self) -> Int[Array, " R"]:
        """Number of tokens chosen so far."""
        ...

    @property
    def done(self) -> Bool[Array, " R"]:
        """True if no more tokens will be chosen."""
        ...


S = TypeVar("S", bound=SearchState)


@runtime_checkable
class Search(Protocol[S]):
    """A search strategy: pure functions that choose tokens from a model's logits, with the state S.

    An implementation is a frozen dataclass of the decoding options, the end tokens and the padding token.
    """

    @property
    def outputs_per_prompt(self) -> int:
        """Sequences that are extended at the same time for each prompt."""
        ...

    @property
    def branches(self) -> int:
        """Sequences that may share one row of the model's state as its branches; 0: each needs a row."""
        ...

    @property
    def lookahead(self) -> int:
        """Largest number of tokens that a step may append to a sequence beyond the first."""
        ...

    def init(
        self, logits: Float32[Array, "B V"], prompts: Batch, rows: RowSettings, prompt_width: int | None = None
    ) -> S:
        """The state with the first tokens, chosen from the logits after the prompts.

        Args:
          prompt_width: columns that the state keeps for prompts, at least those of the batch; None: as many.
        """
        ...

    def advance(self, model: Decodable, state: S, model_state: State) -> tuple[S, State]:
        """Runs the model on the last tokens and chooses the next ones."""
        ...

    def is_finished(self, state: S) -> Bool[Array, " B"]:
        """True for the prompts whose hypotheses are final."""
        ...

    def hypotheses(self, state: S) -> Hypotheses:
        """The best outputs so far, up to `DecodeConfig.hypotheses` per prompt."""
        ...


def decode_loop(
    search: Search[S],
    model: Decodable,
    state: S,
    model_state: State,
    max_steps: Int[Array, ""] | int,
    min_finished: Int[Array, ""] | int,
) -> tuple[S, State, Int[Array, ""], Int[Array, ""]]:
    """Advances all rows, until `min_finished` prompts are finished or `max_steps` slots of the state are taken.

    A step adds a token to every row and takes a slot; with `search.lookahead` it adds as many tokens as it can and
    takes as many slots as the row that got most, which may be `lookahead` slots more than `max_steps`.

    Returns:
      The states; the number of slots; and the number of steps in which each row was not done, summed over the rows.
    """

    def has_next_step(carry: tuple[S, State, Array, Array]) -> Bool[Array, ""]:
        state, _, steps, _ = carry
        return (jnp.sum(search.is_finished(state)) < min_finished) & (steps < max_steps)

    def step(carry: tuple[S, State, Array, Array]) -> tuple[S, State, Array, Array]:
        state, model_state, steps, passes = carry
        new, model_state = search.advance(model, state, model_state)
        taken = jnp.max(new.step - state.step) if search.lookahead else 1
        return new, model_state, steps + taken, passes + jnp.sum(~state.done)

    return jax.lax.while_loop(has_next_step, step, (state, model_state, jnp.int32(0), jnp.int32(0)))


def is_any(tokens: Int[Array, "*batch"], ids: tuple[int, ...]) -> Bool[Array, "*batch"]:
    """True for each token that is one of `ids`."""
    return jnp.isin(tokens, jnp.asarray(ids, jnp.int32)) if ids else jnp.zeros_like(tokens, bool)
