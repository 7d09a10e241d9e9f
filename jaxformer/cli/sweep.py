"""`jaxformer sweep`: run a list of edits of one recipe, and rank the runs."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from jaxformer import registry
from jaxformer.cli.arguments import Command, Flag, one_of, positive

EXECUTORS = "jaxformer.sweep.executors"
EXECUTOR_NAMES = registry.names(EXECUTORS)


def run(arguments: Namespace) -> int:
    from jaxformer.sweep import planning

    plan = planning.make_plan(arguments.sweep, arguments.config, Path(arguments.workdir))
    if arguments.report:
        from jaxformer.sweep import ranking

        ranking.write_ranking(plan)
        return 0
    execute = registry.member(EXECUTORS, arguments.executor, "execute")
    return execute(plan, arguments.workers)


COMMAND = Command(
    "run a list of edits of one recipe, and rank the runs",
    run,
    {
        "sweep": Flag("file that defines SWEEP"),
        "workdir": Flag("folder of the sweep; each run has its own below it", directory="create"),
        "executor": Flag(", ".join(EXECUTOR_NAMES), default="local", type=one_of(*EXECUTOR_NAMES)),
        "report": Flag("train nothing: rank the runs that are done", default=False, switch=True),
        "workers": Flag("runs at the same time", default=1, type=positive),
    },
    config="recipe",
    example="jaxformer sweep --config=configs/quickstart.py --sweep=experiments/sweeps/learning_rate.py "
    "--workdir=runs/rates",
)
