"""Checks of single fields against the ranges, choices and folders in their types."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxformer.config.constraints import OptionsOf, check_value
from jaxformer.config.hints import constraint_of, field_types, item_constraint
from jaxformer.errors import ConfigError


def check_fields(section: Any, path: str) -> None:
    """Checks the plain values of one section, not those of the sections below it.

    Raises:
      ConfigError: a value is none that its field's type allows.
    """
    hints = field_types(type(section))
    for field in dataclasses.fields(section):
        value, constraint = getattr(section, field.name), constraint_of(hints[field.name])
        if value is not None and constraint is not None and not isinstance(constraint, OptionsOf):
            check_value(value, constraint, f"{path}.{field.name}")
        items = item_constraint(hints[field.name])
        if value is not None and items is not None and not isinstance(items, OptionsOf):
            for item in value:
                check_value(item, items, f"{path}.{field.name}")


def invalid(path: str, got: Any, expected: str, remedy: str = "") -> ConfigError:
    """The error for a field whose value does not fit the rest of the config."""
    value = ascii(got) if isinstance(got, str) else str(got)
    return ConfigError(f"{path}: got {value}, expected {expected}{'; ' + remedy if remedy else ''}")
