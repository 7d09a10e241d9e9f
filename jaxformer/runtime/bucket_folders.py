"""Folders of files in a bucket (`gs://`, `s3://`), fetched whole to the cache before they are read.

An object is fetched again only if its generation (or ETag) has changed, or if the copy differs from its checksum.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
from pathlib import Path
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.runtime import directories, files, object_store
from jaxformer.runtime.object_store import Store

INDEX = "objects.json"
"""File beside a copy: generation (hexadecimal) and SHA-256 of every object by key."""


def local_folder(path: str, what: str) -> Path:
    """The absolute folder that `path` names. An address in a bucket is fetched first, once a process.

    Args:
      what: the flag or field, for errors.

    Raises:
      ConfigError: the home in `path` is not known; or there is nothing at the address, or it is refused.
      StorageError: the storage does not answer.
    """
    if object_store.is_url(path):
        return _fetch(path, what)
    return directories.expand_user(path, what)


@functools.cache
def _fetch(url: str, what: str) -> Path:
    store = Store(url, what)
    name = hashlib.sha256(str(store.address).encode()).hexdigest()[:16]
    folder = directories.cache() / "data" / name
    root = folder / store.address.path.rpartition("/")[2]
    root.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known: dict[str, Any] = {}
        with contextlib.suppress(FileNotFoundError, ConfigError):
            known = files.read_json(folder / INDEX)
        found: dict[str, Any] = {}

        def fetch(key: str) -> None:
            entry = known.get(key, {})
            has_copy = _digest(root / key) == entry.get("sha256", "")
            stored = store.read(key, unless=bytes.fromhex(entry["generation"]) if has_copy else None)
            if stored is None:
                return
            if has_copy and stored.generation.hex() == entry["generation"]:
                found[key] = entry
                return
            (root / key).parent.mkdir(parents=True, exist_ok=True)
            files.write_atomic(root / key, stored.value)
            digest = hashlib.sha256(stored.value).hexdigest()
            found[key] = {"generation": stored.generation.hex(), "sha256": digest}

        keys = [key for key in store.list_keys() if object_store.is_safe(key)]
        store.for_each(fetch, ((key, 0) for key in keys))
        for path in root.rglob("*"):
            if path.is_file() and path.relative_to(root).as_posix() not in found:
                path.unlink()
        files.write_json(folder / INDEX, found)
    if not found:
        raise ConfigError(f"{what}: got {url!a}, where nothing is, expected a folder with files; check the address")
    return root


def _digest(path: Path) -> str | None:
    """SHA-256 of a file; None if it does not exist."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
