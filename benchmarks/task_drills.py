"""Every task through the command line: trained, killed twice, resumed, evaluated and decoded. One command, one table.

    python benchmarks/task_drills.py [--only=TASK,TASK] [--seed=0]

Each run is one of `task_recipes.py`, by processes of their own: `train` without interruption; `train` killed with
SIGKILL after its first checkpoint and once more at a random moment, and then resumed; `evaluate` and `decode` of both.
All arrays of the last checkpoint, the rows of metrics.jsonl, the measures of `evaluate` and the lines of `decode` have
to be the same. The table goes into docs/measurements/tasks.md, the rows to benchmarks/results/tasks.json; `--only`
renews the rows of these tasks and keeps the others. Exits 1 if anything differs. `captioning` and
`series_classification` need scikit-learn (extra `[bench]`).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import pages  # noqa: E402
import task_recipes  # noqa: E402

PAGE = ROOT / "docs" / "measurements" / "tasks.md"
RESULTS = ROOT / "benchmarks" / "results" / "tasks.json"
RATES = ("tokens_per_second", "steps_per_second", "wall_time")
LINES = 4
"""Number of examples of the validation split that are decoded."""
MISSING = {"masked_lm": "<mask>", "permutation_lm": "<mask>", "span_corruption": "<extra_id_0>"}
"""The first word of each decoded line, for tasks that fill in what is missing."""
DIGITS = ("captioning", "series_classification")
"""Tasks whose data come with scikit-learn."""
LIMIT = 600
"""Seconds that one command may take."""


class Failed(Exception):
    """A command ended as it should not have."""


@dataclass
class Drill:
    """One task in a folder of its own."""

    task: str
    folder: Path
    rng: random.Random
    kills: list[int] = field(default_factory=list)

    def command(self, name: str, *flags: str) -> list[str]:
        return [sys.executable, "-m", "jaxformer", name, *flags]

    def call(self, name: str, *flags: str) -> None:
        """Runs a command to its end."""
        result = subprocess.run(
            self.command(name, *flags),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        if result.returncode:
            last = (result.stderr.strip() or result.stdout.strip()).splitlines()[-1:]
            raise Failed(f"{name} ended with {result.returncode}: {' '.join(last)}")

    def training(self, workdir: Path) -> list[str]:
        """The flags of `train`."""
        config = f"--config={ROOT / 'benchmarks' / 'task_recipes.py'}:{self.task}"
        flags = [config, f"--workdir={workdir}", f"--config.data.dir={self.folder / 'files'}"]
        cache = f"--config.data.cache={self.folder / 'cache'}"
        start = [f"--config.init.directory={self.folder / 'dialogue-whole'}"] if self.task == "preference" else []
        return [*flags, cache, *start]

    def kill(self, workdir: Path, first: bool, seconds: float) -> bool:
        """Starts `train` and kills it: after its first checkpoint, or at a random moment. False: it had ended."""
        process = subprocess.Popen(
            self.command("train", *self.training(workdir)),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end = time.monotonic() + (LIMIT if first else self.rng.uniform(0.3, 1.0) * seconds)
        while process.poll() is None and time.monotonic() < end:
            if first and saved(workdir):
                break
            time.sleep(0.01)
        time.sleep(self.rng.uniform(0, 0.1) if first else 0)
        process.send_signal(signal.SIGKILL)
        code = process.wait()
        if code not in (0, -signal.SIGKILL):
            raise Failed(f"train ended with {code} before it was killed")
        return code != 0

    def use(self, workdir: Path) -> dict[str, Any]:
        """Evaluates and decodes; all that two runs must have in common."""
        self.call("evaluate", f"--workdir={workdir}", "--split=validation")
        output = workdir / "decoded.txt"
        self.call("decode", f"--workdir={workdir}", f"--input={self.lines()}", f"--output={output}")
        rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        return {
            "the state": digests(workdir),
            "the rows of metrics.jsonl": [{k: v for k, v in row.items() if k not in RATES} for row in rows],
            "the measures": measures(workdir),
            "the decoded lines": output.read_text().splitlines(),
        }

    def lines(self) -> Path:
        """The file that is decoded: inputs of the validation split, or the table of a forecast."""
        if self.task == "forecasting":
            return self.folder / "files" / "series.csv"
        path = self.folder / f"{self.task}.in.txt"
        if not path.exists():
            from jaxformer import tasks
            from jaxformer.config import overrides
            from jaxformer.data import sources

            config = overrides.read(self.folder / f"{self.task}-whole")
            examples = sources.build(config.data, split="validation").splits["validation"]
            lines = [tasks.get(self.task).input_line(examples[i]) for i in range(LINES)]
            if self.task in MISSING:
                lines = [" ".join([MISSING[self.task], *line.split()[1:]]) for line in lines]
            path.write_text("".join(line + "\n" for line in lines))
        return path

    def run(self) -> tuple[str, list[str]]:
        """Runs the drill. Returns a line about it, and a list of what differs."""
        whole, killed = (self.folder / f"{self.task}-{word}" for word in ("whole", "killed"))
        begun = time.monotonic()
        self.call("train", *self.training(whole))
        seconds = time.monotonic() - begun
        for first in (True, False):
            if not self.kill(killed, first, seconds):
                break
            self.kills.append(max(saved(killed), default=0))
        self.call("train", *self.training(killed))
        mine, theirs = self.use(killed), self.use(whole)
        wrong = [f"{name} differ" for name in theirs if mine[name] != theirs[name]]
        wrong += [] if self.kills else ["it was never killed"]
        wrong += [] if mine["the decoded lines"] else ["nothing was decoded"]
        shown = ", ".join(f"{name} {value:.4g}" for name, value in list(mine["the measures"].items())[:2])
        steps = " and ".join(map(str, self.kills))
        return f"killed with {steps} saved; {len(mine['the state'])} arrays; {shown}", wrong


def saved(workdir: Path) -> list[int]:
    """Steps of the checkpoints of a run."""
    return sorted(int(each.name) for each in (workdir / "checkpoints" / "last").glob("[0-9]*"))


def digests(workdir: Path) -> dict[str, str]:
    """A checksum of every array of the last checkpoint, as Orbax alone reads it."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    folder = workdir / "checkpoints" / "last" / str(max(saved(workdir))) / "state"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the arrays come without their sharding
        state = ocp.PyTreeCheckpointer().restore(folder)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): hashlib.sha256(np.asarray(x).tobytes()).hexdigest() for path, x in leaves}


def measures(workdir: Path) -> dict[str, float]:
    """The numbers that `evaluate` wrote, without the time that it took."""
    found = json.loads((workdir / "eval-validation.json").read_text())
    return {name: value for name, value in found.items() if isinstance(value, float) and "second" not in name}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="tasks with commas between")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    flags = parser.parse_args(arguments)
    chosen = [name for name in task_recipes.NAMES if not flags.only or name in flags.only.split(",")]
    if "preference" in chosen and "dialogue" not in chosen:
        chosen.insert(0, "dialogue")
    chosen.sort(key=lambda name: name == "preference")  # which starts from a run of dialogue
    bad = 0
    with tempfile.TemporaryDirectory(prefix="task_drills-") as place:
        task_recipes.files(Path(place) / "files")
        for name in chosen:
            if name in DIGITS and importlib.util.find_spec("sklearn") is None:
                print(f"{name}: left out, since scikit-learn is not installed")
                continue
            drill = Drill(name, Path(place), random.Random(f"{flags.seed} {name}"))
            try:
                words, wrong = drill.run()
            except Failed as error:
                words, wrong = "", [str(error)]
            bad += bool(wrong)
            print(name, words, *wrong, sep="; ", flush=True)
            write({"task": name, "words": words, "wrong": wrong})
    return int(bad > 0)


def write(row: dict[str, Any]) -> None:
    """Renews the row of a task in the results and on the page."""
    import jax

    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    where = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "jax": jax.__version__}
    rows[row.pop("task")] = row | where
    rows = {name: rows[name] for name in task_recipes.NAMES if name in rows}
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    cells = [
        (name, "; ".join(filter(None, [each["words"], *each["wrong"]])), "**no**" if each["wrong"] else "yes")
        for name, each in rows.items()
    ]
    pages.put(PAGE, "tasks", pages.table(("task", "what happened", "all the same"), cells))


if __name__ == "__main__":
    sys.exit(main())
