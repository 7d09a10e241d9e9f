"""`jaxformer train`: start a run, or resume it."""

from __future__ import annotations

from argparse import Namespace

from jaxformer.cli.arguments import Command, Flag
from jaxformer.config import overrides


def run(arguments: Namespace) -> int:
    config = overrides.parse(arguments.config)
    from jaxformer import preflight
    from jaxformer.parallel import distributed

    distributed.join()
    preflight.check_processes_agree(config)
    from jaxformer.hf import workdirs
    from jaxformer.train import loop

    code = loop.train(config, arguments.workdir, workdirs.ORIGIN)
    if code == 0:
        from jaxformer import report

        report.write_after_training(arguments.workdir)
    return code


COMMAND = Command(
    "start a run, or resume it", run, {"workdir": Flag("folder of the run", directory="create")}, config="recipe"
)
