"""Starting `jaxformer train` somewhere: each file builds the exact command of one place and runs it, or prints it.

    python -m launch.local  --processes=2 -- --config=configs/NAME.py --workdir=DIR [--config.a.b=VALUE ...]
    python -m launch.slurm  --nodes=2 --gpus-per-node=8 --time=12:00:00 -- --config=... --workdir=...
    python -m launch.tpu_vm --name=my-v5e --zone=us-west4-a -- --config=... --workdir=...

What follows `--` goes to `jaxformer train` as it is. `--dry-run` prints what would be run and runs nothing;
`--doctor` checks first whether all processes see each other and belong together, in place of the training. Nothing
here imports the model, so a laptop without jax can launch.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from typing import Sequence

DISTRIBUTED = "JAXFORMER_DISTRIBUTED"
"""The environment variable by which a process learns of its partners (see `jaxformer.parallel.distributed`)."""

PREEMPTED = 143
"""The exit code of a run that was asked to stop and saved: the same command goes on."""

STALLED = 75
"""The exit code of a run that hung and was ended by its watchdog: the same command goes on from its last checkpoint."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with what all launchers take."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--dry-run", action="store_true", help="print the commands, run nothing")
    made.add_argument("--doctor", action="store_true", help="run jaxformer doctor there in place of the training")
    made.add_argument("train", nargs="*", metavar="-- ARGUMENT", help="arguments of jaxformer train")
    return made


def read(made: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses `argv`; exits with code 2 and one line if the arguments of `train` are missing or not flags."""
    flags = made.parse_args(argv)
    for name in () if flags.doctor else ("config", "workdir"):
        if not any(argument.startswith(f"--{name}=") for argument in flags.train):
            made.error(f"got no --{name}=VALUE after --, expected the arguments of jaxformer train there")
    strange = [argument for argument in flags.train if not argument.startswith("--")]
    if strange:
        made.error(f"got {strange[0]!r} after --, expected --flag=VALUE only")
    return flags


def train(flags: argparse.Namespace, python: str) -> list[str]:
    """The command that trains, or with --doctor the one that checks, as an argument list."""
    if flags.doctor:
        kept = [argument for argument in flags.train if not argument.startswith("--workdir=")]
        return [python, "-m", "jaxformer", "doctor", *kept]
    return [python, "-m", "jaxformer", "train", *flags.train]


def call(command: Sequence[str], standard_input: str | None = None) -> int:
    """Runs a command and returns its exit code; 2 and one line if the program does not exist."""
    try:
        return subprocess.run(command, input=standard_input, text=True, check=False).returncode
    except FileNotFoundError:
        print(f"error: {command[0]}: no such program here; use --dry-run to see the command", file=sys.stderr)
        return 2


def shown(command: Sequence[str]) -> str:
    """A command as a shell would read it back."""
    return shlex.join(command)
