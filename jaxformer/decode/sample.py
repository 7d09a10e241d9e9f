"""Greedy search and sampling: one token a row and step, until every row has finished.

Greedy search takes the most probable token, of equals the one with the lowest id. Sampling draws `config.hypotheses`
independent continuations a prompt, in the order of the draws. A draw depends on the key, the row's own id, the number
of the draw and the step, so a row's result is the same whatever else is in the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32, Int, Key

from jaxformer.config import DecodeConfig
from jaxformer.decode import bans, top, warp
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
    """The draws as far as they are, R = B n rows."""

    step: Array  # int32 [R]: tokens chosen so far
    tokens: Array  # int32 [R, T]
    scores: Array  # float32 [R]
    done: Array  # bool [R]
    limit: Array  # int32 [R]: tokens there may be
    keys: Array  # PRNG keys [R]
    prompt: bans.Said | None  # None: nothing depends on what was said


def outputs(config: DecodeConfig) -> int:
    """Followed at once for each prompt."""
    return config.hypotheses if config.method == "sample" else 1


def branches(config: DecodeConfig) -> int:
    """Of a row: none, since draws have nothing in common but the prompt."""
    return 0


def begin(
    logits: Float32[Array, "B V"],
    batch: Batch,
    config: DecodeConfig,
    eos: tuple[int, ...],
    pad: int,
    limit: Int[Array, " B"],
    rows: Int[Array, " B"],
    key: Key[Array, ""],
    width: int | None = None,
) -> Progress:
    """The draws with their first tokens, from the logits after the prompts.

    Args:
      width: columns for the prompts, where there are to be more than theirs.
    """
    count, draws = batch.target.tokens.shape[0], outputs(config)
    keys = jax.vmap(lambda row: jax.vmap(lambda draw: jax.random.fold_in(jax.random.fold_in(key, row), draw))(
        jnp.arange(draws)
    ))(rows).reshape(count * draws)  # fmt: skip
    limit = jnp.repeat(jnp.minimum(limit, config.max_length), draws)
    said = bans.said(batch.target, width) if warp.processes(config) else None
    now = Progress(
        step=jnp.zeros(count * draws, jnp.int32),
        tokens=jnp.full((count * draws, config.max_length), pad, jnp.int32),
        scores=jnp.zeros(count * draws, jnp.float32),
        done=limit <= 0,
        limit=limit,
        keys=keys,
        prompt=jax.tree.map(lambda x: jnp.repeat(x, draws, axis=0), said),
    )
    return choose(jnp.repeat(logits, draws, axis=0), now, config, eos, pad)


def advance(
    model: Decodable, now: Progress, state: State, config: DecodeConfig, eos: tuple[int, ...], pad: int
) -> tuple[Progress, State]:
    """The draws a token longer, but for those that are done, and the state that has read the one before."""
    last = jnp.take_along_axis(now.tokens, jnp.maximum(now.step - 1, 0)[:, None], axis=1)
    logits, state = model.step(last, state)
    return choose(logits, now, config, eos, pad), state


def choose(
    logits: Float32[Array, "R V"], now: Progress, config: DecodeConfig, eos: tuple[int, ...], pad: int
) -> Progress:
    """Adds a token to every draw that is not done, chosen from its logits."""
    if warp.processes(config):
        logits = warp.process(config, logits, bans.context(now.prompt, now.tokens, now.step, now.limit), eos)
    if config.method == "greedy":
        token = top.top_k(logits, 1)[1][:, 0]  # as argmax, which the CPU compiler does not vectorise
    else:
        here = jax.vmap(jax.random.fold_in)(now.keys, now.step)
        token = jax.vmap(jax.random.categorical)(here, warp.truncate(config, logits))
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    # Where every token is banned, one is chosen all the same, at no probability.
    gain = jnp.where(jnp.isneginf(chosen), chosen, chosen - jax.nn.logsumexp(logits, axis=-1))
    token = jnp.where(now.done, pad, token).astype(jnp.int32)
    step = now.step + ~now.done
    return now.replace(
        step=step,
        tokens=now.tokens.at[jnp.arange(len(token)), jnp.where(now.done, now.tokens.shape[1], now.step)].set(
            token, mode="drop"
        ),
        scores=now.scores + jnp.where(now.done, 0.0, gain),
        done=now.done | is_any(token, eos) | (step >= now.limit),
    )


def finished(now: Progress, config: DecodeConfig) -> Bool[Array, " B"]:
    """The prompts all of whose draws are done."""
    return now.done.reshape(-1, outputs(config)).all(axis=1)


def found(now: Progress, config: DecodeConfig) -> Hypotheses:
    """The draws so far, `[B, n, T]`."""
    draws = outputs(config)
    return Hypotheses(*(x.reshape(-1, draws, *x.shape[1:]) for x in (now.tokens, now.step, now.scores)))


def is_any(tokens: Int[Array, "*batch"], ids: tuple[int, ...]) -> Bool[Array, "*batch"]:
    """Whether each token is one of `ids`."""
    return jnp.isin(tokens, jnp.asarray(ids, jnp.int32)) if ids else jnp.zeros_like(tokens, bool)
