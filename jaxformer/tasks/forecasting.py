"""Forecasts of a multivariate series: the next H steps of all channels from the last L (look-back).

Loss and measures are of standardised values, as published figures are: mean squared and mean absolute error, averaged
over windows, steps and channels. Predictions are in the units of the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxformer import losses
from jaxformer.config import Config, DecodeConfig
from jaxformer.data import series
from jaxformer.data.sources import Example
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.errors import ConfigError
from jaxformer.tasks import Features, Predictor, Task, _diagnosis, _series, _tokens, text_lines
from jaxformer.types import Array, Batch, Sums

MAX_WINDOWS = 1024
"""Windows that a diagnosis forecasts at a time."""


class Forecast(NamedTuple):
    """The next steps of a series in the units of the data, float64 `[H, C]`, and the names of its channels."""

    values: np.ndarray
    names: tuple[str, ...]


def encode(config: Config, tokenizers: Tokenizers | None, example: Example, rng: np.random.Generator) -> Features:
    """The standardised window `[L, C]`, and as labels the standardised steps after it, float32 `[H, C]`."""
    return {**_encode(config, example["values"]), "labels": _series.standardise(config, example["future"])}


def _encode(config: Config, values: Float[np.ndarray, "T C"]) -> Features:
    """The last `data.length` steps.

    Raises:
      ConfigError: there are fewer, or they have other channels.
    """
    if len(values) < config.data.length:
        got = f"series: got {len(values)} time steps"
        raise ConfigError(f"{got}, expected at least the look-back, data.length ({config.data.length}); give more rows")
    return {"source": _series.standardise(config, values[-config.data.length :])}


def prompt(config: Config, tokenizers: Tokenizers | None, text: str) -> Features:
    """The last steps of a CSV table, whose first line may name the columns; see `series.read_table`.

    Raises:
      ConfigError: the table is malformed or too short, or lacks a channel of the training data.
    """
    return _encode(config, read_channels(config, text))


def read_channels(config: Config, text: str) -> Float[np.ndarray, "T C"]:
    """The values of a CSV table in the order of the model's channels; columns of other names are left out."""
    names, lines = config.task.channels, list(enumerate(text.split("\n"), 1))
    first = next((line for _, line in lines if line.strip()), "")
    date = config.data.columns.get("date", "")
    if date and date not in (cell.strip() for cell in first.split(",")):
        date = ""
    table = series.read_table(lines, "input", date)
    if not table.names or not names:
        return table.values
    if set(table.names) != set(names):
        got, expected = ", ".join(table.names), ", ".join(names)
        raise ConfigError(f"input: got the columns {got}, expected {expected} and the date; mend the header")
    return table.values[:, [table.names.index(name) for name in names]]


def loss(config: Config, forecast: Float[Array, "B H C"], batch: Batch) -> Sums:
    """The squared error of standardised values."""
    labels, weights = _labels_and_weights(batch)
    return {"loss": losses.squared_error(forecast, labels, weights)}


def forecast_metrics(config: Config, forecast: Float[Array, "B H C"], batch: Batch) -> Sums:
    """Squared error ("loss" and "mse") and absolute error ("mae") of standardised values."""
    labels, weights = _labels_and_weights(batch)
    squared = losses.squared_error(forecast, labels, weights)
    absolute = jnp.sum(jnp.abs(forecast.astype(jnp.float32) - labels) * weights)
    return {"loss": squared, "mse": squared, "mae": (absolute, squared[1])}


def _labels_and_weights(batch: Batch) -> tuple[Array, Array]:
    """Labels `[B, H, C]`, and the weight of each row for each of its values."""
    labels, weights = _tokens.labels_and_weights(batch)
    return labels, jnp.broadcast_to(weights[:, None, None], labels.shape)


def forecast(predictor: Predictor, windows: Sequence[Float[np.ndarray, "T C"]]) -> Float[np.ndarray, "B H C"]:
    """The forecasts after `windows`, series of at least L steps, in the units of the data.

    Raises:
      ConfigError: a series is too short, has other channels than the model, or a value that is not finite.
    """
    config, arrays = predictor.config, []
    for values in windows:
        array = np.asarray(values, np.float64)
        if array.ndim != 2 or not np.isfinite(array).all():
            got = f"an array of {array.ndim} axes" if array.ndim != 2 else "a value that is not finite"
            raise ConfigError(f"forecast: got {got}, expected finite numbers [steps, channels]; mend the series")
        arrays.append(array)
    prompts = [_encode(config, array) for array in arrays]
    results = np.zeros((len(arrays), config.data.horizon or 0, len(config.task.channels)))
    for indices, _, outputs in predictor.runner.forward(prompts, buckets=(config.data.length,)):
        results[indices] = _series.unstandardise(config, outputs)
    return results


def predict(predictor: Predictor, texts: Sequence[str], options: DecodeConfig) -> list[Forecast]:
    """The forecast after each CSV table."""
    windows = [read_channels(predictor.config, text) for text in text_lines(texts)]
    return [Forecast(values, predictor.config.task.channels) for values in forecast(predictor, windows)]


def input_line(example: Example) -> str:
    """The window as CSV."""
    return series.format_table(example["values"])


def output_line(result: Forecast) -> str:
    """The forecast as CSV, with the names of the channels as the first line."""
    return series.format_table(result.values, result.names)


def reference_line(config: Config, example: Example) -> str:
    """The true steps in the same form."""
    return series.format_table(example["future"], config.task.channels)


def diagnose_series(predictor: Predictor, examples: Sequence[Example]) -> dict[str, Any]:
    """Errors by time step and by channel, of standardised values; see `_diagnosis.ForecastErrors`."""
    channels = predictor.config.task.channels
    errors = _diagnosis.ForecastErrors(np.array(predictor.config.task.deviations or (1.0,) * len(channels)))
    for begin in range(0, len(examples), MAX_WINDOWS):
        block = examples[begin : begin + MAX_WINDOWS]
        windows = [np.asarray(example["values"], np.float64) for example in block]
        future = np.stack([np.asarray(example["future"], np.float64) for example in block])
        errors.add(forecast(predictor, windows), future, np.stack([values[-1] for values in windows]))
    return {"forecast": errors.values(channels)}


TASK = Task(
    roles=("values", "future"),
    head="forecast",
    sides=("encoder",),
    method="forecast",
    needs="a head that forecasts",
    encode=encode,
    loss=loss,
    metrics=forecast_metrics,
    prompt=prompt,
    predict=predict,
    input_line=input_line,
    output_line=output_line,
    reference_line=reference_line,
    reads_document=True,
    diagnose_series=diagnose_series,
)
