"""Beam search: the most probable outputs, as far as N hypotheses a prompt can find them.

Every step extends the N live hypotheses by every token and ranks the extensions by log-probability. Those among the N
best that end go to the pool; the N best that do not end live on. At a row's limit all end. Finished hypotheses compete
by log P / lp(length). A finished one never takes the place of a live one. Where `warp.process` has something to do,
log P is the sum of what it makes of the log-probabilities, not normalised again.

`config.stopping` says when a prompt is done:
  exact: when nothing alive can still enter the `config.hypotheses` best, whatever follows.
  estimate: also when the pool is full and no live hypothesis, scored as if it ended now, beats the worst of it. That
    is much sooner, makes one beam equal greedy search, and loses nothing at length penalty 0.
  first: as soon as the pool is full.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32, Int, Key

from jaxformer.config import DecodeConfig
from jaxformer.decode import bans, top, warp
from jaxformer.decode.sample import Hypotheses, is_any
from jaxformer.types import Array, Batch, Branching, Decodable, PyTree, State


@flax.struct.dataclass
class Beams:
    """B prompts with N live hypotheses each, and a separate pool of their N best finished ones.

    Attributes:
      step: int32 `[B]`, the length of the live hypotheses.
      tokens: int32 `[B, N, T]`, live.
      scores: float32 `[B, N]`, their log-probabilities, best first; -inf where there is no hypothesis.
      parent: int32 `[B, N]`, the beam that each live hypothesis extended last: the model's state follows it.
      pool: the finished ones, best first, scores divided by the length penalty; -inf where there is none.
      done: bool `[B]`, the prompt's pool is final.
      limit: int32 `[B]`, new tokens there may be.
      prompt: what was said before, `[B N, S]`; None where nothing depends on it.
    """

    step: Array
    tokens: Array
    scores: Array
    parent: Array
    pool: Hypotheses
    done: Array
    limit: Array
    prompt: bans.Said | None


def outputs(config: DecodeConfig) -> int:
    """Followed at once for each prompt."""
    return config.beams


def branches(config: DecodeConfig) -> int:
    """Of a row: beams share what they have in common."""
    return config.beams


def begin(
    logits: Float32[Array, "B V"],
    batch: Batch,
    config: DecodeConfig,
    eos: tuple[int, ...],
    pad: int,
    limit: Int[Array, " B"],
    rows: Int[Array, " B"] | None = None,
    key: Key[Array, ""] | None = None,
    width: int | None = None,
) -> Beams:
    """The beams with their first tokens, from the logits after the prompts. `rows` and `key` are what draws need.

    Args:
      width: columns for the prompts, where there are to be more than theirs.
    """
    count = batch.target.tokens.shape[0]
    repeat = lambda x: jnp.repeat(x, config.beams, axis=0)  # noqa: E731
    said = bans.said(batch.target, width) if warp.processes(config) else None
    limit = jnp.minimum(limit, config.max_length)
    beams = empty(count, config.beams, config.max_length, pad, limit, jax.tree.map(repeat, said))
    return extend(beams, repeat(logits), config, eos)


def advance(
    model: Decodable, beams: Beams, state: State, config: DecodeConfig, eos: tuple[int, ...], pad: int
) -> tuple[Beams, State]:
    """The beams a token longer, and the state that has read the one before."""
    place = jnp.maximum(beams.step - 1, 0)[:, None, None]
    last = jnp.take_along_axis(beams.tokens, place, axis=2)[:, :, 0]
    logits, state = read(model, last, beams.parent, state)
    return extend(beams, logits, config, eos), state


def finished(beams: Beams, config: DecodeConfig) -> Bool[Array, " B"]:
    """The prompts whose pools are final."""
    return beams.done


def found(beams: Beams, config: DecodeConfig) -> Hypotheses:
    """The best of what has ended so far; where fewer than asked for exist, a score of -inf and length 0."""
    return jax.tree.map(lambda x: x[:, : config.hypotheses], beams.pool)


def read(
    model: Decodable, tokens: Int[Array, "B N"], parent: Int[Array, "B N"], state: State
) -> tuple[Float32[Array, "BN V"], State]:
    """The last tokens of all beams, each added to what its parent had read.

    A state that branches only looks elsewhere; of any other the rows are copied, one a beam.
    """
    if isinstance(state, Branching):
        return model.step(tokens, state.follow(parent))
    rows, width = tokens.shape
    index = jnp.arange(rows)[:, None] * width + parent
    return model.step(tokens.reshape(-1, 1), state.rows(index.reshape(-1)))


def empty(
    rows: int, width: int, length: int, pad: int, limit: Int[Array, " B"], prompt: bans.Said | None = None
) -> Beams:
    """One live hypothesis a prompt, with nothing in it, and empty pools."""
    tokens = jnp.full((rows, width, length), pad, jnp.int32)
    nothing = jnp.full((rows, width), -jnp.inf)
    zeros = jnp.zeros((rows, width), jnp.int32)
    pool = Hypotheses(tokens, zeros, nothing)
    live = nothing.at[:, 0].set(0.0)
    return Beams(jnp.zeros(rows, jnp.int32), tokens, live, zeros, pool, limit <= 0, limit, prompt)


def extend(beams: Beams, logits: Float32[Array, "BN V"], config: DecodeConfig, eos: tuple[int, ...]) -> Beams:
    """The beams one token longer, from the logits of that token; the pools of prompts that are done stay."""
    rows, width, length = beams.tokens.shape
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    if warp.processes(config):
        output = beams.tokens.reshape(rows * width, length)
        past = bans.context(beams.prompt, output, jnp.repeat(beams.step, width), jnp.repeat(beams.limit, width))
        logits, total = warp.process(config, logits - total, past, eos), jnp.zeros_like(total)
    # Each live hypothesis can end in as many ways as there are end tokens; so many more candidates leave N to live on.
    wanted = width * (1 + len(eos))
    scores, parent, token = candidates(beams.scores, logits, total, wanted)
    after = (beams.step + 1)[:, None]
    ended, cut = is_any(token, eos), after >= beams.limit[:, None]
    tokens = jnp.take_along_axis(beams.tokens, parent[:, :, None], axis=1)
    tokens = jnp.where(jnp.arange(length) == beams.step[:, None, None], token[:, :, None], tokens)

    leading = jnp.arange(scores.shape[1]) < width
    enters = (ended | cut) & leading & ~beams.done[:, None]
    final = jnp.where(enters, scores / divisor(config, after), -jnp.inf)
    new = Hypotheses(tokens, jnp.broadcast_to(after, token.shape), final)
    joined = jax.tree.map(lambda old, new: jnp.concatenate([old, new], 1), beams.pool, new)
    pool = pick(joined, jax.lax.top_k(joined.scores, width)[1])
    pool = pool._replace(lengths=jnp.where(jnp.isneginf(pool.scores), 0, pool.lengths))

    alive, index = jax.lax.top_k(jnp.where(ended, -jnp.inf, scores), width)
    beams = beams.replace(
        step=jnp.where(beams.done, beams.step, beams.step + 1),
        tokens=pick(tokens, index),
        scores=alive,
        parent=pick(parent, index),
        pool=pool,
    )
    return beams.replace(done=beams.done | cut[:, 0] | settled(beams, config))


def candidates(
    scores: Float32[Array, "B N"], logits: Float32[Array, "BN V"], total: Float32[Array, "BN 1"], count: int
) -> tuple[Float32[Array, "B n"], Int[Array, "B n"], Int[Array, "B n"]]:
    """The `count` most probable extensions of hypotheses with log-probabilities `scores`.

    Args:
      total: what to subtract from the logits to make log-probabilities of them.

    Returns:
      Log-probabilities, beams extended and tokens added; n = `count` or fewer, if there are not so many.
    """
    rows, width = scores.shape
    vocab = logits.shape[1]
    x, less = logits.reshape(rows, width, vocab), total.reshape(rows, width)
    sums, index = top.of_sums(scores, x, less, min(count, width * vocab))
    return sums, index // vocab, index % vocab


def settled(beams: Beams, config: DecodeConfig) -> Bool[Array, " B"]:
    """Whether the pool's best can not, or as `config.stopping` judges need not, change any more."""
    best, worst = beams.scores[:, 0], beams.pool.scores[:, -1]
    # Log-probabilities only fall, so the largest divisor that can still apply bounds what a live one may reach.
    largest = jnp.maximum(divisor(config, beams.step + 1), divisor(config, beams.limit))
    done, full = beams.pool.scores[:, config.hypotheses - 1] >= best / largest, ~jnp.isneginf(worst)
    if config.stopping == "first":
        done |= full
    if config.stopping == "estimate":
        done |= full & (worst >= best / divisor(config, beams.step))
    return done


def divisor(config: DecodeConfig, length: Int[Array, "*batch"]) -> Float32[Array, "*batch"]:
    """What the log-probability of a hypothesis of `length` new tokens, the end token among them, is divided by."""
    return NORMS[config.length_norm](length, config.length_penalty)


def length_penalty(length: Int[Array, "*batch"], alpha: float) -> Float32[Array, "*batch"]:
    """`lp(y) = ((5 + |y|) / 6) ** alpha` (Wu et al. 2016, equation 14)."""
    return ((5.0 + length) / 6.0) ** alpha


def power(length: Int[Array, "*batch"], alpha: float) -> Float32[Array, "*batch"]:
    """`lp(y) = |y| ** alpha`: at 1 the score is the mean log-probability of a token."""
    return jnp.asarray(length, jnp.float32) ** alpha


NORMS = {"gnmt": length_penalty, "power": power}


def pick(tree: PyTree, index: Int[Array, "B n"]) -> PyTree:
    """Entries `index` along axis 1 of every array `[B, m, ...]` of a tree."""
    rows = jnp.arange(index.shape[0])[:, None]
    return jax.tree.map(lambda x: x[rows, index], tree)
