"""Loss of an n-gram model beside that of a trained language model: the same tokens to learn from, the same windows.

    python benchmarks/ngram_baseline.py --workdir=RUN [--split=validation] [--order=5] [--config.data.dir=DIR]
    python benchmarks/ngram_baseline.py --config=configs/wikitext2.py --config.data.dir=DIR    without a run

The n-gram model is interpolated, modified Kneser-Ney (jaxformer/data/ngrams.py) over the run's tokenizer. It counts the
training texts, and reads what `jaxformer evaluate` reads: rows of at most `data.length` tokens, of which it sees
nothing before the first. Per token, per word and per byte are as in `eval-<split>.json`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from jaxformer import tasks
from jaxformer.config import Config, overrides, saved_edits
from jaxformer.data import ngrams, sources
from jaxformer.data.pipeline import Pipeline
from jaxformer.data.sources import Dataset
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.errors import ConfigError
from jaxformer.hf import workdirs
from jaxformer.tasks import _tokens
from jaxformer.types import Batch

TASK = "language_modelling"


def training_sequences(config: Config, dataset: Dataset, tokenizers: Tokenizers) -> list[np.ndarray]:
    """The training texts as the run frames them: `<bos> text <eos>` each, or all in one with packing "concat"."""
    tokenizer, examples = tokenizers.target, dataset.splits["train"]
    first = _tokens.start_token(tokenizer, TASK)
    last = _tokens.required_token(tokenizer, TASK, "eos", "sep")
    count = len(examples) if config.data.examples is None else min(config.data.examples, len(examples))
    texts = [np.array([*tokenizer.encode(examples[i]["text"]), last]) for i in range(count)]
    if config.data.packing == "concat":
        return [np.concatenate([[first], *texts])]
    return [np.concatenate([[first], text]) for text in texts]


def evaluated_sequences(batches: Iterable[Batch]) -> list[np.ndarray]:
    """The token before each window and its labels, for every segment of every row."""
    found = []
    for batch in batches:
        target, labels = batch.side("target"), np.asarray(batch.labels)
        for tokens, segment, row in zip(np.asarray(target.tokens), np.asarray(target.slots.segment), labels):
            for number in range(1, segment.max(initial=0) + 1):
                slots = np.flatnonzero(segment == number)
                found.append(np.concatenate([tokens[slots[:1]], row[slots]]))
    return found


def measure(workdir: Path | None, split: str, order: int, edits: Sequence[str] = ()) -> dict[str, float]:
    """The measures of the n-gram model on a split, by the names of `eval-<split>.json`.

    Args:
      workdir: a run; None: the recipe that `edits` name, with the tokenizer that its training would learn.

    Raises:
      ConfigError: the task is no language modelling, or the data has no training split or no such split.
    """
    if workdir is None:
        config, tokenizers = overrides.parse(edits), None
    else:
        loaded = workdirs.load(workdir, "")
        config = saved_edits.apply_edits(loaded.config, edits, saved_edits.EVALUATE_FIELDS, "evaluate").config
        tokenizers = loaded.tokenizers
    if config.task.name != TASK:
        raise ConfigError(f"config.task.name: got {config.task.name}, expected {TASK}; choose another run or recipe")
    task = tasks.get(TASK)
    dataset = sources.build(config.data, task.roles)
    tokenizers = tokenizers or Tokenizers.build(config.data, dataset.splits["train"], task.roles)
    pipeline = Pipeline(config, dataset, tokenizers, task)
    windows = evaluated_sequences(pipeline.evaluate(split))
    model = ngrams.fit(training_sequences(config, dataset, tokenizers), order, tokenizers.target.size)
    log_probs = model.log_probs(windows)
    size = {**pipeline.size(split), "labels": float(len(log_probs))}
    return task.derived_metrics(config, {"loss": -float(log_probs.mean())}, size)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=Path)
    parser.add_argument("--split", default="validation")
    parser.add_argument("--order", type=int, default=5, help="tokens of the longest n-gram")
    flags, edits = parser.parse_known_args(argv)
    if flags.order < 1:
        raise ConfigError(f"--order: got {flags.order}, expected at least 1")
    baseline = measure(flags.workdir, flags.split, flags.order, edits)
    path = (flags.workdir or Path()) / f"eval-{flags.split}.json"
    model = json.loads(path.read_text()) if flags.workdir and path.exists() else {}
    missing = f"no {path.name}: run evaluate" if flags.workdir else ""
    print(f"{flags.split:16} {f'{flags.order}-gram':12} {'the run' if model else missing}".rstrip())
    for name, value in baseline.items():
        print(f"{name:16} {value:<12.4f} {f'{model[name]:.4f}' if name in model else ''}".rstrip())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
