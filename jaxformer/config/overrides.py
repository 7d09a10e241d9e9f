"""The editable form of a config: defaults, sections, recipes and command-line overrides as a `ConfigDict`.

Everything is generated from the dataclasses of `schema.py`, so a field added there is at once a default, a recipe edit,
a command-line override, a JSON key and a checked type. `freeze` turns the editable form into a `Config`. Functions of
`recipes.py`, `frozen.py` and `comparison.py` can be called under this module's name too.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, Mapping, Sequence

from ml_collections import ConfigDict

from jaxformer.config.checks import check
from jaxformer.config.comparison import (
    describe_resume_conflicts,
    diff,
    fingerprint,
    result_conflicts,
    resume_conflicts,
)
from jaxformer.config.constraints import OptionsOf
from jaxformer.config.frozen import freeze, from_json, read, to_json
from jaxformer.config.hints import (
    base_type,
    constraint_of,
    describe,
    entry_section,
    field_types,
    options_type,
    parse_value,
    section_type,
    unknown_field_error,
)
from jaxformer.config.recipes import load, read_variable
from jaxformer.config.schema import AdapterConfig, Config, DistillationConfig
from jaxformer.errors import ConfigError
from jaxformer.registry import nearest
from jaxformer.runtime import secrets

__all__ = [
    "check",
    "defaults",
    "describe_resume_conflicts",
    "diff",
    "edit",
    "editable",
    "fingerprint",
    "freeze",
    "from_json",
    "load",
    "override",
    "parse",
    "read",
    "read_variable",
    "result_conflicts",
    "resume_conflicts",
    "section",
    "to_json",
]


ADDED_BY_EDITS = (AdapterConfig, DistillationConfig)
"""Optional sections that an edit of one of their fields adds where the recipe has none: no other field is needed."""


def defaults() -> ConfigDict:
    """A `ConfigDict` with every field of `Config` at its default. Optional sections are None: see `section`."""
    return section(Config)


def section(kind: type, /, **edits: Any) -> ConfigDict:
    """A section of the config as a `ConfigDict`, with `edits` applied; sections in it are edited by nested dicts.

    `config.model.encoder = section(StackConfig, layers=6, attention=dict(heads=8))` gives a run an encoder.

    Raises:
      ConfigError: an edit names no field of the section.
    """
    config = _to_config_dict(kind())
    _apply(config, kind, edits, kind.__name__)
    return config


def parse(argv: Sequence[str]) -> Config:
    """The config of `--config=path[:variant]` and `--config.a.b=VALUE` arguments, in any order; later ones win.

    Raises:
      ConfigError: an argument is not of these forms, or the config is wrong.
    """
    recipes = [a.removeprefix("--config=") for a in argv if a.startswith("--config=")]
    edits = [a for a in argv if not a.startswith("--config=")]
    if len(recipes) != 1 or not recipes[0]:
        got = f"{len(recipes)} of them" if recipes != [""] else "an empty one"
        raise ConfigError(f"--config: got {got}, expected one; give --config=configs/NAME.py[:variant]")
    config = load(recipes[0])
    _override_all(config, edits)
    frozen = freeze(config)
    secrets.reject(dataclasses.asdict(frozen), "config")
    return frozen


def editable(config: Config) -> ConfigDict:
    """A config in the form that a recipe returns; `freeze` turns it back."""
    return _to_config_dict(config)


def edit(config: Config, argv: Sequence[str]) -> Config:
    """`config` with `--config.a.b=VALUE` arguments applied. Errors are those of `parse`."""
    editable = _to_config_dict(config)
    _override_all(editable, argv)
    return freeze(editable)


def override(config: ConfigDict, path: str, text: str) -> None:
    """Sets the value at `path` ("train.steps") to `text`, parsed as the field's type.

    Tuples are "a,b"; None, true and false are words; an entry of a dict is `path.KEY`, and an empty text removes it.
    Sections, and entries that are sections, come from the recipe, except those of `ADDED_BY_EDITS`.

    Raises:
      ConfigError: no such field, a section that this recipe does not have, or a text that is not of the field's type.
    """
    _override(config, Config, "config", path.split("."), text)


def _override(node: ConfigDict, section: type, parent: str, names: Sequence[str], text: str) -> None:
    """`override` of the field that `names` lead to from the section `node` at the path `parent`."""
    for i, name in enumerate(names):
        hints = field_types(section)
        if name not in hints:
            raise unknown_field_error(parent, name, section)
        hint, rest, here = hints[name], names[i + 1 :], f"{parent}.{name}"
        part = section_type(hint)
        constraint = constraint_of(hint)
        if isinstance(constraint, OptionsOf):
            part = _open_options(node, section, name, constraint, parent, text)
        entry = entry_section(hint)
        if entry is not None and len(rest) > 1:
            _override(_entry(node[name], rest, here), entry, f"{here}.{rest[0]}", rest[1:], text)
            return
        if part is None:
            _set_value(node, name, hint, rest, text, here)
            return
        if not rest:
            raise ConfigError(
                f"{here}: got {text!a} for a section, expected one of its fields ({', '.join(field_types(part))}); "
                "sections come from the recipe"
            )
        if part in ADDED_BY_EDITS and node.get(name) is None:
            node[name] = _to_config_dict(part())
        if name not in node or not isinstance(node[name], ConfigDict):
            raise ConfigError(f"{here}.{'.'.join(rest)}: this recipe has no {here}, expected one; add it in the recipe")
        node, section, parent = node[name], part, here


class _UntypedConfigDict(ConfigDict):
    """A `ConfigDict` that stores values unchanged: even without type safety the original turns True into 1.0."""

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, int) and key in self and isinstance(self[key], float):
            del self[key]
        super().__setitem__(key, value)


def _to_config_dict(value: Any) -> Any:
    """A dataclass instance as a `ConfigDict`. It accepts any value: `freeze` checks them, with full paths."""
    if dataclasses.is_dataclass(value):
        hints = field_types(type(value))
        values = {name: _to_config_dict(getattr(value, name)) for name in hints}
        for name, hint in hints.items():
            if values[name] is None and isinstance(constraint_of(hint), OptionsOf):
                values[name] = _UntypedConfigDict(type_safe=False)  # so that a recipe can set its fields
        return _UntypedConfigDict(values, type_safe=False)
    if isinstance(value, dict):
        return _UntypedConfigDict({name: _to_config_dict(item) for name, item in value.items()}, type_safe=False)
    return value


def _apply(config: ConfigDict, section: type, edits: Mapping[str, Any], path: str) -> None:
    hints = field_types(section)
    for name, value in edits.items():
        if name not in hints:
            raise unknown_field_error(path, name, section)
        part, entry = section_type(hints[name]), entry_section(hints[name])
        if isinstance(value, (Mapping, ConfigDict)) and entry is not None:
            entries = {key: _edited(None, entry, item, f"{path}.{name}.{key}") for key, item in value.items()}
            config[name] = _UntypedConfigDict(entries, type_safe=False)
        elif isinstance(value, (Mapping, ConfigDict)) and part is not None:
            config[name] = _edited(config[name], part, value, f"{path}.{name}")
        else:
            config[name] = value


def _edited(base: Any, section: type, edits: Any, path: str) -> Any:
    """The section `base` (None: its defaults) with `edits`; edits that are no dict as they are, for `freeze` to see."""
    if not isinstance(edits, (Mapping, ConfigDict)):
        return edits
    base = base if isinstance(base, ConfigDict) else _to_config_dict(section())
    _apply(base, section, dict(edits.items()), path)
    return base


def _override_all(config: ConfigDict, argv: Sequence[str]) -> None:
    overrides = []
    for argument in argv:
        if not argument.startswith("--config.") or "=" not in argument:
            raise ConfigError(f"argument {argument!a}: expected --config.PATH=VALUE")
        path, _, text = argument.removeprefix("--config.").partition("=")
        overrides.append((path, text))
    # The types of a task's options are known only once its name is.
    for path, text in sorted(overrides, key=lambda item: item[0].startswith("task.options")):
        override(config, path, text)


def _open_options(node: ConfigDict, section: type, name: str, constraint: OptionsOf, path: str, text: str) -> type:
    """Sets the field `name` of the section at `path` to all options, and returns their dataclass."""
    options = options_type(section, constraint, dict(node.items()), path)
    if options is None:
        task = node[constraint.field]
        got = f"{path}.{name}: got {text!a}"
        raise ConfigError(f"{got}, expected no options: the {path.removeprefix('config.')} {task!a} declares none")
    editable = _to_config_dict(options())
    if isinstance(node[name], (Mapping, ConfigDict)):
        _apply(editable, options, dict(node[name].items()), f"{path}.{name}")
    node[name] = editable
    return options


def _entry(entries: ConfigDict, names: Sequence[str], path: str) -> ConfigDict:
    """The entry `names[0]` of a dict of sections at `path`."""
    if names[0] not in entries:
        known = tuple(entries)
        expected = f"expected one of {', '.join(known) or 'none'}{nearest(names[0], known)}"
        raise ConfigError(f"{path}.{'.'.join(names)}: this recipe has no {names[0]!a}, {expected}")
    return entries[names[0]]


def _set_value(node: ConfigDict, name: str, hint: Any, rest: Sequence[str], text: str, path: str) -> None:
    kind, _ = base_type(hint)
    if typing.get_origin(kind) is dict:
        if len(rest) != 1 or not rest[0]:
            raise ConfigError(f"{path}: got {text!a} for a dict, expected entries; give --{path}.KEY=VALUE")
        entries = dict(node[name].items()) if name in node and node[name] is not None else {}
        if not text:
            if rest[0] not in entries:
                expected = f"expected the name of one to remove ({', '.join(entries) or 'there is none'})"
                hint = nearest(rest[0], tuple(entries))
                raise ConfigError(f"{path}.{rest[0]}: got no value and no such entry, {expected}{hint}")
            del entries[rest[0]]
        elif entry_section(hint) is not None:
            got = f"{path}.{rest[0]}: got {text!a} for a section"
            raise ConfigError(f"{got}, expected one of its fields, or nothing, which removes it; the recipe adds it")
        else:
            entries[rest[0]] = parse_value(text, typing.get_args(kind)[1], f"{path}.{rest[0]}")
        node[name] = ConfigDict(entries, type_safe=False)
        return
    if rest:
        raise ConfigError(f"{path}.{'.'.join(rest)}: {path} is {describe(hint)} and has no fields; give --{path}=VALUE")
    node[name] = parse_value(text, hint, path)
