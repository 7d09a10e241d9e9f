"""ALiBi: scores decrease linearly with distance, with a fixed slope for each head (Press et al. 2022)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Float, Float32, Int

from jaxformer.config import AttentionConfig, EncodingConfig
from jaxformer.nn.encodings import Encoding
from jaxformer.types import Array, Slots


def slopes(heads: int) -> Float32[np.ndarray, " H"]:
    """Slope of each head: the decrease of its scores for one position of distance.

    For H a power of two, slope h = 2^(-8 (h + 1) / H). Otherwise the slopes of the next lower power P of two are
    followed by every other slope of 2 P, starting with the first, as in the authors' code.
    """
    power = 2 ** (heads.bit_length() - 1)
    geometric = 2.0 ** (-8.0 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-8.0 * np.arange(1, 2 * power + 1, 2) / (2 * power))
    return np.concatenate([geometric, between[: heads - power]]).astype(np.float32)


class Slopes(nn.Module):
    """Slopes of the heads as constants; no parameters."""

    config: EncodingConfig
    attention: AttentionConfig
    head_width: int

    @nn.compact
    def __call__(self, slots: Slots) -> Float32[Array, " H"]:
        return jnp.asarray(slopes(self.attention.heads))


def bias(
    config: EncodingConfig,
    shared: Float32[Array, " H"],
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    query_position: Int[Array, "B T"],
    key_position: Int[Array, "B S"],
) -> Float32[Array, "#B H T S"]:
    """Bias -slope_h |i - j| for query position i and key position j: `[B, H, T, S]`.

    It is symmetric and so suits encoders too. For keys at or before the query it is the paper's slope_h (j - i).
    """
    distance = jnp.abs(query_position[:, None, :, None] - key_position[:, None, None, :])
    return -shared[:, None, None] * distance.astype(jnp.float32)


ENCODING = Encoding(shared=Slopes, bias=bias, heads=lambda slopes: 0)
