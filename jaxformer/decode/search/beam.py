"""Beam search: an approximate search for the most probable outputs, with N live hypotheses per prompt.

Every step extends the N live hypotheses by every token and ranks the extensions by log-probability. Extensions among
the N best that end go to the pool of finished hypotheses. The N best that do not end stay live: a finished hypothesis
never takes the slot of a live one. At a row's maximum length all end. Finished hypotheses compete by
log P / lp(length). With logits processors, log P is the sum of the processed log-probabilities, which are not
normalised again.

`config.stopping` says when a prompt is finished:
  exact: no live hypothesis can still enter the `config.hypotheses` best, whatever follows.
  estimate: also if the pool is full and no live hypothesis, scored as if it ended now, beats the worst of the pool.
    That is much sooner, makes one beam equal greedy search, and loses nothing at length penalty 0.
  first: the pool is full.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32, Int

from jaxformer.config import DecodeConfig
from jaxformer.decode import logits_processors
from jaxformer.decode.logits_processors import PromptTokens
from jaxformer.decode.search.base import Hypotheses, RowSettings, is_any
from jaxformer.decode.top_k import top_k_of_sums
from jaxformer.types import Array, Batch, BranchingState, Decodable, PyTree, State


class Beams(NamedTuple):
    """N live hypotheses for each of B prompts, and a separate pool of their N best finished ones.

    Attributes:
      step: int32 `[B]`, length of the live hypotheses.
      tokens: int32 `[B, N, T]`, live hypotheses.
      scores: float32 `[B, N]`, their log-probabilities, best first; -inf if there is no hypothesis.
      parent: int32 `[B, N]`, the beam that each live hypothesis extended last; the model's state is reordered by it.
      pool: finished hypotheses, best first, with scores divided by the length penalty; -inf if there is none.
      done: bool `[B]`, True if the prompt's pool is final.
      max_length: int32 `[B]`, new tokens that an output may have.
      prompt: tokens `[B N, S]`, if logits processors need them; else None.
    """

    step: Array
    tokens: Array
    scores: Array
    parent: Array
    pool: Hypotheses
    done: Array
    max_length: Array
    prompt: PromptTokens | None


@dataclass(frozen=True)
class BeamSearch:
    """Beam search; see `base.Search`.

    Attributes:
      eos: tokens that end an output.
      pad: token that fills outputs after their end.
    """

    config: DecodeConfig
    eos: tuple[int, ...]
    pad: int

    @property
    def outputs_per_prompt(self) -> int:
        """Number of beams."""
        return self.config.beams

    @property
    def branches(self) -> int:
        """Number of beams: the beams of a prompt share their common prefix."""
        return self.config.beams

    @property
    def lookahead(self) -> int:
        """0: nothing is proposed."""
        return 0

    def init(
        self, logits: Float32[Array, "B V"], prompts: Batch, rows: RowSettings, prompt_width: int | None = None
    ) -> Beams:
        """The beams with their first tokens."""
        config = self.config
        repeat = lambda x: jnp.repeat(x, config.beams, axis=0)  # noqa: E731
        needs_prompt = logits_processors.has_processors(config)
        aligned = logits_processors.right_align(prompts.side("target"), prompt_width) if needs_prompt else None
        max_length = jnp.minimum(rows.max_lengths, config.max_length)
        return self.extend(self.empty(max_length, jax.tree.map(repeat, aligned)), repeat(logits))

    def empty(self, max_length: Int[Array, " B"], prompt: PromptTokens | None = None) -> Beams:
        """One live hypothesis without tokens per prompt, and empty pools."""
        rows, beams = max_length.shape[0], self.config.beams
        tokens = jnp.full((rows, beams, self.config.max_length), self.pad, jnp.int32)
        no_scores = jnp.full((rows, beams), -jnp.inf)
        zeros = jnp.zeros((rows, beams), jnp.int32)
        return Beams(
            step=jnp.zeros(rows, jnp.int32),
            tokens=tokens,
            scores=no_scores.at[:, 0].set(0.0),
            parent=zeros,
            pool=Hypotheses(tokens, zeros, no_scores),
            done=max_length <= 0,
            max_length=max_length,
            prompt=prompt,
        )

    def advance(self, model: Decodable, state: Beams, model_state: State) -> tuple[Beams, State]:
        """Runs the model on the last tokens of all beams and extends them."""
        slot = jnp.maximum(state.step - 1, 0)[:, None, None]
        last = jnp.take_along_axis(state.tokens, slot, axis=2)[:, :, 0]
        logits, model_state = step_beams(model, last, state.parent, model_state)
        return self.extend(state, logits), model_state

    def extend(self, state: Beams, logits: Float32[Array, "BN V"]) -> Beams:
        """Extends the beams by one token. The pools of finished prompts do not change.

        Args:
          logits: those of the new token, one row per beam.
        """
        _, beams, length = state.tokens.shape
        logits, normalizer = self._process(state, logits)
        # Each live hypothesis can end with each of the end tokens; so many more candidates leave N that do not end.
        count = beams * (1 + len(self.eos))
        scores, parent, token = candidates(state.scores, logits, normalizer, count)
        new_length = (state.step + 1)[:, None]
        ended, cut = is_any(token, self.eos), new_length >= state.max_length[:, None]
        tokens = jnp.take_along_axis(state.tokens, parent[:, :, None], axis=1)
        tokens = jnp.where(jnp.arange(length) == state.step[:, None, None], token[:, :, None], tokens)

        is_leading = jnp.arange(scores.shape[1]) < beams
        enters_pool = (ended | cut) & is_leading & ~state.done[:, None]
        final = jnp.where(enters_pool, scores / self.length_divisor(new_length), -jnp.inf)
        finished = Hypotheses(tokens, jnp.broadcast_to(new_length, token.shape), final)

        alive, index = jax.lax.top_k(jnp.where(ended, -jnp.inf, scores), beams)
        state = state._replace(
            step=jnp.where(state.done, state.step, state.step + 1),
            tokens=select(tokens, index),
            scores=alive,
            parent=select(parent, index),
            pool=merge_pools(state.pool, finished),
        )
        return state._replace(done=state.done | cut[:, 0] | self.is_settled(state))

    def _process(
        self, state: Beams, logits: Float32[Array, "BN V"]
    ) -> tuple[Float32[Array, "BN V"], Float32[Array, "BN 1"]]:
        """Scores of the next tokens, and what to subtract from them to get log-probabilities."""
        normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        if state.prompt is None:
            return logits, normalizer
        rows, beams, length = state.tokens.shape
        history = logits_processors.token_history(
            state.prompt,
            state.tokens.reshape(rows * beams, length),
            jnp.repeat(state.step, beams),
            jnp.repeat(state.max_length, beams),
        )
        scores = logits_processors.process(self.config, logits - normalizer, history, self.eos)
        return scores, jnp.zeros_like(normalizer)

    def is_settled(self, state: Beams) -> Bool[Array, " B"]:
        """True if the best of the pool cannot change any more, or need not by the rule `config.stopping`."""
        best_live, worst_finished = state.scores[:, 0], state.pool.scores[:, -1]
        # Log-probabilities only fall, so the largest divisor that can still apply bounds a live hypothesis' score.
        largest = jnp.maximum(self.length_divisor(state.step + 1), self.length_divisor(state.max_length))
        settled = state.pool.scores[:, self.config.hypotheses - 1] >= best_live / largest
        is_full = ~jnp.isneginf(worst_finished)
        if self.config.stopping == "first":
            settled |= is_full
        if self.config.stopping == "estimate":
            settled |= is_full & (worst_finished >= best_live / self.length_divisor(state.step))
        return settled

    def length_divisor(self, length: Int[Array, "*batch"]) -> Float32[Array, "*batch"]:
        """The length penalty that the log-probability of a hypothesis is divided by.

        Args:
          length: number of new tokens, with the end token.
        """
        return LENGTH_PENALTIES[self.config.length_norm](length, self.config.length_penalty)

    def is_finished(self, state: Beams) -> Bool[Array, " B"]:
        """True for the prompts whose pools are final."""
        return state.done

    def hypotheses(self, state: Beams) -> Hypotheses:
        """The best finished hypotheses so far; missing ones have score -inf and length 0."""
        return jax.tree.map(lambda x: x[:, : self.config.hypotheses], state.pool)


def step_beams(
    model: Decodable, tokens: Int[Array, "B N"], parent: Int[Array, "B N"], state: State
) -> tuple[Float32[Array, "BN V"], State]:
    """Appends a token to every beam, after the prefix of its parent.

    A state with branches only changes which slots each branch reads. Of other states the rows are copied, one per beam.
    """
    if isinstance(state, BranchingState):
        return model.step(tokens, state.select_branches(parent))
    rows, beams = tokens.shape
    index = jnp.arange(rows)[:, None] * beams + parent
    return model.step(tokens.reshape(-1, 1), state.rows(index.reshape(-1)))


def candidates(
    scores: Float32[Array, "B N"], logits: Float32[Array, "BN V"], normalizer: Float32[Array, "BN 1"], count: int
) -> tuple[Float32[Array, "B n"], Int[Array, "B n"], Int[Array, "B n"]]:
    """The most probable extensions of hypotheses with log-probabilities `scores`.

    Args:
      normalizer: what to subtract from the logits to get log-probabilities.
      count: number of candidates n; there are fewer if N V is less.

    Returns:
      Log-probabilities, beams extended and tokens added.
    """
    rows, beams = scores.shape
    vocab = logits.shape[1]
    by_beam = logits.reshape(rows, beams, vocab)
    sums, index = top_k_of_sums(scores, by_beam, normalizer.reshape(rows, beams), min(count, beams * vocab))
    return sums, index // vocab, index % vocab


def merge_pools(pool: Hypotheses, finished: Hypotheses) -> Hypotheses:
    """The best of both, as many as `pool` has, best first; hypotheses with score -inf have length 0."""
    joined = jax.tree.map(lambda old, new: jnp.concatenate([old, new], 1), pool, finished)
    pool = select(joined, jax.lax.top_k(joined.scores, pool.scores.shape[1])[1])
    return pool._replace(lengths=jnp.where(jnp.isneginf(pool.scores), 0, pool.lengths))


def select(tree: PyTree, index: Int[Array, "B n"]) -> PyTree:
    """Entries `index` along axis 1 of every array `[B, m, ...]` of a tree."""
    rows = jnp.arange(index.shape[0])[:, None]
    return jax.tree.map(lambda x: x[rows, index], tree)


def gnmt_length_penalty(length: Int[Array, "*batch"], alpha: float) -> Float32[Array, "*batch"]:
    """`lp(y) = ((5 + |y|) / 6) ** alpha` (Wu et al. 2016, equation 14)."""
    return ((5.0 + length) / 6.0) ** alpha


def power_length_penalty(length: Int[Array, "*batch"], alpha: float) -> Float32[Array, "*batch"]:
    """`lp(y) = |y| ** alpha`; with alpha 1 the score is the mean log-probability per token."""
    return jnp.asarray(length, jnp.float32) ** alpha


LENGTH_PENALTIES = {"gnmt": gnmt_length_penalty, "power": power_length_penalty}
"""Length penalties by `DecodeConfig.length_norm`."""
