"""Exact top-k over long rows: only blocks that can hold one of the k largest entries are sorted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jaxformer.types import Array

PREFERRED_BLOCK, MIN_BLOCK, MAX_BLOCK = 64, 16, 256
"""Entries of a block: the preferred number, and the bounds between which a divisor of the row length is sought."""


def top_k(x: Float[Array, "B V"], k: int) -> tuple[Float[Array, "B k"], Int[Array, "B k"]]:
    """Values and indices of the `k` largest entries of each row, largest first.

    Ties come in order of index, exactly as from `jax.lax.top_k`.
    """
    zero = jnp.zeros((x.shape[0], 1), x.dtype)
    return top_k_of_sums(zero, x[:, None], zero, k)


def top_k_of_sums(
    add: Float[Array, "B N"], x: Float[Array, "B N V"], subtract: Float[Array, "B N"], k: int
) -> tuple[Float[Array, "B k"], Int[Array, "B k"]]:
    """`top_k` of `add + (x - subtract)`, with N V entries in each row. The sums are never written to memory.

    Each of the k largest lies in one of the k blocks with the largest maxima. The maxima cost one vectorised pass over
    `x`, and only those k blocks are sorted.
    """
    rows, parts, width = x.shape
    size = block_size(width)
    if width % size:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, -width % size)), constant_values=-jnp.inf)
    blocks = x.shape[2] // size
    if parts * blocks <= 2 * k:
        values, index = jax.lax.top_k((add[:, :, None] + (x - subtract[:, :, None])).reshape(rows, -1), k)
        return values, _entry_index(index // size, index % size, (blocks, size, width))
    maxima = add[:, :, None] + (x.reshape(rows, parts, blocks, size).max(axis=-1) - subtract[:, :, None])
    # Ascending block order keeps the candidates in order of index, so that ties break as in `jax.lax.top_k`.
    chosen = jnp.sort(jax.lax.top_k(maxima.reshape(rows, -1), k)[1], axis=-1)
    entries = jnp.take_along_axis(x.reshape(rows, parts * blocks, size), chosen[:, :, None], axis=1)
    of_block = lambda part: jnp.take_along_axis(part, chosen // blocks, axis=1)[:, :, None]  # noqa: E731
    values, index = jax.lax.top_k((of_block(add) + (entries - of_block(subtract))).reshape(rows, k * size), k)
    block = jnp.take_along_axis(chosen, index // size, axis=1)
    return values, _entry_index(block, index % size, (blocks, size, width))


def block_size(width: int) -> int:
    """Entries of a block in a row of `width`: the divisor closest to `PREFERRED_BLOCK`, or that if none is in bounds.

    If the last block needed padding, the compiler would copy the whole array first.
    """
    divisors = [size for size in range(MIN_BLOCK, MAX_BLOCK + 1) if width % size == 0]
    return min(divisors, key=lambda size: abs(size - PREFERRED_BLOCK), default=PREFERRED_BLOCK)


def _entry_index(block: Int[Array, "B k"], offset: Int[Array, "B k"], shape: tuple[int, int, int]) -> Int[Array, "B k"]:
    """Index among N V entries of the entry `offset` of a block; `shape` is (blocks of a part, block size, V)."""
    blocks, size, width = shape
    return block // blocks * width + block % blocks * size + offset
