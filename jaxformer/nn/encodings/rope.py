"""Rotary position embedding: queries and keys are turned by an angle proportional to their position (Su et al. 2021).

Channels are taken in pairs; pair i of a head at position p is rotated by p * theta_i, theta_i = base^(-2i / R), with
R rotated channels in all. Since rotations compose, q_m . k_n depends on positions through m - n only.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxformer.config import AttentionConfig, ConfigError, EncodingConfig
from jaxformer.nn.encodings import Encoding
from jaxformer.types import Array, Slots


class Angles(nn.Module):
    """Cosines and sines of every slot's angles, float32 `[B, T, R/2]` each; R = fraction * head width.

    Raises:
      ConfigError: R is not a positive even number of at most the head width.
    """

    config: EncodingConfig
    attention: AttentionConfig
    head_width: int

    @nn.compact
    def __call__(self, slots: Slots) -> tuple[Array, Array]:
        rotated = int(self.config.fraction * self.head_width)
        if rotated % 2 or not 0 < rotated <= self.head_width:
            raise ConfigError(
                f"encoding.fraction: got {self.config.fraction} of head width {self.head_width} = {rotated} channels, "
                "expected an even number of them, at least 2; change fraction, heads or head_width"
            )
        frequency = jnp.asarray(self.config.base ** (-2.0 * np.arange(rotated // 2) / rotated), jnp.float32)
        angle = slots.position.astype(jnp.float32)[..., None] * frequency
        return jnp.cos(angle), jnp.sin(angle)


def rotate(config: EncodingConfig, x: Array, shared: tuple[Array, Array]) -> Array:
    """Turns the first R channels of `x` `[B, T, H, K]`, in float32; the others pass.

    Pairs are channels (2i, 2i + 1) when `config.interleaved` (the paper), else (i, i + R/2) (GPT-NeoX, Llama). The two
    differ by a fixed permutation of the channels, which matters only for reading weights trained with the other.
    """
    cos, sin = (table[:, :, None, :] for table in shared)
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half].astype(jnp.float32), x[..., 2 * half :]
    if config.interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    first, second = first * cos - second * sin, second * cos + first * sin
    if config.interleaved:
        turned = jnp.stack([first, second], axis=-1).reshape(turned.shape)
    else:
        turned = jnp.concatenate([first, second], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)


ENCODING = Encoding(shared=Angles, rotate=rotate)
