"""`jaxformer export`: write a run as a Hugging Face directory."""

from __future__ import annotations

from argparse import Namespace

from jaxformer.cli.arguments import Command, Flag


def run(arguments: Namespace) -> int:
    from jaxformer.hf import workdirs

    workdirs.export_checkpoint(arguments.workdir, arguments.target, arguments.family or None, arguments.adapter)
    print(f"written to {arguments.target}")
    return 0


COMMAND = Command(
    "write a run as a Hugging Face directory",
    run,
    {
        "workdir": Flag("folder of the run, or one of its checkpoints", directory="read", bucket="copy"),
        "target": Flag("new folder", directory="create"),
        "adapter": Flag(
            "write the adapters alone, as the peft package does; without it they are merged", default=False, switch=True
        ),
        "family": Flag("architecture to write; without it the first that computes the same", default=""),
    },
    example="jaxformer export --workdir=runs/quickstart --target=exported",
)
