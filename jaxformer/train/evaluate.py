"""Evaluation: the measures of a whole split, every example once, and the scores of decoded text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh

from jaxformer import metrics, tasks
from jaxformer.config import Config, components
from jaxformer.data.pipeline import Pipeline
from jaxformer.data.sources import Dataset, Example
from jaxformer.data.truncation import Truncation
from jaxformer.errors import ConfigError
from jaxformer.models import build
from jaxformer.tasks import Predictor, Sample, Task, _mixture
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
    return _measures(config, _sum_batches(config, eval_step, variables, batches, mesh), size, cut)


def _sum_batches(config: Config, eval_step: EvalStep, variables: PyTree, batches: Iterable[Batch], mesh: Mesh) -> Sums:
    total: Sums = {}
    balanced = build.uses_causal_ring(config.model, config.data.length)
    for batch in batches:
        sums = jax.device_get(eval_step(variables, steps.shard_batch(batch, mesh, balanced)))
        total = metrics.add(total, sums) if total else sums
    if not total:
        raise ConfigError("evaluation: got a split without examples, expected at least one; check config.data.splits")
    return total


def _measures(config: Config, total: Sums, size: Mapping[str, float], cut: Truncation | None) -> dict[str, float]:
    task, labels = tasks.get(config.task.name), {"labels": float(np.asarray(total["loss"][1]))}
    if cut is not None and len(cut.unread_labels):
        unread = task.unread_label_metrics(config, cut.unread_labels)
        total = {**total, **metrics.add({name: total[name] for name in unread}, unread)}
    values = task.derived_metrics(config, metrics.divide(total), {**size, **labels})
    return values | {name: float(count) for name, count in (cut.counts() if cut else {}).items() if count}


def make_eval_steps(config: Config, module: nn.Module) -> dict[str, EvalStep]:
    """The evaluation step of each component; components with the same metrics share a compiled one."""
    names = components.names(config) or ("",)
    groups = _mixture.same_functions(config, names)
    found = {}
    for view, members in groups:
        found |= dict.fromkeys(members, steps.make_eval_step(view, module))
    return found


def evaluate_components(
    config: Config,
    eval_steps: Mapping[str, EvalStep],
    variables: PyTree,
    pipelines: Mapping[str, Pipeline],
    split: str,
    examples: int | None,
    mesh: Mesh,
    watched: Callable[[Iterable[Batch]], Iterable[Batch]] = iter,
) -> tuple[dict[str, float], dict[str, Truncation]]:
    """The measures of a split of every component that has it, and what was truncated in it.

    Of a mixture: `loss/NAME` and all others by component, and without a name those that all components trained on have
    in common, over all of their examples.

    Args:
      eval_steps, pipelines: by component.
      examples: number of examples of each, the first ones; None: all.
      watched: passes batches through, for heartbeats.
    """
    views = components.views(config)
    chosen = {name: each for name, each in pipelines.items() if split in each.dataset.splits}
    cuts = {name: each.truncated(split, examples) for name, each in chosen.items()}
    if config.data.mixture is None:
        batches, size = pipelines[""].evaluate(split, examples), pipelines[""].size(split, examples)
        step, cut = eval_steps[""], cuts[""]
        return evaluate_batches(config, step, variables, watched(batches), size, mesh, cut), cuts
    sums, sizes, values = {}, {}, {}
    for name, pipeline in chosen.items():
        batches, sizes[name] = watched(pipeline.evaluate(split, examples)), pipeline.size(split, examples)
        sums[name] = _sum_batches(views[name], eval_steps[name], variables, batches, mesh)
        measured = _measures(views[name], sums[name], sizes[name], cuts[name])
        values |= {components.measure(measure, name): value for measure, value in measured.items()}
    return _mixture.whole(config, sums, sizes) | values, cuts


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


def decode_components(
    predictor_of: Callable[[Config], Predictor],
    config: Config,
    parts: Mapping[str, Dataset],
    split: str,
    examples: int | None,
) -> dict[str, Decoded]:
    """`decode` of every component that has the split, and a task with scores or samples, by name.

    Args:
      predictor_of: the predictor of a component's view.
      parts: data sets of the components, as `Dataset.components` has them.
      examples: number of examples of each; None: all.
    """
    return {
        name: decode(predictor_of(view), parts[name], split, examples)
        for name, view in components.views(config).items()
        if name in parts and split in parts[name].splits and tasks.get(view.task.name).has_samples
    }


def score_components(config: Config, decoded: Mapping[str, Decoded]) -> dict[str, float]:
    """The corpus measures of every component that has scores: `bleu/NAME`."""
    views = components.views(config)
    return {
        components.measure(measure, name): value
        for name, each in decoded.items()
        for measure, value in score(views[name], each).items()
    }


def records_of(decoded: Mapping[str, Decoded]) -> list[dict[str, str]]:
    """The records of all components, each with the name of its component."""
    return [
        {"component": name, **record} if name else record for name, each in decoded.items() for record in each.records
    ]


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
