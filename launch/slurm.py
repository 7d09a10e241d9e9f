"""Launches a SLURM job with one process per node, or with --per-gpu one per GPU.

    python -m launch.slurm --nodes=2 --gpus-per-node=8 --time=12:00:00 --setup='source .venv/bin/activate' \\
        -- --config=configs/NAME.py --workdir=/shared/runs/NAME

The script is passed to sbatch on standard input. Two minutes before the time limit, and when the job is preempted, the
run saves and exits with code 143, and the job goes back into the queue: the same command resumes it. --sbatch passes
further options of sbatch and may be repeated: --sbatch=--constraint=a100 --sbatch=--account=abc.

--rank-logs=DIR writes the output of process i to DIR/rank-i.txt; DIR may hold the patterns of sbatch, as slurm-%j. With
--container=IMAGE the run starts in a container, by apptainer or by pyxis (--container-engine). It sees --folder and the
directories of --mount; the workdir must lie in one of them.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

import launch
from launch import restarts, shell

MAX_RESTARTS = 100
"""Default of --max-restarts: a job with a time limit of four hours then runs for two weeks."""

CONTAINER_ENGINES = ("apptainer", "pyxis")

BODY = """
export {distributed}=auto
cd {folder} || exit 1
{setup}{logs}srun {srun} &
step=$!
{wait}trap '' USR1 TERM
if [ "$code" -eq {preempted} ] || [ "$code" -eq {stalled} ]; then
  if [ "${{SLURM_RESTART_COUNT:-0}}" -ge {restarts} ]; then
    echo "launch: not requeued: {restarts} restarts (--max-restarts) are used up" >&2
  else
    # A controller that is restarting refuses for a while. SLURM itself holds a requeued job back for about two minutes.
    for delay in 5 15 45 0; do
      scontrol requeue "$SLURM_JOB_ID" && break
      sleep "$delay"
    done
  fi
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
    lines = [
        "#!/bin/bash",
        "# sbatch reads this script on its standard input.",
        *(f"#SBATCH {option}" for option in directives(flags)),
    ]
    srun = shlex.join(["--kill-on-bad-exit=1", *container_command(flags, launch.train_command(flags, flags.python))])
    if flags.rank_logs:
        srun = f'--output="$logs"/rank-%t.txt --open-mode=append {srun}'
    body = BODY.format(
        distributed=launch.DISTRIBUTED,
        folder=shlex.quote(flags.folder),
        setup=f"{flags.setup} || exit 1\n" if flags.setup else "",
        logs=log_directory(flags.rank_logs) if flags.rank_logs else "",
        srun=srun,
        wait=shell.wait_for("step", "USR1 TERM", "srun forwards SIGTERM to every process of the run."),
        preempted=launch.PREEMPTED,
        stalled=launch.STALLED,
        restarts=flags.max_restarts,
    )
    return "\n".join(lines) + "\n" + body.lstrip("\n")


def log_directory(pattern: str) -> str:
    """Shell lines that set `logs` to the directory of --rank-logs and make it: srun makes no directories."""
    name = '"$SLURM_JOB_ID"'.join(shlex.quote(part) if part else "" for part in pattern.split("%j"))
    return f'logs={name}\nmkdir -p "$logs" || exit 1\n'


def container_command(flags: argparse.Namespace, command: Sequence[str]) -> list[str]:
    """The words after srun's own options: `command`, in a container if there is one."""
    mounts = [f"{flags.folder}:{flags.folder}", *(m if ":" in m else f"{m}:{m}" for m in flags.mount)]
    if not flags.container:
        return list(command)
    if flags.container_engine == "pyxis":
        places = ",".join(mounts)
        options = [f"--container-image={flags.container}", f"--container-mounts={places}"]
        return [*options, f"--container-workdir={flags.folder}", *command]
    gpus = ["--nv"] if flags.gpus_per_node else []
    binds = [f"--bind={mount}" for mount in mounts]
    return ["apptainer", "exec", *gpus, *binds, f"--pwd={flags.folder}", flags.container, *command]


def check_container(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """Exits with code 2 if options of containers contradict each other, or the workdir is not seen inside."""
    if not flags.container:
        if flags.mount or flags.container_engine:
            parser.error("--mount, --container-engine: got no --container, expected one; name the image")
        return
    flags.container_engine = flags.container_engine or CONTAINER_ENGINES[0]
    seen = [os.path.abspath(flags.folder), *(mount.split(":")[-1] for mount in flags.mount)]
    for path in seen:
        if not path.startswith("/"):
            parser.error(f"--mount: got {path}, expected an absolute path")
    workdir = launch.train_argument(flags, "workdir")
    path = os.path.normpath(os.path.join(flags.folder, workdir))
    if workdir and not any(
        os.path.commonpath([path, os.path.normpath(place)]) == os.path.normpath(place) for place in seen
    ):
        parser.error(
            f"--workdir: got {workdir}, which the container does not see, expected a path below {' or '.join(seen)}; "
            "add --mount=DIRECTORY"
        )


def main(argv: Sequence[str] | None = None, program: str | None = None) -> int:
    """Runs the launcher and returns the exit code."""
    parser = launch.make_parser(__doc__, program)
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
    parser.add_argument("--rank-logs", default="", metavar="DIR", help="a log for each process: DIR/rank-0.txt, ...")
    parser.add_argument("--container", default="", metavar="IMAGE", help="run in a container of this image")
    parser.add_argument("--container-engine", choices=CONTAINER_ENGINES, help="program that runs it [apptainer]")
    parser.add_argument(
        "--mount", action="append", default=[], metavar="DIR[:INSIDE]", help="directory that the container sees"
    )
    restarts.add_flag(parser, MAX_RESTARTS)
    flags = launch.parse(parser, argv)
    launch.at_least(parser, flags, "nodes", 1)
    launch.at_least(parser, flags, "max-restarts", 0)
    if flags.per_gpu and not flags.gpus_per_node:
        parser.error("--per-gpu: got no --gpus-per-node, expected the number of processes per node")
    check_container(parser, flags)
    if "%" in flags.rank_logs.replace("%j", ""):
        parser.error(f"--rank-logs: got {flags.rank_logs}, expected no pattern but %j, the number of the job")
    launch.refuse_multiline(
        parser, [*directives(flags), *flags.train, flags.rank_logs, flags.container, *flags.mount, flags.folder]
    )
    text = script(flags)
    if flags.dry_run:
        print(text, end="")
        return 0
    return launch.run(["sbatch"], text)


if __name__ == "__main__":
    sys.exit(main())
