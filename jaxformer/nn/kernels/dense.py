"""Dense attention: all scores at once, memory quadratic in length. The tests compare the other kernels with it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Float32

from jaxformer.config import AttentionConfig
from jaxformer.nn import kernels
from jaxformer.nn.kernels import AttentionBias, AttentionDropout, Kernel, Keys, Queries
from jaxformer.nn.layers import soft_cap
from jaxformer.nn.masks import Mask
from jaxformer.types import Array

MASKED_SCORE = -1e30  # finite: a row of masked scores only gives no NaN, also in the gradient


def probabilities(
    q: Queries,
    k: Keys,
    mask: Mask,
    bias: AttentionBias | None,
    dropout: AttentionDropout | None,
    config: AttentionConfig,
    sink: Float[Array, " H"] | None = None,
) -> Float32[Array, "B H T S"]:
    """Probabilities `[B, H, T, S]`: softmax over visible keys of q k^T + bias, after dropout; 0 if none is visible."""
    see = mask.dense()
    return jnp.where(
        jnp.any(see, axis=-1)[:, None, :, None], _probabilities(q, k, see, mask, bias, dropout, config, sink), 0.0
    )


def kernel_weights(
    q: Queries,
    k: Keys,
    mask: Mask,
    bias: AttentionBias | None,
    config: AttentionConfig,
    sink: Float[Array, " H"] | None = None,
) -> Float32[Array, "B H T S"]:
    """The weights `[B, H, T, S]` of the config's kernel without dropout: `probabilities`, or those it defines."""
    own = kernels.own_weights(config)
    return probabilities(q, k, mask, bias, None, config, sink) if own is None else own(q, k, mask, bias, config)


def _probabilities(
    q: Queries,
    k: Keys,
    see: Bool[Array, "B T S"],
    mask: Mask,
    bias: AttentionBias | None,
    dropout: AttentionDropout | None,
    config: AttentionConfig,
    sink: Float[Array, " H"] | None,
) -> Float32[Array, "B H T S"]:
    """`probabilities`, but uniform in rows that see nothing.

    The query heads of one key head are folded into the rows of one product, so key heads are not repeated in memory.
    (With group and head as separate axes the backward pass takes a third more time on a CPU.)
    """
    batch, length, heads, width = q.shape
    groups = k.shape[2]
    folded = jnp.moveaxis(q, 1, 2).reshape(batch, groups, heads // groups * length, width)
    scores = jnp.einsum("bgrk,bsgk->bgrs", folded, k, preferred_element_type=jnp.float32)
    scores = soft_cap(scores.reshape(batch, heads, length, -1), config.soft_cap)
    if bias is not None:
        scores = scores + bias.function(bias.args, q, k, mask.query.position, mask.key.position)
    scores = jnp.where(see[:, None], scores, MASKED_SCORE)
    if sink is None:
        probs = jax.nn.softmax(scores, axis=-1)
    else:  # the sink is one more column, whose probability is dropped
        column = jnp.broadcast_to(sink.astype(jnp.float32)[:, None, None], (*scores.shape[:-1], 1))
        probs = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]
    return probs if dropout is None else dropout.drop(probs)


def attend(
    q: Queries,
    k: Keys,
    v: Keys,
    mask: Mask,
    bias: AttentionBias | None,
    dropout: AttentionDropout | None,
    config: AttentionConfig,
    sink: Float[Array, " H"] | None = None,
) -> Queries:
    """Output o_t = sum_s softmax_s(q_t . k_s + bias_ts) v_s over visible s (Vaswani et al. 2017, equation 1)."""
    see = mask.dense()
    probs = _probabilities(q, k, see, mask, bias, dropout, config, sink).astype(v.dtype)
    batch, heads, length, slots = probs.shape
    folded = probs.reshape(batch, v.shape[2], -1, slots)
    o = jnp.einsum("bgrs,bsgk->bgrk", folded, v, preferred_element_type=jnp.float32)
    o = jnp.moveaxis(o.reshape(batch, heads, length, -1), 2, 1)
    return jnp.where(jnp.any(see, axis=-1)[:, :, None, None], o, 0.0).astype(q.dtype)


KERNEL = Kernel(attend, has_sinks=True)
