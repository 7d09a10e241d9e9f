"""Recipes: Python files of the user's that return a config, run with one-line errors that name file and line."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import os
import traceback
from typing import Any, Generator

from ml_collections import ConfigDict

from jaxformer import registry
from jaxformer.config.hints import describe_value
from jaxformer.errors import ConfigError
from jaxformer.registry import nearest


def load(recipe: str) -> ConfigDict:
    """The result of a recipe's `get_config`; `recipe` is `path.py` or `path.py:variant`.

    A recipe may list its variants, `VARIANTS = ("transformer", "lstm")`, and their former names,
    `OLD_VARIANTS = {"bilstm": "lstm"}`. Modules in its directory are importable as tasks, encodings, kernels and data
    sources.

    Raises:
      ConfigError: no such file, no `get_config`, no such variant, or the file fails (the message has the line).
    """
    path, variant = recipe, ""
    if not os.path.exists(path) and ":" in recipe:
        path, _, variant = recipe.rpartition(":")
    function = read_variable(path, "get_config", "a function get_config(variant) that returns a config")
    registry.add_search_directory(os.path.dirname(path))
    namespace = getattr(function, "__globals__", {})
    variant = namespace.get("OLD_VARIANTS", {}).get(variant, variant)
    known = tuple(namespace.get("VARIANTS", ()))
    if variant and known and variant not in known:
        expected = f"expected one of {', '.join(known)}{nearest(variant, known)}"
        raise ConfigError(f"{path}: got variant {variant!r}, {expected}")
    if not callable(function):
        got = f"got get_config = {describe_value(function)}"
        raise ConfigError(f"{path}: {got}, expected a function get_config(variant)")
    with _one_line_errors(path):
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
        got = f"got {describe_value(config)} from get_config"
        raise ConfigError(f"{path}: {got}, expected a ConfigDict; return the config")
    return config


@dataclasses.dataclass(frozen=True)
class Description:
    """Entry of a recipe in a list of recipes.

    Attributes:
      path: of the file.
      summary: first line of its docstring; "" without one.
      variants: what may follow a colon, if the recipe lists it.
      error: why the recipe cannot be used, in one line; "" if it can.
    """

    path: str
    summary: str
    variants: tuple[str, ...] = ()
    error: str = ""


def describe(path: str) -> Description:
    """A recipe's docstring and variants. The file is run, as `load` does, and so is its first variant."""
    try:
        with open(path, encoding="utf-8") as file:
            summary = (ast.get_docstring(ast.parse(file.read())) or "").strip().partition("\n")[0]
    except (OSError, ValueError, SyntaxError):  # `load` words the error
        summary = ""
    variants: tuple[str, ...] = ()
    try:
        function = read_variable(path, "get_config", "a function get_config(variant) that returns a config")
        variants = tuple(map(str, getattr(function, "__globals__", {}).get("VARIANTS", ())))
        load(f"{path}:{variants[0]}" if variants else path)
    except ConfigError as error:
        return Description(path, summary, variants, str(error))
    return Description(path, summary, variants)


def read_variable(path: str, name: str, expected: str) -> Any:
    """The variable `name` that the Python file at `path` defines. `expected` describes it in errors.

    Raises:
      ConfigError: no such file, no such variable, or the file fails (the message has the line).
    """
    namespace: dict[str, Any] = {"__file__": path, "__name__": os.path.splitext(os.path.basename(path))[0]}
    try:
        if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
            raise ValueError("a device or pipe")  # reading it may never end
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, ValueError) as error:
        raise ConfigError(_describe_unreadable(path, error)) from None
    with _one_line_errors(path):
        exec(compile(text, path, "exec"), namespace)  # a recipe is a program of the user's, run at their request
    if name not in namespace:
        raise ConfigError(f"{path}: got no {name}, expected {expected}")
    return namespace[name]


def _describe_unreadable(path: str, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        directory = os.path.dirname(path) or "."
        known = sorted(n for n in os.listdir(directory) if n.endswith(".py")) if os.path.isdir(directory) else []
        return f"{path!a}: no such file, expected a Python file{nearest(os.path.basename(path), known)}"
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return f"{path!a}: got an unreadable file ({reason}), expected a Python file"


@contextlib.contextmanager
def _one_line_errors(path: str) -> Generator[None]:
    """Turns whatever the file at `path` raises, SystemExit included, into one line with the file's line number."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
        line = error.lineno if isinstance(error, SyntaxError) else (lines[-1] if lines else None)
        where = f"{path}:{line}" if line else path
        text = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
        if isinstance(error, ConfigError):
            raise ConfigError(f"{where}: {text}") from None
        raise ConfigError(f"{where}: got {type(error).__name__}: {text}, expected a working file") from None
