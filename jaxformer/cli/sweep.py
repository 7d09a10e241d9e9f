"""`jaxformer sweep`: run a list of edits of one recipe, and rank the runs."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxformer import registry
from jaxformer.cli.arguments import Command, Flag, one_of, positive
from jaxformer.errors import ConfigError
from jaxformer.runtime import object_store

if TYPE_CHECKING:
    from jaxformer.sweep.adaptive import Search

EXECUTORS = "jaxformer.sweep.executors"
EXECUTOR_NAMES = registry.names(EXECUTORS)


def run(arguments: Namespace) -> int:
    from jaxformer.sweep import planning, submission

    flags = [name for name in ("report", "watch", "changed") if getattr(arguments, name)]
    if len(flags) > 1:
        raise ConfigError(
            f"--{flags[1]}: got it with --{flags[0]}, expected one of them: --report and --watch submit nothing"
        )
    sweep = planning.read_sweep(arguments.sweep)
    if object_store.is_url(arguments.workdir):
        return _in_bucket(sweep, arguments)
    if isinstance(sweep, planning.Search):
        return _search(sweep, arguments)
    plan = planning.make_plan(arguments.sweep, arguments.config, Path(arguments.workdir), sweep)
    if arguments.report:
        from jaxformer.sweep import ranking

        ranking.write_ranking(submission.submitted(plan))
        return 0
    if arguments.watch:
        from jaxformer.sweep import watching

        plan = submission.submitted(plan)
        return watching.watch(plan.runs, plan.runs[0].config.checkpoint)
    # A sweep that the executor refuses leaves nothing behind.
    registry.member(EXECUTORS, arguments.executor, "check")(plan, arguments.workers)
    execute = registry.member(EXECUTORS, arguments.executor, "execute")
    with submission.lock(plan.workdir):
        return execute(submission.freeze(plan, arguments.config, arguments.changed), arguments.workers)


def _in_bucket(sweep: Any, arguments: Namespace) -> int:
    """The same for a sweep at an address.

    Raises:
      ConfigError: also if the sweep, or the executor, needs a folder.
    """
    from jaxformer.sweep import bucket, planning, ranking, submission, watching
    from jaxformer.sweep.executors import local

    url = arguments.workdir
    if isinstance(sweep, planning.Search):
        raise ConfigError(
            f"--workdir: got {url!a} for a search, expected a folder: Optuna's journal needs a local or shared disk; "
            "use a folder, or a list of runs"
        )
    if arguments.executor != "local":
        raise ConfigError(
            f"--executor: got {arguments.executor} with --workdir={url}, expected local; give the same command on each "
            "machine, or use a folder"
        )
    remote = bucket.BucketSweep(url)
    plan = planning.make_plan(arguments.sweep, arguments.config, remote.folder, sweep)
    if arguments.report:
        ranking.write_ranking(remote.submitted(plan))
        remote.publish_ranking()
        return 0
    if arguments.watch:
        plan = remote.submitted(plan)
        update = lambda: remote.update(plan.runs)  # noqa: E731
        return watching.watch(plan.runs, plan.runs[0].config.checkpoint, update=update, seconds=bucket.LOOK_SECONDS)
    with submission.lock(remote.folder), bucket.claiming(remote) as claims:
        plan = remote.freeze(plan, arguments.config, arguments.changed)
        remote.update(plan.runs)
        code = local.execute(plan, arguments.workers, claims)
        remote.publish_ranking()
        return code


def _search(search: Search, arguments: Namespace) -> int:
    from jaxformer.sweep import searching, submission

    searching.check_executor(arguments.executor)
    if arguments.watch:
        raise ConfigError("--watch: got it for a search, expected a list of runs; the search itself shows its table")
    plan = searching.make_plan(arguments.sweep, search, arguments.config, Path(arguments.workdir))
    if arguments.report:
        searching.write_report(plan.submitted())
        return 0
    with submission.lock(plan.workdir):
        return searching.execute(plan.frozen(arguments.config, arguments.changed), arguments.workers)


COMMAND = Command(
    "run a list of edits of one recipe, and rank the runs",
    run,
    {
        "sweep": Flag("file that defines SWEEP"),
        "workdir": Flag("folder of the sweep; each run has its own below it", directory="create", bucket="itself"),
        "executor": Flag(", ".join(EXECUTOR_NAMES), default="local", type=one_of(*EXECUTOR_NAMES)),
        "report": Flag("train nothing: rank the runs that are done", default=False, switch=True),
        "watch": Flag(
            "train nothing: show the runs that other processes train, until all are done", default=False, switch=True
        ),
        "changed": Flag(
            "go on although configs, runs or code differ from what was submitted", default=False, switch=True
        ),
        "workers": Flag("runs at the same time", default=1, type=positive),
    },
    config="recipe",
    example="jaxformer sweep --config=configs/quickstart.py --sweep=experiments/sweeps/learning_rate.py "
    "--workdir=runs/rates",
)
