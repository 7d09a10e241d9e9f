"""Training with the allocator settings of `jaxformer/runtime/memory.py` and with glibc's own, in turn.

    python benchmarks/allocator.py [--config=configs/quickstart.py] [--steps=40] [--rounds=3] [-- EDIT ...]

Each training is a fresh process and a fresh workdir; its seconds a step are those of the second half of its reports.
Prints the medians over the rounds, and the median of the rounds' own ratios with their spread. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from jaxformer.runtime import memory

ROOT = Path(__file__).resolve().parents[1]
PLAIN = """
import runpy, sys
from jaxformer.runtime import memory
memory.restart_with_tunables = lambda: None
runpy.run_module("jaxformer", run_name="__main__", alter_sys=True)
"""


def seconds(arguments: list[str], steps: int, plain: bool) -> float:
    """Of one step: the median over the second half of a training's reports."""
    environment = {name: value for name, value in os.environ.items() if name != memory.VARIABLE}
    with tempfile.TemporaryDirectory() as workdir:
        start = ["-c", PLAIN, "train"] if plain else ["-m", "jaxformer", "train"]
        edits = ("steps", steps), ("log_every", 2), ("evaluate_every", 0), ("checkpoint_every", 0)
        command = [sys.executable, *start, *arguments, f"--workdir={workdir}", "--config.evaluate.examples=8"]
        command += [*(f"--config.train.{name}={value}" for name, value in edits), "--config.evaluate.decode_examples=0"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        rows = [json.loads(line) for line in Path(workdir, "metrics.jsonl").read_text().splitlines()]
    rates = [row["steps_per_second"] for row in rows if row["split"] == "train"]
    return 1 / statistics.median(rates[len(rates) // 2 :])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart.py")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("edits", nargs="*", metavar="-- EDIT")
    flags = parser.parse_args(argv)
    arguments = [f"--config={flags.config}", *flags.edits]
    times: dict[bool, list[float]] = {True: [], False: []}
    for round_ in range(flags.rounds):
        for plain in (True, False) if round_ % 2 else (False, True):
            times[plain].append(seconds(arguments, flags.steps, plain))
    ratios = [plain / kept for plain, kept in zip(times[True], times[False], strict=True)]
    print(f"seconds a step: {statistics.median(times[True]):.3f} with glibc's own settings, ", end="")
    print(f"{statistics.median(times[False]):.3f} with ours")
    print(f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f} in {flags.rounds} rounds)")


if __name__ == "__main__":
    main()
