"""Rotary position embedding: queries and keys are rotated by angles proportional to their position (Su et al. 2021).

The first R channels of a head form pairs. Pair i at position p is rotated by p * theta_i, theta_i = base^(-2i / R)
(equation 15). Since rotations compose, q_m . k_n depends on the positions only through m - n.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Bool, Float, Float32, Int

from jaxformer.config import AttentionConfig, EncodingConfig, RopeScalingConfig
from jaxformer.errors import ConfigError
from jaxformer.nn.encodings import Encoding
from jaxformer.types import Array, Slots


class Rotation(NamedTuple):
    """Cosines and sines of the angles of each slot, `[B, T, P]`, for P pairs of channels."""

    cos: Float32[Array, "B T P"]
    sin: Float32[Array, "B T P"]


class ByWindow(NamedTuple):
    """Rotations of the layers without and with a window; `of_layer` takes one of the two."""

    full: Rotation
    windowed: Rotation

    def of_layer(self, banded: Bool[Array, ""]) -> Rotation:
        """The rotation of a layer, which has a window if `banded`."""
        return jax.tree.map(lambda full, windowed: jnp.where(banded, windowed, full), self.full, self.windowed)


class Angles(nn.Module):
    """The rotation of each slot, for P = R / 2 pairs, R = fraction * head width; with `window_base` one by window.

    Raises:
      ConfigError: R is not a positive even number of at most the head width.
    """

    config: EncodingConfig
    attention: AttentionConfig
    head_width: int

    @nn.compact
    def __call__(self, slots: Slots) -> Rotation | ByWindow:
        rotated = int(self.config.fraction * self.head_width)
        if rotated % 2 or not 0 < rotated <= self.head_width:
            raise ConfigError(
                f"encoding.fraction: got {self.config.fraction} of head width {self.head_width} = {rotated} channels, "
                "expected an even number of them, at least 2; change fraction, heads or head_width"
            )
        full = _rotation(self.config, rotated, slots)
        if self.config.window_base is None:
            return full
        windowed = dataclasses.replace(self.config, base=self.config.window_base, scaling=None)
        return ByWindow(full, _rotation(windowed, rotated, slots))


def _rotation(config: EncodingConfig, rotated: int, slots: Slots) -> Rotation:
    """The rotation of each slot, for half of the `rotated` channels."""
    frequency, magnitude = frequencies(config, rotated, slots)
    angle = slots.position.astype(jnp.float32)[..., None] * frequency
    return Rotation(jnp.cos(angle) * magnitude, jnp.sin(angle) * magnitude)


def frequencies(config: EncodingConfig, rotated: int, slots: Slots) -> tuple[Float32[Array, "*rows P"], float]:
    """theta of the P = R / 2 pairs (dynamic: `[B, 1, P]`, longrope: `[B, T, P]`) under `config.scaling`, and a factor
    for cosines and sines.

    linear: theta / factor (Chen et al. 2023). dynamic: the base grows with the length of a row, beyond the original
    length ("dynamic NTK"); padding is not counted, so a row is independent of the other rows. llama3: low frequencies
    are divided by the factor, high ones kept, those between interpolated (Llama 3.1). yarn: the same with a ramp over
    channels, and a magnitude (Peng et al. 2024, YaRN, section 3). longrope: theta of each pair is divided by a number
    of its own, from one list in texts of up to the original length and from another in longer ones, and the magnitude
    is sqrt(1 + ln(factor) / ln(original)) (Ding et al. 2024, LongRoPE, section 3). A text's length is that of its own
    segment, without padding.
    """
    scaling, exponent = config.scaling, np.arange(rotated // 2) * 2.0 / rotated
    theta = config.base**-exponent
    if scaling is None:
        return jnp.asarray(theta, jnp.float32), 1.0
    if scaling.kind == "dynamic":
        if rotated == 2:  # a single pair, whose theta is base^0 = 1
            return jnp.ones(1, jnp.float32), 1.0
        last = jnp.max(jnp.where(slots.segment > 0, slots.position, -1), axis=1)
        longest = jnp.maximum(last + 1, scaling.original).astype(jnp.float32)[:, None, None]
        growth = scaling.factor * longest / scaling.original - (scaling.factor - 1.0)
        return 1.0 / (config.base * growth ** (rotated / (rotated - 2.0))) ** jnp.asarray(exponent, jnp.float32), 1.0
    if scaling.kind == "longrope":
        return _long_rope(theta, scaling, slots)
    if scaling.kind == "linear":
        unscaled = np.zeros_like(theta)
    elif scaling.kind == "llama3":
        turns = scaling.original * theta / (2.0 * np.pi)
        unscaled = np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0.0, 1.0)
    else:
        unscaled = 1.0 - _yarn_ramp(config.base, scaling, rotated)
    theta = theta * unscaled + theta / scaling.factor * (1.0 - unscaled)
    magnitude = 1.0
    if scaling.kind == "yarn":
        usual = 0.1 * np.log(max(scaling.factor, 1.0)) + 1.0
        magnitude = usual if scaling.magnitude is None else scaling.magnitude
    return jnp.asarray(theta, jnp.float32), float(magnitude)


def _long_rope(
    theta: Float[np.ndarray, " P"], scaling: RopeScalingConfig, slots: Slots
) -> tuple[Float32[Array, "B T P"], float]:
    """`frequencies` of LongRoPE.

    Raises:
      ConfigError: there is not one divisor for each pair.
    """
    for name in ("short", "long"):
        if len(getattr(scaling, name)) != len(theta):
            raise ConfigError(
                f"encoding.scaling.{name}: got {len(getattr(scaling, name))} divisors, expected {len(theta)}, one for "
                "each rotated pair"
            )
    short, long = (jnp.asarray(theta / np.asarray(divisors), jnp.float32) for divisors in (scaling.short, scaling.long))
    is_long = _text_lengths(slots) > scaling.original
    magnitude = scaling.magnitude
    if magnitude is None:
        magnitude = np.sqrt(1.0 + np.log(max(scaling.factor, 1.0)) / np.log(scaling.original))
    return jnp.where(is_long[..., None], long, short), float(magnitude)


def _text_lengths(slots: Slots) -> Int[Array, "B T"]:
    """Length of the text that each slot belongs to: its last position and one more; at padding, that of the longest."""
    last = jnp.where(slots.segment > 0, slots.position, -1)
    number = slots.segment.shape[1] + 1  # texts are numbered from 1
    of_segment = jax.vmap(lambda x, segment: jax.ops.segment_max(x, segment, number))(last, slots.segment)
    own = jnp.take_along_axis(of_segment, slots.segment, axis=1)
    return jnp.where(slots.segment > 0, own, jnp.max(last, axis=1, keepdims=True)) + 1


def _yarn_ramp(base: float, scaling: RopeScalingConfig, rotated: int) -> Float[np.ndarray, " P"]:
    """Ramp over pairs: 0 above `fast` rotations in the original length, 1 below `slow`, linear between."""

    def channel(turns: float) -> float:
        return rotated * np.log(scaling.original / (turns * 2.0 * np.pi)) / (2.0 * np.log(base))

    first, last = channel(scaling.fast), channel(scaling.slow)
    if scaling.whole:
        first, last = np.floor(first), np.ceil(last)
    first, last = max(first, 0.0), min(last, rotated - 1.0)
    return np.clip((np.arange(rotated // 2) - first) / (last - first if last != first else 0.001), 0.0, 1.0)


def rotate(config: EncodingConfig, x: Float[Array, "B T H K"], shared: Rotation) -> Float[Array, "B T H K"]:
    """`x` with the first R = 2 P channels of each head rotated, in float32; the others are unchanged.

    Pairs are channels (2i, 2i + 1) if `config.interleaved` (the paper), else (i, i + R/2) (GPT-NeoX, Llama). The two
    differ by a permutation of channels, which matters only when weights are exchanged between them.
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
