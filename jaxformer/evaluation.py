"""Evaluation of a trained run on a split: metrics of every example, and scores of decoded text."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxformer import tasks
from jaxformer.checkpoint import find_run
from jaxformer.config import Config, components, saved_edits
from jaxformer.data import sources
from jaxformer.data.pipeline import Pipeline
from jaxformer.data.sources import Dataset
from jaxformer.data.truncation import Truncation
from jaxformer.errors import ConfigError
from jaxformer.hf import workdirs
from jaxformer.model import Model
from jaxformer.parallel import mesh as meshes
from jaxformer.runtime import files
from jaxformer.tasks import _datasets
from jaxformer.train import by_length, metric_settings, reference, step, trackers
from jaxformer.train import evaluate as measuring
from jaxformer.train.by_length import BinnedEvaluation
from jaxformer.train.evaluate import Decoded
from jaxformer.train.lock import WorkdirLock
from jaxformer.train.setup import build_pipelines
from jaxformer.train.trackers import _delivery

LOG = logging.getLogger("jaxformer")


def evaluate(workdir: str | Path, split: str = "test", which: str = "", edits: Sequence[str] = ()) -> dict[str, Any]:
    """Evaluates a trained run on a split, and writes `eval-<split>.json` and the decoded text beside it.

    Only the files of this split are read.

    Args:
      which: the weights: "best", "last" or the number of a step; "": as the run's config says.
      edits: changes of the run's config, as `--config.data.dir=DIR`; see `saved_edits.EVALUATE_FIELDS`. The result
        lists them. The complete split is measured, decoded and written, unless an edit names `evaluate.examples`,
        `evaluate.decode_examples` or `evaluate.samples`: the run's own values are for validation during training.

    Raises:
      ConfigError: `workdir` is not a run, or its data has no such split, or it has no such checkpoint, or an edit would
        change the model.
    """
    workdir = Path(workdir)
    loaded = workdirs.load(workdir, which)
    edited = saved_edits.apply_edits(loaded.config, edits, saved_edits.EVALUATE_FIELDS, "evaluate")
    config, views = edited.config, components.views(edited.config)
    model = dataclasses.replace(loaded, config=config)
    limits = {
        name: getattr(config.evaluate, name) if f"evaluate.{name}" in edited.used else None
        for name in ("examples", "decode_examples", "samples")
    }
    dataset = _datasets.build(config, split)
    for name, view in views.items():
        if name in dataset.components:
            sources.check_channels(dataset.components[name], view.task.channels)
    begun = time.monotonic()
    values, cuts, binned = _measure(model, dataset, split, limits["examples"], find_run(workdir.absolute())[0])
    rows = [] if binned is None else binned.rows()
    decoded = _decode(model, dataset, split, limits)
    values |= _diagnose_series(model, dataset, split, limits)
    split_examples = {name: len(part.splits[split]) for name, part in dataset.components.items()}
    unmeasured: list[str] = []
    if decoded:
        records = measuring.records_of(decoded)
        values |= measuring.score_components(config, decoded)
        if binned is not None:
            rows = _add_scores(model, rows, binned, decoded[""])
        signatures = {
            measure: signature
            for name in decoded
            for score, signature in tasks.get(views[name].task.name).score_signatures(views[name]).items()
            if (measure := components.measure(score, name)) in values
        }
        values |= {"signatures": signatures} if signatures else {}
        unmeasured = [components.measure("bleu", name) for name in decoded
                      if "bleu" in tasks.get(views[name].task.name).score_signatures(views[name])
                      and components.measure("bleu", name) not in values]  # fmt: skip
        values |= _diagnose(views, decoded)
        scored = [name for name in decoded if tasks.get(views[name].task.name).score is not None]
        count = sum(len(decoded[name].records) for name in scored)
        values |= {"decoded_examples": count} if count < sum(split_examples[name] for name in scored) else {}
        files.write_json(workdir / "samples" / f"{split}.json", records[: limits["samples"]])
    notes = [cut.sentence(f"{name}, {split}" if name else split, config.data.length) for name, cut in cuts.items()]
    notes += [f"{split}: {name} is left out: no reference has the four words that it counts" for name in unmeasured]
    for line in filter(None, (*notes, edited.warning("evaluate"))):
        LOG.warning(line)
    result = {"split": split, "seconds": round(time.monotonic() - begun, 1), **_weights_used(model)}
    result |= {"examples": sum(cut.examples for cut in cuts.values()), **values}
    for name, cut in cuts.items():
        counts = cut.counts() | ({"examples": cut.examples} if name else {})
        result |= {components.measure(count, name): value for count, value in counts.items()}
        limited = cut.examples < split_examples[name]
        result |= {components.measure("split_examples", name): split_examples[name]} if limited else {}
    result |= {"changed": edited.changed} if edited.changed else {}
    result |= {"by_length": rows} if rows else {}
    files.write_json(workdir / f"eval-{split}.json", result)
    _track(loaded.config, workdir)
    return result


def _track(config: Config, workdir: Path) -> None:
    """Adds the measures to the trackers of a run; of one that is training, they are added when it ends."""
    if not config.train.trackers or not (workdir / "metrics.jsonl").exists() or jax.process_count() > 1:
        return
    try:
        trackers.check_available(config.train.trackers)
        with WorkdirLock(workdir.absolute()):
            _delivery.publish(config, workdir.absolute(), LOG.warning)
    except ConfigError as error:
        LOG.warning("not tracked: %s", error)


def _decode(model: Model, dataset: Dataset, split: str, limits: Mapping[str, int | None]) -> dict[str, Decoded]:
    """The decoded examples of each component; none if nothing is to be decoded.

    Components without scores and diagnosis have nothing measured on decoded text. They are shown if an edit asks for
    it.
    """
    config, views = model.config, components.views(model.config)
    limit, shown = limits["decode_examples"], dataset.components
    if limit is None:
        limit = limits["examples"]
        shown = {name: part for name, part in shown.items() if _is_decoded(tasks.get(views[name].task.name))}
    if limit == 0 or not shown:
        return {}
    metric_settings.check_samples_exist(config)
    predictor_of = lambda view: dataclasses.replace(model, config=view).predictor  # noqa: E731
    return measuring.decode_components(predictor_of, config, shown, split, limit)


def _is_decoded(task: tasks.Task) -> bool:
    """True if an evaluation measures the task's results, and not only its logits."""
    return task.score is not None or task.diagnose is not None


def _diagnose(views: Mapping[str, Config], decoded: Mapping[str, Decoded]) -> dict[str, Any]:
    """The task's diagnosis of every component that has one: "diagnosis", or "diagnosis/NAME" in a mixture."""
    found = {}
    for name, each in decoded.items():
        diagnose = tasks.get(views[name].task.name).diagnose
        if diagnose is not None:
            found[components.measure("diagnosis", name)] = diagnose(views[name], each.results, each.examples)
    return found


def _diagnose_series(model: Model, dataset: Dataset, split: str, limits: Mapping[str, int | None]) -> dict[str, Any]:
    """`_diagnose` of components whose examples are arrays. They have no text, so as many are read as are measured."""
    found = {}
    for name, view in components.views(model.config).items():
        diagnose = tasks.get(view.task.name).diagnose_series
        part = dataset.components.get(name)
        if diagnose is None or part is None or split not in part.splits or limits["decode_examples"] == 0:
            continue
        count = len(part.splits[split])
        chosen = range(count if limits["examples"] is None else min(limits["examples"], count))
        examples = [part.splits[split][index] for index in chosen]
        found[components.measure("diagnosis", name)] = diagnose(
            dataclasses.replace(model, config=view).predictor, examples
        )
    return found


def _add_scores(
    model: Model, rows: list[dict[str, Any]], binned: BinnedEvaluation, decoded: Decoded
) -> list[dict[str, Any]]:
    """`rows` by length with the scores of the decoded text of each bin."""
    prompts = model.predictor.prompts(decoded.inputs)
    lengths = [len(prompt[model.config.model.input_side]) for prompt in prompts]
    return by_length.add_scores(model.config, rows, binned.bins, lengths, decoded.results, decoded.examples)


def _measure(
    model: Model, dataset: Dataset, split: str, examples: int | None, workdir: Path
) -> tuple[dict[str, Any], dict[str, Truncation], BinnedEvaluation | None]:
    """The metrics of the first `examples` of a split (None: all), what was truncated in them, and those by length.

    Metrics by length are of a run without a mixture.
    """
    config = model.config
    if model.tokenizers is None and config.model.reads_tokens:
        raise ConfigError("evaluate: got a run without tokenizers, expected some to read its data; use another run")
    mesh = meshes.smallest_mesh(config.mesh)
    with jax.set_mesh(mesh):
        if reference.is_needed(config):
            found = reference.recorded(workdir)
            # Of this split alone: others, which some sources have all the same, have no values.
            dataset = dataclasses.replace(dataset, splits={split: dataset.splits[split]})
            dataset, _ = reference.attach(
                config, dataset, {split: examples}, model.tokenizers, mesh, workdirs.ORIGIN, found
            )
        pipelines = build_pipelines(config, dataset, model.tokenizers)
        binned = None
        if config.data.mixture is None:
            binned = _by_length(model, pipelines[""], split, examples)
        eval_steps = measuring.make_eval_steps(config, model.module) if binned is None else {"": binned}
        variables = model.inference_variables()
        values, cuts = measuring.evaluate_components(config, eval_steps, variables, pipelines, split, examples, mesh)
        return values, cuts, binned


def _by_length(model: Model, pipeline: Pipeline, split: str, examples: int | None) -> BinnedEvaluation | None:
    """An evaluation step that also measures by length; None for tasks whose rows have no length, or all the same."""
    config = model.config
    lengths = np.zeros(0, int)
    if by_length.applies(config) and not config.evaluate.length_bins:
        lengths = np.concatenate([by_length.row_lengths(config, b) for b in pipeline.evaluate(split, examples)])
    bins = by_length.choose_bins(config, lengths)
    if not bins.upper:
        return None
    return BinnedEvaluation(step.make_binned_eval_step(config, model.module, bins.upper), bins)


def _weights_used(model: Model) -> dict[str, Any]:
    """The checkpoints that the parameters come from, in words and as values."""
    weights = model.weights
    if weights is None:
        return {}
    return {"weights": weights.describe(), "checkpoint": weights._asdict() | {"steps": list(weights.steps)}}
