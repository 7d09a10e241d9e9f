"""Kills, stops, damages and starves training runs, and checks that nothing is lost. One command, one table.

    python benchmarks/faults.py [--only=kills,stops,damage,disk,input] [--kills=200] [--minutes=25] [--soak=MINUTES]

Every run is one of `tiny_runs.py`. The table goes into docs/measurements/faults.md between its markers, the rows to
benchmarks/results/faults.json; `--only` renews the rows of these parts and keeps the others. Needs Linux; the disk
drills mount small tmpfs disks and are left out, and say so, where that is not allowed. Exits 1 if anything was lost.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import fault_drills  # noqa: E402
import fault_inputs  # noqa: E402
import fault_processes as processes  # noqa: E402
import fault_soak  # noqa: E402
import pages  # noqa: E402
import tiny_runs  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "faults.json"
PAGE = ROOT / "docs" / "measurements" / "faults.md"
RATES = ("tokens_per_second", "steps_per_second", "wall_time")


def outcome(workdir: Path) -> dict[str, Any]:
    """All that a finished run must have in common with one that was never interrupted."""
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    parts = {part: sorted(map(int, processes.names(workdir / "checkpoints" / part))) for part in ("last", "best")}
    return {
        "state": json.loads((workdir / processes.FINAL).read_text()),
        "metrics.jsonl": [{k: v for k, v in row.items() if k not in RATES} for row in rows],
        "tensorboard": fault_drills.events(workdir / "tensorboard"),
        "checkpoints": parts,
        "damaged": processes.names(workdir / "checkpoints" / "damaged"),
        "batches": processes.tries(workdir),
    }


class Kills:
    """SIGKILL at random moments of every kind of run, until each has finished many times over."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder, self.rng = folder, rng
        self.reference: dict[str, dict[str, Any]] = {}
        self.seconds: dict[str, float] = {}
        self.counts = {name: {"kills": 0, "in_save": 0, "finished": 0} for name in tiny_runs.RUNS}
        self.wrong: list[str] = []

    def whole(self, name: str) -> None:
        """The uninterrupted run; the second time, with compiled programs at hand, says how long one takes."""
        for number in range(2):
            workdir = self.folder / f"{name}-whole-{number}"
            begun = time.monotonic()
            code = self.attempt(name, workdir, lambda pid: processes.wait(pid))
            if code != 0:
                raise RuntimeError(f"{name}: the uninterrupted run ended with {code}; see {self.folder}/{name}.log")
            self.seconds[name] = time.monotonic() - begun
            processes.preload(workdir)
        self.reference[name] = outcome(workdir)

    def attempt(self, name: str, workdir: Path, watch: Callable[[int], int]) -> int:
        config = tiny_runs.config(name, self.folder / "files")
        return watch(processes.spawn(processes.training(config, workdir), self.folder / f"{name}.log"))

    def run(self, name: str, number: int, kills: int) -> None:
        """One run, killed up to so many times and then left alone."""
        workdir, counts = self.folder / f"{name}-{number}", self.counts[name]
        for attempt in range(kills + 1):
            if attempt == kills:
                watch = processes.wait
            elif self.rng.random() < 0.4:
                skip, delay = self.rng.randrange(2), self.rng.random() ** 2 * 0.05
                watch = lambda pid: processes.kill_in_save(pid, workdir, skip, delay)  # noqa: E731, B023
            else:
                delay = self.rng.uniform(0.1, 1.1) * self.seconds[name]
                watch = lambda pid: processes.kill_after(pid, delay)  # noqa: E731, B023
            code = self.attempt(name, workdir, watch)
            if code == 0:
                break
            if code != -9:
                self.wrong.append(f"{name}-{number}: exit code {code}")
                return
            counts["kills"] += 1
            counts["in_save"] += any(processes.names(workdir / "checkpoints" / "saving"))
            newest = fault_drills.newest(workdir)
            if newest is not None and fault_drills.problem(newest):
                self.wrong.append(f"{name}-{number}: newest checkpoint {newest}: {fault_drills.problem(newest)}")
        counts["finished"] += 1
        mine = outcome(workdir)
        for what, value in self.reference[name].items():
            if mine[what] != value:
                self.wrong.append(f"{name}-{number}: {what} differs")
        if not self.wrong:
            fault_drills.remove(workdir)


def kills(folder: Path, rng: random.Random, limit: int, minutes: float) -> list[dict[str, Any]]:
    end = time.monotonic() + 60 * minutes
    drill, number = Kills(folder, rng), 0
    for name in tiny_runs.RUNS:
        drill.whole(name)
        print(f"{name}: whole in {drill.seconds[name]:.1f} s", flush=True)
    while time.monotonic() < end and sum(c["kills"] for c in drill.counts.values()) < limit:
        name = min(tiny_runs.RUNS, key=lambda each: drill.counts[each]["kills"])
        drill.run(name, number, rng.randrange(5, 12))
        number += 1
        print(number, name, drill.counts[name], drill.wrong[-1:], flush=True)
    rows = []
    for name, counts in drill.counts.items():
        wrong = [words for words in drill.wrong if words.startswith(f"{name}-")]
        words = (
            f"{counts['kills']} kills, {counts['in_save']} inside a save; {counts['finished']} runs finished, state, "
            "rows, batches and checkpoints those of the uninterrupted run"
        )
        rows.append(fault_drills.row("kills", f"SIGKILL at random moments: {name}", words, wrong, **counts))
    total = {key: sum(c[key] for c in drill.counts.values()) for key in ("kills", "in_save", "finished")}
    words = f"{total['kills']} kills, {total['in_save']} inside a save, {total['finished']} runs"
    rows.append(fault_drills.row("kills", "SIGKILL, together", words, drill.wrong, **total))
    return rows


def write(rows: list[dict[str, Any]], parts: list[str]) -> None:
    """Renews the rows of these parts in the results and the page."""
    old = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    order = [*PARTS, "soak"]
    rows = sorted([each for each in old if each["part"] not in parts] + rows, key=lambda r: order.index(r["part"]))
    import jax

    where = {"python": platform.python_version(), "jax": jax.__version__, "date": time.strftime("%Y-%m-%d")}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"measured": where, "rows": rows}, indent=1) + "\n")
    cells = [(each["drill"], each["words"], "yes" if each["good"] else "**no**") for each in rows]
    pages.put(PAGE, "faults", pages.table(("drill", "what happened", "as promised"), cells))


PARTS = ("kills", "stops", "damage", "disk", "input")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=25, help="after which no further run is killed")
    parser.add_argument("--inputs", type=int, default=12000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--soak", type=float, default=0, help="minutes of one long run, nothing else")
    parser.add_argument("--keep", default="", help="folder of the runs; default: a temporary one")
    options = parser.parse_args(arguments)
    parts = ["soak"] if options.soak else options.only.split(",")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.keep or temporary)
        tiny_runs.files(folder / "files")
        os.environ |= {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        }
        import jaxformer.parallel.distributed
        import jaxformer.train.loop  # noqa: F401  imported once, before any process is forked

        rng, rows = random.Random(options.seed), []
        acts = {
            "kills": lambda: kills(folder, rng, options.kills, options.minutes),
            "stops": lambda: fault_drills.stops(folder),
            "damage": lambda: fault_drills.damage(folder),
            "disk": lambda: fault_drills.disk(folder),
            "input": lambda: fault_inputs.corpus(folder, rng, options.inputs),
            "soak": lambda: fault_soak.soak(folder, options.soak),
        }
        for part in parts:
            begun = time.monotonic()
            rows += acts[part]()
            print(f"{part}: {time.monotonic() - begun:.0f} s", flush=True)
    write(rows, parts)
    for each in rows:
        print(f"{'ok ' if each['good'] else 'NO '} {each['drill']}: {each['words']}")
    return 0 if all(each["good"] for each in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
