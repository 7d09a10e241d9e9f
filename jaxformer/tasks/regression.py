"""A number for a text, or for a pair of texts.

Scores are scaled from `data.score_range` to 0 to 1, of which loss and measures are; predictions and `squared_error` of
whole splits are in the units of the data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxformer import losses, metrics
from jaxformer.config import Config, DecodeConfig
from jaxformer.data.sources import Example
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.tasks import Features, Predictor, _diagnosis, _tokens, classification, text_lines
from jaxformer.types import Array, Batch, Sums


def encode(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Features:
    """`<cls> text <sep>` (and `pair <sep>`), and the scaled score."""
    prompt = classification.prompt(config, tokenizers, classification.input_line(example))
    return {**prompt, "labels": np.asarray(example["score"], np.float32)}


def loss(config: Config, outputs: Float[Array, "B 1"], batch: Batch) -> Sums:
    """The squared error of output and scaled score."""
    return {"loss": losses.squared_error(outputs[:, 0], *_tokens.labels_and_weights(batch))}


def error_metrics(config: Config, outputs: Float[Array, "B 1"], batch: Batch) -> Sums:
    """The squared error ("loss") and the absolute error ("mae") of output and scaled score."""
    labels, weights = _tokens.labels_and_weights(batch)
    absolute = jnp.sum(jnp.abs(outputs[:, 0].astype(jnp.float32) - labels) * weights)
    squared = losses.squared_error(outputs[:, 0], labels, weights)
    return {"loss": squared, "mae": (absolute, squared[1])}


def predict(predictor: Predictor, lines: Sequence[str], options: DecodeConfig) -> list[float]:
    """The number of each line, in the units of the data; not limited to `data.score_range`."""
    prompts = predictor.prompts(text_lines(lines))
    results = np.zeros(len(prompts))
    for indices, _, outputs in predictor.runner.forward(prompts):
        results[indices] = outputs[:, 0]
    return [_in_units(predictor.config, value) for value in results.tolist()]


def _in_units(config: Config, scaled: float) -> float:
    """A score from 0 to 1 on the scale of `data.score_range`."""
    low, high = config.data.score_range
    return low + (high - low) * scaled


def output_line(result: float) -> str:
    """The number with four decimals."""
    return f"{result:.4f}"


def reference_line(config: Config, example: Example) -> str:
    """The true score in the same form."""
    return output_line(_in_units(config, example["score"]))


def score(config: Config, results: Sequence[float], examples: Sequence[Example]) -> dict[str, float]:
    """Correlation of ranks (Spearman) and of values (Pearson), and the mean squared error in the units of the data."""
    predicted = np.array(results)
    true = np.array([_in_units(config, example["score"]) for example in examples])
    return {
        "spearman": metrics.spearman(predicted, true),
        "pearson": metrics.pearson(predicted, true),
        "squared_error": float(np.mean(np.square(predicted - true))),
    }


def diagnose(config: Config, results: Sequence[float], examples: Sequence[Example]) -> dict[str, Any]:
    """Predicted numbers against true ones in the units of the data, see `_diagnosis.number_errors`."""
    return {"numbers": _diagnosis.number_errors([_in_units(config, each["score"]) for each in examples], results)}


TASK = dataclasses.replace(
    classification.TASK,
    roles=("text", "score"),
    method="regress",
    needs="a head of one number",
    encode=encode,
    loss=loss,
    metrics=error_metrics,
    predict=predict,
    output_line=output_line,
    reference_line=reference_line,
    score=score,
    score_names=("spearman", "pearson", "squared_error"),
    classes=("score",),
    diagnose=diagnose,
)
