"""The front of the config: `ConfigDict` for recipes and the command line, the dataclasses of `config.py` past the door.

Everything here is generated from the dataclasses, so a field added there is at once a default, a recipe edit, a
command-line override, a JSON key and a checked type. What a type cannot say is in `checks/`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
import traceback
import typing
from typing import Any, Iterator, Mapping, Sequence

from ml_collections import ConfigDict

from jaxformer import files, redaction
from jaxformer.checks import check
from jaxformer.config import Config, ConfigError
from jaxformer.registry import nearest
from jaxformer.schema import describe, fields, members, part_of, read_text, show, typed, unknown

__all__ = [
    "changes",
    "check",
    "deciding",
    "defaults",
    "differences",
    "edit",
    "fingerprint",
    "freeze",
    "from_json",
    "load",
    "override",
    "parse",
    "read",
    "same",
    "section",
    "to_json",
    "variable",
]

RESUMABLE = (
    "train.steps", "train.log_every", "train.evaluate_every", "train.checkpoint_every", "train.skip_limit",
    "train.deadline", "train.watchdog",
    "checkpoint.keep_last", "checkpoint.keep_best", "checkpoint.average", "checkpoint.average_of",
    "evaluate", "decode", "mesh", "data.cache",
)  # fmt: skip
"""What may change between the start of a run and its resumption: how long, how often, how shown, on which devices."""

NEUTRAL = ("train.log_every", "train.skip_limit", "train.deadline", "train.watchdog", "mesh", "data.cache")
"""Fields that decide how a run is executed and shown, and no number it ends with (but for rounding, of `mesh`)."""

RESOLVED = ("vocab", "classes")
"""Fields that a run fills in when they are None, so that None agrees with whatever the saved config has."""

RENAMED = {"decode": {"early_stop": ("stopping", {True: "estimate", False: "exact"})}}
"""Section -> a field's name in configs saved by earlier versions -> its name now, and what its values are called."""

WERE_SINGLE = {"decode": ("forced_last",)}
"""Section -> fields that hold several values and held one or None in configs saved by earlier versions."""


# --- the ConfigDict side ----------------------------------------------------------------------------------------------


def defaults() -> ConfigDict:
    """A `ConfigDict` with every field of `Config` at its default. Optional parts are None: see `section`."""
    return section(Config)


def section(kind: type, **edits: Any) -> ConfigDict:
    """A part of the config as a `ConfigDict`, with `edits` applied; nested parts are edited by nested dicts.

    `config.model.encoder = section(StackConfig, layers=6, attention=dict(heads=8))` gives a run an encoder.

    Raises:
      ConfigError: an edit names no field of `kind`.
    """
    out = _loose(kind())
    _edit(out, kind, edits, kind.__name__)
    return out


class _Loose(ConfigDict):
    """A `ConfigDict` that keeps what it is given: even without type safety the original makes 1.0 of True."""

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, int) and key in self and isinstance(self[key], float):
            del self[key]
        super().__setitem__(key, value)


def _loose(value: Any) -> Any:
    """A dataclass instance as a `ConfigDict`, not type-safe on purpose: `freeze` alone judges, with full paths."""
    if dataclasses.is_dataclass(value):
        values = {f.name: _loose(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return _Loose(values, type_safe=False)
    return _Loose(value, type_safe=False) if isinstance(value, dict) else value


def _edit(config: ConfigDict, kind: type, edits: Mapping[str, Any], path: str) -> None:
    hints = fields(kind)
    for name, value in edits.items():
        if name not in hints:
            raise unknown(path, name, kind)
        part = part_of(hints[name])
        if part is None or not isinstance(value, (Mapping, ConfigDict)):
            config[name] = value
            continue
        base = config[name] if isinstance(config[name], ConfigDict) else _loose(part())
        _edit(base, part, dict(value.items()), f"{path}.{name}")
        config[name] = base


# --- freeze -----------------------------------------------------------------------------------------------------------


def freeze(config: ConfigDict | Mapping[str, Any]) -> Config:
    """The typed, checked config. Keys that are missing take their defaults.

    Raises:
      ConfigError: an unknown key, a wrong type, or values that make no sense together. One line, with the full path.
    """
    frozen = typed(config, Config, "config")
    check(frozen)
    return frozen


# --- JSON -------------------------------------------------------------------------------------------------------------


def to_json(config: Config) -> str:
    """The config as sorted, indented JSON: equal configs give equal text."""
    return json.dumps(dataclasses.asdict(config), sort_keys=True, indent=2, allow_nan=False) + "\n"


def from_json(text: str) -> Config:
    """The config that `to_json` wrote, judged as strictly as a recipe.

    Raises:
      ConfigError: the text is not such JSON.
    """
    try:
        value = files.parse(text, _unique)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"config.json: got no valid JSON ({error}), expected what a run wrote") from None
    if not isinstance(value, dict):
        raise ConfigError(f"config.json: got {show(value)}, expected a JSON object")
    return freeze(_current(value))


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


def _current(values: dict[str, Any]) -> dict[str, Any]:
    """A saved config with the fields of `RENAMED` and `WERE_SINGLE` as they are now."""
    for part, fields_of_it in RENAMED.items():
        saved = values.get(part)
        for old, (new, meaning) in fields_of_it.items():
            if isinstance(saved, dict) and isinstance(saved.get(old), bool):
                saved[new] = meaning[saved.pop(old)]
    for part, names in WERE_SINGLE.items():
        saved = values.get(part)
        for name in names:
            if isinstance(saved, dict) and isinstance(saved.get(name, []), (int, type(None))):
                saved[name] = [] if saved[name] is None else [saved[name]]
    return values


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"config.json: got key {twice!a} twice, expected it once")
    return out


# --- recipes and the command line -------------------------------------------------------------------------------------


def load(recipe: str) -> ConfigDict:
    """What the `get_config` of a recipe returns; `recipe` is `path.py` or `path.py:variant`.

    A recipe may say which variants it takes, `VARIANTS = ("transformer", "lstm")`, and which names they had before,
    `OLD_VARIANTS = {"bilstm": "lstm"}`.

    Raises:
      ConfigError: no such file, no `get_config`, no such variant, or the file fails (the message has the line).
    """
    path, variant = recipe, ""
    if not os.path.exists(path) and ":" in recipe:
        path, _, variant = recipe.rpartition(":")
    function = variable(path, "get_config", "a function get_config(variant) that returns a config")
    variants = getattr(function, "__globals__", {})
    variant = variants.get("OLD_VARIANTS", {}).get(variant, variant)
    known = tuple(variants.get("VARIANTS", ()))
    if variant and known and variant not in known:
        expected = f"expected one of {', '.join(known)}{nearest(variant, known)}"
        raise ConfigError(f"{path}: got variant {variant!r}, {expected}")
    if not callable(function):
        raise ConfigError(f"{path}: got get_config = {show(function)}, expected a function get_config(variant)")
    with _blame(path):
        takes_variant = bool(inspect.signature(function).parameters)
        if variant and not takes_variant:
            raise ConfigError(f"{path}: got variant {variant!r}, expected none; this recipe has no variants")
        try:
            config = function(variant) if takes_variant else function()
        except KeyError as error:
            if not variant or error.args != (variant,):
                raise
            raise ConfigError(f"{path}: got variant {variant!r}, expected one that the recipe has; see it") from None
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"{path}: got {show(config)} from get_config, expected a ConfigDict; return the config")
    return config


def variable(path: str, name: str, what: str) -> Any:
    """The variable `name` that a Python file of the user's defines; `what` says in errors what it should be.

    Raises:
      ConfigError: no such file, no such variable, or the file fails (the message has the line).
    """
    namespace: dict[str, Any] = {"__file__": path, "__name__": os.path.splitext(os.path.basename(path))[0]}
    try:
        if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
            raise ValueError("a device or pipe")  # which may have no end
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, ValueError) as error:
        raise ConfigError(_unreadable(path, error)) from None
    with _blame(path):
        exec(compile(text, path, "exec"), namespace)  # a recipe is a program of the user's, run as they asked
    if name not in namespace:
        raise ConfigError(f"{path}: got no {name}, expected {what}")
    return namespace[name]


def _unreadable(path: str, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        folder = os.path.dirname(path) or "."
        known = sorted(n for n in os.listdir(folder) if n.endswith(".py")) if os.path.isdir(folder) else []
        return f"{path!a}: no such file, expected a Python file{nearest(os.path.basename(path), known)}"
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return f"{path!a}: got an unreadable file ({reason}), expected a Python file"


class _blame:
    """Turns whatever a recipe raises, SystemExit included, into one line with the recipe's own line number."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, KeyboardInterrupt):
            return
        lines = [f.lineno for f in traceback.extract_tb(trace) if f.filename == self.path]
        line = error.lineno if isinstance(error, SyntaxError) else (lines[-1] if lines else None)
        where = f"{self.path}:{line}" if line else self.path
        text = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
        if isinstance(error, ConfigError):
            raise ConfigError(f"{where}: {text}") from None
        raise ConfigError(f"{where}: got {type(error).__name__}: {text}, expected a working file") from None


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
    redaction.refuse(dataclasses.asdict(frozen), "config")
    return frozen


def edit(config: Config, argv: Sequence[str]) -> Config:
    """`config` with `--config.a.b=VALUE` arguments applied. Errors are those of `parse`."""
    loose = _loose(config)
    _override_all(loose, argv)
    return freeze(loose)


def _override_all(config: ConfigDict, argv: Sequence[str]) -> None:
    for argument in argv:
        if not argument.startswith("--config.") or "=" not in argument:
            raise ConfigError(f"argument {argument!a}: expected --config.PATH=VALUE")
        path, _, text = argument.removeprefix("--config.").partition("=")
        override(config, path, text)


def override(config: ConfigDict, path: str, text: str) -> None:
    """Sets the value at `path` ("train.steps") to `text`, read as the field's type.

    Tuples are "a,b", entries of a dict `path.KEY`, which no text removes; None, true and false are words. Sections come
    from the recipe.

    Raises:
      ConfigError: no such field, a part that this recipe does not have, or a text that is not of its type.
    """
    node, kind, here = config, Config, "config"
    names = path.split(".")
    for i, name in enumerate(names):
        hints = fields(kind)
        if name not in hints:
            raise unknown(here, name, kind)
        hint, rest = hints[name], names[i + 1 :]
        part, here = part_of(hint), f"{here}.{name}"
        if part is None:
            _assign(node, name, hint, rest, text, here)
            return
        if not rest:
            raise ConfigError(
                f"{here}: got {text!a} for a section, expected one of its fields ({', '.join(fields(part))}); "
                "sections come from the recipe"
            )
        if name not in node or not isinstance(node[name], ConfigDict):
            raise ConfigError(f"{here}.{'.'.join(rest)}: this recipe has no {here}, expected one; add it in the recipe")
        node, kind = node[name], part


def _assign(node: ConfigDict, name: str, hint: Any, rest: list[str], text: str, path: str) -> None:
    kind, _ = members(hint)
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
        else:
            entries[rest[0]] = read_text(text, typing.get_args(kind)[1], f"{path}.{rest[0]}")
        node[name] = ConfigDict(entries, type_safe=False)
        return
    if rest:
        raise ConfigError(f"{path}.{'.'.join(rest)}: {path} is {describe(hint)} and has no fields; give --{path}=VALUE")
    node[name] = read_text(text, hint, path)


# --- comparing --------------------------------------------------------------------------------------------------------


def changes(a: Config, b: Config) -> dict[str, tuple[Any, Any]]:
    """Path ("train.seed") -> the two values, for every field in which two configs differ, in schema order."""

    def walk(x: Any, y: Any, path: str) -> Iterator[tuple[str, tuple[Any, Any]]]:
        if dataclasses.is_dataclass(x) and type(x) is type(y):
            for f in dataclasses.fields(x):
                name = f"{path}.{f.name}" if path else f.name
                yield from walk(getattr(x, f.name), getattr(y, f.name), name)
        elif x != y:
            yield path, (x, y)

    return dict(walk(a, b, ""))


def differences(config: Config, saved: Config) -> list[str]:
    """What makes `config` another run than the one that wrote `saved`: "path: here X, there Y"; empty if it may resume.

    What may change on resuming (`RESUMABLE`) and what a run fills in by itself (`RESOLVED`) does not count.
    """
    found = changes(config, saved)
    return [f"{path}: here {_brief(found[path][0])}, there {_brief(found[path][1])}" for path in same(config, saved)]


def same(config: Config, saved: Config) -> list[str]:
    """The paths of `differences`; empty if `config` may resume the run that wrote `saved`."""
    return [path for path, (mine, _) in changes(config, saved).items() if not _resumable(path, mine)]


def deciding(config: Config, saved: Config) -> list[str]:
    """The paths in which `config` would end with other numbers than the resolved `saved`; empty if with the same."""
    found = changes(config, saved)
    return [path for path, (mine, _) in found.items() if not (_filled_in(path, mine) or _below(path, NEUTRAL))]


def fingerprint(config: Config) -> str:
    """16 hexadecimal digits that differ for configs that may end with different numbers.

    Only fields that differ from their default count, `NEUTRAL` ones left out: a field that a later version adds does
    not change the fingerprints of configs that leave it at its default.
    """

    def walk(part: Any, path: str) -> Iterator[tuple[str, Any]]:
        yield path, type(part).__name__
        for field in dataclasses.fields(part):
            value, name = getattr(part, field.name), f"{path}.{field.name}" if path else field.name
            if dataclasses.is_dataclass(value):
                yield from walk(value, name)
            elif value != _default(field) and not _below(name, NEUTRAL):
                yield name, value

    text = json.dumps(dict(walk(config, "")), sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _resumable(path: str, mine: Any) -> bool:
    return _filled_in(path, mine) or _below(path, RESUMABLE)


def _filled_in(path: str, mine: Any) -> bool:
    return mine in (None, ()) and path.rpartition(".")[2] in RESOLVED


def _below(path: str, sections: Sequence[str]) -> bool:
    return any(path == section or path.startswith(section + ".") for section in sections)


def _brief(value: Any) -> str:
    if value is None or dataclasses.is_dataclass(value):
        return "None" if value is None else f"a {type(value).__name__}"
    return show(value).rpartition(" (")[0]
