"""Logits processors: rules that change the scores of tokens before one is chosen.

All are pure functions of scores `[B, V]`. A token that a rule excludes gets the score -inf. The rules run in the
field's usual order. `process` has those of every search strategy: repetition penalty, repeated n-grams, bad words,
minimum length, forced and suppressed tokens. `process_for_sampling` has those of sampling alone: temperature, top-k,
top-p and min-p, each over the distribution that the rules before it leave.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32, Int

from jaxformer.config import DecodeConfig
from jaxformer.decode.top_k import top_k
from jaxformer.types import Array, Stream


def has_processors(config: DecodeConfig) -> bool:
    """True if `process` changes any score under these options."""
    penalised = config.repetition_penalty != 1.0
    banned = config.no_repeat_ngram > 0 or config.min_length > 0 or bool(config.bad_words or config.suppress)
    return penalised or banned or config.forced_first is not None or bool(config.forced_last)


def process(
    config: DecodeConfig, scores: Float32[Array, "B V"], history: TokenHistory, eos: tuple[int, ...]
) -> Float32[Array, "B V"]:
    """Scores after the rules of every search strategy.

    Greedy search and sampling pass logits; beam search passes log-probabilities.
    """
    if config.repetition_penalty != 1.0:
        scores = repetition_penalty(scores, history, config.repetition_penalty)
    if config.no_repeat_ngram > 0:
        scores = no_repeat_ngram(scores, history, config.no_repeat_ngram)
    scores = bad_words(scores, history, config.bad_words)
    if config.min_length > 0:
        scores = jnp.where((history.step < config.min_length)[:, None], suppress(scores, eos), scores)
    if config.forced_first is not None:
        scores = force(scores, (config.forced_first,), history.step == 0)
    if config.forced_last:
        scores = force(scores, config.forced_last, history.is_last)
    return suppress(scores, config.suppress)


def process_for_sampling(config: DecodeConfig, logits: Float32[Array, "B V"]) -> Float32[Array, "B V"]:
    """Logits after temperature and truncation, the rules of sampling alone."""
    if config.temperature != 1.0:
        logits = scale_by_temperature(logits, config.temperature)
    if config.top_k > 0:
        logits = keep_top_k(logits, config.top_k)
    if config.top_p < 1.0:
        logits = keep_top_p(logits, config.top_p)
    if config.min_p > 0.0:
        logits = keep_min_p(logits, config.min_p)
    return logits


class PromptTokens(NamedTuple):
    """Prompts aligned to the right: `tokens` int32 `[B, S]`; `valid` bool `[B, S]` is False in the padding."""

    tokens: Array
    valid: Array


class TokenHistory(NamedTuple):
    """The tokens of B rows before the one to choose.

    Attributes:
      tokens: int32 `[B, S]`, prompt and output. A row's valid tokens are contiguous and end before column `end`.
      valid: bool `[B, S]`.
      end: int32 `[B]`.
      step: int32 `[B]`, number of output tokens among them.
      is_last: bool `[B]`, True if the next token is the last one that the row may have.
    """

    tokens: Array
    valid: Array
    end: Array
    step: Array
    is_last: Array


def right_align(prompt: Stream, width: int | None = None) -> PromptTokens:
    """Prompts with their valid tokens at the right end of `width` columns, so that outputs follow without a gap.

    Args:
      width: number of columns, at least the prompt's; None: the prompt's.
    """
    valid = prompt.slots.segment != 0
    order = jnp.argsort(valid, axis=1, stable=True)
    left = ((0, 0), (0 if width is None else width - valid.shape[1], 0))
    tokens, valid = (jnp.pad(jnp.take_along_axis(x, order, axis=1), left) for x in (prompt.tokens, valid))
    return PromptTokens(tokens, valid)


def token_history(
    prompt: PromptTokens, output: Int[Array, "B T"], step: Int[Array, " B"], max_length: Int[Array, " B"]
) -> TokenHistory:
    """History after the first `step[b]` tokens of output b, which may have `max_length[b]` tokens."""
    written = jnp.arange(output.shape[1]) < step[:, None]
    return TokenHistory(
        tokens=jnp.concatenate([prompt.tokens, output], axis=1),
        valid=jnp.concatenate([prompt.valid, written], axis=1),
        end=prompt.tokens.shape[1] + step,
        step=step,
        is_last=step + 1 >= max_length,
    )


def repetition_penalty(scores: Float32[Array, "B V"], history: TokenHistory, penalty: float) -> Float32[Array, "B V"]:
    """Penalises tokens that occur in the prompt or the output (Keskar et al. 2019, CTRL, section 4.1).

    A positive score of such a token is divided by `penalty`, a negative one multiplied by it. The number of
    occurrences does not matter.
    """
    vocab = scores.shape[1]
    old = jnp.take_along_axis(scores, jnp.clip(history.tokens, 0, vocab - 1), axis=1)
    new = jnp.where(old > 0, old / penalty, old * penalty)
    rows = jnp.arange(scores.shape[0])[:, None]
    return scores.at[rows, jnp.where(history.valid, history.tokens, vocab)].set(new, mode="drop")


def no_repeat_ngram(scores: Float32[Array, "B V"], history: TokenHistory, size: int) -> Float32[Array, "B V"]:
    """Bans tokens that would complete an n-gram, n = `size`, which the prompt or the output already contains.

    Paulus et al. 2018, section 2.5, have the rule for n = 3 and the output alone.
    """
    windows = history.tokens.shape[1] - size + 1
    if windows < 1:
        return scores
    suffix, exists = _suffix(history, size - 1)
    # A row's valid tokens are contiguous: a window whose first and last token are valid has no gap.
    match = exists[:, None] & history.valid[:, :windows] & history.valid[:, size - 1 :]
    for i in range(size - 1):
        match &= history.tokens[:, i : i + windows] == suffix[:, i : i + 1]
    return _ban(scores, match, history.tokens[:, size - 1 :])


def bad_words(
    scores: Float32[Array, "B V"], history: TokenHistory, words: tuple[tuple[int, ...], ...]
) -> Float32[Array, "B V"]:
    """Bans the last token of each of `words` (token sequences) whose other tokens end the history."""
    for size in sorted({len(word) for word in words}):
        group = jnp.asarray([word for word in words if len(word) == size], jnp.int32)
        suffix, exists = _suffix(history, size - 1)
        match = exists[:, None] & (suffix[:, None, :] == group[None, :, :-1]).all(axis=2)
        scores = _ban(scores, match, jnp.broadcast_to(group[:, -1], match.shape))
    return scores


def suppress(scores: Float32[Array, "B V"], tokens: tuple[int, ...]) -> Float32[Array, "B V"]:
    """Bans `tokens` in all rows."""
    return scores.at[:, jnp.asarray(tokens, jnp.int32)].set(-jnp.inf, mode="drop") if tokens else scores


def force(scores: Float32[Array, "B V"], tokens: tuple[int, ...], forced: Bool[Array, " B"]) -> Float32[Array, "B V"]:
    """Bans all but `tokens`, which get score 0, in the rows where `forced` is True."""
    only = jnp.where(jnp.isin(jnp.arange(scores.shape[1]), jnp.asarray(tokens, jnp.int32)), 0.0, -jnp.inf)
    return jnp.where(forced[..., None], only, scores)


def scale_by_temperature(logits: Float32[Array, "B V"], temperature: float) -> Float32[Array, "B V"]:
    """`logits / temperature`: the distribution is sharper below 1 and flatter above 1."""
    return logits / temperature


def keep_top_k(logits: Float32[Array, "B V"], k: int) -> Float32[Array, "B V"]:
    """Keeps the `k` most probable tokens (Fan et al. 2018). Ties keep the lowest ids."""
    if k >= logits.shape[1]:
        return logits
    values, index = top_k(logits, k)
    return jnp.full_like(logits, -jnp.inf).at[jnp.arange(logits.shape[0])[:, None], index].set(values)


def keep_top_p(logits: Float32[Array, "B V"], p: float) -> Float32[Array, "B V"]:
    """Nucleus sampling (Holtzman et al. 2020): keeps the smallest set of most probable tokens whose mass is >= `p`."""
    order = jnp.argsort(logits, axis=1, descending=True, stable=True)
    probs = jnp.take_along_axis(jax.nn.softmax(logits, axis=1), order, axis=1)
    before = jnp.cumsum(probs, axis=1) - probs
    keep = jnp.take_along_axis(before < p, jnp.argsort(order, axis=1), axis=1)
    return jnp.where(keep, logits, -jnp.inf)


def keep_min_p(logits: Float32[Array, "B V"], p: float) -> Float32[Array, "B V"]:
    """Keeps tokens at least `p` times as probable as the most probable one (Nguyen et al. 2024)."""
    return jnp.where(logits >= logits.max(axis=1, keepdims=True) + math.log(p), logits, -jnp.inf)


def _suffix(history: TokenHistory, size: int) -> tuple[Int[Array, "B n"], Bool[Array, " B"]]:
    """Every row's last n = `size` tokens, and True for the rows that have so many."""
    rows, width = history.tokens.shape
    if size > width:
        return jnp.zeros((rows, size), jnp.int32), jnp.zeros(rows, bool)
    index = jnp.maximum(history.end[:, None] - size, 0) + jnp.arange(size)
    tokens, valid = (jnp.take_along_axis(x, index, axis=1) for x in (history.tokens, history.valid))
    return tokens, valid.all(axis=1) & (history.end >= size)


def _ban(scores: Float32[Array, "B V"], match: Bool[Array, "B n"], tokens: Int[Array, "B n"]) -> Float32[Array, "B V"]:
    """Bans in each row those of its `tokens` where `match` is True."""
    rows = jnp.arange(scores.shape[0])[:, None]
    return scores.at[rows, jnp.where(match, tokens, scores.shape[1])].set(-jnp.inf, mode="drop")
