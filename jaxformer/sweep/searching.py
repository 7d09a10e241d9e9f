"""Executes a search: suggests trials, trains each as a run of its own, and prunes those with bad validations.

A trial's folder is named as every run's of a sweep, and its config is the frozen config of the submission with the
trial's edits. A later command resumes from three things: the trials in the journal (`study`), the validations
in each run's `metrics.jsonl`, and each run's checkpoints.
"""

from __future__ import annotations

import dataclasses
import fcntl
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from jaxformer.config import CheckpointConfig, Config, overrides
from jaxformer.errors import ConfigError
from jaxformer.runtime import files, secrets, workdir_lock
from jaxformer.runtime.exit_codes import CRASHED, DONE, PREEMPTED, STALLED, WRONG_INPUT
from jaxformer.sweep import progress, ranking, submission
from jaxformer.sweep.adaptive import Search
from jaxformer.sweep.executors import local
from jaxformer.sweep.planning import Plan, Run, edit_arguments, format_value, run_directory, run_name
from jaxformer.sweep.space import Axis, Choice, Edits
from jaxformer.sweep.study import Study, Trial, require

MAX_RESTARTS = 3
"""Times that a trial whose process was killed, or hung, is started again before it counts as failed."""

MAX_FIRST_FAILURES = 3
"""Failed trials that end a search in which none has succeeded."""

REFUSED = {
    "together": "the lanes of one program start at the same time",
    "slurm": "a job array is a list of runs that is known when it is submitted",
    "submitit": "jobs are known when they are submitted",
    "print": "commands are known only when earlier trials have ended",
}
"""Reason why an executor cannot honour a search."""


@dataclass(frozen=True)
class SearchPlan:
    """A search whose settings have been checked.

    Attributes:
      base: the config that trials edit.
      recipe: argument of the command line with which a trial's process loads it.
      checkpoint: names the measure that is searched.
    """

    search: Search
    base: Config
    workdir: Path
    recipe: tuple[str, ...]
    checkpoint: CheckpointConfig
    runs: dict[tuple[str, ...], Run] = field(default_factory=dict, repr=False, compare=False)
    """Runs that `run_of` has made, by their arguments: a config takes milliseconds to check."""

    def run_of(self, edits: Edits) -> Run:
        """The run of a trial.

        Raises:
          ConfigError: the values contradict each other or the config.
        """
        arguments = tuple(edit_arguments(edits))
        if arguments in self.runs:
            return self.runs[arguments]
        config = overrides.edit(self.base, arguments)
        directory = run_directory(self.workdir, run_name(edits), config)
        command = (
            sys.executable, "-m", "jaxformer", "train", *self.recipe, *arguments, f"--workdir={directory}",
        )  # fmt: skip
        self.runs[arguments] = Run(edits, config, directory, command)
        return self.runs[arguments]

    def frozen(self, arguments: Sequence[str], changed: bool) -> SearchPlan:
        """The plan as it is kept at submission: see `submission.freeze`."""
        return self._kept(submission.freeze(self._base_plan(), arguments, changed, self._settings()))

    def submitted(self) -> SearchPlan:
        """The plan of the newest submission, for a report: see `submission.submitted`."""
        return self._kept(submission.submitted(self._base_plan(), self._settings()))

    def _base_plan(self) -> Plan:
        directory = run_directory(self.workdir, run_name({}), self.base)
        return Plan(self.workdir, (Run({}, self.base, directory, ("", "", "", "", *self.recipe, "")),))

    def _settings(self) -> dict[str, Any]:
        return {**self.search.to_json(), "optuna": require().__version__}

    def _kept(self, plan: Plan) -> SearchPlan:
        (run,) = plan.runs
        return dataclasses.replace(self, base=run.config, recipe=run.command[4:-1], runs={})


def check_executor(name: str) -> None:
    """Checks that an executor can honour a search.

    Raises:
      ConfigError: it cannot.
    """
    if name in REFUSED:
        raise ConfigError(f"--executor: got {name} for a search, expected local: {REFUSED[name]}")


def make_plan(sweep_file: str, search: Search, arguments: Sequence[str], workdir: Path) -> SearchPlan:
    """Checks a search over the recipe and edits in `arguments`.

    Raises:
      ConfigError: Optuna is missing; the config, an axis or the pruner is wrong.
    """
    require()
    if workdir.exists() and not workdir.is_dir():
        raise ConfigError(f"--workdir: got {str(workdir)!a} (a file), expected a folder")
    base = overrides.parse(arguments)
    checkpoint = dataclasses.replace(
        base.checkpoint, metric=search.metric or base.checkpoint.metric, mode=search.mode or base.checkpoint.mode
    )
    for path, axis in search.axes.items():
        try:
            _check_axis(base, path, axis)
        except ConfigError as error:
            raise ConfigError(f"{sweep_file}: {error}") from None
    _check_pruner(sweep_file, search, base)
    return SearchPlan(search, base, workdir, tuple(arguments), checkpoint)


def _check_axis(base: Config, path: str, axis: Axis) -> None:
    """Checks the ends of an axis: each is of the field's type, and one of them at least fits the config."""
    if isinstance(axis, Choice):
        ends = axis.values
    else:  # 1 and 2 of `uniform` stand for numbers between them, which no integer field takes
        ends = tuple(map(int if axis.whole else float, (axis.low, axis.high)))
    errors, editable = [], overrides.editable(base)
    for value in ends:
        overrides.override(editable, path, format_value(value))
        secrets.reject({path: value}, "config")
        try:
            overrides.edit(base, edit_arguments({path: value}))
        except ConfigError as error:
            errors.append(error)
    if len(errors) == len(ends):
        raise errors[0]


def _check_pruner(sweep_file: str, search: Search, base: Config) -> None:
    if search.pruner is None:
        return
    name, steps, every = search.pruner.name, base.train.steps, base.train.evaluate_every
    for path in ("train.steps", "train.evaluate_every"):
        if path in search.axes:
            raise ConfigError(
                f"{sweep_file}: got a pruner and the axis {path}, expected one of them: trials are compared at equal "
                "steps"
            )
    if not 0 < every < steps:
        raise ConfigError(
            f"{sweep_file}: got pruner {name} and config.train.evaluate_every {every}, expected validations before the "
            f"last step, {steps}"
        )
    begin = search.pruner.options.get("warmup", search.pruner.options.get("first", 0))
    if begin >= steps:
        raise ConfigError(f"{sweep_file}: got pruner {name} that begins at step {begin}, expected one below {steps}")


# --- execution --------------------------------------------------------------------------------------------------------


class _Process(Protocol):
    """The part of `subprocess.Popen` that is used."""

    returncode: Any

    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class Orphan:
    """A run's process that an earlier, killed search has started, as far as the lock of its workdir shows it."""

    def __init__(self, workdir: Path, pid: int) -> None:
        self.workdir, self.pid = workdir, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """None while the process holds the lock, then -SIGKILL: how it ended is not known."""
        if self.returncode is None and owner_pid(self.workdir) != self.pid:
            self.returncode = -signal.SIGKILL
        return self.returncode

    def terminate(self) -> None:
        """Asks the process to save and stop."""
        if self.poll() is None and self.pid:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Leaves the process alone: the next search finds it again."""


def owner_pid(workdir: Path) -> int | None:
    """The process of this host that trains in `workdir`, by the kernel's lock; 0 if it is not known; None: nobody."""
    try:
        handle = os.open(workdir / workdir_lock.FILE_NAME, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        try:
            owner = files.parse_json(os.pread(handle, 4096, 0).decode("utf-8", "replace"))
        except ValueError:
            return 0
        is_here = isinstance(owner, dict) and owner.get("host") == socket.gethostname()
        return owner["pid"] if is_here and type(owner.get("pid")) is int else 0
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(handle)


@dataclass
class _Worker:
    """A trial whose process is running.

    Attributes:
      signals: how many times the process was asked to stop.
      seen: inode, size and time of the `metrics.jsonl` that was read last.
      is_pruned: the pruner has judged against the trial.
    """

    trial: Trial
    run: Run
    process: _Process
    signals: int = 0
    seen: Any = None
    is_pruned: bool = False


@dataclass
class _Execution:
    """A search that is being executed on this machine."""

    plan: SearchPlan
    study: Study
    table: progress.Table
    workers: int
    active: dict[int, _Worker] = field(default_factory=dict)
    restarts: dict[int, int] = field(default_factory=dict)
    signals: list[int] = field(default_factory=list)
    has_stopped: bool = False
    problem: str = ""

    def __post_init__(self) -> None:
        self.waiting = self.study.open

    @property
    def is_stopping(self) -> bool:
        return bool(self.signals) or self.has_stopped or bool(self.problem)

    def next_trial(self) -> Trial | None:
        """An open trial of an earlier process, then a new one; None: none is to be started now."""
        busy = {worker.run.workdir for worker in self.active.values()}
        for trial in self.waiting:
            # Two trials may have the same values: the second takes the first's result when that is there.
            if self._workdir(trial) not in busy:
                self.waiting.remove(trial)
                return trial
        if self.waiting or len(self.study.trials) >= self.plan.search.trials:
            return None
        trial = self.study.suggest()
        if self._workdir(trial) in busy:
            self.waiting.append(trial)
            return None
        return trial

    def _workdir(self, trial: Trial) -> Path | None:
        try:
            return self.plan.run_of(trial.edits).workdir
        except ConfigError:
            return None

    def start(self, trial: Trial, index: int) -> None:
        """Starts or resumes the trial's run, or takes over the process that an earlier search left."""
        try:
            run = self.plan.run_of(trial.edits)
        except ConfigError as error:
            run = Run(trial.edits, self.plan.base, self.plan.workdir / run_name(trial.edits), ())
            self.fail(trial, run, f": {error}")
            return
        pid = owner_pid(run.workdir)
        worker = _Worker(trial, run, Orphan(run.workdir, -1 if pid is None else pid))
        self.judge(worker)  # what the run wrote before the search was killed, or an equal trial did
        if pid is None and (run.is_finished or worker.is_pruned or self.problem):
            self.conclude(worker)
            return
        if pid is None:
            worker.process = local.start(run, index)
        self.active[index] = worker
        self.table.start(run)

    def judge(self, worker: _Worker) -> None:
        """Reports new validations before the last step, in their order, up to the one at which the trial is pruned."""
        path, metric = worker.run.workdir / "metrics.jsonl", self.plan.checkpoint.metric
        try:
            status = path.stat()
            seen = (status.st_ino, status.st_size, status.st_mtime_ns)
            if worker.is_pruned or seen == worker.seen:
                return
            content = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return
        worker.seen = seen
        for line in content.split("\n")[:-1]:  # the last may be incomplete
            row = files.parse_metrics_row(line)
            if row is None or row["split"] != "validation":
                continue
            if metric not in row:
                known = ", ".join(name for name in row if name not in ("step", "wall_time", "split"))
                self.problem = f"search: got metric {metric!a}, expected a measure of the validation split ({known})"
                return
            value = row[metric] if isinstance(row[metric], (int, float)) else math.nan  # null: not finite
            if row["step"] < worker.run.config.train.steps and self.study.report(worker.trial, row["step"], value):
                worker.is_pruned = True
                return

    def poll(self) -> None:
        """Reports new validations of every worker, asks pruned ones to stop, and ends the trials of ended processes."""
        for index, worker in list(self.active.items()):
            has_ended = worker.process.poll() is not None  # before the rows are read, so that none is missed
            self.judge(worker)
            wanted = max(len(self.signals), int(worker.is_pruned or bool(self.problem)))
            if has_ended:
                del self.active[index]
                self.conclude(worker)
            elif worker.signals < wanted:
                worker.process.terminate()
                worker.signals += 1

    def conclude(self, worker: _Worker) -> None:
        """Ends the trial of a process that has ended, or leaves it to be resumed."""
        trial, run, code = worker.trial, worker.run, worker.process.returncode
        if self.problem:
            self.table.end(run, "stopped")
        elif worker.is_pruned:
            self.study.end(trial, "pruned", trained=progress.newest(run.workdir, self.plan.checkpoint.metric)[0])
            shown = "not finite" if trial.value is None else f"{trial.value:.5g}"
            self.table.end(run, "pruned", f"(step {trial.step}: {self.plan.checkpoint.metric} {shown})")
        elif run.is_finished:
            result = run.result or {}
            value = result.get(self.plan.checkpoint.metric)
            if isinstance(value, (int, float)) and math.isfinite(value):
                self.study.end(trial, "complete", float(value), result["step"])
                self.table.end(run, "finished")
            else:
                self.fail(trial, run, f": its final {self.plan.checkpoint.metric} is {value}, expected a number")
        elif code in (PREEMPTED, -signal.SIGTERM) or (self.is_stopping and code is not None and code < 0):
            # Suggestions without its result would be others than those of a search that was not stopped.
            self.has_stopped = True
            self.table.end(run, "stopped")
        elif code == WRONG_INPUT and owner_pid(run.workdir) is not None:
            self._requeue(trial, run)  # an orphan had not locked its folder yet when this one was started
        elif (code == STALLED or code < 0) and self.restarts.get(trial.number, 0) < MAX_RESTARTS:
            if not isinstance(worker.process, Orphan):
                self.restarts[trial.number] = self.restarts.get(trial.number, 0) + 1
            self._requeue(trial, run)
        else:
            self.fail(trial, run, local.describe_failure(run, code))

    def _requeue(self, trial: Trial, run: Run) -> None:
        self.waiting.insert(0, trial)
        self.table.running.pop(run.workdir, None)
        self.table.log(f"again     {run.workdir.name}")

    def fail(self, trial: Trial, run: Run, why: str) -> None:
        """Counts a trial as failed. The next command tries it again."""
        self.study.end(trial, "failed")
        self.table.end(run, "failed", why)
        states = [each.state for each in self.study.trials]
        if states.count("failed") >= MAX_FIRST_FAILURES and not {"complete", "pruned"} & set(states):
            self.has_stopped = True
            self.table.log(f"the first {MAX_FIRST_FAILURES} trials failed, so no more are started")


def execute(plan: SearchPlan, workers: int) -> int:
    """Executes a search with `workers` trials at a time, each as a process with its output in `log.txt`.

    SIGTERM and Ctrl-C are forwarded, so that the runs save. A trial whose process was killed is resumed, at most
    `MAX_RESTARTS` times.

    Returns:
      0; 1 if a trial failed; 143 if the search, or one of its runs, was stopped.

    Raises:
      ConfigError: the validations have no such measure, or the journal is damaged.
    """
    study = Study(plan.workdir, plan.search, plan.checkpoint.mode, plan.base.train.steps)
    table = progress.Table((), plan.checkpoint, workers, total=plan.search.trials)
    ended = [trial for trial in study.trials if trial.state != "running"]
    for trial in ended:
        table.count(plan.run_of(trial.edits), "pruned" if trial.state == "pruned" else "finished")
    execution = _Execution(plan, study, table, workers)
    open_count = len(execution.waiting)
    table.log(f"{plan.search.trials} trials: {len(ended)} ended, {open_count} to resume, {workers} at a time")
    note_signal = lambda number, frame: execution.signals.append(number)  # noqa: E731
    handlers = {number: signal.signal(number, note_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        while True:
            while len(execution.active) < workers and not execution.is_stopping:
                trial = execution.next_trial()
                if trial is None:
                    break
                execution.start(trial, min(set(range(workers)) - set(execution.active)))
            if not execution.active:
                break
            time.sleep(local.POLL_SECONDS)
            execution.poll()
            table.draw()
    finally:
        table.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for worker in execution.active.values():
            worker.process.kill()
    if execution.problem:
        raise ConfigError(execution.problem)
    _write_ranking(plan, study)
    states = [trial.state for trial in study.trials]
    if execution.signals or "running" in states:
        table.log(f"stopped after {len(states)} of {plan.search.trials} trials; run the same command to go on")
        return PREEMPTED
    return CRASHED if "failed" in states else DONE


def write_report(plan: SearchPlan) -> None:
    """Ranks the trials that have ended, without writing to the search that may be going on."""
    _write_ranking(plan, Study(plan.workdir, plan.search, plan.checkpoint.mode, plan.base.train.steps, writable=False))


def _write_ranking(plan: SearchPlan, study: Study) -> None:
    runs: dict[Path, Run] = {}
    rows = []
    for trial in study.trials:
        try:
            run = plan.run_of(trial.edits)
            name = run.workdir.name
        except ConfigError:
            run, name = None, run_name(trial.edits)
        if run is not None and trial.state == "complete":
            runs[run.workdir] = run
        edits = {path: format_value(value) for path, value in trial.edits.items()}
        state = "open" if trial.state == "running" else trial.state
        rows.append(
            {
                "number": trial.number, "state": state, "step": trial.step if state != "complete" else trial.trained,
                "value": trial.value, "trained": trial.trained, "edits": edits, "run": name,
            }
        )  # fmt: skip
    ranking.write_ranking(Plan(plan.workdir, tuple(runs.values())), plan.checkpoint, rows)
