"""Sinusoidal positions: fixed sines and cosines, added to the input (Vaswani et al. 2017, section 3.5)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Float32, Int

from jaxformer.config import EncodingConfig
from jaxformer.nn.encodings import Encoding
from jaxformer.types import Array, Slots


def sinusoids(
    position: Int[Array, "*batch"], width: int, base: float = 10000.0, concatenated: bool = False
) -> Float32[Array, "*batch D"]:
    """Position codes `[..., D]` (Vaswani et al. 2017, section 3.5):

        PE(p, 2i) = sin(p / base^(2i / D)),   PE(p, 2i + 1) = cos(p / base^(2i / D))

    Sine and cosine of a pair share their frequency: only then is PE(p + n) a rotation of PE(p). An odd width drops the
    last cosine. With `concatenated`, all sines come first and then all cosines.
    """
    pairs = (width + 1) // 2
    frequency = jnp.asarray(base ** (-2.0 * np.arange(pairs) / width), jnp.float32)
    angle = position.astype(jnp.float32)[..., None] * frequency
    if concatenated:
        return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)[..., :width]
    code = jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1)
    return code.reshape(*position.shape, 2 * pairs)[..., :width]


class Sinusoidal(nn.Module):
    """`sinusoids` of the positions plus `config.offset`, `[B, T, D]`, without parameters and for any length."""

    config: EncodingConfig
    width: int

    @nn.compact
    def __call__(self, slots: Slots) -> Float32[Array, "B T D"]:
        return sinusoids(slots.position + self.config.offset, self.width, self.config.base, self.config.concatenated)


ENCODING = Encoding(embed=Sinusoidal)
