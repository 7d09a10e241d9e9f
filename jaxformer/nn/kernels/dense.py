"""The sum written out: all scores at once, memory quadratic in length. Every other kernel must equal this one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32

from jaxformer.config import AttentionConfig
from jaxformer.nn.kernels import Kernel, Keys, Noise, Queries, Score
from jaxformer.nn.masks import Mask
from jaxformer.types import Array

HIDDEN = -1e30  # finite, so that a row of nothing but hidden scores gives numbers and no NaN, in the gradient too


def probabilities(
    q: Queries, k: Keys, mask: Mask, score: Score | None, noise: Noise | None, config: AttentionConfig
) -> Float32[Array, "B H T S"]:
    """Softmax over visible keys of q k^T + score, after dropout; 0 where nothing is visible."""
    see = mask.dense()
    return jnp.where(jnp.any(see, axis=-1)[:, None, :, None], _probabilities(q, k, see, mask, score, noise), 0.0)


def _probabilities(
    q: Queries, k: Keys, see: Bool[Array, "B T S"], mask: Mask, score: Score | None, noise: Noise | None
) -> Float32[Array, "B H T S"]:
    """`probabilities`, but uniform in rows that see nothing.

    The queries of all heads that read one key head are folded into the rows of one product, so key heads are never
    repeated in memory. (Keeping group and head as two axes costs a third more time in the backward on a CPU.)
    """
    batch, length, heads, width = q.shape
    groups = k.shape[2]
    folded = jnp.moveaxis(q, 1, 2).reshape(batch, groups, heads // groups * length, width)
    scores = jnp.einsum("bgrk,bsgk->bgrs", folded, k, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, heads, length, -1)
    if score is not None:
        scores = scores + score.function(score.args, q, k, mask.query.position, mask.key.position)
    probs = jax.nn.softmax(jnp.where(see[:, None], scores, HIDDEN), axis=-1)
    return probs if noise is None else noise.drop(probs)


def attend(
    q: Queries,
    k: Keys,
    v: Keys,
    mask: Mask,
    score: Score | None,
    noise: Noise | None,
    config: AttentionConfig,
) -> Queries:
    """o_t = sum_s softmax_s(q_t . k_s + score_ts) v_s over visible s (Vaswani et al. 2017, equation 1)."""
    see = mask.dense()
    probs = _probabilities(q, k, see, mask, score, noise).astype(v.dtype)
    batch, heads, length, slots = probs.shape
    folded = probs.reshape(batch, v.shape[2], -1, slots)
    o = jnp.einsum("bgrs,bsgk->bgrk", folded, v, preferred_element_type=jnp.float32)
    o = jnp.moveaxis(o.reshape(batch, heads, length, -1), 2, 1)
    return jnp.where(jnp.any(see, axis=-1)[:, :, None, None], o, 0.0).astype(q.dtype)


KERNEL = Kernel(attend)
