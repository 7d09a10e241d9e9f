"""Runs that take a second, one for each way from data to batches: what `faults.py` interrupts and the tests resume."""

from __future__ import annotations

import json
import random
from pathlib import Path

from ml_collections import ConfigDict

from jaxformer.config import Config, MixtureConfig, StackConfig, overrides

STEPS = 24
STACK = dict(layers=1, width=16, attention=dict(heads=2), ffn=dict(width=16), embed=dict(dropout=0.1), unroll=1)
WORDS = [bytes([97 + i % 26]).decode() * (1 + i % 5) for i in range(26)]


def files(folder: Path) -> None:
    """The text and the table that some of the runs read."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 44), ("valid", 12)):
        lines = [" ".join(rng.choices(WORDS, k=rng.randrange(1, 6))) for _ in range(count)]
        (folder / f"{split}.txt").write_text("".join(line + "\n" for line in lines))
        rows = [{"text": line, "label": "long" if len(line) > 12 else "short"} for line in lines]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def config(name: str, folder: Path, **edits: object) -> Config:
    """The config of a run."""
    return overrides.freeze(recipe(name, folder, **edits))


def recipe(name: str, folder: Path, **edits: object) -> ConfigDict:
    """What a recipe of it returns; `edits` are by path, with `__` for the dot.

    Five batches an epoch, reports every 3 steps, checkpoints every 5, evaluations every 8: nothing falls together
    always, so that a kill meets every combination.
    """
    config = overrides.defaults()
    config.data.cache, config.data.dir = str(folder / "cache"), str(folder)
    config.data.batch, config.data.length, config.data.tokenizer.kind = 8, 16, "byte"
    config.train.steps, config.train.log_every = STEPS, 3
    config.train.checkpoint_every, config.train.evaluate_every = 5, 8
    config.checkpoint.keep_best = 2
    config.schedule.warmup, config.schedule.peak = 4, 1e-2
    config.evaluate.batch = 8
    RUNS[name](config)
    for path, value in edits.items():
        overrides.override(config, path.replace("__", "."), str(value))
    return config


def _text(config) -> None:
    config.data.source = "text"
    config.data.splits = {"train": ("train.txt",), "validation": ("valid.txt",)}


def _packed(config) -> None:
    """A language model on rows cut from one long text; two microbatches a step."""
    _text(config)
    config.data.packing, config.data.batch, config.train.accumulation = "concat", 8, 2
    config.task.name = "language_modelling"
    config.model.decoder = overrides.section(StackConfig, **STACK)


def _fitted(config) -> None:
    """A language model on rows that hold several texts each."""
    _text(config)
    config.data.packing, config.data.length, config.data.batch = "first_fit", 48, 4
    config.task.name = "language_modelling"
    config.model.decoder = overrides.section(StackConfig, **STACK)


def _bucketed(config) -> None:
    """Translation in buckets of a token budget, with a weight average."""
    config.data.source, config.data.name, config.data.tokenizer.kind = "algorithmic", "reverse/6", "character"
    config.data.examples, config.data.length, config.data.buckets, config.data.tokens = 40, 8, (4, 6), 64
    config.data.batch = 16
    config.model.encoder = overrides.section(StackConfig, **STACK)
    config.model.decoder = overrides.section(StackConfig, **STACK)
    config.model.share_embeddings = True
    config.train.ema = 0.9
    config.evaluate.examples = 16
    config.checkpoint.average = 2


def _masked(config) -> None:
    """A masked language model with batch norm: statistics that no gradient makes."""
    _text(config)
    config.task.name = "masked_lm"
    config.model.encoder = overrides.section(StackConfig, **STACK, norm=dict(kind="batch"))


def _classes(config) -> None:
    """Classification; Muon, which keeps two kinds of moments."""
    config.data.source = "table"
    config.data.splits = {"train": ("train.jsonl",), "validation": ("valid.jsonl",)}
    config.data.columns = {"text": "text", "label": "label"}
    config.task.name = "classification"
    config.model.encoder = overrides.section(StackConfig, **STACK)
    config.model.head.kind, config.model.head.pooling = "classes", "mean"
    config.optimizer.name = "muon"
    config.checkpoint.metric, config.checkpoint.mode = "accuracy", "max"


def _mixed(config) -> None:
    """Two tasks as text in one model, two microbatches a step, and the first under a prompt that is only evaluated."""
    labels = dict(source="table", columns={"text": "text", "label": "label"})
    splits = {"validation": ("valid.jsonl",), "test": ("valid.jsonl",)}
    as_text = lambda **template: dict(name="text_to_text", template=template)  # noqa: E731
    words = dict(target="{label}", words={"long": "a lot"})
    parts = dict(
        judge=labels | dict(splits={"train": ("train.jsonl",), **splits}, task=as_text(source="size: {text}", **words)),
        copy=dict(
            source="text",
            splits={"train": ("train.txt[:20]",), "validation": ("valid.txt",)},
            task=as_text(source="copy: {text}", target="{text}"),
        ),
        unseen=labels | dict(weight=0.0, splits=splits, task=as_text(source="{text} is", predict="rank", **words)),
    )
    config.data.mixture = overrides.section(MixtureConfig, components=parts, temperature=2.0)
    config.data.length, config.train.accumulation = 24, 2
    config.task.name = "text_to_text"
    config.model.encoder = overrides.section(StackConfig, **STACK)
    config.model.decoder = overrides.section(StackConfig, **STACK)
    config.model.share_embeddings = True
    config.checkpoint.metric = "loss/judge"


RUNS = {
    "packed": _packed,
    "fitted": _fitted,
    "bucketed": _bucketed,
    "masked": _masked,
    "classes": _classes,
    "mixed": _mixed,
}
