"""Evaluation of a trained run on a split: metrics of every example, and scores of decoded text."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxformer import tasks
from jaxformer.config import saved_edits
from jaxformer.data import sources
from jaxformer.data.pipeline import Pipeline
from jaxformer.data.sources import Dataset
from jaxformer.data.truncation import Truncation
from jaxformer.errors import ConfigError
from jaxformer.hf import workdirs
from jaxformer.model import Model
from jaxformer.parallel import mesh as meshes
from jaxformer.runtime import files
from jaxformer.train import by_length, metric_settings, step
from jaxformer.train import evaluate as measuring
from jaxformer.train.by_length import BinnedEvaluation

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
    model = dataclasses.replace(loaded, config=edited.config)
    config, task = edited.config, tasks.get(edited.config.task.name)
    limits = {
        name: getattr(config.evaluate, name) if f"evaluate.{name}" in edited.used else None
        for name in ("examples", "decode_examples", "samples")
    }
    dataset = sources.with_classes(sources.build(config.data, task.roles, split), config.task.classes)
    sources.check_channels(dataset, config.task.channels)
    begun = time.monotonic()
    values, cut, binned = _measure(model, dataset, split, limits["examples"])
    rows = [] if binned is None else binned.rows()
    decode_limit = limits["examples"] if limits["decode_examples"] is None else limits["decode_examples"]
    if task.score is None:  # nothing is measured on decoded text: it is shown if an edit asks for it
        decode_limit = limits["decode_examples"] or 0
    if decode_limit != 0:
        metric_settings.check_samples_exist(config)
        decoded = measuring.decode(model.predictor, dataset, split, decode_limit)
        scores, records = measuring.score(config, decoded), decoded.records
        if binned is not None:
            prompts = model.predictor.prompts(decoded.inputs)
            lengths = [len(prompt[config.model.input_side]) for prompt in prompts]
            rows = by_length.add_scores(config, rows, binned.bins, lengths, decoded.results, decoded.examples)
        signatures = task.score_signatures(config)
        values |= scores | ({"signatures": signatures} if signatures else {})
        values |= {"decoded_examples": len(records)} if task.score and len(records) < len(dataset.splits[split]) else {}
        files.write_json(workdir / "samples" / f"{split}.json", records[: limits["samples"]])
    for line in filter(None, (cut.sentence(split, config.data.length), edited.warning("evaluate"))):
        LOG.warning(line)
    result = {"split": split, "seconds": round(time.monotonic() - begun, 1), **_weights_used(model)}
    result |= {"examples": cut.examples, **values, **cut.counts()}
    split_examples = len(dataset.splits[split])
    result |= {"split_examples": split_examples} if cut.examples < split_examples else {}
    result |= {"changed": edited.changed} if edited.changed else {}
    result |= {"by_length": rows} if rows else {}
    files.write_json(workdir / f"eval-{split}.json", result)
    return result


def _measure(
    model: Model, dataset: Dataset, split: str, examples: int | None
) -> tuple[dict[str, Any], Truncation, BinnedEvaluation | None]:
    """The metrics of the first `examples` of a split (None: all), what was truncated in them, and those by length."""
    config = model.config
    if model.tokenizers is None and config.model.reads_tokens:
        raise ConfigError("evaluate: got a run without tokenizers, expected some to read its data; use another run")
    pipeline = Pipeline(config, dataset, model.tokenizers, tasks.get(config.task.name))
    mesh = meshes.smallest_mesh(config.mesh)
    with jax.set_mesh(mesh):
        binned = _by_length(model, pipeline, split, examples)
        eval_step = step.make_eval_step(config, model.module) if binned is None else binned
        batches, cut = pipeline.evaluate(split, examples), pipeline.truncated(split, examples)
        size = pipeline.size(split, examples)
        variables = model.inference_variables()
        return measuring.evaluate_batches(config, eval_step, variables, batches, size, mesh, cut), cut, binned


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
