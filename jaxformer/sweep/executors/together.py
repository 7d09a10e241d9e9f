"""Trains all runs of a sweep as one program in this process: runs that differ in seed and rates only."""

from __future__ import annotations

from pathlib import Path

from jaxformer.errors import ConfigError
from jaxformer.sweep import ranking
from jaxformer.sweep.planning import Plan


def check(plan: Plan, workers: int) -> None:
    """Checks that one program can train all runs.

    Raises:
      ConfigError: the runs differ in more than seed and rates, or have a setting that one program cannot honour.
    """
    if workers != 1:
        raise ConfigError(f"--workers: got {workers}, expected 1 with --executor=together, which is one program")
    from jaxformer.train import lanes

    lanes.differing_rates([run.config for run in plan.runs])


def execute(plan: Plan, workers: int) -> int:
    """Trains the runs as lanes of one program (`train.together`), each in its own folder with its lines in `log.txt`.

    SIGTERM and Ctrl-C save all runs, and the same command goes on. A run whose loss diverges does not stop the others.

    Returns:
      0; 2 if a run failed; 143 if the sweep was stopped.
    """
    from jaxformer import report
    from jaxformer.hf import workdirs
    from jaxformer.train import together

    print(f"{len(plan.runs)} runs: {len(plan.runs) - len(plan.unfinished)} finished, one program for all", flush=True)

    def tell(event: str, workdir: Path, reason: str) -> None:
        why = f": {reason}" if reason else ""
        print(f"{event:<9} {workdir.name}{why}", flush=True)
        if event == "finished":
            report.write_after_training(workdir)

    code = together.train([(run.config, run.workdir) for run in plan.runs], workdirs.ORIGIN, tell)
    ranking.write_ranking(plan)
    return code
