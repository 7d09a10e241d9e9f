"""Greedy search and sampling: one token a row and step, until every row has finished."""

from __future__ import annotations

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int, Key

from jaxformer.config import DecodeConfig
from jaxformer.decode import bans, growing, top, warp
from jaxformer.types import Array, Batch, Decodable, State


class Hypotheses(NamedTuple):
    """What decoding B prompts gives, n a prompt, with room for T new tokens.

    Attributes:
      tokens: int32 `[B, n, T]`, the new tokens, the end token included if one was reached, then padding.
      lengths: int32 `[B, n]`, how many of them are real.
      scores: float32 `[B, n]`: the log-probability of those tokens (natural log). Greedy search and sampling take it
        after `warp.process` (a forced token counts 0) and before temperature and truncation; beam search sums what
        `warp.process` makes of the model's log-probabilities and divides by the length penalty.
    """

    tokens: Array
    lengths: Array
    scores: Array


@flax.struct.dataclass
class Progress:
    """The rows as far as they are."""

    step: Array  # int32 scalar: tokens chosen so far
    tokens: Array  # int32 [B, T]
    lengths: Array  # int32 [B]
    scores: Array  # float32 [B]
    finished: Array  # bool [B]

    @property
    def over(self) -> Bool[Array, ""]:
        return jnp.all(self.finished)


def sample(
    model: Decodable,
    batch: Batch,
    config: DecodeConfig,
    eos: tuple[int, ...],
    pad: int,
    limit: Int[Array, " B"] | None = None,
    rows: Int[Array, " B"] | None = None,
    key: Key[Array, ""] | None = None,
) -> Hypotheses:
    """Decodes `batch`, whose prompts are in `batch.target`, by `config.method` "greedy" or "sample".

    Greedy takes the most probable token, of equals the one with the lowest id. Sampling draws `config.hypotheses`
    independent continuations a prompt, in the order of the draws. A draw depends on the key, the row's own id, the
    number of the draw and the step, so a row's result is the same whatever else is in the batch.

    Args:
      eos: tokens that end a row.
      pad: fills rows after their end.
      limit: new tokens allowed in each row, at most `config.max_length`; None: that many.
      rows: ids of the rows; None: 0 to B - 1.
      key: PRNG key; None: made of `config.seed`.
    """
    count, length = batch.target.tokens.shape[0], config.max_length
    draws = config.hypotheses if config.method == "sample" else 1
    key = jax.random.key(config.seed) if key is None else key
    rows = jnp.arange(count) if rows is None else rows
    limit = jnp.full(count, length) if limit is None else jnp.minimum(limit, length)
    keys = jax.vmap(lambda row: jax.vmap(lambda draw: jax.random.fold_in(jax.random.fold_in(key, row), draw))(
        jnp.arange(draws)
    ))(rows).reshape(count * draws)  # fmt: skip
    limit = jnp.repeat(limit, draws)
    prompt = jax.tree.map(lambda x: jnp.repeat(x, draws, axis=0), bans.said(batch.target))

    def choose(logits: Array, now: Progress) -> Progress:
        if warp.processes(config):
            logits = warp.process(config, logits, bans.context(prompt, now.tokens, now.step, limit), eos)
        if config.method == "greedy":
            token = top.top_k(logits, 1)[1][:, 0]  # as argmax, which the CPU compiler does not vectorise
        else:
            here = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, now.step)
            token = jax.vmap(jax.random.categorical)(here, warp.truncate(config, logits))
        chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
        # Where every token is banned, one is chosen all the same, at no probability.
        gain = jnp.where(jnp.isneginf(chosen), chosen, chosen - jax.nn.logsumexp(logits, axis=-1))
        token = jnp.where(now.finished, pad, token).astype(jnp.int32)
        lengths = now.lengths + ~now.finished
        return now.replace(
            step=now.step + 1,
            tokens=now.tokens.at[:, now.step].set(token),
            lengths=lengths,
            scores=now.scores + jnp.where(now.finished, 0.0, gain),
            finished=now.finished | is_any(token, eos) | (lengths >= limit),
        )

    def advance(carry: tuple[Progress, State]) -> tuple[Progress, State]:
        now, state = carry
        logits, state = model.step(jax.lax.dynamic_slice_in_dim(now.tokens, now.step - 1, 1, axis=1), state)
        return choose(logits, now), state

    logits, state, room = growing.start(model, batch, length)
    if draws > 1:
        spread = jnp.repeat(jnp.arange(count), draws)
        logits, state = logits[spread], state.rows(spread)
    begin = Progress(
        step=jnp.zeros((), jnp.int32),
        tokens=jnp.full((count * draws, length), pad, jnp.int32),
        lengths=jnp.zeros(count * draws, jnp.int32),
        scores=jnp.zeros(count * draws, jnp.float32),
        finished=limit <= 0,
    )
    end = growing.loop(advance, choose(logits, begin), state, room)
    return Hypotheses(*(x.reshape(count, draws, *x.shape[1:]) for x in (end.tokens, end.lengths, end.scores)))


def is_any(tokens: Int[Array, "*batch"], ids: tuple[int, ...]) -> Bool[Array, "*batch"]:
    """Whether each token is one of `ids`."""
    return jnp.isin(tokens, jnp.asarray(ids, jnp.int32)) if ids else jnp.zeros_like(tokens, bool)
