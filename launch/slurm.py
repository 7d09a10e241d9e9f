"""Launches a SLURM job with one process per node, or with --per-gpu one per GPU.

    python -m launch.slurm --nodes=2 --gpus-per-node=8 --time=12:00:00 --setup='source .venv/bin/activate' \\
        -- --config=configs/NAME.py --workdir=/shared/runs/NAME

The script is passed to sbatch on standard input. Two minutes before the time limit, and when the job is preempted, the
run saves and exits with code 143, and the job goes back into the queue: the same command resumes it. --sbatch passes
further options of sbatch and may be repeated: --sbatch=--constraint=a100 --sbatch=--account=abc.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

import launch

BODY = """
export {distributed}=auto
cd {folder} || exit 1
{setup}srun {srun} &
step=$!
signals=0
seen=-1
# srun forwards SIGTERM to every process of the run.
trap 'signals=$((signals + 1)); kill -TERM "$step"' USR1 TERM
# A signal interrupts wait, whose code is then the signal's. Only an uninterrupted wait returns the run's exit code.
while [ "$seen" -ne "$signals" ]; do
  seen=$signals
  code=0
  wait "$step" || code=$?
done
if [ "$code" -eq {preempted} ] || [ "$code" -eq {stalled} ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def directives(flags: argparse.Namespace) -> list[str]:
    """Options of sbatch, one for each #SBATCH line."""
    tasks = flags.gpus_per_node if flags.per_gpu else 1
    rows = {
        "--job-name": flags.job_name,
        "--nodes": flags.nodes,
        "--ntasks-per-node": tasks,
        "--gpus-per-node": flags.gpus_per_node or None,
        "--cpus-per-task": flags.cpus_per_task,
        "--time": flags.time,
        "--partition": flags.partition,
        "--output": flags.log,
    }
    options = [f"{name}={value}" for name, value in rows.items() if value is not None]
    # USR1 to the batch shell (B:), 120 seconds before the time limit.
    return [*options, "--requeue", "--open-mode=append", "--signal=B:USR1@120", *flags.sbatch]


def script(flags: argparse.Namespace) -> str:
    """The batch script of the job."""
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in directives(flags))]
    command = launch.train_command(flags, flags.python)
    srun = ["--kill-on-bad-exit=1", *command]
    body = BODY.format(
        distributed=launch.DISTRIBUTED,
        folder=shlex.quote(flags.folder),
        setup=f"{flags.setup} || exit 1\n" if flags.setup else "",
        srun=shlex.join(srun),
        preempted=launch.PREEMPTED,
        stalled=launch.STALLED,
    )
    return "\n".join(lines) + "\n" + body.lstrip("\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the launcher and returns the exit code."""
    parser = launch.make_parser(__doc__)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus-per-node", type=int, default=0)
    parser.add_argument("--per-gpu", action="store_true", help="one process per GPU instead of per node")
    parser.add_argument("--cpus-per-task", type=int)
    parser.add_argument("--time", help="limit, as sbatch takes it: 12:00:00")
    parser.add_argument("--partition")
    parser.add_argument("--job-name", default="jaxformer")
    parser.add_argument("--log", default="slurm-%j.txt", help="output file, as sbatch takes it")
    parser.add_argument("--folder", default=os.getcwd(), help="directory of the command [the current one]")
    parser.add_argument("--python", default="python", help="interpreter on the nodes, after --setup")
    parser.add_argument("--setup", default="", help="shell command before the run: modules, environment")
    parser.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help="another option of sbatch")
    flags = launch.parse(parser, argv)
    if flags.per_gpu and not flags.gpus_per_node:
        parser.error("--per-gpu: got no --gpus-per-node, expected the number of processes per node")
    multiline = [text for text in (*directives(flags), *flags.train) if "\n" in text]
    if multiline:
        parser.error(f"got {multiline[0]!r}, expected values on one line")
    text = script(flags)
    if flags.dry_run:
        print(text, end="")
        return 0
    return launch.run(["sbatch"], text)


if __name__ == "__main__":
    sys.exit(main())
