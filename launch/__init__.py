"""Launchers: each file builds the command that starts `jaxformer train` on one kind of machine, and runs or prints it.

    python -m launch --on=local --processes=2 -- --config=configs/NAME.py --workdir=DIR [--config.a.b=VALUE ...]
    python -m launch --on=slurm --nodes=2 --gpus-per-node=8 --time=12:00:00 -- --config=... --workdir=...
    python -m launch --on=tpu   --name=my-v5e --zone=us-west4-a --type=v5litepod-16 --spot -- --config=... --workdir=...
    python -m launch --on=gke   --name=my-run --image=IMAGE --tpu=tpu-v5-lite-podslice:4x4 -- --config=... --workdir=...
    python -m launch --on=sky   --name=my-run --nodes=2 --accelerators=A100:8 --spot -- --config=... --workdir=...

Everything after `--` is passed to `jaxformer train` unchanged. `--dry-run` prints everything that would be run or
written, and does nothing. `--doctor` runs `jaxformer doctor` instead of the training, which checks that all processes
meet and belong together. The launchers do not import the package, so they work on a laptop without jax.

Each engine is also a program of its own: `python -m launch.local`, `launch.slurm`, `launch.tpu`, `launch.gke` and
`launch.sky`. `launch.tpu_vm` trains on a TPU VM that already exists, without making or deleting anything.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

DISTRIBUTED = "JAXFORMER_DISTRIBUTED"
"""Environment variable by which a process finds the others (see `jaxformer.parallel.distributed`)."""

CRASHED = 1
"""Exit code of a crash."""

WRONG_INPUT = 2
"""Exit code of wrong flags, config or data: another attempt would end in the same way."""

INTERRUPTED = 130
"""Exit code of a launcher that was interrupted while it stopped a run."""

PREEMPTED = 143
"""Exit code of a run that was asked to stop and has saved; the same command continues."""

STALLED = 75
"""Exit code of a run that hung and was ended by its watchdog; the same command continues from its last checkpoint."""

RESTARTABLE = (PREEMPTED, STALLED)
"""Exit codes after which the same command continues the run."""

PORT = 7000
"""TCP port of the first process, where the launcher has to name one."""


def make_parser(description: str | None, program: str | None = None) -> argparse.ArgumentParser:
    """A parser with the arguments that all launchers take; `program` is the name in its messages."""
    parser = argparse.ArgumentParser(
        prog=program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be run or written, do nothing")
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


def refuse_multiline(parser: argparse.ArgumentParser, values: Sequence[str]) -> None:
    """Exits with code 2 if a value has several lines, which no script or manifest would keep as one."""
    for value in values:
        if "\n" in value:
            parser.error(f"got {value!r}, expected values on one line")


def at_least(parser: argparse.ArgumentParser, flags: argparse.Namespace, name: str, least: int) -> None:
    """Exits with code 2 if the number in the flag `--name` is below `least`."""
    value = getattr(flags, name.replace("-", "_"))
    if value < least:
        parser.error(f"--{name}: got {value}, expected at least {least}")


def train_argument(flags: argparse.Namespace, name: str) -> str:
    """Value of `--name=` among the arguments of `train`, the last one if there are several; "" without it."""
    prefix = f"--{name}="
    values = [argument.removeprefix(prefix) for argument in flags.train if argument.startswith(prefix)]
    return values[-1] if values else ""


def is_in_bucket(workdir: str) -> bool:
    """True for the address of a workdir in a bucket, which outlives all machines and lies on no disk."""
    return workdir.startswith(("gs://", "s3://"))


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
        return WRONG_INPUT
