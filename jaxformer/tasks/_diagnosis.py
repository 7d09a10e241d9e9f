"""Diagnosis of an evaluation: confusion matrix, calibration, errors with entities, of sets, numbers and forecasts.
Values are JSON; `jaxformer.report` shows them."""

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

MAX_POINTS = 500
"""Pairs of a true and a predicted number that are kept, drawn evenly: more would hide each other."""

GROUPS = 10
"""Groups of equally many predictions, in their order, whose mean is compared with that of the true numbers."""

MAX_STEPS = 100
"""Steps of a forecast that are kept, evenly spaced with the first and the last one."""

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


def set_errors(
    classes: Sequence[str], true: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]
) -> list[dict[str, Any]]:
    """For each class of sets `{"label", "true", "predicted", "correct"}`: in how many sets it is, was put, and both.

    The `MAX_CLASSES` classes in most true sets, in that order; those in no set of either kind are left out.
    """
    counts = {name: Counter[str]() for name in classes}
    for own, found in zip(true, predicted, strict=True):
        for name in {*own, *found}:
            is_true, is_found = name in own, name in found
            counts[name].update({"true": is_true, "predicted": is_found, "correct": is_true and is_found})
    seen = [name for name in classes if counts[name]["true"] or counts[name]["predicted"]]
    seen = sorted(seen, key=lambda name: -counts[name]["true"])[:MAX_CLASSES]
    return [{"label": name, **{key: counts[name][key] for key in ("true", "predicted", "correct")}} for name in seen]


def number_errors(true: Sequence[float], predicted: Sequence[float]) -> dict[str, Any]:
    """Predicted numbers against true ones; {} without any.

    Returns:
      `examples`; `error`, the root of the mean squared error; `bias`, the mean of predicted less true; `points`,
      `[true, predicted]` of at most `MAX_POINTS` examples; and `groups` of similar predictions, from the lowest to the
      highest, `{"count", "predicted", "true", "deviation"}`: their means, and the standard deviation of the true ones.
      Predictions are calibrated where both means agree.
    """
    own, found = np.asarray(true, np.float64), np.asarray(predicted, np.float64)
    if not len(own):
        return {}
    order = np.argsort(found, kind="stable")
    chosen = np.arange(len(own))
    if len(own) > MAX_POINTS:
        chosen = np.sort(np.random.default_rng(0).choice(len(own), MAX_POINTS, replace=False))
    groups = [
        {
            "count": len(members),
            "predicted": float(found[members].mean()),
            "true": float(own[members].mean()),
            "deviation": float(own[members].std()),
        }
        for members in np.array_split(order, min(GROUPS, len(order)))
    ]
    return {
        "examples": len(own),
        "error": float(np.sqrt(np.mean(np.square(found - own)))),
        "bias": float(np.mean(found - own)),
        "points": np.stack([own, found], axis=1)[chosen].tolist(),
        "groups": groups,
    }


class ForecastErrors:
    """Sums of the errors of forecasts, by time step and by channel, over blocks of windows.

    Args:
      scale: deviations of the channels `[C]`, which errors are divided by, as the measures are.
    """

    def __init__(self, scale: np.ndarray) -> None:
        self.scale, self.count = scale, 0
        self.squared, self.absolute, self.naive = (np.zeros(()) for _ in range(3))

    def add(self, forecast: np.ndarray, future: np.ndarray, last: np.ndarray) -> None:
        """Adds forecasts `[B, H, C]`, what came `[B, H, C]` and the last known steps `[B, C]`."""
        error, naive = (forecast - future) / self.scale, (last[:, None] - future) / self.scale
        self.count += len(future)
        self.squared = self.squared + np.square(error).sum(axis=0)
        self.absolute = self.absolute + np.abs(error).sum(axis=0)
        self.naive = self.naive + np.square(naive).sum(axis=0)

    def values(self, channels: Sequence[str]) -> dict[str, Any]:
        """Means of squared error ("mse"), absolute error ("mae") and the squared error of repeating the last known
        step ("naive_mse"): by `steps` after the last known one, and by `channels`. {} without windows."""
        if not self.count:
            return {}
        means = {"mse": self.squared, "mae": self.absolute, "naive_mse": self.naive}
        means = {name: values / self.count for name, values in means.items()}
        horizon = len(means["mse"])
        kept = np.unique(np.linspace(0, horizon - 1, min(horizon, MAX_STEPS)).round().astype(int))
        steps = {name: values.mean(axis=1)[kept].tolist() for name, values in means.items()}
        by_channel = {name: values.mean(axis=0).tolist() for name, values in means.items()}
        return {
            "steps": {"step": (kept + 1).tolist(), **steps},
            "channels": {"channel": list(channels), **by_channel},
        }


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
