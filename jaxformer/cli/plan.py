"""`jaxformer plan`: the cost of a training step on devices that need not be present."""

from __future__ import annotations

from argparse import Namespace

from jaxformer.cli.arguments import Command, Flag, positive
from jaxformer.config import overrides


def run(arguments: Namespace) -> int:
    from jaxformer import plan
    from jaxformer.plan import chips

    config = overrides.parse(arguments.config)
    place = chips.parse_hardware(arguments.topology, arguments.chip, arguments.devices, config.mesh.slices)
    title = next(word for word in arguments.config if word.startswith("--config=")).removeprefix("--config=")
    plan.run(config, title, place, arguments.search)
    return 0


COMMAND = Command(
    "what a training step costs, on devices not present",
    run,
    {
        "devices": Flag("number of devices; without it that of config.mesh", default=None, type=positive),
        "topology": Flag("TPU slice (or one of several) to compile for with libtpu: v5e:16x16, v5p:4x4x8", default=""),
        "chip": Flag("without a topology: the chip whose figures are used; h100 without it", default=""),
        "search": Flag("try the meshes of that many devices and rank them", default=False, switch=True),
    },
    config="recipe",
    prints=True,
    details="memory, FLOPs, traffic and time, by compiling the step",
    example="jaxformer plan --config=configs/gpt2_124m.py --devices=8 --chip=h100",
)
