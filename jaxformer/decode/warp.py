"""What is done to the scores before a token is chosen. Pure functions of float32 logits `[B, V]`.

A token that is ruled out gets the logit -inf. The order is the field's usual one: what every method does (`process`:
repetition penalty, repeated n-grams, bad words, least length, forced and suppressed tokens), then what only sampling
does (`truncate`: temperature, top-k, top-p, min-p); each truncation sees the distribution that the ones before it left.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Float32

from jaxformer.config import DecodeConfig
from jaxformer.decode import bans, top
from jaxformer.types import Array


def processes(config: DecodeConfig) -> bool:
    """Whether `process` does anything."""
    penalised = config.repetition_penalty != 1.0
    banned = config.no_repeat_ngram > 0 or config.min_length > 0 or bool(config.bad_words or config.suppress)
    return penalised or banned or config.forced_first is not None or bool(config.forced_last)


def process(
    config: DecodeConfig, scores: Float32[Array, "B V"], past: bans.Context, eos: tuple[int, ...]
) -> Float32[Array, "B V"]:
    """The part that every method uses. Greedy search and sampling give it logits, beam search log-probabilities."""
    if config.repetition_penalty != 1.0:
        scores = bans.repetition_penalty(scores, past, config.repetition_penalty)
    if config.no_repeat_ngram > 0:
        scores = bans.no_repeat_ngram(scores, past, config.no_repeat_ngram)
    scores = bans.bad_words(scores, past, config.bad_words)
    if config.min_length > 0:
        scores = jnp.where((past.step < config.min_length)[:, None], bans.suppress(scores, eos), scores)
    if config.forced_first is not None:
        scores = bans.force(scores, (config.forced_first,), past.step == 0)
    if config.forced_last:
        scores = bans.force(scores, config.forced_last, past.last)
    return bans.suppress(scores, config.suppress)


def truncate(config: DecodeConfig, logits: Float32[Array, "B V"]) -> Float32[Array, "B V"]:
    """The part that only sampling uses: temperature, then the truncations."""
    if config.temperature != 1.0:
        logits = temperature(logits, config.temperature)
    if config.top_k > 0:
        logits = top_k(logits, config.top_k)
    if config.top_p < 1.0:
        logits = top_p(logits, config.top_p)
    if config.min_p > 0.0:
        logits = min_p(logits, config.min_p)
    return logits


def temperature(logits: Float32[Array, "B V"], value: float) -> Float32[Array, "B V"]:
    """`logits / value`: below 1 sharper, above 1 flatter."""
    return logits / value


def top_k(logits: Float32[Array, "B V"], k: int) -> Float32[Array, "B V"]:
    """Keeps the `k` most probable tokens (Fan et al. 2018); of equals, those with the lowest ids."""
    if k >= logits.shape[1]:
        return logits
    values, index = top.top_k(logits, k)
    return jnp.full_like(logits, -jnp.inf).at[jnp.arange(logits.shape[0])[:, None], index].set(values)


def top_p(logits: Float32[Array, "B V"], p: float) -> Float32[Array, "B V"]:
    """Nucleus sampling (Holtzman et al. 2020): keeps the smallest set of most probable tokens whose mass is >= `p`."""
    order = jnp.argsort(logits, axis=1, descending=True, stable=True)
    probs = jnp.take_along_axis(jax.nn.softmax(logits, axis=1), order, axis=1)
    before = jnp.cumsum(probs, axis=1) - probs
    keep = jnp.take_along_axis(before < p, jnp.argsort(order, axis=1), axis=1)
    return jnp.where(keep, logits, -jnp.inf)


def min_p(logits: Float32[Array, "B V"], p: float) -> Float32[Array, "B V"]:
    """Keeps tokens at least `p` times as probable as the most probable one (Nguyen et al. 2024)."""
    return jnp.where(logits >= logits.max(axis=1, keepdims=True) + math.log(p), logits, -jnp.inf)
