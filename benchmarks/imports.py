"""What a command imports before its work begins, and how long that takes (`python -X importtime`).

    python benchmarks/imports.py [--commands=train,decode] [--rounds=5] [--beside=TREE] [--top=12]

Each command's modules are imported in a process of its own, by turns with those of another working tree (--beside).
Prints medians of seconds, of processor seconds, and the packages that take the most.
"""

from __future__ import annotations

import argparse
import collections
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = {
    "help": "from jaxformer import cli",
    "train": "from jaxformer.cli import train; import jaxformer.preflight; from jaxformer.train import loop, seeds",
    "decode": "from jaxformer import cli, tasks; from jaxformer.hf import workdirs; tasks.get('translation')",
}
"""Command -> the imports that it begins with (`jaxformer/cli/`)."""
BEFORE = {
    "train": "from jaxformer import report; from jaxformer.hf import workdirs",
}
"""Command -> what it imported, too, before imports were put off; for a working tree of that time (--beside)."""


def measure(tree: Path, code: str) -> tuple[float, float, collections.Counter[str]]:
    """Seconds of all imports, processor seconds of the process, and seconds by top-level package."""
    code += "; import time, sys; print(time.process_time())"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code],
        env={**os.environ, "PYTHONPATH": str(tree)}, cwd=tree, capture_output=True, text=True, check=True,
    )  # fmt: skip
    packages: collections.Counter[str] = collections.Counter()
    for line in done.stderr.splitlines():
        itself, _, name = line.removeprefix("import time:").split("|") if line.count("|") == 2 else ("", "", "")
        if itself.strip().isdigit():
            packages[name.strip().split(".")[0]] += int(itself) / 1e6
    return sum(packages.values()), float(done.stdout), packages


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commands", default=",".join(COMMANDS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--top", type=int, default=12)
    flags = parser.parse_args(argv)
    for command in flags.commands.split(","):
        code = COMMANDS[command]
        trees = {"here": (ROOT, code)}
        if flags.beside:
            trees = {"beside": (flags.beside.resolve(), "; ".join([code, BEFORE.get(command, "pass")])), **trees}
        found: dict[str, list[tuple[float, float, collections.Counter[str]]]] = {name: [] for name in trees}
        for _ in range(flags.rounds):
            for name, (tree, words) in trees.items():
                found[name].append(measure(tree, words))
        for name, results in found.items():
            seconds, cpu = (statistics.median(result[number] for result in results) for number in (0, 1))
            total = sum((result[2] for result in results), collections.Counter())
            largest = ", ".join(f"{package} {t / len(results):.2f}" for package, t in total.most_common(flags.top))
            print(f"{command} {name}: imports {seconds:.2f} s, processor {cpu:.2f} s | {largest}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
