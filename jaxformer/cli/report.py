"""`jaxformer report`: one HTML page of one run, or of several compared."""

from __future__ import annotations

from argparse import Namespace

from jaxformer.cli.arguments import Command, Flag, port
from jaxformer.config import overrides
from jaxformer.errors import ConfigError


def run(arguments: Namespace) -> int:
    from jaxformer import report

    for workdir in report.expand(arguments.workdir):
        overrides.read(workdir)

    if arguments.serve:
        for name in ("output", "figures"):
            if getattr(arguments, name):
                raise ConfigError(f"--{name}: got {getattr(arguments, name)!a} with --serve, expected one of the two")
        from jaxformer.report import live

        return live.serve(arguments.workdir, arguments.port or 0)
    if arguments.port is not None:
        raise ConfigError(f"--port: got {arguments.port} without --serve, expected both; add --serve")
    print(f"written to {report.write(arguments.workdir, arguments.output, arguments.figures)}")
    return 0


COMMAND = Command(
    "one HTML page of one run, or of several compared",
    run,
    {
        "workdir": Flag(
            "folder of a run, of seeds or of a sweep; may be repeated", repeats=True, directory="write", bucket="page"
        ),
        "output": Flag(
            "page to write, FILE.html; without it report.html of one run, and of several comparison.html in the "
            "folder that holds them",
            default="",
        ),
        "serve": Flag("follow runs while they train: a live page, for this machine only", default=False, switch=True),
        "port": Flag("with --serve: port of the page; without it any that is free", default=None, type=port),
        "figures": Flag("folder for every chart as PNG and SVG, for papers; made if it is missing", default=""),
    },
    example="jaxformer report --workdir=runs/a --workdir=runs/b --output=both.html",
)
