"""One decision about a series, or about an image as the series of its patches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxformer.config import Config
from jaxformer.data import series
from jaxformer.data.sources import Example
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.tasks import Features, Predictor, _series, _tokens, classification


def encode(config: Config, tokenizers: Tokenizers | None, example: Example, rng: np.random.Generator) -> Features:
    """The standardised values `[T, C]` and the label."""
    return {**encode_values(config, example["values"]), "labels": np.array(example["label"], np.int32)}


def prompt(config: Config, tokenizers: Tokenizers | None, line: str) -> Features:
    """A series in one line; see `series.read_line`."""
    return encode_values(config, series.read_line(line))


def encode_values(config: Config, values: Float[np.ndarray, "T C"]) -> Features:
    """The first `data.length` steps of a series, standardised; "cut" counts the others."""
    cut = _tokens.truncation(len(values) - config.data.length)
    return {"source": _series.standardise(config, values[: config.data.length]), **cut}


def input_line(example: Example) -> str:
    """The series in one line."""
    return series.format_line(example["values"])


def diagnose_series(predictor: Predictor, examples: Sequence[Example]) -> dict[str, Any]:
    """Confusion matrix and calibration, as of texts."""
    config, results = predictor.config, [dict[str, Any]() for _ in examples]
    prompts = [encode_values(config, example["values"]) for example in examples]
    for indices, _, outputs in predictor.runner.forward(prompts, finish=classification.probabilities):
        for index, probs in zip(indices, outputs, strict=True):
            best = int(probs.argmax())
            name = classification.class_names(config, len(probs))[best]
            results[index] = {"label": name, "probability": float(probs[best])}
    return classification.diagnose(config, results, examples)


TASK = dataclasses.replace(
    classification.TASK,
    roles=("values", "label"),
    sides=("encoder",),
    encode=encode,
    prompt=prompt,
    input_line=input_line,
    sample=None,  # a predictor reads lines of text, and no series
    diagnose=None,
    diagnose_series=diagnose_series,
    reference_line=lambda config, example: classification.class_names(config, 0)[example["label"]],
)
