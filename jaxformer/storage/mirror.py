"""The folder on this host in which a run in a bucket works, and how it is made equal to the bucket.

    <cache>/workdirs/<hash of the address>/<name of the run>/   the workdir, as everywhere else
                                           training.lock        held by a run that trains there
                                           fetching.lock        held while the folder is made equal to the bucket
                                           id                   identifies this mirror in the lease
                                           publishing/          hard links to a checkpoint that is being published
                                           process-3/           the same for process 3 of a run without a shared disk,
                                                                which holds its part of each checkpoint

A checkpoint in the bucket exists if its `manifest.json` does. Its files are named by the manifest, and manifests are
found by the names in `published.json` as well as by a listing, so an old listing hides none.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxformer.checkpoint import manifest
from jaxformer.checkpoint.manifest import Damaged
from jaxformer.errors import ConfigError
from jaxformer.runtime import directories, files, lease
from jaxformer.runtime.object_store import ABSENT, Store, is_safe

LOG = logging.getLogger("jaxformer")

INDEX = "published.json"
"""Object with the names of all checkpoints and other files; written last."""
REPLACED = "checkpoints/saving/replaced/"
"""Key prefix of the new version of a checkpoint whose objects are being rewritten, and of no others."""
DAMAGED = "checkpoints/damaged/"
CHECKPOINT_KEY = re.compile(r"checkpoints/(?:saving/replaced/)?((?:last|best)/\d+)/(.+)")
CHECKPOINT_NAME = re.compile(r"(?:last|best)/\d+")
TEMPORARY = re.compile(r"\..*\.tmp|\.lock-\d+")
"""Names of files that are being written, and of probes of the workdir's lock."""

DOWNLOADS = 3
"""Attempts at a file of a checkpoint whose bytes differ from the manifest."""

Select = Callable[[Path], tuple[list[Path], int]]
"""Folders of checkpoints in a workdir, in the order in which to try them, and the number that is needed."""

Signature = tuple[int, int]
"""Time of the last change (ns) and size of a file."""


@dataclass
class Bucket:
    """Content of the bucket, as far as it is known.

    Attributes:
      checkpoints: SHA-256 of the manifest by name ("last/400").
      replaced: names of complete checkpoints below `REPLACED`.
      files: signature of the local file that is equal to the object, by key.
      index: generation of `INDEX`.
    """

    checkpoints: dict[str, str] = field(default_factory=dict)
    replaced: set[str] = field(default_factory=set)
    files: dict[str, Signature] = field(default_factory=dict)
    index: bytes = ABSENT


class Mirror:
    """The mirror of the workdir in `store`.

    Args:
      part: folder in the mirror's folder, for a process that has a mirror of its own; "": the folder itself.

    Attributes:
      root: the workdir on this host.
      id: the same for every process that uses this folder.
      prefixes: key prefix of every checkpoint that the bucket held when it was fetched, by name.
    """

    def __init__(self, store: Store, part: str = "") -> None:
        self.store = store
        self.prefixes: dict[str, str] = {}
        url = str(store.address)
        self.folder = directories.cache() / "workdirs" / hashlib.sha256(url.encode()).hexdigest()[:16] / part
        self.root = self.folder / store.address.path.rpartition("/")[2]
        self.root.mkdir(parents=True, exist_ok=True)
        with self.locked("fetching"):
            if not (self.folder / "id").exists():
                files.write_atomic(self.folder / "id", secrets.token_hex(16))
            self.id = (self.folder / "id").read_text(encoding="utf-8")

    @contextlib.contextmanager
    def locked(self, name: str) -> Generator[None]:
        """Holds a lock of the folder; waits for it."""
        with open(self.folder / f"{name}.lock", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def try_locked(self, name: str) -> Generator[bool]:
        """Holds a lock of the folder, and gives True; or False if another process holds it."""
        with open(self.folder / f"{name}.lock", "a") as file:
            for attempt in range(5):  # `is_training` holds it for a moment
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    time.sleep(0.02 * attempt)
                else:
                    yield True
                    return
            yield False

    # Fetching.

    def is_training(self) -> bool:
        """True if a run trains in the folder."""
        with open(self.folder / "training.lock", "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False

    def fetch(
        self, owner: bool = False, alone: bool = True, select: Select | None = None, trains: bool = False
    ) -> Bucket | None:
        """Makes the folder equal to the bucket. What only the folder has is removed: the bucket counts.

        Args:
          owner: this process holds the lease: incomplete checkpoints are deleted from the bucket.
          alone: no other process uses the folder; else files that it may be about to publish stay.
          trains: this process holds the lock of the folder's run, of which another process has the lease.
          select: chooses the checkpoints that are needed, in the order in which they are tried, and their number, from
            what all say about themselves. Of the others only that is fetched. None: all are fetched.

        Returns:
          What the bucket holds. None if a run trains in the folder: then it is ahead of the bucket, and left alone.

        Raises:
          ConfigError: a newer version wrote a checkpoint, or one of an earlier format was copied there.
        """
        with self.locked("fetching"):
            if not owner and not trains and self.is_training():
                return None
            bucket = Bucket()
            names, plain, listed, had_checkpoints = self._names(bucket)
            markers = self._markers(names)
            self.prefixes = {name: prefix for name, (prefix, _) in markers.items()}
            shutil.rmtree(self.root / "checkpoints" / "saving", ignore_errors=True)
            for name, (prefix, marker) in markers.items():
                self._fetch_checkpoint(name, prefix, marker, listed, arrays=select is None)
                if prefix == _prefix(name):
                    bucket.checkpoints[name] = digest(marker)
                else:
                    bucket.replaced.add(name)
            for part in ("last", "best"):
                for directory in _subdirectories(self.root / "checkpoints" / part):
                    if f"{part}/{directory.name}" not in markers:
                        shutil.rmtree(directory, ignore_errors=True)
                if not markers and not had_checkpoints:  # an empty folder would say that there was one
                    shutil.rmtree(self.root / "checkpoints" / part, ignore_errors=True)
            if had_checkpoints:
                # A run that has lost all of its checkpoints does not start again from nothing.
                (self.root / "checkpoints" / "last").mkdir(parents=True, exist_ok=True)
            self._fetch_files(plain, bucket)
            for key, _ in self.files() if alone else ():
                if key not in bucket.files and not key.startswith(DAMAGED):
                    (self.root / key).unlink(missing_ok=True)
            if owner:
                self._delete_leftovers(listed, markers)
            if select is not None and markers:
                self._fetch_selected(select, markers, listed)
            return bucket

    def _fetch_selected(self, select: Select, markers: dict[str, tuple[str, bytes]], listed: list[str]) -> None:
        """Fetches as many intact checkpoints as are needed, in the order in which they are tried."""
        directories, count = select(self.root)
        for directory in directories:
            name = f"{directory.parent.name}/{directory.name}"
            if count == 0:
                return
            if name in markers:
                self._fetch_checkpoint(name, *markers[name], listed, arrays=True)
                with contextlib.suppress(Damaged):
                    manifest.check_files(directory, manifest.read(directory) or {})
                    count -= 1

    def _names(self, bucket: Bucket) -> tuple[set[str], set[str], list[str], bool]:
        """Names of checkpoints that may exist, keys of other files, all keys of a listing, and if any was complete.

        A listing alone does not say the last: it also has what a killed process had begun.
        """
        index, content, is_unreadable = self.store.read(INDEX), {}, False
        listed = [key for key in self.store.list_keys() if is_safe(key)]
        if index is not None:
            bucket.index = index.generation
            try:
                content = files.parse_json(index.value.decode("utf-8", "replace"))
                content = {name: [str(key) for key in content[name]] for name in ("checkpoints", "files")}
            except (ValueError, TypeError, LookupError):
                content, is_unreadable = {}, True
                LOG.warning("%s/%s cannot be read; the listing is used", self.store.address, INDEX)
        names = {match[1] for key in listed if (match := CHECKPOINT_KEY.fullmatch(key))}
        names |= {name for name in content.get("checkpoints", ()) if CHECKPOINT_NAME.fullmatch(name)}
        plain = {key for key in (*listed, *content.get("files", ())) if is_safe(key) and is_plain(key)}
        for key in listed:
            path = self.root / key
            if key.startswith(DAMAGED) and path.is_file():
                bucket.files[key] = signature(path)
        had_checkpoints = is_unreadable or any(name.startswith("last/") for name in content.get("checkpoints", ()))
        return names, plain, listed, had_checkpoints

    def _markers(self, names: set[str]) -> dict[str, tuple[str, bytes]]:
        """Key prefix and manifest of every checkpoint that exists, by name."""
        found: dict[str, tuple[str, bytes]] = {}

        def look(name: str) -> None:
            for prefix in (_prefix(name), _prefix(name, REPLACED)):
                marker = self.store.read(prefix + manifest.FILE_NAME)
                if marker is not None:
                    found[name] = prefix, marker.value
                    return

        self.store.for_each(look, ((name, 0) for name in sorted(names)))
        return found

    def _fetch_checkpoint(self, name: str, prefix: str, marker: bytes, listed: list[str], arrays: bool) -> None:
        """Brings a checkpoint here, unless it is, intact. Files that are missing or differ stay so for its reader.

        Args:
          arrays: all of it; else only what it says about itself.
        """
        target = self.root / "checkpoints" / name
        with contextlib.suppress(OSError, Damaged):
            if (target / manifest.FILE_NAME).read_bytes() == marker:
                if arrays:
                    manifest.check_files(target, manifest.read(target) or {})
                return
        staging = self.root / "checkpoints" / "saving" / f"fetched-{name.replace('/', '-')}"
        staging.mkdir(parents=True)
        (staging / manifest.FILE_NAME).write_bytes(marker)
        try:
            wanted = manifest.read(staging) or {}
        except Damaged:
            keys = [key.removeprefix(prefix) for key in listed if key.startswith(prefix)]
            entry: dict[str, Any] = {"bytes": 0, "sha256": ""}
            wanted = {key: entry for key in keys if key != manifest.FILE_NAME}
        if not arrays:
            wanted = {key: entry for key, entry in wanted.items() if key.startswith("about/")}

        self._download(prefix, wanted, staging)
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        staging.rename(target)

    def fetch_part(self, name: str, keys: Iterable[str]) -> None:
        """Brings files of a checkpoint here that are not, intact. Those that are missing or differ stay so."""
        target = self.root / "checkpoints" / name
        listed = manifest.read(target) or {}
        wanted = {}
        for key in keys:
            try:
                manifest.check_files(target, {key: listed[key]})
            except Damaged:
                wanted[key] = listed[key]
        self._download(self.prefixes.get(name, _prefix(name)), wanted, target)

    def _download(self, prefix: str, wanted: manifest.FileList, target: Path) -> None:
        """Fetches files of a checkpoint to a folder; up to `DOWNLOADS` times while their bytes differ."""

        def download(key: str) -> None:
            for _ in range(DOWNLOADS):
                (target / key).parent.mkdir(parents=True, exist_ok=True)
                with open(target / key, "w+b") as file:
                    if self.store.read_into(file, prefix + key, wanted[key]["bytes"]) is None:
                        break
                    file.seek(0)
                    if hashlib.file_digest(file, "sha256").hexdigest() == wanted[key]["sha256"]:
                        return
            else:
                return
            (target / key).unlink()

        self.store.for_each(download, ((key, 0) for key in wanted))  # of each no more than a part is in memory

    def _fetch_files(self, keys: set[str], bucket: Bucket) -> None:
        """Fetches all files outside of checkpoints."""

        def download(key: str) -> None:
            found = self.store.read(key)
            if found is None:
                return
            path = self.root / key
            if not path.is_file() or path.read_bytes() != found.value:
                path.parent.mkdir(parents=True, exist_ok=True)
                files.write_atomic(path, found.value)
            bucket.files[key] = signature(path)

        wanted = sorted(key for key in keys if not key.startswith(DAMAGED))
        self.store.for_each(download, ((key, 0) for key in wanted))

    def _delete_leftovers(self, listed: list[str], markers: dict[str, tuple[str, bytes]]) -> None:
        """Deletes what a killed process left in the bucket: objects of checkpoints without a manifest.

        Raises:
          ConfigError: they are a checkpoint of format 1, which has none.
        """
        complete = {prefix for prefix, _ in markers.values()}
        keys = [key for key in listed if (match := CHECKPOINT_KEY.fullmatch(key))
                and key[: match.start(2)] not in complete]  # fmt: skip
        for key in keys:
            if key.endswith("/about/metadata") and not key.startswith(REPLACED):
                found, about = self.store.read(key), None
                with contextlib.suppress(ValueError):
                    about = files.parse_json(found.value.decode("utf-8", "replace")) if found else None
                if isinstance(about, dict) and about.get("format") == 1:
                    raise ConfigError(
                        f"{self.store.address}/{key.removesuffix('/about/metadata')}: got a checkpoint of format 1, "
                        "without checksums, expected format 2; resume it once in a local folder, then copy that"
                    )
        keys.sort(key=lambda key: not key.endswith(manifest.FILE_NAME))  # a second copy of a checkpoint has a manifest
        for key in keys:
            self.store.delete(key)

    # Looking at the folder.

    def files(self) -> Iterator[tuple[str, Signature]]:
        """Key and signature of every file outside of checkpoints, and of those in `checkpoints/damaged`."""
        for folder, subfolders, names in os.walk(self.root):
            inside = Path(folder).relative_to(self.root)
            if inside == Path("checkpoints"):
                subfolders[:] = [name for name in subfolders if name == "damaged"]
            for name in sorted(names):
                key = (inside / name).as_posix()
                path = Path(folder, name)
                with contextlib.suppress(OSError):
                    if is_plain(key) and path.is_file():
                        yield key, signature(path)

    def checkpoints(self) -> dict[str, str]:
        """SHA-256 of the manifest of every complete checkpoint, by name; older steps first."""
        found = {}
        for part in ("best", "last"):
            for directory in _subdirectories(self.root / "checkpoints" / part):
                with contextlib.suppress(OSError):
                    found[f"{part}/{directory.name}"] = digest((directory / manifest.FILE_NAME).read_bytes())
        return dict(sorted(found.items(), key=lambda item: int(item[0].partition("/")[2])))


def is_plain(key: str) -> bool:
    """True if a key is that of a file that is published as it is: of no checkpoint, lock or file being written."""
    if key in (INDEX, lease.KEY) or TEMPORARY.fullmatch(key.rpartition("/")[2]):
        return False
    return not key.startswith("checkpoints/") or key.startswith(DAMAGED)


def signature(path: Path) -> Signature:
    """Time of the last change and size of a file."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def digest(content: bytes) -> str:
    """SHA-256 of a manifest."""
    return hashlib.sha256(content).hexdigest()


def _prefix(name: str, base: str = "checkpoints/") -> str:
    return f"{base}{name}/"


def _subdirectories(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [entry for entry in folder.iterdir() if entry.name.isdecimal() and entry.is_dir()]


def index_content(bucket: Bucket) -> bytes:
    """Content of `INDEX`."""
    content = {"format": 1, "checkpoints": sorted(bucket.checkpoints), "files": sorted(bucket.files)}
    return json.dumps(content, indent=1).encode() + b"\n"
