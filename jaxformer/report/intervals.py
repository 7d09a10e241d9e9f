"""Confidence intervals of measures, from what an evaluation wrote: 95 %, over the examples of the split.

They say how much a measure would vary with other examples of the same kind. What varies with the seed of training is
in the deviation over seeds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxformer.report.runs import Run, as_float

Z = 1.959964
"""97.5 % quantile of the normal distribution."""

RESAMPLES = 1000
"""Samples of a bootstrap, which has a fixed seed."""

TEXTS = ("output", "reference")

CLASSIFICATION = ("classification", "series_classification")
"""Tasks whose accuracy counts examples; elsewhere it counts tokens, which depend on each other."""


@dataclass(frozen=True)
class Interval:
    """Bounds of a measure, and how they were found."""

    low: float
    high: float
    how: str


def interval(run: Run, split: str, measure: str) -> Interval | None:
    """The interval of a measure of `eval-<split>.json`; None if none can be given honestly."""
    values = run.evaluations.get(split, {})
    value = as_float(values.get(measure))
    if not math.isfinite(value):
        return None
    decoded = values.get("decoded_examples", values.get("examples"))
    task = run.config.task.name if run.config else ""
    is_share = measure == "exact_match" or (measure == "accuracy" and task in CLASSIFICATION)
    if is_share and isinstance(decoded, int) and decoded > 0 and 0 <= value <= 1:
        return wilson(value, decoded if measure == "exact_match" else values.get("examples", decoded))
    bounds = values["diagnosis"].get("f1_interval") if isinstance(values.get("diagnosis"), dict) else None
    if measure == "f1" and isinstance(bounds, list) and len(bounds) == 2:
        low, high = map(as_float, bounds)
        return Interval(low, high, f"bootstrap over {decoded:,} examples, {RESAMPLES:,} resamples")
    records = run.samples.get(split, [])
    if measure in ("bleu", "chrf") and records and len(records) == decoded:
        found = bootstrap(measure, records, run.config.task.language if run.config else "")
        # The same text gives the same score. If it does not, the file is of another evaluation.
        return found[1] if found is not None and abs(found[0] - value) < 0.01 else None
    return None


def wilson(share: float, count: int) -> Interval:
    """The score interval of a proportion (Wilson 1927)."""
    scale = 1 + Z**2 / count
    middle = (share + Z**2 / (2 * count)) / scale
    half = Z * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2)) / scale
    return Interval(max(middle - half, 0.0), min(middle + half, 1.0), f"Wilson interval of {count:,} examples")


def bootstrap(measure: str, records: Sequence[dict[str, Any]], language: str = "") -> tuple[float, Interval] | None:
    """sacreBLEU's score of the outputs, and its bootstrap interval (Koehn 2004): mean and half-width over resamples.

    None if a record lacks its text. `language` is that of the references, by whose words BLEU counts.
    """
    import sacrebleu

    outputs, references = ([text for r in records if isinstance(text := r.get(key), str)] for key in TEXTS)
    if not len(outputs) == len(references) == len(records):
        return None
    metric = sacrebleu.BLEU(trg_lang=language) if measure == "bleu" else sacrebleu.CHRF()
    score = metric.corpus_score(outputs, [references], n_bootstrap=RESAMPLES)
    found = json.loads(score.format(is_json=True, signature=metric.get_signature().format()))
    mean, half = as_float(found.get("confidence_mean")), as_float(found.get("confidence_var"))
    if not math.isfinite(mean + half):
        return None
    how = f"bootstrap over {len(records):,} examples, {RESAMPLES:,} resamples"
    return float(score.score), Interval(mean - half, mean + half, how)
