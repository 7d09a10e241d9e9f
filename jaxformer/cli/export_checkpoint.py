"""`jaxformer export`: write a run as a Hugging Face directory."""

from __future__ import annotations

from argparse import Namespace

from jaxformer.cli.arguments import Command, Flag


def run(arguments: Namespace) -> int:
    from jaxformer.hf import workdirs

    target, push = arguments.target or None, arguments.push or None
    family = arguments.family or None
    commit = workdirs.export_checkpoint(arguments.workdir, target, family, arguments.adapter, push, arguments.private)
    if target is not None:
        print(f"written to {target}")
    if commit is not None:
        print(f"uploaded: {commit}")
    return 0


COMMAND = Command(
    "write a run as a Hugging Face directory",
    run,
    {
        "workdir": Flag("folder of the run, or one of its checkpoints", directory="read", bucket="copy"),
        "target": Flag("new folder; not needed with --push", default="", directory="create"),
        "push": Flag("name of the model on the Hugging Face hub, as org/name, to upload it with a card", default=""),
        "private": Flag("a new model on the hub is private", default=False, switch=True),
        "adapter": Flag(
            "write the adapters alone, as the peft package does; without it they are merged", default=False, switch=True
        ),
        "family": Flag("architecture to write; without it the first that computes the same", default=""),
    },
    example="jaxformer export --workdir=runs/quickstart --target=exported",
)
