"""The sum written out: all scores at once, memory quadratic in length. Every other kernel must equal this one."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxformer.config import AttentionConfig
from jaxformer.nn.kernels import Kernel, Noise, Score
from jaxformer.nn.masks import Mask
from jaxformer.types import Array

HIDDEN = -1e30  # finite, so that a row of nothing but hidden scores gives numbers and no NaN, in the gradient too


def probabilities(
    q: Array, k: Array, mask: Mask, score: Score | None, noise: Noise | None, config: AttentionConfig
) -> Array:
    """Float32 `[B, H, T, S]`: softmax over visible keys of q k^T + score, after dropout; 0 where nothing is visible."""
    probs = _grouped(q, k, mask, score, noise)
    return probs.reshape(probs.shape[0], q.shape[2], *probs.shape[3:])


def _grouped(q: Array, k: Array, mask: Mask, score: Score | None, noise: Noise | None) -> Array:
    """Probabilities `[B, G, H/G, T, S]`: a group of query heads reads one key head, never repeated in memory."""
    batch, length, heads, width = q.shape
    groups = k.shape[2]
    grouped = q.reshape(batch, length, groups, heads // groups, width)
    scores = jnp.einsum("btgnk,bsgk->bgnts", grouped, k, preferred_element_type=jnp.float32)
    if score is not None:
        extra = score.function(score.args, q, k, mask.query.position, mask.key.position)
        scores = scores + extra.reshape(extra.shape[0], groups, heads // groups, *extra.shape[2:])
    see = mask.dense()[:, None, None]
    probs = jax.nn.softmax(jnp.where(see, scores, HIDDEN), axis=-1)
    probs = jnp.where(see, probs, 0.0)  # changes only rows that see nothing, where the softmax is uniform
    return probs if noise is None else noise.drop(probs)


def attend(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    score: Score | None,
    noise: Noise | None,
    config: AttentionConfig,
) -> Array:
    """o_t = sum_s softmax_s(q_t . k_s + score_ts) v_s over visible s (Vaswani et al. 2017, equation 1)."""
    probs = _grouped(q, k, mask, score, noise).astype(v.dtype)
    o = jnp.einsum("bgnts,bsgk->btgnk", probs, v, preferred_element_type=jnp.float32)
    return o.reshape(*q.shape[:3], v.shape[-1]).astype(q.dtype)


KERNEL = Kernel(attend)
