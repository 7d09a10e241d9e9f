"""Where a build writes: a folder, or an address in a bucket (`gs://`, `s3://`). Files appear whole or not at all.

A worker writes a shard to a partial file on its own machine, which becomes the file of a folder by renaming, and an
object of a bucket by one request. The manifest of a shard is written after it, and says that it exists.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import functools
import hashlib
import os
import secrets
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jaxformer.errors import ConfigError
from jaxformer.runtime import directories, files, object_store
from jaxformer.runtime.lease import Lease
from jaxformer.runtime.object_store import Store

T = TypeVar("T")
R = TypeVar("R")

WORK = ".build"
"""Folder in the target of what only the build reads."""
PLAN = f"{WORK}/plan.json"
MAX_BUCKET_SHARD_MB = 1024
"""Largest `--shard-mb` in a bucket: a shard is uploaded in one request, and is in memory meanwhile."""
PARALLEL_CHECKS = 4
"""Finished shards in a bucket that are checked at a time. One whose object was replaced is read into memory."""


@dataclass(frozen=True)
class Folder:
    """A folder of files on a disk, by their keys. It can be sent to other processes and machines.

    Attributes:
      path: the folder.
      threads: how many calls are worth making at a time.
    """

    path: Path
    threads = 1

    def __str__(self) -> str:
        return str(self.path)

    @property
    def partials(self) -> Path:
        """Folder on this machine of files that are being written."""
        return self.path / WORK

    def child(self, name: str) -> Folder:
        """A folder in this one; "": itself."""
        return Folder(self.path / name)

    def check(self) -> None:
        """Raises a ConfigError if nothing can be written there."""
        files.check_directory("--target", str(self.path), new=True)

    def holds_others(self) -> bool:
        """True if there are files outside of `WORK`."""
        return self.path.is_dir() and any(path.name != WORK for path in self.path.iterdir())

    def local(self, key: str) -> Path:
        """Path on this machine of a file, or of its copy."""
        return self.path / key

    def copy(self, key: str) -> Path | None:
        """Path of a file on this machine, copied if it lies elsewhere; None if it does not exist."""
        return self.path / key if (self.path / key).exists() else None

    def read(self, key: str) -> bytes | None:
        """A file; None if it does not exist."""
        try:
            return (self.path / key).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, key: str, content: bytes) -> None:
        """Writes a file."""
        (self.path / key).parent.mkdir(parents=True, exist_ok=True)
        files.write_atomic(self.path / key, content)

    def delete(self, key: str) -> None:
        """Deletes a file, which need not exist."""
        (self.path / key).unlink(missing_ok=True)

    def publish(self, partial: Path, key: str) -> tuple[int, str, str]:
        """Makes a partial file, which is then gone, the file `key`. Returns its size, SHA-256 and generation."""
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        found = file_hash(partial)
        os.replace(partial, self.path / key)
        return *found, ""

    def is_whole(self, key: str, size: int, sha256: str, generation: str) -> bool:
        """True if a file has these contents. One of another generation, or without one, is read."""
        return (self.path / key).is_file() and file_hash(self.path / key) == (size, sha256)

    @contextlib.contextmanager
    def locked(self) -> Generator[Callable[[], None]]:
        """Holds the target, and gives a function that raises StorageError once another build has taken it over.

        The operating system releases a folder if the process dies.

        Raises:
          ConfigError: another build holds it.
        """
        self.partials.mkdir(parents=True, exist_ok=True)
        with _locked(self.partials / "lock", str(self)):
            yield lambda: None


@dataclass(frozen=True)
class Bucket:
    """A folder in a bucket, with the methods of `Folder`.

    Partial files, and copies of what is read, are in the cache of each machine.
    """

    url: str
    threads = PARALLEL_CHECKS

    def __str__(self) -> str:
        return self.url

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (self.url,)

    @functools.cached_property
    def store(self) -> Store:
        """The objects."""
        return Store(self.url, "--target")

    @property
    def partials(self) -> Path:
        return directories.cache() / "builds" / hashlib.sha256(self.url.encode()).hexdigest()[:16]

    def child(self, name: str) -> Bucket:
        return Bucket(f"{self.url}/{name}") if name else self

    def check(self) -> None:
        pass  # `Store` says what is wrong, at the first request

    def holds_others(self) -> bool:
        return any(key.partition("/")[0] != WORK for key in self.store.list_keys())

    def local(self, key: str) -> Path:
        return self.partials / key

    def copy(self, key: str) -> Path | None:
        content = self.read(key)
        if content is None:
            return None
        path = self.local(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomic(path, content)
        return path

    def read(self, key: str) -> bytes | None:
        found = self.store.read(key)
        return None if found is None else found.value

    def write(self, key: str, content: bytes) -> None:
        self.store.write(key, content)

    def delete(self, key: str) -> None:
        self.local(key).unlink(missing_ok=True)
        self.store.delete(key)

    def publish(self, partial: Path, key: str) -> tuple[int, str, str]:
        content = partial.read_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        generation = self.store.write(key, content)
        partial.unlink()
        return len(content), sha256, generation.hex()

    def is_whole(self, key: str, size: int, sha256: str, generation: str) -> bool:
        known = None
        with contextlib.suppress(ValueError):
            known = bytes.fromhex(generation) or None
        found = self.store.read(key, unless=known, size=size)
        if found is None or found.generation == known:  # what this build has written has not changed
            return found is not None
        return (len(found.value), hashlib.sha256(found.value).hexdigest()) == (size, sha256)

    @contextlib.contextmanager
    def locked(self) -> Generator[Callable[[], None]]:
        """As of a folder. A dead build's lease expires; one of this machine need not be waited for."""
        self.partials.mkdir(parents=True, exist_ok=True)
        with _locked(self.partials / "lock", self.url):
            name = self.partials / "id"
            if not name.exists():
                files.write_atomic(name, secrets.token_hex(16))
            holder = "a build that writes to it"
            lease = Lease(self.store, name.read_text(encoding="utf-8"), key=f"{WORK}/lock", holder=holder)
            lease.acquire()
            try:
                yield lease.check
            finally:
                lease.release()


Target = Folder | Bucket


def open_target(path: str, shard_mb: int | None) -> Target:
    """The target that `--target` names.

    Args:
      shard_mb: megabytes of input in a shard, if they were given.

    Raises:
      ConfigError: it is no folder for shards, shards are too large, or there are no credentials.
      StorageError: the storage does not answer.
    """
    if not object_store.is_url(path):
        return Folder(directories.expand_user(path, "--target"))
    if shard_mb is not None and shard_mb > MAX_BUCKET_SHARD_MB:
        got = f"--shard-mb: got {shard_mb} with a --target in a bucket"
        raise ConfigError(f"{got}, expected at most {MAX_BUCKET_SHARD_MB}: a shard is one request; lower it")
    bucket = Bucket(str(object_store.parse("--target", path)))
    bucket.read(PLAN)  # before the text is read: credentials may be missing
    return bucket


def read_json(target: Target, key: str) -> dict[str, Any] | None:
    """The JSON object in a file; None if it does not exist, empty if it is damaged."""
    content = target.read(key)
    if content is None:
        return None
    try:
        found = files.parse_json(content.decode())
    except ValueError:  # UnicodeDecodeError is one
        found = {}
    return found if isinstance(found, dict) else {}


def write_json(target: Target, key: str, value: Any) -> None:
    """Writes a JSON value as `files.write_json` does."""
    target.write(key, files.json_text(value).encode())


def for_each(target: Target, act: Callable[[T], R], items: Iterable[T], workers: int = 1) -> list[R]:
    """The results of `act` for each item, in order; as many at a time as the target or `workers` say."""
    with concurrent.futures.ThreadPoolExecutor(max(target.threads, workers)) as pool:
        return list(pool.map(act, items))


def file_hash(path: Path) -> tuple[int, str]:
    """Size and SHA-256 of a file."""
    with open(path, "rb") as file:
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()


@functools.cache
def _opened(url: str) -> Bucket:
    """A bucket in another process, which then opens it once."""
    return Bucket(url)


@contextlib.contextmanager
def _locked(path: Path, target: str) -> Generator[None]:
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--target: got {target!r}, where another process builds, expected one at a time; wait for it"
            ) from None
        yield
