"""`jaxformer config`: every value of a recipe, or the list of all config fields."""

from __future__ import annotations

from argparse import Namespace

from jaxformer.cli.arguments import Command, Flag
from jaxformer.config import overrides
from jaxformer.errors import ConfigError


def run(arguments: Namespace) -> int:
    if not arguments.fields:
        print(overrides.to_json(overrides.parse(arguments.config)), end="")
        return 0
    if arguments.config:
        raise ConfigError(f"jaxformer config: got --fields and {arguments.config[0]!a}, expected one of them")
    from jaxformer.config import reference

    print(reference.format_text())
    return 0


COMMAND = Command(
    "print every value of a recipe with its edits as JSON, or list all fields of configs with their meanings",
    run,
    {"fields": Flag("list the fields, with type, default and meaning (docs/config.md)", default=False, switch=True)},
    config="optional",
    prints=True,
)
