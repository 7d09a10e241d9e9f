"""`jaxformer plan`: the cost of a training step, or of decoding, on devices that need not be present."""

from __future__ import annotations

from argparse import Namespace

from jaxformer.cli.arguments import Command, Flag, positive
from jaxformer.config import overrides
from jaxformer.errors import ConfigError

DECODING = ("batch", "prompt", "tokens")
"""Flags that are of decoding alone."""


def run(arguments: Namespace) -> int:
    from jaxformer import plan
    from jaxformer.plan import chips

    config = overrides.parse(arguments.config)
    place = chips.parse_hardware(arguments.topology, arguments.chip, arguments.devices, config.mesh.slices)
    title = next(word for word in arguments.config if word.startswith("--config=")).removeprefix("--config=")
    given = [name for name in DECODING if getattr(arguments, name) is not None]
    if given and not arguments.decode:
        raise ConfigError(
            f"--{given[0]}: got it without --decode, expected both, since a training step has config.data.batch and "
            "data.length; add --decode, or leave it out"
        )
    if arguments.decode and arguments.search:
        raise ConfigError("--search: got it with --decode, expected one of them: meshes are ranked for training alone")
    if arguments.decode:
        plan.run_decoding(config, title, place, [getattr(arguments, name) for name in DECODING])
    else:
        plan.run(config, title, place, arguments.search)
    return 0


COMMAND = Command(
    "what a training step or decoding costs, on devices not present",
    run,
    {
        "devices": Flag("number of devices; without it that of config.mesh", default=None, type=positive),
        "topology": Flag("TPU slice (or one of several) to compile for with libtpu: v5e:16x16, v5p:4x4x8", default=""),
        "chip": Flag("without a topology: the chip whose figures are used; h100 without it", default=""),
        "search": Flag("try the meshes of that many devices and rank them", default=False, switch=True),
        "decode": Flag("plan decoding: time a token, memory of caches, largest batches", default=False, switch=True),
        "batch": Flag("with --decode: prompts at a time; config.decode.batch without it", default=None, type=positive),
        "prompt": Flag(
            "with --decode: tokens of a prompt, or of a source; without it data.length (less the new tokens)",
            default=None,
            type=positive,
        ),
        "tokens": Flag("with --decode: new tokens; config.decode.max_length without it", default=None, type=positive),
    },
    config="recipe",
    prints=True,
    details="memory, FLOPs, traffic and time, by compiling the step; with --decode from shapes",
    example="jaxformer plan --config=configs/gpt2_124m.py --devices=8 --chip=h100",
)
