"""A set of classes for a text, or for a pair of texts: each class is present or not, whatever the others are.

The logit of a class is that of its own probability, and a class above one half belongs to the set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxformer import losses, metrics
from jaxformer.config import Config, DecodeConfig
from jaxformer.data.sources import Example
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.tasks import Features, Predictor, Sample, _diagnosis, _tokens, classification, text_lines
from jaxformer.types import Array, Batch, Sums

SEPARATOR = ","
"""Between the names of a set, in tables and in output lines."""


def encode(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Features:
    """`<cls> text <sep>` (and `pair <sep>`); as labels, 1 for each class of the set and 0 for the others, `[C]`."""
    labels = np.zeros(len(config.task.classes), np.float32)
    labels[list(example["labels"])] = 1.0
    line = classification.input_line(example)
    return {**classification.prompt(config, tokenizers, line), "labels": labels}


def loss(config: Config, logits: Float[Array, "B C"], batch: Batch) -> Sums:
    """The binary cross-entropy, in nats, averaged over texts and classes."""
    labels, weights = _tokens.labels_and_weights(batch)
    return {"loss": losses.binary_cross_entropy(logits, labels, weights)}


def set_metrics(config: Config, logits: Float[Array, "B C"], batch: Batch) -> Sums:
    """The loss, and how well the sets are hit: `metrics.set_scores`."""
    labels, weights = _tokens.labels_and_weights(batch)
    return {"loss": losses.binary_cross_entropy(logits, labels, weights), **metrics.set_scores(logits, labels, weights)}


def probabilities(logits: Array, batch: Batch) -> Array:
    """The probability of each class, part of the compiled forward pass."""
    return jax.nn.sigmoid(logits.astype(jnp.float32))


def predict(predictor: Predictor, lines: Sequence[str], options: DecodeConfig) -> list[dict[str, Any]]:
    """For each line `{"labels", "probabilities"}`: the names of its set, and a dict of all classes."""
    prompts = predictor.prompts(text_lines(lines))
    results: list[dict[str, Any]] = [{} for _ in prompts]
    for indices, _, outputs in predictor.runner.forward(prompts, finish=probabilities):
        for index, probs in zip(indices, outputs, strict=True):
            names = classification.class_names(predictor.config, len(probs))
            by_name = dict(zip(names, map(float, probs), strict=True))
            results[index] = {"labels": [name for name in names if by_name[name] > 0.5], "probabilities": by_name}
    return results


def output_line(result: Mapping[str, Any]) -> str:
    """The names of the set with commas between them; empty for the empty set."""
    return SEPARATOR.join(result["labels"])


def reference_line(config: Config, example: Example) -> str:
    """The true set in the same form."""
    return SEPARATOR.join(config.task.classes[label] for label in sorted(example["labels"]))


def sample(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Sample:
    """The text and the true set."""
    return Sample(classification.input_line(example), reference_line(config, example))


def diagnose(config: Config, results: Sequence[Mapping[str, Any]], examples: Sequence[Example]) -> dict[str, Any]:
    """Sets that each class is in, and the calibration of all decisions, see `_diagnosis`.

    A decision is about one class of one text, with the probability of what was decided.
    """
    names = config.task.classes
    true = [[names[label] for label in example["labels"]] for example in examples]
    probs, is_correct = [], []
    for own, result in zip(true, results, strict=True):
        for name, value in result["probabilities"].items():
            probs.append(max(value, 1 - value))
            is_correct.append((value > 0.5) == (name in own))
    return {
        "sets": _diagnosis.set_errors(names, true, [result["labels"] for result in results]),
        "calibration": _diagnosis.calibration(probs, is_correct),
    }


TASK = dataclasses.replace(
    classification.TASK,
    roles=("text", "labels"),
    needs="a head of classes, each present or not",
    encode=encode,
    loss=loss,
    metrics=set_metrics,
    predict=predict,
    output_line=output_line,
    reference_line=reference_line,
    sample=sample,
    diagnose=diagnose,
)
