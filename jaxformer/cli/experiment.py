"""`jaxformer experiment NAME`: test one claim."""

from __future__ import annotations

from argparse import Namespace

from jaxformer.cli.arguments import Command, Flag, one_of


def run(arguments: Namespace) -> int:
    from jaxformer import experiment

    return experiment.run(arguments.name, arguments.scale, arguments.workdir) or 0


COMMAND = Command(
    "test one claim: experiments/NAME.py",
    run,
    {
        "scale": Flag("smoke or full", default="smoke", type=one_of("smoke", "full")),
        "workdir": Flag("folder of its results", directory="create"),
    },
    positionals=("NAME",),
    example="jaxformer experiment score_scaling --scale=smoke --workdir=runs/score_scaling",
)
