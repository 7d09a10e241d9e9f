"""`jaxformer config`: every value of a recipe and where it comes from, or the list of all config fields."""

from __future__ import annotations

from argparse import Namespace

from jaxformer.cli.arguments import Command, Flag
from jaxformer.config import origins, overrides
from jaxformer.errors import ConfigError


def run(arguments: Namespace) -> int:
    if not arguments.fields:
        if arguments.json:
            print(overrides.to_json(overrides.parse(arguments.config)), end="")
        else:
            print(origins.to_text(origins.trace(arguments.config)))
        return 0
    for other in (*arguments.config, *(["--json"] if arguments.json else [])):
        raise ConfigError(f"jaxformer config: got --fields and {other!a}, expected one of them")
    from jaxformer.config import reference

    print(reference.format_text())
    return 0


COMMAND = Command(
    "every value of a recipe and where it comes from",
    run,
    {
        "json": Flag("the values alone, as a run's config.json", default=False, switch=True),
        "fields": Flag("list all fields, with type, default and meaning (docs/config.md)", default=False, switch=True),
    },
    config="optional",
    prints=True,
    details="from the default, the recipe, its variant or the command line",
    example="jaxformer config --config=configs/quickstart.py --config.train.steps=400",
)
