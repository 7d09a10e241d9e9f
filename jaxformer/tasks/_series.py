"""Shared by tasks whose input is a series: standardised values as features."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float32

from jaxformer.config import Config
from jaxformer.errors import ConfigError


def standardise(config: Config, values: Float[np.ndarray, "T C"]) -> Float32[np.ndarray, "T C"]:
    """`values` less the means of the training part, divided by its deviations; unchanged where the run has none.

    Raises:
      ConfigError: there are more or fewer channels than the model has.
    """
    check_channels(config, values)
    if config.task.means:
        values = (values - np.array(config.task.means)) / np.array(config.task.deviations)
    return values.astype(np.float32)


def unstandardise(config: Config, values: Float[np.ndarray, "*batch C"]) -> Float[np.ndarray, "*batch C"]:
    """The inverse of `standardise`, in float64."""
    values = values.astype(np.float64)
    return values * np.array(config.task.deviations) + np.array(config.task.means) if config.task.means else values


def check_channels(config: Config, values: Float[np.ndarray, "T C"]) -> None:
    """Raises a ConfigError if `values` has another number of channels than the model."""
    series = config.model.series
    count = None if series is None else series.channels
    if count is not None and values.shape[-1] != count:
        names = f" ({', '.join(config.task.channels)})" if config.task.channels else ""
        raise ConfigError(f"series: got {values.shape[-1]} channels, expected {count}{names}; mend the input")
