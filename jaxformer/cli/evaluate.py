"""`jaxformer evaluate`: measure a run on a split."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from jaxformer.cli.arguments import CHECKPOINT, Command, Flag
from jaxformer.config import overrides
from jaxformer.runtime import files
from jaxformer.train import seeds


def run(arguments: Namespace) -> int:
    workdir, split = arguments.workdir, arguments.split
    members = seeds.expand([workdir])
    for run in members:
        overrides.read(run)
    from jaxformer import evaluation, report
    from jaxformer.train import by_length

    found, target = {}, Path(workdir) / f"eval-{split}.json"
    for run in members:
        found[run.name] = evaluation.evaluate(run, split, arguments.checkpoint, arguments.config)
        report.write_after_training(run)
    if seeds.members(workdir):
        summary = seeds.summarise(found)
        print(seeds.format_table(summary))
        files.write_json(target, {"split": split, **summary})
        report.write_after_training(workdir)
    else:
        values = next(iter(found.values()))
        print_table({name: value for name, value in values.items() if name.split("/")[0] not in NOT_PRINTED})
        if "by_length" in values:
            print("\nby source length:", by_length.format_table(values["by_length"]), sep="\n")
    print(f"written to {target}")
    return 0


NOT_PRINTED = ("checkpoint", "by_length", "diagnosis")
"""Values that are not lines of the table: "weights" describes the checkpoint, lengths have a table of their own, and a
diagnosis is shown by the report."""


def print_table(values: Mapping[str, object]) -> None:
    """Prints a line for each value: its name, and the value as text."""
    width = max(len(name) for name in values)
    for name, value in values.items():
        text = f"{value:.6g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
        print(f"{name:<{width}}  {text}")


COMMAND = Command(
    "measure a run on a split",
    run,
    {
        "workdir": Flag("folder of the run, or of several seeds", directory="write", bucket="copy"),
        "split": Flag("split of the data", default="test"),
        "checkpoint": CHECKPOINT,
    },
    config="edits",
    details="prints the measures and writes eval-<split>.json",
    example="jaxformer evaluate --workdir=runs/quickstart --split=test",
)
