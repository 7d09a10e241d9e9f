"""Folders of files in a bucket (`gs://`, `s3://`), fetched to the cache before they are read: whole, or file by file.

An object is fetched again only if its generation (or ETag) has changed, or if the copy differs from its checksum.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
from collections.abc import Generator
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


def checksums(url: str, what: str) -> dict[str, str]:
    """SHA-256 of the files that `local_folder` has fetched from an address, by key."""
    root = local_folder(url, what)
    return {key: entry["sha256"] for key, entry in files.read_json(root.parent / INDEX).items()}


@functools.cache
def local_file(url: str, key: str, what: str) -> Path:
    """Copy of one file of a folder in a bucket, without the others; fetched as `local_folder` does, once a process.

    Raises:
      ConfigError: it is not there, or the address is refused.
      StorageError: the storage does not answer.
    """
    copy = _Copy(url, what)
    with copy.locked():
        known = copy.index()
        entry = copy.fetch(key, known.get(key, {}))
        if entry is None:
            raise ConfigError(f"{what}: got no {key} in {url!a}, expected the file that was there; restore it")
        files.write_json(copy.folder / INDEX, known | {key: entry})
    return copy.root / key


@functools.cache
def _fetch(url: str, what: str) -> Path:
    copy = _Copy(url, what)
    with copy.locked():
        known, found = copy.index(), {}

        def fetch(key: str) -> None:
            entry = copy.fetch(key, known.get(key, {}))
            if entry is not None:
                found[key] = entry

        keys = [key for key in copy.store.list_keys() if object_store.is_safe(key)]
        copy.store.for_each(fetch, ((key, 0) for key in keys))
        for path in copy.root.rglob("*"):
            if path.is_file() and path.relative_to(copy.root).as_posix() not in found:
                path.unlink()
        files.write_json(copy.folder / INDEX, found)
    if not found:
        raise ConfigError(f"{what}: got {url!a}, where nothing is, expected a folder with files; check the address")
    return copy.root


class _Copy:
    """The copy on this host of a folder in a bucket.

    Attributes:
      store: the objects.
      root: the copy.
      folder: where it lies, with its index.
    """

    def __init__(self, url: str, what: str) -> None:
        self.store = Store(url, what)
        name = hashlib.sha256(str(self.store.address).encode()).hexdigest()[:16]
        self.folder = directories.cache() / "data" / name
        self.root = self.folder / self.store.address.path.rpartition("/")[2]
        self.root.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Generator[None]:
        """Holds the copy; waits for it."""
        with open(self.folder / "lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def index(self) -> dict[str, Any]:
        """Generation and SHA-256 of each fetched file, by key; empty if the index is missing or damaged."""
        with contextlib.suppress(FileNotFoundError, ConfigError):
            return files.read_json(self.folder / INDEX)
        return {}

    def fetch(self, key: str, entry: dict[str, Any]) -> dict[str, Any] | None:
        """Fetches an object, unless the copy is whole and the object has not changed.

        Args:
          entry: of the index; empty: none.

        Returns:
          The new entry; None if there is no such object.
        """
        has_copy = _digest(self.root / key) == entry.get("sha256", "")
        stored = self.store.read(key, unless=bytes.fromhex(entry["generation"]) if has_copy else None)
        if stored is None:
            return None
        if has_copy and stored.generation.hex() == entry["generation"]:
            return entry
        (self.root / key).parent.mkdir(parents=True, exist_ok=True)
        files.write_atomic(self.root / key, stored.value)
        return {"generation": stored.generation.hex(), "sha256": hashlib.sha256(stored.value).hexdigest()}


def _digest(path: Path) -> str | None:
    """SHA-256 of a file; None if it does not exist."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
