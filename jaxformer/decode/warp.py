"""What is done to the logits before a token is chosen. Pure functions of float32 logits `[B, V]`.

A token that is ruled out gets the logit -inf. The order is the field's usual one: repetition penalty, temperature,
top-k, top-p, min-p; each truncation sees the distribution that the ones before it left.
"""

from __future__ import annotations

import math
from typing import Callable

import jax
import jax.numpy as jnp

from jaxformer.config import DecodeConfig
from jaxformer.decode import top
from jaxformer.types import Array

Warp = Callable[[Array, Array, Array], Array]
"""`(logits [B, V], tokens so far [B, T], which of them are real: bool [B, T]) -> logits [B, V]`."""


def warp(config: DecodeConfig) -> Warp:
    """All that `config` asks for, in order: `truncate` after `penalise`."""

    def apply(logits: Array, tokens: Array, real: Array) -> Array:
        return truncate(config, penalise(config, logits, tokens, real))

    return apply


def penalise(config: DecodeConfig, logits: Array, tokens: Array, real: Array) -> Array:
    """The part that every method uses: the repetition penalty. Scores are log-probabilities after it."""
    if config.repetition_penalty == 1.0:
        return logits
    return repetition_penalty(logits, tokens, real, config.repetition_penalty)


def truncate(config: DecodeConfig, logits: Array) -> Array:
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


def repetition_penalty(logits: Array, tokens: Array, real: Array, penalty: float) -> Array:
    """Discourages tokens that already stand in the prompt or the output (Keskar et al. 2019, CTRL, section 4.1).

    A positive logit of such a token is divided by `penalty`, a negative one multiplied by it, once however often the
    token occurred. `tokens` is `[B, T]`; entries where `real` is False do not count.
    """
    vocab = logits.shape[1]
    old = jnp.take_along_axis(logits, jnp.clip(tokens, 0, vocab - 1), axis=1)
    new = jnp.where(old > 0, old / penalty, old * penalty)
    rows = jnp.arange(logits.shape[0])[:, None]
    return logits.at[rows, jnp.where(real, tokens, vocab)].set(new, mode="drop")


def temperature(logits: Array, value: float) -> Array:
    """`logits / value`: below 1 sharper, above 1 flatter."""
    return logits / value


def top_k(logits: Array, k: int) -> Array:
    """Keeps the `k` most probable tokens (Fan et al. 2018); of equals, those with the lowest ids."""
    if k >= logits.shape[1]:
        return logits
    values, index = top.top_k(logits, k)
    return jnp.full_like(logits, -jnp.inf).at[jnp.arange(logits.shape[0])[:, None], index].set(values)


def top_p(logits: Array, p: float) -> Array:
    """Nucleus sampling (Holtzman et al. 2020): keeps the smallest set of most probable tokens whose mass is >= `p`."""
    order = jnp.argsort(logits, axis=1, descending=True, stable=True)
    probs = jnp.take_along_axis(jax.nn.softmax(logits, axis=1), order, axis=1)
    before = jnp.cumsum(probs, axis=1) - probs
    keep = jnp.take_along_axis(before < p, jnp.argsort(order, axis=1), axis=1)
    return jnp.where(keep, logits, -jnp.inf)


def min_p(logits: Array, p: float) -> Array:
    """Keeps tokens at least `p` times as probable as the most probable one (Nguyen et al. 2024)."""
    return jnp.where(logits >= logits.max(axis=1, keepdims=True) + math.log(p), logits, -jnp.inf)
