"""Greedy search and sampling: one token per row and step, until every row has finished.

Greedy search takes the most probable token; ties take the lowest id. Sampling draws `config.hypotheses` independent
continuations per prompt and returns them in the order of the draws. A draw depends on the key, the row's index, the
number of the draw and the step. So a row's result does not depend on the rest of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32, Int, Key

from jaxformer.config import DecodeConfig
from jaxformer.decode import logits_processors
from jaxformer.decode.draft import DraftedModel, SelfDraftedModel
from jaxformer.decode.logits_processors import PromptTokens
from jaxformer.decode.search import speculation
from jaxformer.decode.search.base import Hypotheses, RowSampling, RowSettings, is_any
from jaxformer.decode.top_k import top_k
from jaxformer.types import Array, Batch, Decodable, Extendable, RewindableState, State


class Draws(NamedTuple):
    """Continuations in progress: n draws for each of B prompts, in R = B n rows.

    Attributes:
      step: int32 `[R]`, number of tokens chosen so far.
      tokens: int32 `[R, T]`, new tokens, then padding.
      scores: float32 `[R]`, log-probability of the tokens.
      done: bool `[R]`.
      max_length: int32 `[R]`, new tokens that the row may have.
      keys: PRNG keys `[R]`.
      prompt: tokens `[R, S]`, if logits processors or proposals need them; else None.
      sampling: settings of the rows, if the search has them by row (`per_row.py`); else None.
      source: tokens `[R, S]` of the source, if there is one and proposals are looked up in it; else None.
    """

    step: Array
    tokens: Array
    scores: Array
    done: Array
    max_length: Array
    keys: Array
    prompt: PromptTokens | None
    sampling: RowSampling | None = None
    source: PromptTokens | None = None


@dataclass(frozen=True)
class SampleSearch:
    """Greedy search (`config.method` "greedy") or sampling ("sample"); see `base.Search`.

    Attributes:
      eos: tokens that end an output.
      pad: token that fills outputs after their end.
    """

    config: DecodeConfig
    eos: tuple[int, ...]
    pad: int

    @property
    def outputs_per_prompt(self) -> int:
        """Number of draws per prompt."""
        return self.config.hypotheses if self.config.method == "sample" else 1

    @property
    def branches(self) -> int:
        """0: draws share nothing but the prompt."""
        return 0

    @property
    def lookahead(self) -> int:
        """Number of proposals of a step."""
        return self.config.speculate

    def init(
        self, logits: Float32[Array, "B V"], prompts: Batch, rows: RowSettings, prompt_width: int | None = None
    ) -> Draws:
        """The draws with their first tokens."""
        config, prompt, draws = self.config, prompts.side("target"), self.outputs_per_prompt
        count = prompt.tokens.shape[0]
        max_length = jnp.repeat(jnp.minimum(rows.max_lengths, config.max_length), draws)
        needs_prompt = logits_processors.has_processors(config) or bool(self.lookahead)
        aligned = logits_processors.right_align(prompt, prompt_width) if needs_prompt else None
        source = speculation.source_text(prompts, logits.shape[1]) if self.lookahead else None
        repeat = partial(jax.tree.map, lambda x: jnp.repeat(x, draws, axis=0))
        state = Draws(
            step=jnp.zeros(count * draws, jnp.int32),
            tokens=jnp.full((count * draws, config.max_length), self.pad, jnp.int32),
            scores=jnp.zeros(count * draws, jnp.float32),
            done=max_length <= 0,
            max_length=max_length,
            keys=self.keys(rows),
            prompt=repeat(aligned),
            sampling=self.row_sampling(rows),
            source=repeat(source),
        )
        return self.choose(jnp.repeat(logits, draws, axis=0), state)

    def keys(self, rows: RowSettings) -> Key[Array, " R"]:
        """PRNG keys `[R]` of the draws."""
        draws = jnp.arange(self.outputs_per_prompt)
        return jax.vmap(lambda row: jax.vmap(lambda draw: jax.random.fold_in(jax.random.fold_in(rows.key, row), draw))(
            draws
        ))(rows.row_indices).reshape(-1)  # fmt: skip

    def row_sampling(self, rows: RowSettings) -> RowSampling | None:
        """The settings of the rows, of a search that has them by row; else None."""
        return None

    def advance(self, model: Decodable, state: Draws, model_state: State) -> tuple[Draws, State]:
        """Adds a token to every draw that is not done, or as many as are proposed and right."""
        if self.lookahead:
            return self.advance_by_proposals(model, state, model_state)
        logits, model_state = model.step(self.last_tokens(state), model_state)
        return self.choose(logits, state), model_state

    def advance_by_proposals(self, model: Decodable, state: Draws, model_state: State) -> tuple[Draws, State]:
        """Adds 1 to K + 1 tokens to every draw that is not done, K = `lookahead` (see `speculation.py`).

        Raises:
          TypeError: the model reads one token at a time, or its state cannot take tokens back.
        """
        if not isinstance(model, Extendable):
            raise TypeError(f"advance: got a {type(model).__name__}, expected an Extendable")
        begun, count = state.step, self.lookahead
        if isinstance(model, DraftedModel | SelfDraftedModel):
            proposals, model_state = self.draft(model, state, model_state)
        else:
            proposals = self.look_up(state)
        tokens = jnp.concatenate([self.last_tokens(state), proposals], axis=1)
        logits, model_state = model.extend(tokens, model_state)
        if not isinstance(model_state, RewindableState):
            raise TypeError(f"advance: got a {type(model_state).__name__}, expected a RewindableState")
        at = partial(jax.lax.dynamic_index_in_dim, axis=1, keepdims=False)

        def has_next(carry: tuple[Array, Draws, Array]) -> Bool[Array, ""]:
            number, _, active = carry
            return (number <= count) & jnp.any(active)

        def choose_next(carry: tuple[Array, Draws, Array]) -> tuple[Array, Draws, Array]:
            number, state, active = carry
            new = self.choose(at(logits, number), state._replace(done=~active))
            is_right = self.last_tokens(new)[:, 0] == at(proposals, jnp.minimum(number, count - 1))
            done = jnp.where(active, new.done, state.done)
            return number + 1, new._replace(done=done), active & ~done & is_right

        _, state, _ = jax.lax.while_loop(has_next, choose_next, (jnp.int32(0), state, ~state.done))
        return state, model_state.keep(state.step - begun, count + 1)

    def draft(
        self, model: DraftedModel | SelfDraftedModel, state: Draws, model_state: State
    ) -> tuple[Int[Array, "R K"], State]:
        """The draft's choices by the same rules, with the same noise; and its state after it has read them."""

        def choose_next(carry: tuple[Draws, State], _: None) -> tuple[tuple[Draws, State], Int[Array, " R"]]:
            state, model_state = carry
            logits, model_state = model.read(self.last_tokens(state), model_state)
            state = self.choose(logits, state)
            return (state, model_state), self.last_tokens(state)[:, 0]

        count = model.reads(self.lookahead)
        (_, model_state), tokens = jax.lax.scan(choose_next, (state, model_state), length=count)
        return tokens[: self.lookahead].T, model_state

    def look_up(self, state: Draws) -> Int[Array, "R K"]:
        """Proposals for the next tokens of every draw, looked up in its source, its prompt and its output.

        Raises:
          ValueError: the state has no prompts.
        """
        if state.prompt is None:
            raise ValueError("look_up: got a state without prompts, expected those that `init` keeps")
        written = jnp.arange(state.tokens.shape[1]) < state.step[:, None]
        parts = [state.prompt, PromptTokens(state.tokens, written)]
        if state.source is not None:
            parts.insert(0, state.source)
        text, valid = (jnp.concatenate(columns, axis=1) for columns in zip(*parts, strict=True))
        return speculation.look_up(text, valid, text.shape[1] - state.tokens.shape[1] + state.step, self.lookahead)

    def last_tokens(self, state: Draws) -> Int[Array, "R 1"]:
        """The last token of every draw."""
        return jnp.take_along_axis(state.tokens, jnp.maximum(state.step - 1, 0)[:, None], axis=1)

    def choose(self, logits: Float32[Array, "R V"], state: Draws) -> Draws:
        """Adds a token, chosen from the logits, to every draw that is not done."""
        config = self.config
        if state.prompt is not None and logits_processors.has_processors(config):
            history = logits_processors.token_history(state.prompt, state.tokens, state.step, state.max_length)
            logits = logits_processors.process(config, logits, history, self.eos)
        token = self.next_token(logits, state)
        chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
        # If every token is banned, one is chosen all the same, with log-probability -inf.
        gain = jnp.where(jnp.isneginf(chosen), chosen, chosen - jax.nn.logsumexp(logits, axis=-1))
        token = jnp.where(state.done, self.pad, token).astype(jnp.int32)
        step = state.step + ~state.done
        # Index T is out of bounds, so that rows that are done write nothing.
        column = jnp.where(state.done, state.tokens.shape[1], state.step)
        return state._replace(
            step=step,
            tokens=state.tokens.at[jnp.arange(len(token)), column].set(token, mode="drop"),
            scores=state.scores + jnp.where(state.done, 0.0, gain),
            done=state.done | is_any(token, self.eos) | (step >= state.max_length),
        )

    def next_token(self, logits: Float32[Array, "R V"], state: Draws) -> Int[Array, " R"]:
        """The token of every draw, from its processed logits."""
        if self.config.method == "greedy":
            return top_k(logits, 1)[1][:, 0]  # an argmax, which the CPU compiler does not vectorise
        keys = jax.vmap(jax.random.fold_in)(state.keys, state.step)
        return jax.vmap(jax.random.categorical)(keys, logits_processors.process_for_sampling(self.config, logits))

    def is_finished(self, state: Draws) -> Bool[Array, " B"]:
        """True for the prompts all of whose draws are done."""
        return state.done.reshape(-1, self.outputs_per_prompt).all(axis=1)

    def hypotheses(self, state: Draws) -> Hypotheses:
        """The draws so far."""
        per_prompt = lambda x: x.reshape(-1, self.outputs_per_prompt, *x.shape[1:])  # noqa: E731
        return Hypotheses(per_prompt(state.tokens), per_prompt(state.step), per_prompt(state.scores))
