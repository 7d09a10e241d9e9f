"""From editable values or JSON to the typed, checked `Config`, and back to JSON."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any, Mapping

from ml_collections import ConfigDict

from jaxformer.config.checks import check
from jaxformer.config.hints import convert, describe_value
from jaxformer.config.schema import Config
from jaxformer.errors import ConfigError
from jaxformer.runtime import files

RENAMED_FIELDS = {"decode": {"early_stop": ("stopping", {True: "estimate", False: "exact"})}}
"""Section -> field of configs saved by earlier versions -> its present name, and saved value -> present value."""

FORMERLY_SINGLE = {"decode": ("forced_last",)}
"""Section -> fields that hold a tuple, and held one value or None in configs saved by earlier versions."""


def freeze(config: ConfigDict | Mapping[str, Any]) -> Config:
    """The typed, checked config. Missing keys take their defaults.

    Raises:
      ConfigError: an unknown key, a wrong type, a value that is not allowed, or values that contradict each other. One
        line, with the full path.
    """
    frozen = convert(config, Config, "config")
    check(frozen)
    return frozen


def to_json(config: Config) -> str:
    """The config as sorted, indented JSON: equal configs give equal text."""
    return json.dumps(dataclasses.asdict(config), sort_keys=True, indent=2, allow_nan=False) + "\n"


def from_json(text: str) -> Config:
    """The config that `to_json` wrote, checked as strictly as a recipe.

    Raises:
      ConfigError: the text is no JSON of a config.
    """
    try:
        value = files.parse_json(text, _unique_keys)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"config.json: got no valid JSON ({error}), expected what a run wrote") from None
    if not isinstance(value, dict):
        raise ConfigError(f"config.json: got {describe_value(value)}, expected a JSON object")
    return freeze(_migrate(value))


def read(workdir: str | os.PathLike[str]) -> Config:
    """The resolved config of the run in `workdir`.

    Raises:
      ConfigError: there is no run, or its `config.json` cannot be read.
    """
    path = os.path.join(workdir, "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{workdir}: got no config.json, expected the workdir of a run; check --workdir") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: got an unreadable file ({error}), expected what a run wrote") from None
    try:
        return from_json(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _migrate(values: dict[str, Any]) -> dict[str, Any]:
    """A saved config with the fields of `RENAMED_FIELDS` and `FORMERLY_SINGLE` in their present form."""
    for section, renamed in RENAMED_FIELDS.items():
        saved = values.get(section)
        for old, (new, present_values) in renamed.items():
            if isinstance(saved, dict) and isinstance(saved.get(old), bool):
                saved[new] = present_values[saved.pop(old)]
    for section, names in FORMERLY_SINGLE.items():
        saved = values.get(section)
        for name in names:
            if isinstance(saved, dict) and isinstance(saved.get(name, []), (int, type(None))):
                saved[name] = [] if saved[name] is None else [saved[name]]
    return values


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"config.json: got key {repeated!a} twice, expected it once")
    return values
