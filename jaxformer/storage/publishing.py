"""Publishing: what appears in the mirror of a run goes to the bucket, so that a kill at any moment loses nothing.

The order of one publication:

1. the files of new checkpoints, but not their manifests;
2. other files that changed. `metrics.jsonl` then has all rows up to these checkpoints, since a run writes rows first;
3. the manifests: from now on the checkpoints exist;
4. `published.json`, with the names of all of it;
5. deletions: of a checkpoint the manifest first.

A checkpoint that replaces one of the same step is first published completely below `saving/replaced/`, so that one of
the two exists at any moment. The lease is checked before each step that others can see.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path

from jaxformer.checkpoint import manifest
from jaxformer.checkpoint.manifest import Damaged
from jaxformer.errors import StorageError
from jaxformer.runtime.lease import Lease
from jaxformer.runtime.object_store import Conflict
from jaxformer.storage.mirror import INDEX, REPLACED, Bucket, Mirror, digest, index_content
from jaxformer.storage.processes import Leader, present, upload

LOG = logging.getLogger("jaxformer")

SCAN_SECONDS = 1.0
"""Seconds between two looks for new checkpoints."""
LOOKS = 20
LOOK_SECONDS = 0.1
"""Looks at a mirror without checkpoints, and the time between two, before it counts as deleted."""
FILES_SECONDS = 30.0
"""Seconds between two publications of files that grow, where there is no new checkpoint."""


def _has_last(names: Iterable[str]) -> bool:
    """True if one of these checkpoints is one to resume from."""
    return any(name.startswith("last/") for name in names)


class Publisher:
    """Publishes what a run writes to its mirror, in a thread.

    Args:
      bucket: what the bucket holds, as fetched.
      leader: commands the other processes, if they share no disk: then the mirror has a part of each checkpoint.
    """

    def __init__(self, mirror: Mirror, bucket: Bucket, lease: Lease, leader: Leader | None = None) -> None:
        self.mirror, self.store, self.bucket, self.lease = mirror, mirror.store, bucket, lease
        self.leader = leader
        self.error: BaseException | None = None
        self.requests: queue.Queue[Future[None] | None] = queue.Queue()
        self.thread = threading.Thread(target=self._serve, name="publish", daemon=True)
        self.snapshots = mirror.folder / "publishing"
        self.index = b""

    def start(self) -> None:
        """Starts the thread."""
        self.thread.start()

    def check(self) -> None:
        """Raises the error of a publication that failed. Cheap enough for every step."""
        if self.error is not None:
            raise self.error

    def flush(self, heartbeat: Callable[[], None] = lambda: None) -> None:
        """Returns when everything that is in the mirror now is in the bucket.

        Args:
          heartbeat: called every second.

        Raises:
          StorageError: it could not be published.
        """
        self.check()
        future: Future[None] = Future()
        self.requests.put(future)
        while True:
            with contextlib.suppress(TimeoutError):
                return future.result(timeout=1.0)
            heartbeat()

    def close(self) -> None:
        """Stops the thread, once it has finished what it does."""
        if self.thread.is_alive():
            self.requests.put(None)
            self.thread.join()

    def _serve(self) -> None:
        published = time.monotonic()
        while True:
            request: Future[None] | None = None
            is_request = True
            try:
                request = self.requests.get(timeout=SCAN_SECONDS)
            except queue.Empty:
                is_request = False
            if is_request and request is None:
                return
            try:
                is_due = time.monotonic() - published > FILES_SECONDS
                if request is not None or (self.error is None and (is_due or self._has_new_checkpoint())):
                    self.publish()
                    published = time.monotonic()
                if request is not None:
                    request.set_result(None)
            except BaseException as error:
                self.error = error
                if request is not None:
                    request.set_exception(error)

    def _has_new_checkpoint(self) -> bool:
        return any(self.bucket.checkpoints.get(name) != value for name, value in self.mirror.checkpoints().items())

    def publish(self) -> None:
        """Publishes all changes, in the order that the module describes.

        Raises:
          StorageError: the storage does not answer, another run has taken over, or the disk of the mirror is damaged.
        """
        local = self._local_checkpoints()
        new = [name for name, value in local.items() if self.bucket.checkpoints.get(name) != value]
        present = dict(self.mirror.files())
        changed = [key for key, value in present.items() if self.bucket.files.get(key) != value]
        gone = [name for name in self.bucket.checkpoints if name not in local]
        # Of its own accord a run deletes files of trackers only, which have folders of their own.
        missing = [key for key in self.bucket.files if "/" in key and key not in present]
        vanished = [key for key in missing if not (self.mirror.root / key).exists()]
        if not (new or changed or gone or vanished):
            return
        self.lease.check()
        snapshots = {name: folder for name in new if (folder := self._snapshot(name)) is not None}
        replacing = {name for name in snapshots if name in self.bucket.checkpoints}
        for name, folder in snapshots.items():
            self._upload(name, folder, f"{REPLACED}{name}/" if name in replacing else f"checkpoints/{name}/")
        # Looked at again: rows that were written before a checkpoint are published before it.
        present = dict(self.mirror.files())
        self._write_files(key for key, value in present.items() if self.bucket.files.get(key) != value)
        for name, folder in snapshots.items():
            self._commit(name, folder, name in replacing)
        for name in gone:
            del self.bucket.checkpoints[name]
        for key in vanished:
            del self.bucket.files[key]
        self._write_index()
        for name in gone:
            self._delete_checkpoint(f"checkpoints/{name}/")
        for key in vanished:
            self.lease.check()
            self.store.delete(key)
        shutil.rmtree(self.snapshots, ignore_errors=True)

    def _local_checkpoints(self) -> dict[str, str]:
        """The checkpoints of the mirror.

        Raises:
          StorageError: all to resume from are gone. Then somebody deleted them, and the bucket must keep them.
        """
        for _ in range(LOOKS):  # the only one is out of sight for a moment while it is replaced
            local = self.mirror.checkpoints()
            if _has_last(local) or not _has_last(self.bucket.checkpoints):
                return local
            time.sleep(LOOK_SECONDS)
        raise StorageError(
            f"{self.mirror.root}: got no checkpoints any more, expected those of the run, which nobody but the run may "
            "delete; run the same command: the bucket has them"
        )

    def _snapshot(self, name: str) -> Path | None:
        """Hard links to a checkpoint, which stay if the run deletes it; None if it is gone or being replaced."""
        source, target = self.mirror.root / "checkpoints" / name, self.snapshots / name
        shutil.rmtree(target, ignore_errors=True)
        try:
            before = (source / manifest.FILE_NAME).read_bytes()
            listed = manifest.read(source) or {}
            for key in listed if self.leader is None else present(source, listed):
                (target / key).parent.mkdir(parents=True, exist_ok=True)
                os.link(source / key, target / key)
            (target / manifest.FILE_NAME).write_bytes(before)
            return target if (source / manifest.FILE_NAME).read_bytes() == before else None
        except FileNotFoundError:
            return None

    def _upload(self, name: str, folder: Path, prefix: str) -> None:
        """Writes the files of a checkpoint, without its manifest.

        Raises:
          StorageError: a file differs from the manifest, so the disk returned other bytes than were written.
        """
        listed = manifest.read(folder) or {}
        if self.leader is not None:
            marker = digest((folder / manifest.FILE_NAME).read_bytes())
            parts = self.leader.divide(name, marker, list(listed), present(folder, listed))
            self.lease.check()
            self.leader.command(do="upload", name=name, marker=marker, prefix=prefix, parts=parts)
            try:
                upload(self.store, self.lease.check, folder, {key: listed[key] for key in parts[0]}, prefix)
            finally:
                self.leader.answers()
        else:
            upload(self.store, self.lease.check, folder, listed, prefix)

    def _write_files(self, keys: Iterable[str]) -> None:
        """Writes files as they are now; `config.json` last, since a workdir with it counts as a run."""
        for key in sorted(keys, key=lambda key: (key == "config.json", key)):
            path = self.mirror.root / key
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                content = path.read_bytes()
                self.lease.check()
                self.store.write(key, content)
                self.bucket.files[key] = (status.st_mtime_ns, status.st_size)

    def _commit(self, name: str, folder: Path, replaces: bool) -> None:
        """Writes the manifest of a checkpoint whose other files are in the bucket."""
        marker = (folder / manifest.FILE_NAME).read_bytes()
        prefix = f"checkpoints/{name}/"
        if replaces:
            self.lease.check()
            self.store.write(f"{REPLACED}{name}/{manifest.FILE_NAME}", marker)
            self.bucket.replaced.add(name)
            self._delete_checkpoint(prefix)
            self._upload(name, folder, prefix)
        self.lease.check()
        self.store.write(prefix + manifest.FILE_NAME, marker)
        self.bucket.checkpoints[name] = digest(marker)
        if name in self.bucket.replaced:
            self._delete_checkpoint(f"{REPLACED}{name}/")
            self.bucket.replaced.discard(name)

    def _delete_checkpoint(self, prefix: str) -> None:
        """Deletes the manifest of a checkpoint, then the files that it names."""
        marker = self.store.read(prefix + manifest.FILE_NAME)
        self.lease.check()
        self.store.delete(prefix + manifest.FILE_NAME)
        if marker is not None:
            with contextlib.suppress(Damaged):  # then the next start deletes the files
                listed = manifest.parse(marker.value, prefix)
                self.store.for_each(lambda key: self.store.delete(prefix + key), ((key, 0) for key in listed))

    def _write_index(self) -> None:
        """Writes `published.json`, on condition that no other process has written it since.

        Raises:
          StorageError: one has.
        """
        content = index_content(self.bucket)
        if content == self.index:
            return
        self.lease.check()
        try:
            self.bucket.index = self.store.write(INDEX, content, self.bucket.index)
        except Conflict:
            now = self.store.read(INDEX)
            if now is None or now.value != content:  # else the answer to this very write was lost
                self.lease.lost = True
                self.lease.check()
            else:
                self.bucket.index = now.generation
        self.index = content
