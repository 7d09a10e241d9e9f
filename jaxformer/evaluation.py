"""Evaluation of a trained run on a split: metrics of every example, and scores of decoded text."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxformer import tasks
from jaxformer.config import components, saved_edits
from jaxformer.data.sources import Dataset
from jaxformer.data.truncation import Truncation
from jaxformer.errors import ConfigError
from jaxformer.hf import workdirs
from jaxformer.model import Model
from jaxformer.parallel import mesh as meshes
from jaxformer.runtime import files
from jaxformer.tasks import _datasets
from jaxformer.train import evaluate as measuring
from jaxformer.train.setup import build_pipelines

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
    begun = time.monotonic()
    values, cuts = _measure(model, dataset, split, limits["examples"])
    decode_limit = limits["examples"] if limits["decode_examples"] is None else limits["decode_examples"]
    scored = [name for name in dataset.components if tasks.get(views[name].task.name).score is not None]
    split_examples = {name: len(part.splits[split]) for name, part in dataset.components.items()}
    if scored and decode_limit != 0:
        predictor_of = lambda view: dataclasses.replace(model, config=view).predictor  # noqa: E731
        scores, records = measuring.decode_components(predictor_of, config, dataset, split, decode_limit)
        signatures = {
            components.measure(score, name): signature
            for name in scored
            for score, signature in tasks.get(views[name].task.name).score_signatures(views[name]).items()
        }
        values |= scores | ({"signatures": signatures} if signatures else {})
        complete = sum(split_examples[name] for name in scored)
        values |= {"decoded_examples": len(records)} if len(records) < complete else {}
        files.write_json(workdir / "samples" / f"{split}.json", records[: limits["samples"]])
    notes = [cut.sentence(f"{name}, {split}" if name else split, config.data.length) for name, cut in cuts.items()]
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
    files.write_json(workdir / f"eval-{split}.json", result)
    return result


def _measure(
    model: Model, dataset: Dataset, split: str, examples: int | None
) -> tuple[dict[str, Any], dict[str, Truncation]]:
    """The metrics of the first `examples` of a split (None: all), and what was truncated in them, by component."""
    config = model.config
    if model.tokenizers is None:
        raise ConfigError("evaluate: got a run without tokenizers, expected some to read its data; use another run")
    pipelines = build_pipelines(config, dataset, model.tokenizers)
    mesh = meshes.smallest_mesh(config.mesh)
    with jax.set_mesh(mesh):
        eval_steps, variables = measuring.make_eval_steps(config, model.module), model.inference_variables()
        return measuring.evaluate_components(config, eval_steps, variables, pipelines, split, examples, mesh)


def _weights_used(model: Model) -> dict[str, Any]:
    """The checkpoints that the parameters come from, in words and as values."""
    weights = model.weights
    if weights is None:
        return {}
    return {"weights": weights.describe(), "checkpoint": weights._asdict() | {"steps": list(weights.steps)}}
