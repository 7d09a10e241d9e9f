"""Evaluation: the measures of a whole split, every example once, and the scores of decoded text."""

from __future__ import annotations

import dataclasses
import logging
import time
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Sequence

import jax
from flax import linen as nn
from jax.sharding import Mesh

from jaxformer import checkpoint, files, metrics, reuse, tasks
from jaxformer.config import Config, ConfigError
from jaxformer.data import sources
from jaxformer.data.cuts import Cut
from jaxformer.data.pipeline import Pipeline
from jaxformer.data.sources import Dataset
from jaxformer.model import Model
from jaxformer.models import build
from jaxformer.parallel import mesh as meshes
from jaxformer.train import step as steps
from jaxformer.types import Batch, PyTree, Sums

LOG = logging.getLogger("jaxformer")
Measure = Callable[[PyTree, Batch], Sums]


def make(config: Config, module: nn.Module) -> Measure:
    """The compiled function `(variables, batch) -> sums`; no dropout key is supplied, so nothing is random."""
    task = tasks.get(config.task.name)

    def measure(variables: PyTree, batch: Batch) -> Sums:
        return task.metrics(config, module.apply(variables, batch, whole=False), batch)

    return jax.jit(measure)


def weights(config: Config, params: PyTree, variables: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """What evaluation and decoding apply: the running average in place of the parameters, if the run keeps one."""
    others = {name: value for name, value in variables.items() if name != "ema"}
    return {"params": params if config.train.ema is None else variables["ema"], **others}


def measure(
    config: Config,
    function: Measure,
    variables: PyTree,
    batches: Iterable[Batch],
    size: Mapping[str, float],
    mesh: Mesh,
    cut: Cut | None = None,
) -> dict[str, float]:
    """The measures of one pass over `batches`: sums first, one division at the end.

    Args:
      size: of the text of exactly these batches, see `Pipeline.size`.
      cut: what is missing in them. It counts where a measure can count it, and is among the measures if there is any.
    """
    total: Sums = {}
    balanced = build.ring(config.model, config.data.length)
    for batch in batches:
        sums = jax.device_get(function(variables, steps.place(batch, mesh, balanced)))
        total = metrics.add(total, sums) if total else sums
    if not total:
        raise ConfigError("evaluation: got a split without examples, expected at least one; check config.data.splits")
    task, labels = tasks.get(config.task.name), {"labels": float(total["loss"][1])}
    if cut is not None and len(cut.unread):
        more = task.unread(config, cut.unread)
        total |= metrics.add({name: total[name] for name in more}, more)
    values = task.finish(config, metrics.divide(total), {**size, **labels})
    return values | {name: float(count) for name, count in (cut.counts() if cut else {}).items() if count}


def decode(model: Model, dataset: Dataset, split: str, examples: int | None) -> tuple[dict[str, float], list[dict]]:
    """Decodes and scores the first `examples` of a split (None: all).

    Returns:
      The task's corpus measures, and a record of input, output and reference for every example.
    """
    config = model.config
    task = tasks.get(config.task.name)
    part = dataset.splits[split]
    chosen = [part[i] for i in range(len(part) if examples is None else min(examples, len(part)))]
    lines = [task.input(example) for example in chosen]
    results = task.decode(model, lines, config.decode)
    records = [
        {"input": line, "output": task.line(result), "reference": task.reference(config, example)}
        for line, result, example in zip(lines, results, chosen, strict=True)
    ]
    return task.score(config, results, chosen), records


def evaluate(workdir: str | Path, split: str = "test", which: str = "", edits: Sequence[str] = ()) -> dict[str, Any]:
    """Evaluates a trained run on a split, and writes `eval-<split>.json` and the decoded text beside it.

    Only the files of this split are read.

    Args:
      which: the weights: "best", "last" or the number of a step; "": as the run's config says.
      edits: of the run's config, as `--config.data.dir=DIR`; see `reuse.EVALUATION`. The result says them. All of the
        split is measured, decoded and kept, unless an edit names `evaluate.examples`, `evaluate.decode_examples` or
        `evaluate.samples`: the run's own values are those of validation during training.

    Raises:
      ConfigError: `workdir` is not a run, or its data has no such split, or it has no such checkpoint, or an edit would
        change the model.
    """
    workdir = Path(workdir)
    model = checkpoint.load(workdir, which)
    edited = reuse.edited(model.config, edits, reuse.EVALUATION, "evaluate")
    config = edited.config
    limits = {
        name: getattr(config.evaluate, name) if f"evaluate.{name}" in edited.given else None
        for name in ("examples", "decode_examples", "samples")
    }
    model = dataclasses.replace(model, config=config)
    task = tasks.get(config.task.name)
    dataset = sources.numbered_as(sources.build(config.data, task.roles, split), config.task.classes)
    begun = time.monotonic()
    devices = meshes.smallest(config.mesh)
    pipeline = Pipeline(config, dataset, model.tokenizers, task)
    with jax.set_mesh(devices):
        function = make(config, model.module)
        variables = {"params": model.params, **model.variables}
        part = (split, limits["examples"])
        batches, size, cut = pipeline.evaluate(*part), pipeline.size(*part), pipeline.cut(*part)
        result = measure(config, function, variables, batches, size, devices, cut)
    decoded = limits["examples"] if limits["decode_examples"] is None else limits["decode_examples"]
    if task.score is not None and decoded != 0:
        scores, records = decode(model, dataset, split, decoded)
        signatures = task.signatures(config)
        result |= scores | ({"signatures": signatures} if signatures else {})
        result |= {"decoded_examples": len(records)} if len(records) < len(dataset.splits[split]) else {}
        files.write_json(workdir / "samples" / f"{split}.json", records[: limits["samples"]])
    for line in filter(None, (cut.sentence(split, config.data.length), edited.complaint("evaluate"))):
        LOG.warning(line)
    used = model.weights._asdict() | {"steps": list(model.weights.steps)}
    about = {"weights": model.weights.sentence(), "checkpoint": used}
    seconds = round(time.monotonic() - begun, 1)
    result = {"split": split, "seconds": seconds, **about, "examples": cut.examples, **result, **cut.counts()}
    whole = len(dataset.splits[split])
    result |= {"split_examples": whole} if cut.examples < whole else {}
    result |= {"changed": edited.changed} if edited.changed else {}
    files.write_json(workdir / f"eval-{split}.json", result)
    return result
