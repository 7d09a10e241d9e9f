"""Linear forecasts: each channel's next values are a linear map of its past ones (Zeng et al. 2023)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Float, Float32

from jaxformer.config import ModelConfig
from jaxformer.nn.layers import Dense, Dropout, parameter, zeros_parameter
from jaxformer.nn.products import dot
from jaxformer.nn.series import SeriesInput
from jaxformer.types import Array, Batch

INIT_SCALE = 1 / 3
"""Initial variance of the maps times their fan-in, that of the published models (PyTorch's Linear)."""


class LinearForecast(nn.Module):
    """Forecast `[B, H, C]` of a series `[B, L, C]` by linear maps from L steps to H.

    With `config.linear.trend` the series is the sum of a moving average and a remainder, each with a map of its own
    (DLinear). With `config.series.normalise` last and one map it is NLinear.
    """

    config: ModelConfig

    def setup(self) -> None:
        linear, series, head = self.config.linear, self.config.series, self.config.head
        if linear is None or series is None or head.look_back is None or head.horizon is None:
            raise ValueError("model.linear: got no sizes, expected a series, a look-back and a horizon; resolve them")
        self.series = SeriesInput(series)
        self.dropout = Dropout(head.dropout)
        channels = series.channels if linear.individual else None
        self.remainder = ChannelMap(head.look_back, head.horizon, channels)
        if linear.trend is not None:
            self.trend = ChannelMap(head.look_back, head.horizon, channels)

    def __call__(self, batch: Batch, full_logits: bool = True) -> Float32[Array, "B H C"]:
        """The forecast in the scale of the series. `full_logits` has no effect."""
        source, linear = batch.side("source"), self.config.linear
        values, statistics = self.series.normalise(source)
        x = self.dropout(jnp.swapaxes(values, 1, 2).astype(self.config.dtype))
        if linear is None or linear.trend is None:
            y = self.remainder(x)
        else:
            trend = moving_average(x, linear.trend)
            y = self.remainder(x - trend) + self.trend(trend)
        return self.series.scale_back(jnp.swapaxes(y, 1, 2), statistics)


class ChannelMap(nn.Module):
    """Linear map of the last axis, from `steps` to `horizon`; one for each of `channels`, or shared if that is None."""

    steps: int
    horizon: int
    channels: int | None

    @nn.compact
    def __call__(self, x: Float[Array, "B C L"]) -> Float[Array, "B C H"]:
        if self.channels is None:
            return Dense((self.steps, self.horizon), (None, None), init_scale=INIT_SCALE, name="shared")(x)
        init = nn.initializers.variance_scaling(INIT_SCALE, "fan_in", "uniform", in_axis=1, out_axis=2, batch_axis=0)
        kernel = parameter(self, "kernel", init, (None, None, None), (self.channels, self.steps, self.horizon))
        bias = zeros_parameter(self, "bias", (None, None), (self.channels, self.horizon))
        return jnp.einsum("bcl,clh->bch", x, kernel.astype(x.dtype)) + bias.astype(x.dtype)


def moving_average(x: Float[Array, "B C L"], width: int) -> Float[Array, "B C L"]:
    """Mean of the `width` (odd) steps around each step of the last axis; the ends repeat beyond the series."""
    steps = x.shape[-1]
    weights = np.zeros((steps, steps), np.float32)
    for shift in range(-(width // 2), width // 2 + 1):
        np.add.at(weights, (np.clip(np.arange(steps) + shift, 0, steps - 1), np.arange(steps)), 1 / width)
    return dot(x, jnp.asarray(weights))
