"""The k largest of many, quickly: blocks that cannot hold one are dropped before anything is sorted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jaxformer.types import Array

BLOCK = 64


def top_k(x: Float[Array, "B V"], k: int) -> tuple[Float[Array, "B k"], Int[Array, "B k"]]:
    """Values and indices of the `k` largest entries of each row of `x`, largest first.

    Equal values come in order of index, exactly as from `jax.lax.top_k`. Each of the k largest lies in one of the k
    blocks with the largest maxima, or in what is left beside whole blocks. Block maxima cost one vectorised pass, so
    only k blocks and the rest are sorted.
    """
    rows, width = x.shape
    blocks = width // BLOCK
    if blocks <= 2 * k:
        return tuple(jax.lax.top_k(x, k))
    # A slice and a tail rather than padding, which the CPU compiler turns into a slow element-wise gather.
    whole, tail = x[:, : blocks * BLOCK].reshape(rows, blocks, BLOCK), x[:, blocks * BLOCK :]
    # Ascending block order keeps the candidates in order of index, so that ties break the same way.
    chosen = jnp.sort(jax.lax.top_k(whole.max(axis=-1), k)[1], axis=-1)
    held = jnp.take_along_axis(whole, chosen[:, :, None], axis=1).reshape(rows, k * BLOCK)
    values, where = jax.lax.top_k(jnp.concatenate([held, tail], axis=1), k)
    block = jnp.take_along_axis(chosen, jnp.minimum(where // BLOCK, k - 1), axis=1)
    inside = block * BLOCK + where % BLOCK
    return values, jnp.where(where < k * BLOCK, inside, blocks * BLOCK + where - k * BLOCK)
