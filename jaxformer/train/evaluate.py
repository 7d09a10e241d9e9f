"""Evaluation: the measures of a whole split, every example once, and the scores of decoded text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxformer import metrics, tasks
from jaxformer.config import Config
from jaxformer.data.sources import Dataset, Example
from jaxformer.data.truncation import Truncation
from jaxformer.errors import ConfigError
from jaxformer.models import build
from jaxformer.tasks import Predictor, Sample, Task
from jaxformer.train import step as steps
from jaxformer.types import Batch, PyTree, Sums

LOG = logging.getLogger("jaxformer")
EvalStep = Callable[[PyTree, Batch], Sums]


def evaluate_batches(
    config: Config,
    eval_step: EvalStep,
    variables: PyTree,
    batches: Iterable[Batch],
    size: Mapping[str, float],
    mesh: Mesh,
    cut: Truncation | None = None,
) -> dict[str, float]:
    """The measures over all of `batches`: their sums, divided once at the end.

    Args:
      eval_step: `(variables, batch) -> sums`.
      size: size of the text in exactly these batches, see `Pipeline.size`.
      cut: text that did not fit into the batches. Measures that can count it do, and its counts are among the measures
        if there is any.

    Raises:
      ConfigError: there is no batch.
    """
    total: Sums = {}
    balanced = build.uses_causal_ring(config.model, config.data.length)
    for batch in batches:
        sums = jax.device_get(eval_step(variables, steps.shard_batch(batch, mesh, balanced)))
        total = metrics.add(total, sums) if total else sums
    if not total:
        raise ConfigError("evaluation: got a split without examples, expected at least one; check config.data.splits")
    task, labels = tasks.get(config.task.name), {"labels": float(np.asarray(total["loss"][1]))}
    if cut is not None and len(cut.unread_labels):
        unread = task.unread_label_metrics(config, cut.unread_labels)
        total = {**total, **metrics.add({name: total[name] for name in unread}, unread)}
    values = task.derived_metrics(config, metrics.divide(total), {**size, **labels})
    return values | {name: float(count) for name, count in (cut.counts() if cut else {}).items() if count}


class Decoded(NamedTuple):
    """Decoded examples.

    Attributes:
      inputs: the input lines.
      results: of the task, one for each input.
      examples: the examples.
      records: input, output and reference of each, with a note where the input is not all of the example.
    """

    inputs: list[str]
    results: Sequence[Any]
    examples: list[Example]
    records: list[dict[str, str]]


def decode_and_score(
    predictor: Predictor, dataset: Dataset, split: str, examples: int | None
) -> tuple[dict[str, float], list[dict]]:
    """Decodes the first `examples` of a split (None: all), and scores them if the task has scores.

    Returns:
      The task's corpus measures, and the records of the examples.
    """
    decoded = decode(predictor, dataset, split, examples)
    return score(predictor.config, decoded), decoded.records


def score(config: Config, decoded: Decoded) -> dict[str, float]:
    """The task's corpus measures; none if it has no scores."""
    task = tasks.get(config.task.name)
    return {} if task.score is None else task.score(config, decoded.results, decoded.examples)


def decode(predictor: Predictor, dataset: Dataset, split: str, examples: int | None) -> Decoded:
    """Decodes the first `examples` of a split (None: all)."""
    config = predictor.config
    task = tasks.get(config.task.name)
    part = dataset.splits[split]
    chosen = [part[i] for i in range(len(part) if examples is None else min(examples, len(part)))]
    samples = [_sample(predictor, task, index, example) for index, example in enumerate(chosen)]
    inputs = [sample.input for sample in samples]
    results = task.predict(predictor, inputs, config.decode)
    records = [
        {"input": sample.input, "output": task.output_line(result), "reference": sample.reference}
        | ({"note": sample.note} if sample.note else {})
        for sample, result in zip(samples, results, strict=True)
    ]
    return Decoded(inputs, results, chosen, records)


def _sample(predictor: Predictor, task: Task, index: int, example: Example) -> Sample:
    """What is decoded of example number `index`: the same in every evaluation, whatever the run's seed."""
    config = predictor.config
    if task.score is not None or task.sample is None:
        return Sample(task.input_line(example), task.reference_line(config, example))
    return task.sample(config, predictor.framing.tokenizers, example, np.random.default_rng(index))
