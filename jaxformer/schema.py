"""The types of the config's fields: what they are called, what fits them, and what a text means for them.

Generated from the dataclasses of `config.py` and used by `overrides.py`; nothing here names a field.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
import types
import typing
from typing import Any, Iterator, Mapping

from ml_collections import ConfigDict

from jaxformer.config import Config, ConfigError
from jaxformer.registry import nearest


@functools.cache
def fields(kind: type) -> dict[str, Any]:
    """Field name -> type of a config dataclass, in the order of declaration."""
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


def members(hint: Any) -> tuple[Any, bool]:
    """A hint without `| None`, and whether None was allowed."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint, False
    kinds = [k for k in typing.get_args(hint) if k is not type(None)]
    return kinds[0], len(kinds) < len(typing.get_args(hint))


def part_of(hint: Any) -> type | None:
    """The dataclass of a field that is a part of the config, optional or not; None for a plain value."""
    kind, _ = members(hint)
    return kind if dataclasses.is_dataclass(kind) else None


def describe(hint: Any) -> str:
    """A field's type in words for an error message."""
    kind, optional = members(hint)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        words = f"a section ({kind.__name__})"
    elif origin is tuple:
        words = f"a tuple of {'tuples' if typing.get_origin(args[0]) is tuple else args[0].__name__}"
    elif origin is dict:
        words = f"a dict of str to {describe(args[1])}"
    elif kind is bool:
        words = "true or false"
    else:
        words = kind.__name__
    return words + (" or None" if optional else "")


def typed(value: Any, hint: Any, path: str) -> Any:
    """`value` as `hint` wants it: numbers, tuples, dicts and sections converted where nothing is lost."""
    kind, optional = members(hint)
    if value is None and optional:
        return None
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        if isinstance(value, (Mapping, ConfigDict)):
            hints = fields(kind)
            given = dict(value.items())
            for name in given:
                if name not in hints:
                    raise unknown(path, name, kind)
            return kind(**{name: typed(item, hints[name], f"{path}.{name}") for name, item in given.items()})
    elif origin is dict:
        if isinstance(value, (Mapping, ConfigDict)) and all(isinstance(key, str) for key in value):
            return {key: typed(item, args[1], f"{path}.{key}") for key, item in value.items()}
    elif origin is tuple:
        if isinstance(value, (tuple, list)):
            return tuple(typed(item, args[0], f"{path}[{i}]") for i, item in enumerate(value))
    elif kind is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and _finite(value):
            return float(value)
    elif kind is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif isinstance(value, kind):
        return value
    raise ConfigError(f"{path}: got {show(value)}, expected {describe(hint)}")


def _finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int too large for a float
        return False


def show(value: Any) -> str:
    """A value and its type on one short line."""
    if value is None:
        return "None"
    if isinstance(value, ConfigDict) or dataclasses.is_dataclass(value):
        return f"a section ({type(value).__name__})"
    text = ascii(value) if isinstance(value, str) else " ".join(repr(value).split())
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def unknown(path: str, name: Any, kind: type) -> ConfigError:
    """The error for a key that `kind` does not have, with the same key of other sections, else the nearest one here."""
    hints, name = fields(kind), ascii(name).strip("'")[:60]
    elsewhere = sorted((p for p in paths() if p.endswith("." + name)), key=lambda p: not p.startswith(f"{path}."))
    hint = f"; did you mean {' or '.join(elsewhere[:3])}?" if elsewhere else nearest(name, tuple(hints))
    return ConfigError(f"{path}.{name}: got an unknown key, expected one of {', '.join(hints)}{hint}")


@functools.cache
def paths() -> tuple[str, ...]:
    """The paths of all plain values of the schema, optional parts included."""

    def walk(kind: type, path: str) -> Iterator[str]:
        for name, hint in fields(kind).items():
            part = part_of(hint)
            yield from walk(part, f"{path}.{name}") if part else [f"{path}.{name}"]

    return tuple(walk(Config, "config"))


def read_text(text: str, hint: Any, path: str) -> Any:
    """A command-line text as a value of type `hint`."""
    kind, optional = members(hint)
    if optional and text in ("None", "none", "null"):
        return None
    if typing.get_origin(kind) is tuple and typing.get_origin(typing.get_args(kind)[0]) is tuple:
        try:
            return typed(ast.literal_eval(text or "()"), kind, path)
        except (ValueError, SyntaxError, RecursionError, MemoryError):  # ConfigError is one: the text is what was given
            pass
    elif typing.get_origin(kind) is tuple:
        inner = text[1:-1] if text.startswith("(") and text.endswith(")") else text
        items = [item.strip() for item in inner.split(",")]
        return tuple(read_text(item, typing.get_args(kind)[0], path) for item in items if item)
    if kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind is str:
        return text
    if kind in (int, float):
        try:
            return typed(kind(text), kind, path)
        except ValueError:  # ConfigError is one: the text, not the number, is what the user gave
            pass
    raise ConfigError(f"{path}: got {ascii(text)[:80]}, expected {describe(hint)}")
