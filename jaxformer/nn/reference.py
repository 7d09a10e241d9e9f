"""Attention as plain functions of arrays, the way one derives it: no modules, no parameters of their own, no cache.

They are slow and short on purpose: tests hold the real kernels against them, experiments use them to make a point.
In all of them `mask` is True where the query row may see the key column, or None (all visible); a row that sees nothing
returns 0. The softmax is taken over keys.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Bool, Float

from jaxformer.types import Array


def softmax(
    scores: Float[Array, "*batch T S"], mask: Bool[Array, "*#batch T S"] | None = None
) -> Float[Array, "*batch T S"]:
    """p_ts = e^(scores_ts) / sum_s' e^(scores_ts') over the visible s; the row maximum goes first.

    Hidden entries are 0, and so is a whole row without any visible entry.
    """
    if mask is None:
        mask = jnp.ones(scores.shape, bool)
    top = jnp.max(jnp.where(mask, scores, -jnp.inf), axis=-1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weight = jnp.exp(jnp.where(mask, scores - top, -jnp.inf))
    total = jnp.sum(weight, axis=-1, keepdims=True)
    return weight / jnp.where(total == 0.0, 1.0, total)


def attend(
    q: Float[Array, "B T K"],
    k: Float[Array, "B S K"],
    v: Float[Array, "B S K"],
    mask: Bool[Array, "B T S"] | None = None,
    scale: bool = True,
) -> Float[Array, "B T K"]:
    """softmax(q k^T / sqrt(K)) v (Vaswani et al. 2017, equation 1).

    With unit-variance, independent entries a dot product over K channels has variance K; dividing by sqrt(K), the head
    width (not the model width, not the length), keeps the softmax away from saturation. `scale=False` leaves it out.
    """
    scores = q @ k.swapaxes(-1, -2)
    if scale:
        scores = scores / jnp.sqrt(q.shape[-1])
    return softmax(scores, mask) @ v


def self_attention(
    x: Float[Array, "B T D"], mask: Bool[Array, "B T T"] | None = None, scale: bool = False
) -> Float[Array, "B T D"]:
    """Self-attention without parameters: y = softmax(x x^T) x, each output a weighted mean of the inputs.

    x is its own query, key and value, so the scores are symmetric and, with no mask, permuting the inputs permutes the
    outputs. With `scale` the scores are divided by sqrt(D).
    """
    return attend(x, x, x, mask, scale)


def single_head(
    x: Float[Array, "B T D"],
    wq: Float[Array, "D K"],
    wk: Float[Array, "D K"],
    wv: Float[Array, "D K"],
    mask: Bool[Array, "B T T"] | None = None,
    scale: bool = True,
) -> Float[Array, "B T K"]:
    """One head with learned roles: q = x W_q, k = x W_k, v = x W_v, y = softmax(q k^T / sqrt(K)) v.

    With identity weights and no scale it is `self_attention`.
    """
    return attend(x @ wq, x @ wk, x @ wv, mask, scale)


def multi_head_loop(
    x: Float[Array, "B T D"],
    wq: Float[Array, "D H K"],
    wk: Float[Array, "D H K"],
    wv: Float[Array, "D H K"],
    wo: Float[Array, "H K D"],
    mask: Bool[Array, "B T T"] | None = None,
    scale: bool = True,
) -> Float[Array, "B T D"]:
    """H heads one after the other: y = concat(head_1, ..., head_H) W_o, head_h = attend(x W_q^h, x W_k^h, x W_v^h).

    One projection makes all heads' channels; head h is its *channels* h K to (h + 1) K at every time step. (Slicing
    time instead gives each head a part of the sentence, a common slip.)
    """
    width, heads, head_width = wq.shape
    q, k, v = (x @ w.reshape(width, heads * head_width) for w in (wq, wk, wv))
    outputs = []
    for head in range(heads):
        channels = slice(head * head_width, (head + 1) * head_width)
        outputs.append(attend(q[:, :, channels], k[:, :, channels], v[:, :, channels], mask, scale))
    return jnp.concatenate(outputs, axis=-1) @ wo.reshape(heads * head_width, -1)


def multi_head(
    x: Float[Array, "B T D"],
    wq: Float[Array, "D H K"],
    wk: Float[Array, "D H K"],
    wv: Float[Array, "D H K"],
    wo: Float[Array, "H K D"],
    mask: Bool[Array, "B T T"] | None = None,
    scale: bool = True,
) -> Float[Array, "B T D"]:
    """`multi_head_loop` with all heads at once: the head is one more batch axis of every product.

    scores_bhts = sum_k q_bthk k_bshk / sqrt(K),   y_btd = sum_hk (sum_s softmax(scores)_bhts v_bshk) W_o_hkd
    """
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, w) for w in (wq, wk, wv))
    scores = jnp.einsum("bthk,bshk->bhts", q, k)
    if scale:
        scores = scores / jnp.sqrt(wq.shape[-1])
    probs = softmax(scores, None if mask is None else mask[:, None])
    return jnp.einsum("bthk,hkd->btd", jnp.einsum("bhts,bshk->bthk", probs, v), wo)
