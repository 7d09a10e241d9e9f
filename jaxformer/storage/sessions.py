"""Use of a workdir in a bucket: by a run that trains, and by commands that read a run."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax

from jaxformer.checkpoint import allgather_text, checkpoints_of
from jaxformer.errors import ConfigError, StorageError
from jaxformer.runtime import files, object_store
from jaxformer.runtime.object_store import Store
from jaxformer.storage.lease import Lease
from jaxformer.storage.mirror import Bucket, Mirror, Select
from jaxformer.storage.publishing import Publisher

LOG = logging.getLogger("jaxformer")

NONE = "none"
"""Selection of no checkpoint."""

SESSION = "session"
"""File of the mirror's folder by which the processes of a run see that they share it."""


class TrainingSession:
    """Context manager of a run that trains in a bucket. The first process of a run does the work for all of them.

    Entering takes the lease and makes the mirror equal to the bucket. Leaving publishes what the mirror has, and
    releases the lease.

    Attributes:
      root: the workdir on this host.

    Raises:
      ConfigError: another run holds the workdir, the address or its credentials are wrong, or the hosts of the run do
        not share the folder of the mirror; on every process.
      StorageError: the storage does not answer; on every process.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.root = Path()
        self.publisher: Publisher | None = None
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> TrainingSession:
        problem, kind, session = "", "", ""
        try:
            if jax.process_index() == 0:
                session = self._open()
        except (ConfigError, StorageError) as error:
            self.stack.close()
            problem, kind = str(error), type(error).__name__
        kind, problem = allgather_text(kind)[0], allgather_text(problem)[0]
        if not problem:
            problem, kind = self._unshared(allgather_text(session)[0]), "ConfigError"
        if problem:
            self.stack.close()
            raise (StorageError if kind == "StorageError" else ConfigError)(problem)
        return self

    def _open(self) -> str:
        """Takes the lease and fetches the run. Returns a word that the other processes find in the mirror's folder."""
        store = Store(self.url)
        mirror = Mirror(store)
        self.root = mirror.root
        if not self.stack.enter_context(mirror.try_locked("training")):
            raise ConfigError(
                f"workdir {store.address}: got a run that is training in it on this host, expected none; wait for it "
                "or stop it, or use another --workdir"
            )
        lease = Lease(store, mirror.id)
        lease.acquire()
        self.stack.callback(lease.release)
        self.publisher = Publisher(mirror, mirror.fetch(owner=True) or Bucket(), lease)
        self.publisher.start()
        self.stack.callback(self.publisher.close)
        session = secrets.token_hex(8)
        files.write_atomic(mirror.folder / SESSION, session)
        return session

    def _unshared(self, session: str) -> str:
        """The error message if some process does not see the first one's folder; else empty."""
        seen = ""
        if jax.process_index() != 0:
            mirror = Mirror(Store(self.url))
            self.root = mirror.root
            with contextlib.suppress(OSError):
                seen = (mirror.folder / SESSION).read_text(encoding="utf-8")
        alone = jax.process_index() == 0 or seen == session
        without = [host for host in allgather_text("" if alone else socket.gethostname()) if host]
        if not without:
            return ""
        return (
            f"workdir {self.url}: got a cache folder that {', '.join(sorted(set(without)))} does not share with the "
            "first host of the run, expected one for all hosts; set JAXFORMER_CACHE to a folder of a shared disk"
        )

    def check(self) -> None:
        """Raises the error of a publication that failed. Cheap enough for every step."""
        if self.publisher is not None:
            self.publisher.check()

    def flush(self, heartbeat: Callable[[], None] = lambda: None) -> None:
        """Returns when everything is in the bucket. Raises StorageError if it cannot be."""
        if self.publisher is not None:
            self.publisher.flush(heartbeat)

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        with self.stack:
            if self.publisher is None or self.publisher.error is not None:
                return
            try:
                self.publisher.flush()
            except (StorageError, ConfigError) as error:
                if kind is None:
                    raise
                LOG.warning("%s", error)  # the error that ends the run is the one to report


@contextlib.contextmanager
def opened(url: str, what: str = "--workdir", which: str | None = None) -> Generator[Path]:
    """A local copy of a run in a bucket, for a command that reads it. Files that the command writes are published.

    Args:
      url: address of the run, or of one of its checkpoints (`gs://b/run/checkpoints/best`).
      what: the flag or field, for errors.
      which: the checkpoints that are needed: "best", "last" or a step, "" as the address and the config say; `NONE`:
        only what they say about themselves. None: all.

    Raises:
      ConfigError: there is no run, or the credentials are wrong.
      StorageError: the storage does not answer.
    """
    run, slash, part = url.partition("/checkpoints/")
    store = Store(run.rstrip("/").removesuffix("/checkpoints"), what)
    mirror = Mirror(store)
    with mirror.try_locked("reading") as alone:
        inside = (slash + part).strip("/")
        if mirror.fetch(alone=alone, select=_selection(which, inside)) is None:
            print(f"{store.address}: a run trains in it on this host; its folder is read", file=sys.stderr)
        if not (mirror.root / "config.json").is_file():
            raise ConfigError(f"{what}: got {url!a}, where no run is, expected the workdir of one; check the path")
        before = dict(mirror.files())
        yield mirror.root / inside
        for key, value in mirror.files():
            if before.get(key) != value:
                store.write(key, (mirror.root / key).read_bytes())
                print(f"published {store.address}/{key}", file=sys.stderr)


def _selection(which: str | None, inside: str) -> Select | None:
    """Chooses checkpoints of a mirror as `checkpoint.load_run` does.

    Args:
      inside: the part of the workdir that the address names, as "checkpoints/best"; "": none.
    """
    if which is None:
        return None
    if which == NONE:
        return lambda root: ([], 0)
    return lambda root: checkpoints_of(root / inside, which)


def fetched(path: Any, what: str = "path", which: str = "") -> Any:
    """The local copy of a run in a bucket, with the checkpoints that are needed; `path` itself if it is no address.

    Args:
      which: as for `opened`.
    """
    if not object_store.is_url(path):
        return path
    with opened(os.fspath(path), what, which) as root:
        return root
