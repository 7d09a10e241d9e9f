"""A TPU VM or pod slice, through gcloud: the same command on every worker, which find each other by themselves.

    python -m launch.tpu_vm --name=my-v5e --zone=us-west4-a --copy -- --config=configs/NAME.py --workdir=/shared/NAME

--copy first copies this folder to every worker, and --setup runs a shell command there before the training (such as
installing). The training goes on when the connection breaks (--detach), with its output in jaxformer.log there.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Sequence

import launch


def place(flags: argparse.Namespace) -> list[str]:
    return [f"--zone={flags.zone}", *([f"--project={flags.project}"] if flags.project else []), "--worker=all"]


def remote(flags: argparse.Namespace) -> str:
    """What the shell of every worker runs."""
    run = f"{launch.DISTRIBUTED}=auto {launch.shown(launch.train(flags, flags.python))}"
    if flags.detach:
        run = f"nohup env {run} > jaxformer.log 2>&1 < /dev/null &"
    steps = [f"cd {shlex.quote(flags.folder)}", *([f"{{ {flags.setup}; }}"] if flags.setup else [])]
    # Braces: with --detach only the training goes to the background, after the steps before it have succeeded.
    return " && ".join([*steps, f"{{ {run} }}" if flags.detach else run])


def commands(flags: argparse.Namespace) -> list[list[str]]:
    """The gcloud calls, in order."""
    tpu_vm = ["gcloud", "compute", "tpus", "tpu-vm"]
    made = []
    if flags.copy:
        made.append([*tpu_vm, "scp", "--recurse", ".", f"{flags.name}:{flags.folder}", *place(flags)])
    made.append([*tpu_vm, "ssh", flags.name, *place(flags), f"--command={remote(flags)}"])
    return made


def main(argv: Sequence[str] | None = None) -> int:
    parser = launch.parser(__doc__)
    parser.add_argument("--name", required=True, help="of the TPU VM")
    parser.add_argument("--zone", required=True)
    parser.add_argument("--project")
    parser.add_argument("--folder", default="jaxformer", help="of the code on the workers, in the home folder")
    parser.add_argument("--python", default="python3", help="interpreter on the workers")
    parser.add_argument("--setup", default="", help="shell command before the run, in the folder")
    parser.add_argument("--copy", action="store_true", help="copy this folder to the workers first")
    parser.add_argument("--detach", action="store_true", help="leave the run in the background")
    flags = launch.read(parser, argv)
    for command in commands(flags):
        if flags.dry_run:
            print(launch.shown(command))
            continue
        code = launch.call(command)
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
