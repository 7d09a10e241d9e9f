"""`jaxformer data prepare NAME`: make a stock data set of tensorflow_datasets readable without TensorFlow."""

from __future__ import annotations

from argparse import Namespace

from jaxformer.cli.arguments import Command, Flag
from jaxformer.errors import ConfigError


def run(arguments: Namespace) -> int:
    if arguments.prepare != "prepare":
        raise ConfigError(f"data: got {arguments.prepare!a}, expected prepare; give jaxformer data prepare NAME")
    from jaxformer.data import prepare

    print(f"prepared in {prepare.prepare(arguments.name, arguments.dir)}")
    return 0


COMMAND = Command(
    "prepare NAME: make a tfds data set readable here",
    run,
    {"dir": Flag("tfds data_dir to prepare into", directory="create")},
    positionals=("prepare", "NAME"),
    details="without TensorFlow from then on; this step needs it (extra [prepare])",
    example="jaxformer data prepare wmt14_translate/de-en --dir=prepared",
)
