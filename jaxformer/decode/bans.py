"""Tokens that may not, or must, come next. Pure functions of scores `[B, V]` (logits or log-probabilities).

A token that is ruled out gets the score -inf. Some rules look at what was said before: `Context` has it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, Float32, Int

from jaxformer.types import Array, Stream


class Said(NamedTuple):
    """Tokens int32 `[B, S]` and which of them are real, bool `[B, S]`."""

    tokens: Array
    real: Array


class Context(NamedTuple):
    """What stands before the tokens to choose, for B rows.

    Attributes:
      tokens: int32 `[B, S]`, prompts and outputs; a row's real ones stand together and end before its column `end`.
      real: bool `[B, S]`.
      end: int32 `[B]`.
      step: int32 `[B]`, how many of them the output has so far.
      last: bool `[B]`, the row's next token is its last.
    """

    tokens: Array
    real: Array
    end: Array
    step: Array
    last: Array


def said(prompt: Stream, width: int | None = None) -> Said:
    """The prompts, every row's real tokens moved to the right end of `width` columns (None: of those there are), so
    that the output follows without a gap."""
    real = prompt.slots.segment != 0
    order = jnp.argsort(real, axis=1, stable=True)
    left = ((0, 0), (0 if width is None else width - real.shape[1], 0))
    return Said(*(jnp.pad(jnp.take_along_axis(x, order, axis=1), left) for x in (prompt.tokens, real)))


def context(prompt: Said, output: Int[Array, "B T"], step: Int[Array, " B"], limit: Int[Array, " B"]) -> Context:
    """The context after the first `step[b]` tokens of output b, which may have `limit[b]`."""
    written = jnp.arange(output.shape[1]) < step[:, None]
    return Context(
        tokens=jnp.concatenate([prompt.tokens, output], axis=1),
        real=jnp.concatenate([prompt.real, written], axis=1),
        end=prompt.tokens.shape[1] + step,
        step=step,
        last=step + 1 >= limit,
    )


def repetition_penalty(scores: Float32[Array, "B V"], past: Context, penalty: float) -> Float32[Array, "B V"]:
    """Discourages tokens that already stand in the prompt or the output (Keskar et al. 2019, CTRL, section 4.1).

    A positive score of such a token is divided by `penalty`, a negative one multiplied by it, once however often the
    token occurred.
    """
    vocab = scores.shape[1]
    old = jnp.take_along_axis(scores, jnp.clip(past.tokens, 0, vocab - 1), axis=1)
    new = jnp.where(old > 0, old / penalty, old * penalty)
    rows = jnp.arange(scores.shape[0])[:, None]
    return scores.at[rows, jnp.where(past.real, past.tokens, vocab)].set(new, mode="drop")


def no_repeat_ngram(scores: Float32[Array, "B V"], past: Context, size: int) -> Float32[Array, "B V"]:
    """Bans what would complete a sequence of `size` tokens that the prompt or the output already has.

    (Paulus et al. 2018, section 2.5, for `size` 3 and the output alone.)
    """
    places = past.tokens.shape[1] - size + 1
    if places < 1:
        return scores
    suffix, there = _suffix(past, size - 1)
    # A row's real tokens stand together: a window with real ends has no gap.
    match = there[:, None] & past.real[:, :places] & past.real[:, size - 1 :]
    for i in range(size - 1):
        match &= past.tokens[:, i : i + places] == suffix[:, i : i + 1]
    return _ban(scores, match, past.tokens[:, size - 1 :])


def bad_words(
    scores: Float32[Array, "B V"], past: Context, words: tuple[tuple[int, ...], ...]
) -> Float32[Array, "B V"]:
    """Bans the last token of each of `words` (token sequences) whose other tokens are what was said last."""
    for size in sorted({len(word) for word in words}):
        group = jnp.asarray([word for word in words if len(word) == size], jnp.int32)
        suffix, there = _suffix(past, size - 1)
        match = there[:, None] & (suffix[:, None, :] == group[None, :, :-1]).all(axis=2)
        scores = _ban(scores, match, jnp.broadcast_to(group[:, -1], match.shape))
    return scores


def suppress(scores: Float32[Array, "B V"], tokens: tuple[int, ...]) -> Float32[Array, "B V"]:
    """Bans `tokens`."""
    return scores.at[:, jnp.asarray(tokens, jnp.int32)].set(-jnp.inf, mode="drop") if tokens else scores


def force(scores: Float32[Array, "B V"], tokens: tuple[int, ...], where: Bool[Array, " B"]) -> Float32[Array, "B V"]:
    """Leaves only `tokens`, each with score 0, in the rows where `where` is True."""
    only = jnp.where(jnp.isin(jnp.arange(scores.shape[1]), jnp.asarray(tokens, jnp.int32)), 0.0, -jnp.inf)
    return jnp.where(where[..., None], only, scores)


def _suffix(past: Context, size: int) -> tuple[Int[Array, "B n"], Bool[Array, " B"]]:
    """Every row's last n = `size` tokens, and whether it has so many."""
    rows, width = past.tokens.shape
    if size > width:
        return jnp.zeros((rows, size), jnp.int32), jnp.zeros(rows, bool)
    place = jnp.maximum(past.end[:, None] - size, 0) + jnp.arange(size)
    tokens, real = (jnp.take_along_axis(x, place, axis=1) for x in (past.tokens, past.real))
    return tokens, real.all(axis=1) & (past.end >= size)


def _ban(scores: Float32[Array, "B V"], match: Bool[Array, "B n"], tokens: Int[Array, "B n"]) -> Float32[Array, "B V"]:
    """Bans in each row those of its `tokens` where `match` is True."""
    rows = jnp.arange(scores.shape[0])[:, None]
    return scores.at[rows, jnp.where(match, tokens, scores.shape[1])].set(-jnp.inf, mode="drop")
