"""Submits a sweep as one SLURM job array."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess

from jaxformer.errors import ConfigError
from jaxformer.runtime import files
from jaxformer.runtime.exit_codes import PREEMPTED, STALLED
from jaxformer.sweep import ranking
from jaxformer.sweep.planning import Plan

NO_SBATCH = "sbatch: got no such program, expected SLURM; use --executor=local or print"


def check(plan: Plan, workers: int) -> None:
    """Checks that there is sbatch if a run is to be submitted.

    Raises:
      ConfigError: there is none.
    """
    if plan.unfinished and shutil.which("sbatch") is None:
        raise ConfigError(NO_SBATCH)


def execute(plan: Plan, workers: int) -> int:
    """Submits the unfinished runs, `workers` tasks at a time; sbatch reads further options from SBATCH_* variables.

    A task that was preempted and has saved (code 143) goes back into the queue. When the array is done, `--report`
    writes the ranking.

    Raises:
      ConfigError: there is no sbatch, or it refuses.
    """
    if not plan.unfinished:
        ranking.write_ranking(plan)
        return 0
    plan.workdir.mkdir(parents=True, exist_ok=True)
    for run in plan.unfinished:
        run.workdir.mkdir(parents=True, exist_ok=True)
    script = plan.workdir / "sweep.sbatch"
    files.write_atomic(script, array_script(plan, workers))
    try:
        done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError(NO_SBATCH) from None
    if done.returncode:
        raise ConfigError(f"sbatch: got code {done.returncode} ({' '.join(done.stderr.split())}), expected a job id")
    print(f"submitted {len(plan.unfinished)} runs as job array {done.stdout.strip()}")
    return 0


def array_script(plan: Plan, workers: int) -> str:
    """The batch script of the job array: one line of `commands` for each task."""
    commands = "\n".join(f"  {shlex.quote(shlex.join(run.command))}" for run in plan.unfinished)
    log = str(plan.workdir.absolute() / "slurm-%A_%a.txt").replace('"', "")
    return f"""#!/bin/bash
#SBATCH --job-name=jaxformer-sweep
#SBATCH --array=0-{len(plan.unfinished) - 1}%{workers}
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
# A signal interrupts wait, whose code is then the signal's. Only an uninterrupted wait returns the run's exit code.
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
