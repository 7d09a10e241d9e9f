"""`jaxformer train`: start a run, or resume it."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from jaxformer.cli.arguments import Command, Flag, positive
from jaxformer.config import Config, overrides
from jaxformer.errors import ConfigError
from jaxformer.runtime import object_store


def run(arguments: Namespace) -> int:
    config = overrides.parse(arguments.config)
    from jaxformer import preflight
    from jaxformer.parallel import distributed

    distributed.join()
    preflight.check_processes_agree(config)
    from jaxformer.train import loop, seeds, warm_start

    init_format = warm_start.RUN_FORMAT
    if config.init.directory or config.distillation is not None:
        from jaxformer.hf import workdirs

        init_format = workdirs.ORIGIN

    def start(config: Config, workdir: str | Path) -> int:
        code = loop.train(config, workdir, init_format)
        if code == 0:
            _write_report(workdir)
        return code

    is_address = object_store.is_url(arguments.workdir)
    if is_address and arguments.seeds is not None:
        raise ConfigError(f"--workdir: got {arguments.workdir!a} with --seeds, expected a folder; train one seed a run")
    if arguments.seeds is None:
        if is_address:
            return start(config, arguments.workdir)
        if seeds.members(arguments.workdir):
            raise ConfigError(f"--workdir: got {arguments.workdir}, a folder of seeds, expected --seeds with it")
        return start(config, arguments.workdir)
    code = seeds.train(config, arguments.workdir, arguments.seeds, start, distributed.is_first_process())
    if distributed.is_first_process() and code in (0, 2):
        print(seeds.format_table(seeds.read_summary(arguments.workdir)))
        _write_report(arguments.workdir)
    return code


def _write_report(workdir: str | Path) -> None:
    """Writes the report. Its packages are imported now: no step waits for them."""
    from jaxformer import report, storage

    if not object_store.is_url(workdir):
        report.write_after_training(workdir)
        return
    from jaxformer.parallel import distributed

    if distributed.is_first_process():
        with storage.opened(str(workdir), which=storage.NONE) as copy:
            report.write_after_training(copy)


COMMAND = Command(
    "start a run, or resume it",
    run,
    {
        "workdir": Flag("folder of the run", directory="create", bucket="itself"),
        "seeds": Flag(
            "number of seeds from config.train.seed on: a run for each, one after the other, in WORKDIR/seed-<number>, "
            "and the mean of their measures",
            default=None,
            type=positive,
        ),
    },
    config="recipe",
    example="jaxformer train --config=configs/quickstart.py --workdir=runs/quickstart --config.train.steps=400",
)
