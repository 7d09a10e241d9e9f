"""A short text that says what a long one says: learned as a translation is, judged by ROUGE (Lin 2004)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Sequence

from jaxformer import metrics
from jaxformer.config import Config
from jaxformer.tasks import translation

if TYPE_CHECKING:
    from jaxformer.data.sources import Example


def score(config: Config, results: Sequence[str], examples: Sequence[Example]) -> dict[str, float]:
    """ROUGE-1, ROUGE-2 and ROUGE-L (0 to 100)."""
    scores = metrics.rouge(results, [example["target"] for example in examples])
    return {name: score.value for name, score in scores.items()}


def signatures(config: Config) -> dict[str, str]:
    """What exactly each score of `score` is. It does not depend on the text."""
    return {name: score.signature for name, score in metrics.rouge(["a"], ["a"]).items()}


TASK = dataclasses.replace(translation.TASK, score=score, scores=("rouge1", "rouge2", "rouge_l"), signatures=signatures)
