"""Copies on this host of token shards in a bucket, as many as there is room for.

    <cache>/data/shards/<SHA-256>.array_record    a copy; its time says when it was last used
                        <SHA-256>.partial         one that is being fetched; its process has it locked
                        <two digits>.lock, room.lock

A copy is named by its checksum, so it serves every address and never goes out of date. You may delete copies.

A shard is copied when something of it is read for the first time. If there is no room, copies that nobody has used
since this run began are deleted, the least recently used first. Those of this run stay: rows of a batch are drawn from
the whole corpus, so a copy that gave way to another would soon be fetched again. Shards without room are read record by
record (`record_ranges`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import io
import math
import os
import shutil
import time
from pathlib import Path
from typing import BinaryIO

from jaxformer.errors import ConfigError
from jaxformer.runtime import directories, files
from jaxformer.runtime.object_store import Store

DOWNLOADS = 3
"""Attempts at a shard whose bytes differ from its checksum."""
FREE_FRACTION = 0.1
"""Fraction of the disk that copies without a limit leave free: checkpoints and logs need it."""
REBUILD = "expected the one that the index lists; run the same `jaxformer data build` again, which makes it anew"


def copy_path(key: str, sha256: str) -> Path:
    """Path of the copy of a shard, which need not exist."""
    return folder() / f"{sha256}{Path(key).suffix}"


def folder() -> Path:
    """Folder of the copies, which need not exist."""
    return directories.cache() / "data" / "shards"


@dataclasses.dataclass(frozen=True)
class Room:
    """Room for copies on this host, which all of its processes share.

    Attributes:
      limit: bytes of all copies; None: they leave `FREE_FRACTION` of the disk free.
      since: time (s) at which the run began to read: copies that were used later are not deleted.
    """

    limit: int | None = None
    since: float = dataclasses.field(default_factory=time.time)

    def available(self) -> float:
        """Bytes that this run's copies may take, those that are there included, if nobody uses the others."""
        total = sum(_sizes(folder()).values())
        return max(self._spare(folder(), total) + total, 0)

    def fetch(self, store: Store, key: str, size: int, sha256: str) -> bool:
        """Fetches a shard, unless its copy is whole.

        Memory: a part of the shard. Processes that need the same one fetch it once.

        Returns:
          False if there is no room for it. Nothing is then fetched.

        Raises:
          ConfigError: the object is not there, or has other bytes; or the address is refused.
          StorageError: the storage does not answer, or the cache cannot be written.
        """
        path = copy_path(key, sha256)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path.parent / f"{sha256[:2]}.lock", "a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if _is_whole(path, sha256):
                    mark_used(path)
                    return True
                path.unlink(missing_ok=True)  # it is damaged, and takes room
                partial = self._reserve(path, size)
                if partial is None:
                    return False
                with partial:
                    try:
                        _download(partial, store, key, size, sha256)
                        os.replace(partial.name, path)
                    except BaseException:
                        os.unlink(partial.name)
                        raise
                    mark_used(path)
                return True
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return False
            raise files.storage_error(error) or error from error

    def _reserve(self, path: Path, size: int) -> io.BufferedRandom | None:
        """A locked file that has room for a shard, which becomes the copy `path`; None without room."""
        with open(path.parent / "room.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for partial in path.parent.glob("*.partial"):  # of processes that were killed
                delete_unused(partial)
            copies = _sizes(path.parent)
            total = sum(copies.values())
            unused = [copy for copy in copies if copy.suffix != ".partial" and _time_used(copy) < self.since]
            fits = self._spare(path.parent, total) + sum(copies[copy] for copy in unused) >= size
            for oldest in sorted(unused, key=_time_used):
                if self._spare(path.parent, total) >= (size if fits else 0):
                    break
                if delete_unused(oldest):
                    total -= copies[oldest]
            if self._spare(path.parent, total) < size:
                return None
            file = open(path.with_suffix(".partial"), "w+b")  # noqa: SIM115 (the caller closes it)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                _allocate(file, size)
            except OSError:
                os.unlink(file.name)
                file.close()
                raise
            return file

    def _spare(self, directory: Path, total: int) -> float:
        """Bytes that copies may still take if they have `total`."""
        while not directory.exists():
            directory = directory.parent
        disk = shutil.disk_usage(directory)
        if self.limit is None:
            return disk.free - FREE_FRACTION * disk.total
        return min(self.limit - total, disk.free)


def _allocate(file: io.BufferedRandom, size: int) -> None:
    """Makes a file of `size` bytes. A full disk says so here, before anything is fetched, if the system can tell."""
    try:
        os.posix_fallocate(file.fileno(), 0, max(size, 1))
    except AttributeError:  # macOS
        file.truncate(size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        file.truncate(size)


def _download(file: io.BufferedRandom, store: Store, key: str, size: int, sha256: str) -> None:
    for _ in range(DOWNLOADS):
        file.seek(0)
        if store.read_into(file, key, size) is None:
            raise ConfigError(f"{store.address}/{key}: got no shard, {REBUILD}")
        file.truncate()
        file.seek(0)
        if hashlib.file_digest(file, "sha256").hexdigest() == sha256:
            return
    raise ConfigError(f"{store.address}/{key}: got a damaged shard (it differs from its checksum), {REBUILD}")


def open_locked(path: Path) -> BinaryIO:
    """Opens a copy so that no process deletes it until the file is closed, and notes that it is used."""
    file = path.open("rb")
    fcntl.flock(file, fcntl.LOCK_SH)
    mark_used(path)
    return file


def mark_used(path: Path) -> None:
    """Notes that a copy is used now."""
    now = time.time()
    with contextlib.suppress(OSError):  # deleted meanwhile, or of another user
        os.utime(path, (now, now))


def delete_unused(path: Path) -> bool:
    """Deletes a file of the folder, unless a process has it locked. True if it is gone."""
    try:
        with path.open("r+b") as file:  # on NFS a lock that excludes others needs a file that may be written
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except FileNotFoundError:
        return True
    except OSError:  # in use, or of another user
        return False
    return True


def _sizes(directory: Path) -> dict[Path, int]:
    """Bytes of all copies, those that are being fetched included."""
    found = {}
    for pattern in ("*.array_record", "*.partial"):
        for path in directory.glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                found[path] = path.stat().st_size
    return found


def _time_used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return math.inf


def _is_whole(path: Path, sha256: str) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sha256
