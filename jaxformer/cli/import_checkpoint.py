"""`jaxformer import`: make a run from a Hugging Face directory."""

from __future__ import annotations

from argparse import Namespace

from jaxformer.cli.arguments import Command, Flag


def run(arguments: Namespace) -> int:
    from jaxformer.hf import workdirs

    model = workdirs.import_checkpoint(arguments.source, arguments.workdir)
    architecture = "" if model.hf is None else model.hf.architecture
    print(f"{arguments.source}: {architecture}, imported into {arguments.workdir}")
    return 0


COMMAND = Command(
    "make a run from a Hugging Face directory (config.json, model.safetensors)",
    run,
    {
        "source": Flag("the directory", directory="read"),
        "workdir": Flag("new folder of the run", directory="create"),
    },
)
