"""`jaxformer evaluate`: measure a run on a split."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from jaxformer.cli.arguments import CHECKPOINT, Command, Flag
from jaxformer.config import overrides


def run(arguments: Namespace) -> int:
    workdir, split = arguments.workdir, arguments.split
    overrides.read(workdir)
    from jaxformer import evaluation, report

    values = evaluation.evaluate(workdir, split, arguments.checkpoint, arguments.config)
    print_table({name: value for name, value in values.items() if name != "checkpoint"})  # "weights" describes it
    print(f"written to {Path(workdir) / f'eval-{split}.json'}")
    report.write_after_training(workdir)
    return 0


def print_table(values: Mapping[str, object]) -> None:
    """Prints a line for each value: its name, and the value as text."""
    width = max(len(name) for name in values)
    for name, value in values.items():
        text = f"{value:.6g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
        print(f"{name:<{width}}  {text}")


COMMAND = Command(
    "measure a run on a split, print and write eval-<split>.json",
    run,
    {
        "workdir": Flag("folder of the run", directory="write"),
        "split": Flag("split of the data", default="test"),
        "checkpoint": CHECKPOINT,
    },
    config="edits",
)
