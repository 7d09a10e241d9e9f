"""Launches on a TPU VM or pod slice with gcloud: the same command on every worker; the workers find each other.

    python -m launch.tpu_vm --name=my-v5e --zone=us-west4-a --copy -- --config=configs/NAME.py --workdir=/shared/NAME

--copy first copies the current directory to every worker. --setup runs a shell command there before the training, such
as an installation. With --detach the training continues when the connection breaks, and writes to jaxformer.log there.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

import launch


def location_flags(flags: argparse.Namespace) -> list[str]:
    """Flags of gcloud that select the workers."""
    return [f"--zone={flags.zone}", *([f"--project={flags.project}"] if flags.project else []), "--worker=all"]


def worker_command(flags: argparse.Namespace) -> str:
    """The shell command of every worker."""
    run = f"{launch.DISTRIBUTED}=auto {shlex.join(launch.train_command(flags, flags.python))}"
    if flags.detach:
        run = f"nohup env {run} > jaxformer.log 2>&1 < /dev/null &"
    steps = [f"cd {shlex.quote(flags.folder)}", *([f"{{ {flags.setup}; }}"] if flags.setup else [])]
    # In braces, so that --detach puts only the training into the background, after the steps have succeeded.
    return " && ".join([*steps, f"{{ {run} }}" if flags.detach else run])


def commands(flags: argparse.Namespace) -> list[list[str]]:
    """The calls of gcloud, in order."""
    tpu_vm = ["gcloud", "compute", "tpus", "tpu-vm"]
    calls = []
    if flags.copy:
        calls.append([*tpu_vm, "scp", "--recurse", ".", f"{flags.name}:{flags.folder}", *location_flags(flags)])
    calls.append([*tpu_vm, "ssh", flags.name, *location_flags(flags), f"--command={worker_command(flags)}"])
    return calls


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the launcher and returns the exit code."""
    parser = launch.make_parser(__doc__)
    parser.add_argument("--name", required=True, help="name of the TPU VM")
    parser.add_argument("--zone", required=True)
    parser.add_argument("--project")
    parser.add_argument("--folder", default="jaxformer", help="folder of the code on the workers, in the home folder")
    parser.add_argument("--python", default="python3", help="interpreter on the workers")
    parser.add_argument("--setup", default="", help="shell command before the run, in the folder")
    parser.add_argument("--copy", action="store_true", help="copy this folder to the workers first")
    parser.add_argument("--detach", action="store_true", help="leave the run in the background")
    flags = launch.parse(parser, argv)
    for command in commands(flags):
        if flags.dry_run:
            print(shlex.join(command))
            continue
        code = launch.run(command)
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
