"""The folder is the registry: one file in a package is one named member.

A file `jaxformer/nn/encodings/rope.py` that defines the constant `ENCODING` is the encoding named "rope". Nothing is
listed by hand, so adding a member is adding a file, and the tests, which parametrise over `names`, test it at once.

A member may also come from outside the project: the name is then that of an importable module which defines the same
constant, as "mypackage.mymodule". Modules are searched on `sys.path`, beside the recipe, and in the working directory.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import os
import pkgutil
import sys
import traceback
from typing import Any

from jaxformer.errors import ConfigError

_search_directories: list[str] = []
_external_names: set[str] = set()


@functools.cache
def names(package: str) -> tuple[str, ...]:
    """Sorted names of the members of `package` (files starting with "_" are not members).

    Nothing of the package is imported, so a config with a wrong name is refused before jax is loaded.
    """
    spec = importlib.util.find_spec(package)
    path = spec.submodule_search_locations if spec is not None else None
    if path is None:
        raise ValueError(f"registry: got {package!r}, expected a package")
    return tuple(sorted(m.name for m in pkgutil.iter_modules(path) if not m.name.startswith("_")))


def member(package: str, name: str, constant: str) -> Any:
    """The `constant` defined by the file `name` of `package`, or by the module `name` from outside the project.

    Raises:
      ValueError: there is no such file; the message names the nearest one.
      ConfigError: the module from outside cannot be imported, or defines no such constant.
    """
    if is_external(package, name):
        try:
            return _external_member(name, constant)
        except ConfigError as error:
            raise ConfigError(f"{package}: {error}") from None
    known = names(package)
    if name not in known:
        raise ValueError(f"{package}: got {name!r}, expected one of {', '.join(known)}{nearest(name, known)}")
    return getattr(importlib.import_module(f"{package}.{name}"), constant)


def is_external(package: str, name: str) -> bool:
    """True if `name` is that of a module from outside the project: a dotted path, or a module that can be found.

    Nothing is imported for a name without dots.
    """
    parts = name.split(".")
    if name in names(package) or not all(part.isidentifier() for part in parts):
        return False
    if len(parts) > 1:
        return True
    if name in sys.stdlib_module_names:
        return False
    extend_search_path()
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None  # a plain directory has no origin


def add_search_directory(directory: str) -> None:
    """Makes the modules in `directory` importable as members, after everything on `sys.path`."""
    directory = os.path.abspath(directory)
    if directory not in _search_directories:
        _search_directories.append(directory)


def extend_search_path() -> None:
    """Makes modules of the search directories, and of the working directory, importable."""
    for directory in (*_search_directories, os.getcwd()):
        if directory not in sys.path:
            sys.path.append(directory)
            importlib.invalidate_caches()


def _external_member(name: str, constant: str) -> Any:
    extend_search_path()
    expected = f"expected an importable module that defines {constant}"
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:  # whatever a module of the user's raises while it is imported
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            remedy = "run in its directory, or put that on PYTHONPATH"
            raise ConfigError(f"got {name!a}, but there is no module {error.name}, {expected}; {remedy}") from None
        frames = traceback.extract_tb(error.__traceback__)
        frame = [frame for frame in frames if not frame.filename.startswith("<frozen")][-1]
        file, line, text = frame.filename, frame.lineno, " ".join(str(error).split())
        if isinstance(error, SyntaxError):
            file, line, text = error.filename, error.lineno, error.msg
        message = f"{file}:{line}: {type(error).__name__}: {text}"
        raise ConfigError(f"got {name!a}, whose import fails ({message}), {expected}") from None
    if not hasattr(module, constant):
        raise ConfigError(f"got {name!a}, which defines no {constant}, {expected}")
    _external_names.add(name)
    return getattr(module, constant)


def has_external_members() -> bool:
    """True if this process has imported a member from outside the project, whose code may change unnoticed."""
    return bool(_external_names)


def nearest(name: str, known: tuple[str, ...] | list[str]) -> str:
    """The tail of an error message: `; did you mean 'x'?`, or nothing when no known name is close."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
