"""Types of config fields: their names in error messages, conversion of values to them, and parsing of texts.

Everything is derived from the dataclasses of `schema.py`. Nothing here names a field.
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

from jaxformer.config.constraints import Constraint, Folder, OptionsOf, check_value, split_constraint
from jaxformer.config.schema import Config
from jaxformer.errors import ConfigError
from jaxformer.registry import is_external, nearest


@functools.cache
def field_types(section: type[Any]) -> dict[str, Any]:
    """Field name -> type of a config dataclass with its annotations, in the order of declaration."""
    hints = typing.get_type_hints(section, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(section)}


def base_type(hint: Any) -> tuple[Any, bool]:
    """A type without `| None` and annotations, and whether None is allowed. A `Literal` is the type of its values."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return split_constraint(hint)[0], False
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    return split_constraint(members[0])[0], len(members) < len(typing.get_args(hint))


def constraint_of(hint: Any) -> Constraint | OptionsOf | None:
    """The annotation of a type, optional or not, that says which values it allows."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(member for member in typing.get_args(hint) if member is not type(None))
    return split_constraint(hint)[1]


def item_constraint(hint: Any) -> Constraint | OptionsOf | None:
    """The annotation of the items of a tuple; None for any other type."""
    kind, _ = base_type(hint)
    return constraint_of(typing.get_args(kind)[0]) if typing.get_origin(kind) is tuple else None


def section_type(hint: Any) -> type | None:
    """The dataclass of a field that is a section of the config, optional or not; None for a plain value."""
    kind, _ = base_type(hint)
    return kind if dataclasses.is_dataclass(kind) else None


def entry_section(hint: Any) -> type | None:
    """The dataclass of the entries of a field that is a dict of sections; None for any other field."""
    kind, _ = base_type(hint)
    return section_type(typing.get_args(kind)[1]) if typing.get_origin(kind) is dict else None


def describe(hint: Any) -> str:
    """A field's type in words for an error message."""
    kind, optional = base_type(hint)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        words = f"a section ({kind.__name__})"
    elif isinstance(constraint_of(hint), OptionsOf):
        words, optional = "a section", True
    elif origin is tuple:
        words = f"a tuple of {'tuples' if typing.get_origin(args[0]) is tuple else describe(args[0])}"
    elif origin is dict:
        words = f"a dict of str to {describe(args[1])}"
    elif kind is bool:
        words = "true or false"
    else:
        words = kind.__name__
    return words + (" or None" if optional else "")


def convert(value: Any, hint: Any, path: str) -> Any:
    """`value` as the type `hint`: numbers, tuples, dicts and sections are converted where nothing is lost.

    Raises:
      ConfigError: it is of another type, or a section with an unknown field. Ranges and choices are not checked.
    """
    kind, optional = base_type(hint)
    if value is None and optional:
        return None
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        if isinstance(value, (Mapping, ConfigDict)):
            return _convert_section(dict(value.items()), kind, path)
    elif origin is dict:
        if isinstance(value, (Mapping, ConfigDict)) and all(isinstance(key, str) for key in value):
            return {key: convert(item, args[1], f"{path}.{key}") for key, item in value.items()}
    elif origin is tuple:
        if isinstance(value, (tuple, list)):
            return tuple(convert(item, args[0], f"{path}[{i}]") for i, item in enumerate(value))
    elif kind is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and _is_finite(value):
            return float(value)
    elif kind is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif isinstance(value, kind):
        return value
    raise ConfigError(f"{path}: got {describe_value(value)}, expected {describe(hint)}")


def _convert_section(values: dict[str, Any], section: type, path: str) -> Any:
    hints, converted = field_types(section), {}
    for name in values:
        if name not in hints:
            raise unknown_field_error(path, name, section)
    for name, value in values.items():
        if not isinstance(constraint_of(hints[name]), OptionsOf):
            converted[name] = convert(value, hints[name], f"{path}.{name}")
    for name, hint in hints.items():
        constraint = constraint_of(hint)
        if isinstance(constraint, OptionsOf):
            options = options_type(section, constraint, converted, path)
            converted[name] = _convert_options(values.get(name), options, f"{path}.{name}")
    return section(**converted)


def _convert_options(value: Any, options: type | None, path: str) -> Any:
    if options is not None:
        return convert({} if value is None else value, options, path)
    if value is None or (isinstance(value, (Mapping, ConfigDict)) and not value):
        return None
    raise ConfigError(f"{path}: got {describe_value(value)}, expected none: only a task with TASK.options has them")


def options_type(section: type[Any], constraint: OptionsOf, values: Mapping[str, Any], path: str) -> type | None:
    """The dataclass of options that the module named in a section's `values` declares; None: it declares none.

    Only modules from outside the project declare options, so that a built-in name imports nothing.

    Raises:
      ConfigError: the name is not allowed, or the module's `options` is no frozen dataclass of fields with defaults,
        whose types are those of a config.
    """
    default = next(f.default for f in dataclasses.fields(section) if f.name == constraint.field)
    name = values.get(constraint.field, default)
    folder = constraint_of(field_types(section)[constraint.field])
    if not isinstance(folder, Folder) or not isinstance(name, str):
        return None
    check_value(name, folder, f"{path}.{constraint.field}")
    if not is_external(folder.package, name):
        return None
    options = getattr(folder.member(name), "options", None)
    if options is not None:
        _check_options_type(options, f"{name}.{folder.constant}.options")
    return options


def _check_options_type(options: Any, path: str) -> None:
    parameters = getattr(options, "__dataclass_params__", None)
    if not isinstance(options, type) or parameters is None or not parameters.frozen:
        raise ConfigError(f"{path}: got {describe_value(options)}, expected a frozen dataclass")
    try:
        hints = field_types(options)
    except (NameError, TypeError) as error:
        raise ConfigError(f"{path}: got a type that cannot be read ({error}), expected types of its module") from None
    for field in dataclasses.fields(options):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{path}.{field.name}: got no default, expected one")
        kind = base_type(hints[field.name])[0]
        if dataclasses.is_dataclass(kind):
            _check_options_type(kind, f"{path}.{field.name}")
        elif (typing.get_origin(kind) or kind) not in (int, float, str, bool, tuple, dict):
            expected = "int, float, str, bool, tuple[...], dict[str, ...] or a dataclass"
            raise ConfigError(f"{path}.{field.name}: got type {kind}, expected {expected}")


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int too large for a float
        return False


def describe_value(value: Any) -> str:
    """A value and its type on one short line."""
    if value is None:
        return "None"
    if isinstance(value, ConfigDict) or dataclasses.is_dataclass(value):
        return f"a section ({type(value).__name__})"
    text = ascii(value) if isinstance(value, str) else " ".join(repr(value).split())
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def unknown_field_error(path: str, name: Any, section: type) -> ConfigError:
    """The error for a field that `section` does not have. It suggests fields of that name elsewhere, or a near name."""
    known, name = tuple(field_types(section)), ascii(name).strip("'")[:60]
    elsewhere = sorted((p for p in field_paths() if p.endswith("." + name)), key=lambda p: not p.startswith(f"{path}."))
    hint = f"; did you mean {' or '.join(elsewhere[:3])}?" if elsewhere else nearest(name, known)
    return ConfigError(f"{path}.{name}: got an unknown key, expected one of {', '.join(known)}{hint}")


@functools.cache
def field_paths() -> tuple[str, ...]:
    """Paths of all plain values of the schema ("config.train.steps"), those of optional sections included."""

    def walk(section: type, path: str) -> Iterator[str]:
        for name, hint in field_types(section).items():
            part = section_type(hint)
            yield from walk(part, f"{path}.{name}") if part else [f"{path}.{name}"]

    return tuple(walk(Config, "config"))


def parse_value(text: str, hint: Any, path: str) -> Any:
    """A command-line text as a value of type `hint`.

    Raises:
      ConfigError: the text is not of that type.
    """
    kind, optional = base_type(hint)
    if optional and text in ("None", "none", "null"):
        return None
    if typing.get_origin(kind) is tuple and typing.get_origin(typing.get_args(kind)[0]) is tuple:
        try:
            return convert(ast.literal_eval(text or "()"), kind, path)
        except (ValueError, SyntaxError, RecursionError, MemoryError):  # ConfigError is one: report the text instead
            pass
    elif typing.get_origin(kind) is tuple:
        inner = text[1:-1] if text.startswith("(") and text.endswith(")") else text
        items = [item.strip() for item in inner.split(",")]
        return tuple(parse_value(item, typing.get_args(kind)[0], path) for item in items if item)
    if kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind is str:
        return text
    if kind in (int, float):
        try:
            return convert(kind(text), kind, path)
        except ValueError:  # ConfigError is one: report the text instead of the number
            pass
    raise ConfigError(f"{path}: got {ascii(text)[:80]}, expected {describe(hint)}")
