"""One front for all engines: `python -m launch --on=ENGINE [flags of the engine] -- [arguments of jaxformer train]`.

Everything else is the engine's: `python -m launch --on=tpu --help` lists its flags.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import launch

ENGINES = ("local", "slurm", "tpu", "gke", "sky")
"""Names that --on takes; each is a module of this package with `main(argv, program)`."""

FRONT_DEFAULTS = {"slurm": ("--rank-logs=slurm-%j",)}
"""Flags that the front puts before the user's own, which therefore override them."""


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Values of --on before `--`, and all other arguments."""
    end = argv.index("--") if "--" in argv else len(argv)
    names: list[str] = []
    rest: list[str] = []
    front = iter(argv[:end])
    for argument in front:
        if argument == "--on":
            names.append(next(front, ""))
        elif argument.startswith("--on="):
            names.append(argument.removeprefix("--on="))
        else:
            rest.append(argument)
    return names, [*rest, *argv[end:]]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the engine that --on names, and returns its exit code; 2 and one line if it names none."""
    names, rest = split(sys.argv[1:] if argv is None else argv)
    if not names and rest[:1] in (["--help"], ["-h"]):
        print(launch.__doc__)
        return 0
    if len(names) != 1 or names[0] not in ENGINES:
        got = " and ".join(f"--on={name}" for name in names) or "no --on"
        expected = "|".join(ENGINES)
        print(f"error: {got}: expected one of --on={expected}; see python -m launch --help", file=sys.stderr)
        return launch.WRONG_INPUT
    engine = importlib.import_module(f"launch.{names[0]}")
    return engine.main([*FRONT_DEFAULTS.get(names[0], ()), *rest], f"python -m launch --on={names[0]}")


if __name__ == "__main__":
    sys.exit(main())
