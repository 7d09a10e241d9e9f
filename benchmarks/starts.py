"""From typing a command to its first loss or last line: the first time, and again with and without kept programs.

    python benchmarks/starts.py --data=DIR [--jobs=gpt,multi30k_tiny] [--rounds=3]
    python benchmarks/starts.py --workdir=RUN --input=FILE     decodes a file with a run instead
    python benchmarks/starts.py --page                         only writes the table of docs/measurements/starts.md

DIR holds multi30k_en_de/ and tiny_shakespeare/. Every job has a cache of its own, empty at its first start, which
prepares data and compiles. Then two kinds of starts take turns, each in a new workdir: as `jaxformer` is, and with
JAX_ENABLE_COMPILATION_CACHE=0. Training is killed once its first loss is printed. Exits 1 where starts with kept
programs are not the faster ones.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import pages  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "starts.jsonl"
PAGE = ROOT / "docs" / "measurements" / "starts.md"
JOBS = {
    # benchmarks/training.py's decoder: 6 layers of width 384, 16 rows of 256 tokens.
    "gpt, bfloat16": (
        "tiny_shakespeare", "shakespeare_char.py:gpu", "--config.data.batch=16", "--config.model.dtype=bfloat16",
    ),
    "shakespeare_char:cpu": ("tiny_shakespeare", "shakespeare_char.py:cpu"),
    "multi30k_tiny": ("multi30k_en_de", "multi30k_tiny.py"),
    "multi30k_rnn": ("multi30k_en_de", "multi30k_rnn.py"),
}  # fmt: skip
"""Name -> folder below --data, recipe, and what is different."""
LIMIT = 600.0
"""Seconds that a start may take."""
Row = dict[str, Any]


def start(arguments: Sequence[str], cache: str, kept: bool) -> float:
    """Seconds from the command to the line of its first step, or to its end if it trains nothing.

    Raises:
      RuntimeError: it ends in another way, or takes more than `LIMIT`.
    """
    environment = {**os.environ, "JAXFORMER_CACHE": cache, "PYTHONPATH": str(ROOT)}
    environment |= {} if kept else {"JAX_ENABLE_COMPILATION_CACHE": "0"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    begun = time.perf_counter()
    program = subprocess.Popen(
        [sys.executable, "-u", "-m", "jaxformer", *arguments],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    limit = threading.Timer(LIMIT, program.kill)
    limit.start()
    said, stepped = [], False
    for line in program.stdout:
        said.append(line)
        if stepped := line.startswith("step 1/"):
            break
    code = None if stepped else program.wait()
    seconds = time.perf_counter() - begun
    limit.cancel()
    program.kill()
    program.wait()
    program.stdout.close()
    if not stepped and (code or arguments[0] == "train"):
        raise RuntimeError(f"{' '.join(arguments)}: ended with code {code}: {''.join(said[-3:])}")
    return seconds


def measure(name: str, arguments: Sequence[str], rounds: int) -> Row:
    """One row. `{}` in an argument is the place of a folder that every start has for itself."""
    with tempfile.TemporaryDirectory() as folder:
        numbers = itertools.count()
        cache = f"{folder}/cache"
        fresh = lambda: [each.replace("{}", f"{folder}/{next(numbers)}") for each in arguments]  # noqa: E731
        first = start(fresh(), cache, kept=True)
        turns = [(start(fresh(), cache, kept=False), start(fresh(), cache, kept=True)) for _ in range(rounds)]
    without, again = zip(*turns, strict=True)
    return {
        "job": name, "first": first, "again": again, "without": without,
        "times": statistics.median(a / b for a, b in turns), "rounds": rounds, "date": time.strftime("%Y-%m-%d"),
        "hardware": f"{os.cpu_count()} {platform.machine()} cores",
        "versions": {each: importlib.metadata.version(each) for each in ("jax", "jaxlib", "flax")},
        "python": platform.python_version(),
    }  # fmt: skip


COLUMNS = ("command", "jax", "first start, s", "again, s", "again without kept programs, s", "times as fast")


def cells(row: Row) -> list[str]:
    shown = lambda values: f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"  # noqa: E731
    return [
        row["job"], row["versions"]["jax"], f"{row['first']:.1f}", shown(row["again"]), shown(row["without"]),
        f"{row['times']:.2f}",
    ]  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="")
    parser.add_argument("--jobs", default="")
    parser.add_argument("--workdir", default="")
    parser.add_argument("--input", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    flags = parser.parse_args(argv)
    todo: dict[str, list[str]] = {}
    if flags.workdir:
        count = len(flags.input.read_text(encoding="utf-8").splitlines())
        name = f"decode, {count:,} lines by {Path(flags.workdir).name}"
        todo[name] = ["decode", f"--workdir={flags.workdir}", f"--input={flags.input}", "--output={}"]
    elif not flags.page:
        chosen = [name for name in JOBS if not flags.jobs or name.split(",")[0] in flags.jobs.split(",")]
        for name in chosen:
            folder, recipe, *edits = JOBS[name]
            place = Path(flags.data).resolve() / folder
            config = [f"--config={ROOT / 'configs' / recipe}", f"--config.data.dir={place}", *edits]
            todo[f"train {name}"] = ["train", "--workdir={}", *config]
    for name, arguments in todo.items():
        row = measure(name, arguments, flags.rounds)
        print(" | ".join(cells(row)), flush=True)
        with flags.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
    rows = {
        (row["job"], row["versions"]["jax"]): row for row in map(json.loads, flags.results.read_text().splitlines())
    }
    if flags.page:
        pages.put(PAGE, "starts", pages.table(COLUMNS, [cells(rows[key]) for key in sorted(rows)]))
    return int(any(row["times"] <= 1.0 for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
