"""Copies on this host of token shards in a bucket: each is fetched when something of it is read for the first time.

    <cache>/data/shards/<SHA-256>.array_record

A copy is named by its checksum, so it serves every address and never goes out of date. You may delete copies.
"""

from __future__ import annotations

import fcntl
import hashlib
from pathlib import Path

from jaxformer.errors import ConfigError
from jaxformer.runtime import directories, files
from jaxformer.runtime.object_store import Store

DOWNLOADS = 3
"""Attempts at a shard whose bytes differ from its checksum."""
REBUILD = "expected the one that the index lists; run the same `jaxformer data build` again, which makes it anew"


def copy_path(key: str, sha256: str) -> Path:
    """Path of the copy of a shard, which need not exist."""
    return directories.cache() / "data" / "shards" / f"{sha256}{Path(key).suffix}"


def fetch(store: Store, key: str, size: int, sha256: str) -> None:
    """Fetches a shard, unless its copy is whole.

    Memory: the shard. Processes that need the same one fetch it once.

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
                return
            for _ in range(DOWNLOADS):
                found = store.read(key, size=size)
                if found is None:
                    raise ConfigError(f"{store.address}/{key}: got no shard, {REBUILD}")
                if hashlib.sha256(found.value).hexdigest() == sha256:
                    files.write_atomic(path, found.value)
                    return
    except OSError as error:
        raise files.storage_error(error) or error from error
    raise ConfigError(f"{store.address}/{key}: got a damaged shard (it differs from its checksum), {REBUILD}")


def _is_whole(path: Path, sha256: str) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sha256
