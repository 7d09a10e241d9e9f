"""Launchers: each file builds the command that starts `jaxformer train` on one kind of machine, and runs or prints it.

    python -m launch.local  --processes=2 -- --config=configs/NAME.py --workdir=DIR [--config.a.b=VALUE ...]
    python -m launch.slurm  --nodes=2 --gpus-per-node=8 --time=12:00:00 -- --config=... --workdir=...
    python -m launch.tpu_vm --name=my-v5e --zone=us-west4-a -- --config=... --workdir=...

Everything after `--` is passed to `jaxformer train` unchanged. `--dry-run` prints the commands and runs nothing.
`--doctor` runs `jaxformer doctor` instead of the training, which checks that all processes meet and belong together.
The launchers do not import the package, so they work on a laptop without jax.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

DISTRIBUTED = "JAXFORMER_DISTRIBUTED"
"""Environment variable by which a process finds the others (see `jaxformer.parallel.distributed`)."""

PREEMPTED = 143
"""Exit code of a run that was asked to stop and has saved; the same command continues."""

STALLED = 75
"""Exit code of a run that hung and was ended by its watchdog; the same command continues from its last checkpoint."""


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the arguments that all launchers take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run nothing")
    parser.add_argument("--doctor", action="store_true", help="run jaxformer doctor there instead of the training")
    parser.add_argument("train", nargs="*", metavar="-- ARGUMENT", help="arguments of jaxformer train")
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses `argv`; exits with code 2 and one line if the arguments of `train` are missing or not flags."""
    flags = parser.parse_args(argv)
    for name in () if flags.doctor else ("config", "workdir"):
        if not any(argument.startswith(f"--{name}=") for argument in flags.train):
            parser.error(f"got no --{name}=VALUE after --, expected the arguments of jaxformer train there")
    words = [argument for argument in flags.train if not argument.startswith("--")]
    if words:
        parser.error(f"got {words[0]!r} after --, expected --flag=VALUE only")
    return flags


def train_command(flags: argparse.Namespace, python: str) -> list[str]:
    """The command that trains, or with --doctor the one that checks, as an argument list."""
    if flags.doctor:
        arguments = [argument for argument in flags.train if not argument.startswith("--workdir=")]
        return [python, "-m", "jaxformer", "doctor", *arguments]
    return [python, "-m", "jaxformer", "train", *flags.train]


def run(command: Sequence[str], standard_input: str | None = None) -> int:
    """Runs a command and returns its exit code; 2 and one line if the program does not exist."""
    try:
        return subprocess.run(command, input=standard_input, text=True, check=False).returncode
    except FileNotFoundError:
        print(f"error: {command[0]}: no such program here; use --dry-run to see the command", file=sys.stderr)
        return 2
