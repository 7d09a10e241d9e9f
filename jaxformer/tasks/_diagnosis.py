"""Diagnosis of an evaluation: confusion matrix, calibration, errors with entities. Values are JSON; `jaxformer.report`
shows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxformer import metrics

MAX_CLASSES = 100
"""More classes have no confusion matrix: it would be a large file that nobody can read."""

CALIBRATION_BINS = 10
"""Intervals of equal width of the probability that the model gives its answer."""

RESAMPLES = 1000
"""Resamples of the bootstrap (Efron 1979)."""

ENTITY_ERRORS = ("correct", "wrong_type", "wrong_bounds", "missed")
"""Outcomes for a true entity: found; found with another type; overlapped by another span; not found."""


def confusion(classes: Sequence[str], true: Sequence[str], predicted: Sequence[str]) -> dict[str, Any]:
    """`{"classes": [C names], "counts": [C][C]}`: rows are true classes, columns predicted ones; {} for many classes.

    Classes that occur in neither are left out.
    """
    pairs = Counter(zip(true, predicted, strict=True))
    seen = {name for pair in pairs for name in pair}
    names = [name for name in classes if name in seen]
    if not names or len(names) > MAX_CLASSES:
        return {}
    return {"classes": names, "counts": [[pairs[a, b] for b in names] for a in names]}


def calibration(probabilities: Sequence[float], is_correct: Sequence[bool]) -> dict[str, Any]:
    """The expected calibration error (Guo et al. 2017, equation 3), and for each interval of the probability of the
    answer `{"low", "high", "count", "confidence", "accuracy"}`; empty intervals are left out. {} without answers."""
    probs, correct = np.asarray(probabilities, np.float64), np.asarray(is_correct, np.float64)
    if not len(probs):
        return {}
    index = np.clip(np.ceil(probs * CALIBRATION_BINS).astype(int) - 1, 0, CALIBRATION_BINS - 1)
    bins, error = [], 0.0
    for number in np.unique(index):
        members = index == number
        confidence, accuracy = float(probs[members].mean()), float(correct[members].mean())
        error += members.mean() * abs(confidence - accuracy)
        bounds = {"low": number / CALIBRATION_BINS, "high": (number + 1) / CALIBRATION_BINS}
        bins.append({**bounds, "count": int(members.sum()), "confidence": confidence, "accuracy": accuracy})
    return {"error": float(error), "bins": bins}


def entity_errors(true: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """For each entity type its number of true and predicted entities, of each of `ENTITY_ERRORS`, and of those that
    were predicted where no true entity is ("spurious")."""
    rows: dict[str, Counter[str]] = {}

    def count(entity_type: str, *names: str) -> None:
        rows.setdefault(entity_type, Counter()).update(names)

    for true_tags, predicted_tags in zip(true, predicted, strict=True):
        gold, found = metrics.entity_spans(true_tags), metrics.entity_spans(predicted_tags)
        for span in gold:
            count(span[0], "true", _outcome(span, found))
        for span in found:
            is_spurious = not any(_overlap(span, each) for each in gold)
            count(span[0], "predicted", *(["spurious"] if is_spurious else []))
    names = ("true", "predicted", *ENTITY_ERRORS, "spurious")
    return [{"type": kind, **{name: rows[kind][name] for name in names}} for kind in sorted(rows)]


def entity_interval(true: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> list[float]:
    """95 % bootstrap interval of the F1 over entities, `RESAMPLES` times over the sentences; [] without entities."""
    pairs = [(set(metrics.entity_spans(a)), set(metrics.entity_spans(b))) for a, b in zip(true, predicted, strict=True)]
    counts = np.array([(2 * len(a & b), len(a) + len(b)) for a, b in pairs], np.float64).reshape(-1, 2)
    if not counts[:, 1].any():
        return []
    draws = np.random.default_rng(0).multinomial(len(counts), np.full(len(counts), 1 / len(counts)), RESAMPLES)
    sums = draws @ counts
    return [float(bound) for bound in np.quantile(sums[:, 0] / np.maximum(sums[:, 1], 1.0), (0.025, 0.975))]


def _outcome(span: tuple[str, int, int], found: Sequence[tuple[str, int, int]]) -> str:
    if span in found:
        return "correct"
    if any(each[1:] == span[1:] for each in found):
        return "wrong_type"
    return "wrong_bounds" if any(_overlap(span, each) for each in found) else "missed"


def _overlap(first: tuple[str, int, int], second: tuple[str, int, int]) -> bool:
    return first[1] < second[2] and second[1] < first[2]
