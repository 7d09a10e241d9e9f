"""`jaxformer inspect`: the config, parameters, checkpoints and results of a run."""

from __future__ import annotations

from argparse import Namespace

from jaxformer.cli.arguments import Command, Flag
from jaxformer.runtime import secrets


def run(arguments: Namespace) -> int:
    from jaxformer.report import inspection

    print(secrets.redact(inspection.describe(arguments.workdir)))
    return 0


COMMAND = Command(
    "show a run: config, parameters, checkpoints, results",
    run,
    {"workdir": Flag("folder of the run, or one of its checkpoints", directory="read", bucket="copy")},
    prints=True,
    example="jaxformer inspect --workdir=runs/quickstart",
)
