"""The folder is the registry: one file in a package is one named member.

A file `jaxformer/nn/encodings/rope.py` that defines the constant `ENCODING` is the encoding named "rope". Nothing is
listed by hand, so adding a member is adding a file, and the tests, which parametrise over `names`, test it at once.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import pkgutil
from typing import Any


@functools.cache
def names(package: str) -> tuple[str, ...]:
    """Sorted names of the members of `package` (files starting with "_" are not members).

    Nothing of the package is imported, so a config with a wrong name is refused before jax is loaded.
    """
    found = importlib.util.find_spec(package)
    path = found.submodule_search_locations if found is not None else None
    if path is None:
        raise ValueError(f"registry: got {package!r}, expected a package")
    return tuple(sorted(m.name for m in pkgutil.iter_modules(path) if not m.name.startswith("_")))


def member(package: str, name: str, constant: str) -> Any:
    """The `constant` defined by the file `name` of `package`.

    Raises:
      ValueError: there is no such file; the message names the nearest one.
    """
    known = names(package)
    if name not in known:
        raise ValueError(f"{package}: got {name!r}, expected one of {', '.join(known)}{nearest(name, known)}")
    return getattr(importlib.import_module(f"{package}.{name}"), constant)


def nearest(name: str, known: tuple[str, ...] | list[str]) -> str:
    """The tail of an error message: `; did you mean 'x'?`, or nothing when no known name is close."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
