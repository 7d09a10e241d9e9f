"""The k largest of many, quickly: blocks that cannot hold one are dropped before anything is sorted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jaxformer.types import Array

BLOCK, LEAST, MOST = 64, 16, 256


def top_k(x: Float[Array, "B V"], k: int) -> tuple[Float[Array, "B k"], Int[Array, "B k"]]:
    """Values and indices of the `k` largest entries of each row of `x`, largest first.

    Equal values come in order of index, exactly as from `jax.lax.top_k`.
    """
    zero = jnp.zeros((x.shape[0], 1), x.dtype)
    return of_sums(zero, x[:, None], zero, k)


def of_sums(
    add: Float[Array, "B N"], x: Float[Array, "B N V"], less: Float[Array, "B N"], k: int
) -> tuple[Float[Array, "B k"], Int[Array, "B k"]]:
    """The same of `add + (x - less)`, as one row of N V for each b; the sums themselves are never written.

    Each of the k largest lies in one of the k blocks with the largest maxima. Those cost one vectorised pass over `x`,
    and only k blocks are sorted.
    """
    rows, parts, width = x.shape
    size = block(width)
    if width % size:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, -width % size)), constant_values=-jnp.inf)
    blocks = x.shape[2] // size
    if parts * blocks <= 2 * k:
        values, index = jax.lax.top_k((add[:, :, None] + (x - less[:, :, None])).reshape(rows, -1), k)
        return values, _index(index // size, index % size, blocks, size, width)
    maxima = add[:, :, None] + (x.reshape(rows, parts, blocks, size).max(axis=-1) - less[:, :, None])
    # Ascending block order keeps the candidates in order of index, so that ties break the same way.
    chosen = jnp.sort(jax.lax.top_k(maxima.reshape(rows, -1), k)[1], axis=-1)
    held = jnp.take_along_axis(x.reshape(rows, parts * blocks, size), chosen[:, :, None], axis=1)
    of = lambda part: jnp.take_along_axis(part, chosen // blocks, axis=1)[:, :, None]  # noqa: E731
    values, where = jax.lax.top_k((of(add) + (held - of(less))).reshape(rows, k * size), k)
    return values, _index(jnp.take_along_axis(chosen, where // size, axis=1), where % size, blocks, size, width)


def block(width: int) -> int:
    """How many entries make a block: so many that all are full, if any number not far from `BLOCK` does that.

    Where the last block would have to be filled up, the compiler copies the whole array first.
    """
    sizes = [size for size in range(LEAST, MOST + 1) if width % size == 0]
    return min(sizes, key=lambda size: abs(size - BLOCK), default=BLOCK)


def _index(
    chosen: Int[Array, "B k"], inside: Int[Array, "B k"], blocks: int, size: int, width: int
) -> Int[Array, "B k"]:
    """Places among N V entries from numbers of blocks and places in them."""
    return chosen // blocks * width + chosen % blocks * size + inside
