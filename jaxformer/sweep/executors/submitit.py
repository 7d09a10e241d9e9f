"""Submits a sweep through submitit: a job for each run, on SLURM, or on this machine for tests."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

from jaxformer.config import overrides
from jaxformer.errors import ConfigError
from jaxformer.runtime.exit_codes import CRASHED, DONE, PREEMPTED
from jaxformer.sweep import ranking
from jaxformer.sweep.planning import Plan

VARIABLE = "JAXFORMER_SUBMITIT"
"""Parameters of submitit's AutoExecutor with commas between them, as `timeout_min=720,slurm_partition=gpu`."""
ONE_PROCESS = ("nodes", "tasks_per_node")


class Job:
    """One run, as submitit calls it in its job. The run itself handles the signals while it trains.

    Args:
      recipe: the argument of the run's command that names its frozen config.
      workdir: of the run.
      directory: the working directory.
    """

    def __init__(self, recipe: str, workdir: Path, directory: str) -> None:
        self.recipe, self.workdir, self.directory = recipe, workdir, directory

    def __call__(self) -> int:
        """Trains. A run that was stopped, and has saved, asks submitit to requeue its job."""
        from jaxformer import report
        from jaxformer.hf import workdirs
        from jaxformer.train import loop

        os.chdir(self.directory)
        code = loop.train(overrides.parse([self.recipe]), self.workdir, workdirs.ORIGIN)
        if code == PREEMPTED:
            signal.raise_signal(signal.SIGUSR2)  # submitit's handler, now that the run's is gone
        if code != DONE:
            raise RuntimeError(f"the run ended with code {code}")
        report.write_after_training(self.workdir)
        return code

    def checkpoint(self) -> Any:
        """The job that submitit submits again: the same, since the run has saved its state."""
        submitit = importlib.import_module("submitit")
        return submitit.helpers.DelayedSubmission(Job(self.recipe, self.workdir, self.directory))


def check(plan: Plan, workers: int) -> None:
    """Checks that submitit is installed and that its parameters are such that a run trains with them.

    Raises:
      ConfigError: it is not, or they are wrong.
    """
    if not is_installed():
        raise ConfigError("submitit: got no such package, expected it; pip install 'jaxformer[submitit]'")
    found = parameters()
    several = [name for name in ONE_PROCESS if found.get(name, 1) != 1]
    if several:
        raise ConfigError(f"${VARIABLE}: got {several[0]}={found[several[0]]}, expected 1: a run is one process there")
    if found.get("cluster") != "local" and "timeout_min" not in found:
        raise ConfigError(f"${VARIABLE}: got no timeout_min, expected the minutes of a job, as timeout_min=720; add it")


def is_installed() -> bool:
    """True if the package is there."""
    return importlib.util.find_spec("submitit") is not None


def parameters() -> dict[str, Any]:
    """The parameters in the variable.

    Raises:
      ConfigError: it is no list of NAME=VALUE.
    """
    found: dict[str, Any] = {}
    for word in filter(None, os.environ.get(VARIABLE, "").split(",")):
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier() or not value:
            raise ConfigError(f"${VARIABLE}: got {word!a}, expected NAME=VALUE, with commas between several; mend it")
        found[name] = int(value) if value.isdecimal() else value
    return found


def execute(plan: Plan, workers: int) -> int:
    """Submits the unfinished runs, `workers` at a time. Their output is in the sweep's folder `submitit`.

    A job that reaches its time limit, or is preempted, saves and goes back into the queue. On SLURM this returns when
    the jobs are submitted; `--report` ranks them later. With `cluster=local` it waits for them.

    Raises:
      ConfigError: submitit refuses the parameters.
    """
    if not plan.unfinished:
        ranking.write_ranking(plan)
        return DONE
    submitit = importlib.import_module("submitit")
    given = parameters()
    try:
        executor = submitit.AutoExecutor(plan.workdir / "submitit", given.pop("cluster", None))
        is_local = executor.cluster in ("local", "debug")
        executor.update_parameters(name="jaxformer-sweep", slurm_array_parallelism=workers, **given)
    except (NameError, TypeError, ValueError, AssertionError, RuntimeError) as error:
        words = " ".join(str(error).split())[:300]
        raise ConfigError(f"${VARIABLE}: got parameters that submitit refuses ({words}), expected its own") from None
    runs = plan.unfinished
    jobs = [Job(run.command[-2], run.workdir.absolute(), os.getcwd()) for run in runs]
    for run in runs:
        run.workdir.mkdir(parents=True, exist_ok=True)
    if not is_local:
        submitted = _submit(executor, jobs)
        print(f"submitted {len(submitted)} runs, the first as job {submitted[0].job_id}")
        return DONE
    has_failed = False
    for begin in range(0, len(jobs), workers):
        submitted = _submit(executor, jobs[begin : begin + workers])
        for run, job in zip(runs[begin:], submitted, strict=False):
            job.wait()
            error = job.exception()
            has_failed |= error is not None
            words = "" if error is None else " ".join(str(error).split())[-200:]
            print(f"{'failed' if error else 'finished':<9} {run.workdir.name}{' ' * bool(words)}{words}", flush=True)
    ranking.write_ranking(plan)
    return CRASHED if has_failed else DONE


def _submit(executor: Any, jobs: list[Job]) -> list[Any]:
    """Submits jobs as one array. A job is given as itself, so that submitit finds its `checkpoint`."""
    with executor.batch():
        return [executor.submit(job) for job in jobs]
