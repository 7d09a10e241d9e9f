"""`jaxformer doctor`: check this machine, the installation, and the processes of a run."""

from __future__ import annotations

import os
from argparse import Namespace

from jaxformer.cli.arguments import Command, Flag, positive
from jaxformer.config import overrides


def run(arguments: Namespace) -> int:
    config = overrides.parse(arguments.config) if arguments.config else None
    if os.environ.get("JAXFORMER_DISTRIBUTED"):
        from jaxformer.parallel import distributed

        distributed.join(arguments.timeout)
    from jaxformer import doctor

    return doctor.check(config, arguments.devices, arguments.timeout)


COMMAND = Command(
    "check this machine and installation",
    run,
    {
        "devices": Flag("number of devices there must be, of all processes", default=None, type=positive),
        "timeout": Flag("seconds that the processes wait for each other", default=60, type=positive),
    },
    config="optional",
    prints=True,
    details="started by a launcher, that the processes of a run belong together; with a config, its devices and data",
    example="jaxformer doctor --config=configs/quickstart.py",
)
