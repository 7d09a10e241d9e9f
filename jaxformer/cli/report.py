"""`jaxformer report`: one HTML page of one run, or of several compared."""

from __future__ import annotations

from argparse import Namespace

from jaxformer.cli.arguments import Command, Flag
from jaxformer.config import overrides
from jaxformer.train import seeds


def run(arguments: Namespace) -> int:
    for workdir in seeds.expand(arguments.workdir):
        overrides.read(workdir)
    from jaxformer import report

    print(f"written to {report.write(arguments.workdir, arguments.output)}")
    return 0


COMMAND = Command(
    "one HTML page of one run, or of several compared",
    run,
    {
        "workdir": Flag("folder of a run, or of several seeds; may be repeated", repeats=True, directory="write"),
        "output": Flag(
            "page to write, FILE.html; without it report.html of one run, and of several comparison.html in the "
            "folder that holds them",
            default="",
        ),
    },
    example="jaxformer report --workdir=runs/a --workdir=runs/b --output=both.html",
)
