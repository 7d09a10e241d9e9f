"""Patterns of paths, such as the path "encoder/blocks/attention/query/kernel" of a parameter.

A pattern is one or more names joined by "/". It matches every path that holds these names one after the other:
"attention/query" matches the path above, and so do "encoder", "blocks/*/query" and "kernel". `*` and `?` stand for
characters within a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from jaxformer.errors import ConfigError
from jaxformer.registry import nearest


def matches(path: str, pattern: str) -> bool:
    """True if `path` holds names that match those of `pattern`, one after the other."""
    wanted = pattern.split("/")
    return any(all(map(fnmatchcase, names, wanted)) for names in _runs(path, len(wanted)))


def select(paths: Iterable[str], patterns: Sequence[str], field: str) -> set[str]:
    """The paths that a list of patterns selects.

    A pattern with "!" before it takes away what those before it selected; the last one that matches a path counts.

    Args:
      field: name of the config field that holds the patterns, for errors.

    Raises:
      ConfigError: a pattern matches none of the paths.
    """
    paths, selected = list(paths), set()
    for pattern in patterns:
        name = pattern.removeprefix("!")
        found = {path for path in paths if matches(path, name)}
        if not found:
            known = sorted({"/".join(run) for path in paths for run in _runs(path, name.count("/") + 1)})
            hint = nearest(name, known) or f"; there are {', '.join(sorted(paths)[:3])}, ..."
            raise ConfigError(f"{field}: got {pattern!a}, which matches no path, expected part of one{hint}")
        selected = selected - found if pattern.startswith("!") else selected | found
    return selected


def last_value(path: str, entries: Sequence[str], default: float) -> float:
    """The number of the last of `entries`, as "PATTERN=NUMBER", whose pattern matches `path`; else the default."""
    values = [float(number) for pattern, _, number in (entry.rpartition("=") for entry in entries)
              if matches(path, pattern)]  # fmt: skip
    return values[-1] if values else default


def _runs(path: str, length: int) -> list[tuple[str, ...]]:
    """All runs of so many names in `path`."""
    names = path.split("/")
    return [tuple(names[i : i + length]) for i in range(len(names) - length + 1)]
