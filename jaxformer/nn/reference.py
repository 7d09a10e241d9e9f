"""Attention as plain functions of arrays, from the softmax to multi-head attention: no modules, no cache.

The functions are short rather than fast. Tests compare the kernels with them; experiments and notebooks explain with
them. In all of them `mask` is True where the query (row) sees the key (column), and None means that all is visible. A
row that sees nothing returns 0. The softmax is over keys.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Bool, Float

from jaxformer.types import Array


def softmax(
    scores: Float[Array, "*batch T S"], mask: Bool[Array, "*#batch T S"] | None = None
) -> Float[Array, "*batch T S"]:
    """Probabilities p_ts = exp(scores_ts) / sum_s' exp(scores_ts'), the sum over visible s'.

    The maximum of a row is subtracted first, which changes nothing but avoids overflow. Hidden entries are 0, as are
    all entries of a row without a visible one.
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
    """Attention softmax(q k^T / sqrt(K)) v: `[B, T, K]` (Vaswani et al. 2017, equation 1).

    A dot product of K independent entries of unit variance has variance K. Dividing by sqrt(K), the root of the head
    width (not of the model width or the length), keeps the softmax from saturating. `scale=False` omits the division.
    """
    scores = q @ k.swapaxes(-1, -2)
    if scale:
        scores = scores / jnp.sqrt(q.shape[-1])
    return softmax(scores, mask) @ v


def self_attention(
    x: Float[Array, "B T D"], mask: Bool[Array, "B T T"] | None = None, scale: bool = False
) -> Float[Array, "B T D"]:
    """Self-attention without parameters: y = softmax(x x^T) x, each output a weighted mean of the inputs.

    Queries, keys and values are all x, so the scores are symmetric. Without a mask, permuting the inputs permutes the
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
    """One attention head with projections: q = x W_q, k = x W_k, v = x W_v, y = softmax(q k^T / sqrt(K)) v.

    With identity matrices and `scale=False` this is `self_attention`.
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
    """Multi-head attention, one head at a time: y = concat(head_1, ..., head_H) W_o.

    head_h = attend(x W_q^h, x W_k^h, x W_v^h). One projection computes the channels of all heads; head h has channels
    h K to (h + 1) K at every time step. (A common mistake is to slice time instead of channels.)
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
    """Multi-head attention, all heads at once: the head is a batch axis of every product. Equals `multi_head_loop`.

    scores_bhts = sum_k q_bthk k_bshk / sqrt(K),   y_btd = sum_hk (sum_s softmax(scores)_bhts v_bshk) W_o_hkd
    """
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, w) for w in (wq, wk, wv))
    scores = jnp.einsum("bthk,bshk->bhts", q, k)
    if scale:
        scores = scores / jnp.sqrt(wq.shape[-1])
    probs = softmax(scores, None if mask is None else mask[:, None])
    return jnp.einsum("bthk,hkd->btd", jnp.einsum("bhts,bshk->bthk", probs, v), wo)
