"""`jaxformer import`: make a run from a Hugging Face directory."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from jaxformer.cli.arguments import Command, Flag
from jaxformer.runtime import object_store


def run(arguments: Namespace) -> int:
    if not object_store.is_url(arguments.workdir):
        return _import(arguments, arguments.workdir)
    from jaxformer import storage

    with storage.TrainingSession(arguments.workdir) as session:
        return _import(arguments, session.root)


def _import(arguments: Namespace, workdir: str | Path) -> int:
    from jaxformer.hf import workdirs

    model = workdirs.import_checkpoint(arguments.source, workdir, arguments.base or None, arguments.decoder or None)
    architecture = "" if model.hf is None else model.hf.architecture
    print(f"{arguments.source}: {architecture}, imported into {arguments.workdir}")
    return 0


COMMAND = Command(
    "make a run from a Hugging Face directory",
    run,
    {
        "source": Flag("the directory, or a model on the hub: org/name or org/name@revision", directory="read"),
        "base": Flag("model of an adapter's directory; without it the one that adapter_config.json names", default=""),
        "decoder": Flag("decoder of a pair whose encoder is the source; cross-attention starts at random", default=""),
        "workdir": Flag("new folder of the run", directory="create", bucket="itself"),
    },
    details="one with config.json and model.safetensors, an adapter and its base, or an encoder and a decoder",
    example="jaxformer import --source=bert-base-uncased --workdir=runs/bert",
)
