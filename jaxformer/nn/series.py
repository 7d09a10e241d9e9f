"""Series of real numbers: normalising each one, cutting it into patches, and scaling its forecast back."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Float, Float32, Int

from jaxformer.config import SeriesConfig
from jaxformer.nn.heads import last_slot
from jaxformer.nn.layers import parameter, zeros_parameter
from jaxformer.types import Array, Slots, Stream

EPSILON = 1e-5
"""Added to the variance of a series, and (squared) to the learned scale by which a forecast is divided, as in RevIN."""


class Statistics(NamedTuple):
    """Centre and deviation of each channel of each series, both float32 `[B, 1, C]`."""

    centre: Array
    deviation: Array


class SeriesInput(nn.Module):
    """Makes the input of a model of a series `[B, S, C]`, and scales its forecast back.

    `read` normalises each series over its own real steps and cuts it into patches; `restore` is the inverse of the
    normalisation (RevIN, Kim et al. 2022, equations 1 to 3, where the scale is learned if `config.affine`). Gradients
    do not pass through the statistics.
    """

    config: SeriesConfig

    def setup(self) -> None:
        config = self.config
        if config.channels is None:
            raise ValueError("series.channels: got None, expected a number; resolve the config with the data first")
        if config.affine:
            self.scale = parameter(self, "scale", nn.initializers.ones_init(), (None,), (config.channels,))
            self.bias = zeros_parameter(self, "bias", (None,), (config.channels,))

    def read(self, source: Stream) -> tuple[Stream, Statistics]:
        """The stream of patches that the encoder embeds, `[B', T, patch * C']`, and what `restore` needs.

        With independent channels B' is B * C and C' is 1: the channels of a series are neighbouring rows.
        """
        config, channels = self.config, source.tokens.shape[-1]
        values, statistics = self.normalise(source)
        slots = source.slots
        if config.independent:
            values = jnp.swapaxes(values, 1, 2).reshape(-1, values.shape[1], 1)
            slots = Slots(*(jnp.repeat(x, channels, axis=0) for x in (slots.position, slots.segment)))
        return cut_patches(Stream(values, slots), config.patch, config.stride or config.patch), statistics

    def normalise(self, source: Stream) -> tuple[Float32[Array, "B S C"], Statistics]:
        """The normalised series, 0 at padding, and its statistics."""
        config, values = self.config, source.tokens.astype(jnp.float32)
        real = (source.slots.segment != 0)[..., None]
        if config.normalise == "instance":
            count = jnp.maximum(jnp.sum(real, axis=1, keepdims=True), 1)
            centre = jnp.sum(jnp.where(real, values, 0.0), axis=1, keepdims=True) / count
            variance = jnp.sum(jnp.where(real, jnp.square(values - centre), 0.0), axis=1, keepdims=True) / count
            deviation = jnp.sqrt(variance + EPSILON)
        else:
            centre = jnp.zeros_like(values[:, :1])
            if config.normalise == "last":
                centre = jnp.take_along_axis(values, last_slot(source.slots)[:, None, None], axis=1)
            deviation = jnp.ones_like(centre)
        statistics = Statistics(*jax.lax.stop_gradient((centre, deviation)))
        values = (values - statistics.centre) / statistics.deviation
        if config.affine:
            values = values * self.scale + self.bias
        return jnp.where(real, values, 0.0), statistics

    def restore(self, outputs: Float[Array, "R _"], statistics: Statistics) -> Float32[Array, "B H C"]:
        """The forecast `[B, H, C]` in the scale of the series.

        Args:
          outputs: of a head of kind forecast, `[B, H * C]`, or `[B * C, H]` of independent channels.
        """
        rows, channels = statistics.centre.shape[0], statistics.centre.shape[-1]
        if self.config.independent:
            forecast = jnp.swapaxes(outputs.reshape(rows, channels, -1), 1, 2)
        else:
            forecast = outputs.reshape(rows, -1, channels)
        return self.scale_back(forecast, statistics)

    def scale_back(self, forecast: Float[Array, "B H C"], statistics: Statistics) -> Float32[Array, "B H C"]:
        """The inverse of `normalise`, applied to a forecast."""
        forecast = forecast.astype(jnp.float32)
        if self.config.affine:
            forecast = (forecast - self.bias) / (self.scale + EPSILON**2)
        return forecast * statistics.deviation + statistics.centre


def cut_patches(source: Stream, patch: int, stride: int) -> Stream:
    """The patches of a series `[B, S, C]`, `[B, T, patch * C]`: slot t holds `patch` steps from step t * stride on.

    T is S / stride, rounded up. Steps after the last real one repeat it. A slot is real if its first step is.
    """
    rows, steps, channels = source.tokens.shape
    slots = Slots(source.slots.position[:, ::stride] // stride, source.slots.segment[:, ::stride])
    if patch == 1 and stride == 1:
        return Stream(source.tokens, slots)
    index: Int[Array, "T P"] = jnp.asarray(np.arange(0, steps, stride)[:, None] + np.arange(patch))
    index = jnp.minimum(index, last_slot(source.slots)[:, None, None])
    values = jnp.take_along_axis(source.tokens, index.reshape(rows, -1, 1), axis=1)
    return Stream(values.reshape(rows, -1, patch * channels), slots)
