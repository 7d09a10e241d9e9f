"""Sweeps: one recipe, a list of edits of it, a workdir for each, and a ranking at the end.

A sweep file defines `SWEEP`, a list of dicts from config paths to values, built from the functions below:

    from jaxformer.sweep import cross, grid, log_uniform, random, seeds

    SWEEP = cross(grid({"model.encoder.norm.order": ["pre", "post"]}), seeds(3))
    SWEEP = random(20, 0, {"schedule.peak": log_uniform(1e-4, 1e-2), "task.label_smoothing": choice(0.0, 0.1)})

A run is named after its edits and the fingerprint of its whole config, so a sweep that grows keeps what it has, and one
of a changed recipe (or of more steps) begins anew beside it. Runs that have reached their last step are skipped, others
start or resume.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Sequence

import numpy as np

from jaxformer import files, overrides, redaction, results
from jaxformer.config import Config, ConfigError

Edits = dict[str, Any]
Draw = Callable[[np.random.Generator], Any]

SEED = "train.seed"
PREEMPTED, STALLED = 143, 75


# --- lists of edits ---------------------------------------------------------------------------------------------------


def grid(axes: Mapping[str, Iterable[Any]]) -> list[Edits]:
    """All combinations of the axes' values; the last axis varies fastest."""
    return [dict(zip(axes, values)) for values in itertools.product(*axes.values())]


def random(count: int, seed: int, axes: Mapping[str, Draw]) -> list[Edits]:
    """`count` random draws. The first ones stay what they are when `count` grows or an axis is added."""
    rows: list[Edits] = []
    for row in range(count):
        keys = {path: int.from_bytes(hashlib.sha256(path.encode()).digest()[:4]) for path in axes}
        rows.append({path: draw(np.random.default_rng([seed, row, keys[path]])) for path, draw in axes.items()})
    return rows


def uniform(low: float, high: float) -> Draw:
    return lambda rng: _rounded(rng.uniform(low, high))


def log_uniform(low: float, high: float) -> Draw:
    """A number whose logarithm is uniform: for learning rates and other scales."""
    return lambda rng: _rounded(math.exp(rng.uniform(math.log(low), math.log(high))))


def integers(low: int, high: int) -> Draw:
    """A whole number from `low` to `high`, both included."""
    return lambda rng: int(rng.integers(low, high + 1))


def choice(*values: Any) -> Draw:
    return lambda rng: values[int(rng.integers(len(values)))]


def seeds(count: int, first: int = 0) -> list[Edits]:
    """Runs that differ in nothing but chance."""
    return [{SEED: first + i} for i in range(count)]


def cross(*lists: Sequence[Edits]) -> list[Edits]:
    """Every edit of the first list together with every edit of the others; later lists win where they overlap."""
    return [{k: v for edits in row for k, v in edits.items()} for row in itertools.product(*lists)]


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")  # names of folders are made of values


# --- a plan -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One member of a sweep: its edits, its checked config, its folder, and the command that starts or resumes it."""

    edits: Edits
    config: Config
    workdir: Path
    command: tuple[str, ...]

    @property
    def done(self) -> bool:
        return self.result is not None

    @property
    def result(self) -> dict[str, Any] | None:
        """Its `result.json`; None until it has reached its last step with this very config."""
        return results.finished(self.workdir, self.config)


@dataclass(frozen=True)
class Plan:
    """A sweep whose every config has been checked, before anything starts."""

    workdir: Path
    runs: tuple[Run, ...]

    @property
    def open(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if not run.done)


def plan(sweep_file: str, arguments: Sequence[str], workdir: Path) -> Plan:
    """The runs of `SWEEP` in `sweep_file`, each over the recipe and edits in `arguments`.

    Raises:
      ConfigError: the file, or the config of a run, is wrong; or two runs have the same config.
    """
    if workdir.exists() and not workdir.is_dir():
        raise ConfigError(f"--workdir: got {str(workdir)!a} (a file), expected a folder")
    runs: dict[str, Run] = {}
    configs: dict[str, str] = {}
    for edits in _edits(sweep_file):
        name = name_of(edits)
        given = [*arguments, *(f"--config.{path}={as_text(value)}" for path, value in edits.items())]
        try:
            config = overrides.parse(given)
        except ConfigError as error:
            words = " ".join(f"{path}={value}" for path, value in redaction.tree(edits).items())
            raise ConfigError(f"{sweep_file}: run {words}: {error}") from None
        if name in runs:
            raise ConfigError(f"{sweep_file}: got run {name} twice, expected each once; remove one")
        twin = configs.setdefault(overrides.to_json(config), name)
        if twin != name:
            raise ConfigError(
                f"{sweep_file}: got runs {twin} and {name} with the same config, expected one; remove one"
            )
        folder = _folder(workdir, name, config)
        command = (sys.executable, "-m", "jaxformer", "train", *given, f"--workdir={folder}")
        runs[name] = Run(edits, config, folder, command)
    return Plan(workdir, tuple(runs.values()))


def _folder(workdir: Path, name: str, config: Config) -> Path:
    """The folder of a run: `name` and the config's fingerprint.

    Earlier versions used `name` alone. Such a folder is used if it holds this very config, and else left alone, with a
    line that says so.
    """
    folder, old = workdir / f"{name}-{overrides.fingerprint(config)[:8]}", workdir / name
    if folder.exists() or not (old / "config.json").exists():
        return folder
    try:
        differing = overrides.deciding(config, overrides.read(old))
    except ConfigError as error:
        differing = [str(error)]
    if not differing:
        return old
    print(f"not used: {old}, a run of another config ({', '.join(differing)})", file=sys.stderr, flush=True)
    return folder


def _edits(path: str) -> list[Edits]:
    found = overrides.variable(path, "SWEEP", "a list of dicts from config paths to values")
    good = isinstance(found, (list, tuple)) and len(found) > 0
    if not good or not all(isinstance(row, dict) and all(isinstance(k, str) for k in row) for row in found):
        raise ConfigError(f"{path}: got SWEEP of another form, expected a list of dicts from config paths to values")
    return list(found)


def as_text(value: Any) -> str:
    """A value as the command line takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return ",".join(as_text(item) for item in value)
    return str(value)


def name_of(edits: Edits) -> str:
    """A run's edits as a name, "schedule.peak=0.001,train.seed=0", made safe for every file system."""
    text = ",".join(f"{path}={as_text(value)}" for path, value in edits.items()) or "base"
    name = re.sub(r"[^A-Za-z0-9._=,+-]", "_", text)
    if name != text or len(name) > 150:
        # What was replaced or cut off still tells two runs apart.
        name = f"{name[:140]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return name


# --- executors --------------------------------------------------------------------------------------------------------


def show(plan: Plan, workers: int) -> int:
    """Prints the command of every run that is not finished."""
    for run in plan.open:
        print(shlex.join(run.command))
    return 0


def local(plan: Plan, workers: int) -> int:
    """Runs what is not finished, `workers` at a time, each as a process of its own with its output in `log.txt`.

    With several GPUs in CUDA_VISIBLE_DEVICES each worker has its own. A failure does not stop the others. SIGTERM and
    Ctrl-C are handed on, so that the runs save, and end the sweep with code 143.

    Returns:
      0; 1 if a run failed; 143 if the sweep, or one of its runs, was stopped.
    """
    queue, active, failed = list(plan.open), {}, []
    _say(f"{len(plan.runs)} runs: {len(plan.runs) - len(queue)} finished, {len(queue)} to go, {workers} at a time")
    stop: list[int] = []
    previous = {s: signal.signal(s, lambda number, frame: stop.append(number)) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        while active or (queue and not stop):
            while queue and len(active) < workers and not stop:
                slot = min(set(range(workers)) - set(active))
                run = queue.pop(0)
                active[slot] = (run, _start(run, slot))
                _say(f"started   {run.workdir.name}")
            if stop:
                _hand_on(active, len(stop))
            time.sleep(0.05)
            for slot, (run, process) in list(active.items()):
                if process.poll() is not None:
                    del active[slot]
                    failed += [] if _ended(run, process.returncode) else [run]
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for _, process in active.values():
            process.kill()
    rank(plan)
    if stop:
        _say(f"stopped, {len(plan.open)} runs to go; run the same command to go on")
        return PREEMPTED
    return 1 if failed else PREEMPTED if plan.open else 0


def _start(run: Run, slot: int) -> subprocess.Popen:
    run.workdir.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    devices = [d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
    if len(devices) > 1:
        environment["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
    with open(run.workdir / "log.txt", "ab") as log:
        # A session of its own: Ctrl-C reaches the runs once, through the sweep.
        return subprocess.Popen(
            run.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )


def _hand_on(active: Mapping[int, tuple[Run, subprocess.Popen]], signals: int) -> None:
    """Asks every run to save and stop, once a signal received."""
    for _, process in active.values():
        sent = getattr(process, "signals_sent", 0)
        if sent < signals:
            process.terminate()
            process.signals_sent = sent + 1


def _ended(run: Run, code: int) -> bool:
    """Reports how a run ended; False if it failed."""
    if code == 0 and run.done:
        _say(f"finished  {run.workdir.name}")
        return True
    if code in (PREEMPTED, -signal.SIGTERM):
        _say(f"stopped   {run.workdir.name}")
        return True
    lines = (run.workdir / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    last = next((line for line in reversed(lines) if line.strip()), "no output")
    _say(f"failed    {run.workdir.name} (code {code}): {last[:200]}; see {run.workdir / 'log.txt'}")
    return False


def slurm(plan: Plan, workers: int) -> int:
    """Submits what is not finished as one job array, `workers` tasks at a time; sbatch reads SBATCH_* for the rest.

    A task that was preempted and saved (code 143) goes back into the queue. Run the sweep again with
    `--executor=local` when the array is done: nothing is left to run, and the ranking is written.
    """
    if not plan.open:
        rank(plan)
        return 0
    plan.workdir.mkdir(parents=True, exist_ok=True)
    for run in plan.open:
        run.workdir.mkdir(parents=True, exist_ok=True)
    script = plan.workdir / "sweep.sbatch"
    files.write(script, _array(plan, workers))
    try:
        done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError("sbatch: got no such program, expected SLURM; use --executor=local or print") from None
    if done.returncode:
        raise ConfigError(f"sbatch: got code {done.returncode} ({' '.join(done.stderr.split())}), expected a job id")
    print(f"submitted {len(plan.open)} runs as job array {done.stdout.strip()}")
    return 0


def _array(plan: Plan, workers: int) -> str:
    """The script of the job array: one line of `commands` for each task."""
    commands = "\n".join(f"  {shlex.quote(shlex.join(run.command))}" for run in plan.open)
    log = str(plan.workdir.absolute() / "slurm-%A_%a.txt").replace('"', "")
    return f"""#!/bin/bash
#SBATCH --job-name=jaxformer-sweep
#SBATCH --array=0-{len(plan.open) - 1}%{workers}
#SBATCH --output="{log}"
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
commands=(
{commands}
)
cd {shlex.quote(os.getcwd())} || exit 1
bash -c "exec ${{commands[$SLURM_ARRAY_TASK_ID]}}" &
run=$!
signals=0
seen=-1
trap 'signals=$((signals + 1)); kill -TERM "$run"' USR1 TERM
# A signal interrupts wait: only a wait that none interrupted has the run's own exit code.
while [ "$seen" -ne "$signals" ]; do
  seen=$signals
  code=0
  wait "$run" || code=$?
done
if [ "$code" -eq {PREEMPTED} ] || [ "$code" -eq {STALLED} ]; then
  scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}"
fi
exit "$code"
"""


# --- ranking ----------------------------------------------------------------------------------------------------------


def rank(plan: Plan) -> list[dict[str, Any]]:
    """Writes `ranking.json` and `ranking.md`, prints the table, and returns its rows, the best first.

    Runs are ordered by `checkpoint.metric` of their final validation; those that differ in the seed only are one row,
    with the mean and the standard deviation (n - 1) over seeds.
    """
    groups: dict[str, list[tuple[Run, dict[str, Any]]]] = {}
    for run in plan.runs:
        values = run.result
        if values is not None:
            others = {path: value for path, value in run.edits.items() if path != SEED}
            groups.setdefault(name_of(others), []).append((run, values))
    keep = plan.runs[0].config.checkpoint
    rows = [_row(name, members, keep.metric) for name, members in groups.items()]
    worst = math.inf if keep.mode == "min" else -math.inf
    sign = 1 if keep.mode == "min" else -1
    rows.sort(key=lambda row: sign * (worst if row["mean"] is None else row["mean"]))
    plan.workdir.mkdir(parents=True, exist_ok=True)
    lines = [f"| rank | {keep.metric} | deviation | runs | edits |", "|---:|---:|---:|---:|---|"]
    for place, row in enumerate(rows, 1):
        mean, deviation = (f"{row[k]:.5g}" if row[k] is not None else "" for k in ("mean", "deviation"))
        lines.append(f"| {place} | {mean} | {deviation} | {len(row['runs'])} | {row['name']} |")
    files.write(plan.workdir / "ranking.md", "\n".join(lines) + "\n")
    ranking = {"metric": keep.metric, "mode": keep.mode, "missing": [r.workdir.name for r in plan.open], "rows": rows}
    files.write(plan.workdir / "ranking.json", json.dumps(ranking, indent=1) + "\n")
    print("\n".join(lines), flush=True)
    return rows


def _row(name: str, members: list[tuple[Run, dict[str, Any]]], metric: str) -> dict[str, Any]:
    results = {run.workdir.name: result.get(metric) for run, result in members}
    values = [v for v in results.values() if isinstance(v, (int, float)) and math.isfinite(v)]
    whole = len(values) == len(members)  # a diverged seed must not drop out of the mean unseen
    return {
        "name": name,
        "edits": {path: as_text(value) for path, value in members[0][0].edits.items() if path != SEED},
        "mean": statistics.fmean(values) if whole else None,
        "deviation": statistics.stdev(values) if whole and len(values) > 1 else None,
        "runs": results,
    }


def _say(text: str) -> None:
    print(text, flush=True)
