"""A short text that summarises a long one: trained like translation, scored by ROUGE (Lin 2004)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxformer import metrics
from jaxformer.config import Config
from jaxformer.data.sources import Example
from jaxformer.tasks import translation


def score(config: Config, results: Sequence[str], examples: Sequence[Example]) -> dict[str, float]:
    """ROUGE-1, ROUGE-2 and ROUGE-L (0 to 100)."""
    scores = metrics.rouge(results, [example["target"] for example in examples])
    return {name: score.value for name, score in scores.items()}


def score_signatures(config: Config) -> dict[str, str]:
    """The signature of each score of `score`. It does not depend on the text."""
    return {name: score.signature for name, score in metrics.rouge(["a"], ["a"]).items()}


TASK = dataclasses.replace(
    translation.TASK,
    score=score,
    score_names=("rouge1", "rouge2", "rouge_l"),
    score_signatures=score_signatures,
)
