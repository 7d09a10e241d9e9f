"""Small results kept in the cache: a second start with the same texts, settings and code reads them.

A result lies in `<cache>/<kind>/<hash>.json`, named by a hash of everything that it depends on: the content of the
texts, the settings, the versions of the libraries and the source files of the code that makes it. So a change of any of
these makes another entry, and entries never go stale. Files appear whole; a damaged one is made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer import registry
from jaxformer.errors import ConfigError
from jaxformer.runtime import code_version, files

LIBRARIES = ("flax", "jax", "jinja2", "numpy", "sentencepiece", "tokenizers")
"""Libraries that decide results: those of models, and those that make ids from texts."""

logger = logging.getLogger(__name__)


PROJECT = Path(__file__).parents[1]
"""Folder of all of the project's code."""


def keep(directory: Path, kind: str, depends_on: Mapping[str, Any], make: Callable[[], Any]) -> Any:
    """The result of `make()`, from the cache if it is there; a value of JSON.

    A cache that cannot be written costs time only: the result is then made anew at every start.

    Args:
      directory: the cache.
      kind: name of the folder below it.
      depends_on: all that decides the result, values of JSON.
    """
    kept = find(directory, kind, depends_on)
    return kept[0] if kept is not None else store(directory, kind, depends_on, make())


def find(directory: Path, kind: str, depends_on: Mapping[str, Any]) -> tuple[Any] | None:
    """The kept result in a tuple; None if the cache does not have it. Arguments are those of `keep`."""
    key = _digest(depends_on)
    return _read(_path(directory, kind, key), key)


def store(directory: Path, kind: str, depends_on: Mapping[str, Any], value: Any) -> Any:
    """Keeps `value`, if the cache can be written, and returns it. Arguments are those of `keep`."""
    key = _digest(depends_on)
    path = _path(directory, kind, key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(path, {"key": key, "sha256": _digest(value), "value": value}, indent=None)
    except OSError as error:
        logger.info("%s: %s; it is made anew at the next start", path, error.strerror or error)
    return value


def _path(directory: Path, kind: str, key: str) -> Path:
    return directory / kind / f"{key[:24]}.json"


def _read(path: Path, key: str) -> tuple[Any] | None:
    """The value of a file in a tuple; None if there is no file, or it is not what was written."""
    try:
        content = files.read_json(path)
        if content["key"] == key and content["sha256"] == _digest(content["value"]):
            return (content["value"],)
        reason = "it differs from its checksum"
    except FileNotFoundError:
        return None
    except (OSError, ConfigError, LookupError) as error:
        reason = str(error)
    logger.warning("%s is damaged (%s): made again", path, reason)
    return None


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def drawn(examples: Any) -> list[str] | None:
    """A key of examples that the project's code draws, which decides them all; None for other examples."""
    key = getattr(examples, "drawn_key", "")
    if not key or registry.has_external_members():
        return None
    return [key, code_digest(PROJECT)]


def content_digest(items: Iterable[Any]) -> str:
    """A hash of texts or examples in order."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(json.dumps(item, sort_keys=True, default=_described).encode() + b"\n")  # JSON holds no line end
    return digest.hexdigest()


def _described(value: Any) -> Any:
    """A value that JSON does not have, as one that it has: bytes, and numpy's arrays and numbers."""
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise TypeError(f"content: got {type(value).__name__}, expected values of JSON, bytes or arrays")
    return [array.dtype.str, array.shape, array.tobytes().hex()]


def code_digest(*paths: Path) -> str:
    """A hash of source files and of those below folders, of the Python that runs them, and of `LIBRARIES`."""
    versions = [platform.python_version(), *map(metadata.version, LIBRARIES), code_version.source_digest(*paths)]
    return hashlib.sha256(repr(versions).encode()).hexdigest()
