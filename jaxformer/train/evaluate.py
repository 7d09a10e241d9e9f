"""Evaluation: the measures of a whole split, every example once, and the scores of decoded text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh

from jaxformer import metrics, tasks
from jaxformer.config import Config, components
from jaxformer.data.pipeline import Pipeline
from jaxformer.data.sources import Dataset
from jaxformer.data.truncation import Truncation
from jaxformer.errors import ConfigError
from jaxformer.models import build
from jaxformer.tasks import Predictor, _mixture
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


def decode_components(
    predictor_of: Callable[[Config], Predictor], config: Config, dataset: Dataset, split: str, examples: int | None
) -> tuple[dict[str, float], list[dict]]:
    """`decode_and_score` of every component that has the split and a score, and the records of all, by component.

    Args:
      predictor_of: the predictor of a component's view.
      examples: number of examples of each; None: all.
    """
    values: dict[str, float] = {}
    records: list[dict] = []
    for name, view in components.views(config).items():
        part = dataset.components.get(name)
        if part is None or split not in part.splits or tasks.get(view.task.name).score is None:
            continue
        scores, found = decode_and_score(predictor_of(view), part, split, examples)
        values |= {components.measure(score, name): value for score, value in scores.items()}
        records += [{"component": name, **record} if name else record for record in found]
    return values, records


def decode_and_score(
    predictor: Predictor, dataset: Dataset, split: str, examples: int | None
) -> tuple[dict[str, float], list[dict]]:
    """Decodes and scores the first `examples` of a split (None: all).

    Returns:
      The task's corpus measures, and a record of input, output and reference for every example.
    """
    config = predictor.config
    task = tasks.get(config.task.name)
    part = dataset.splits[split]
    chosen = [part[i] for i in range(len(part) if examples is None else min(examples, len(part)))]
    lines = [task.input_line(example) for example in chosen]
    results = task.predict(predictor, lines, config.decode)
    records = [
        {"input": line, "output": task.output_line(result), "reference": task.reference_line(config, example)}
        for line, result, example in zip(lines, results, chosen, strict=True)
    ]
    return {} if task.score is None else task.score(config, results, chosen), records
