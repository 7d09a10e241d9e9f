"""Use of a workdir in a bucket: by a run that trains, and by commands that read a run."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TypeVar

import jax

from jaxformer.checkpoint import allgather_text, checkpoints_of
from jaxformer.checkpoint.own_disks import OwnDisks
from jaxformer.errors import ConfigError, StorageError
from jaxformer.parallel.messages import Messages
from jaxformer.runtime import files, object_store
from jaxformer.runtime.lease import Lease
from jaxformer.runtime.object_store import Store
from jaxformer.storage.mirror import Bucket, Mirror, Select
from jaxformer.storage.processes import Follower, Leader
from jaxformer.storage.publishing import Publisher

Result = TypeVar("Result")

LOG = logging.getLogger("jaxformer")

NONE = "none"
"""Selection of no checkpoint."""

SESSION = "session"
"""File of the mirror's folder by which the processes of a run see that they share it."""


class TrainingSession:
    """Context manager of a run that trains in a bucket.

    Entering takes the lease and makes the mirror equal to the bucket. Leaving publishes what the mirror has, and
    releases the lease. If the processes of the run share the folder of the mirror, the first does the work for all.
    Otherwise each has a mirror of its own, with its part of every checkpoint.

    Attributes:
      root: the workdir on this host.
      disks: how the processes save and restore together, if they share no folder.

    Raises:
      ConfigError: another run holds the workdir, or the address or its credentials are wrong; on every process.
      StorageError: the storage does not answer; on every process.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.root = Path()
        self.publisher: Publisher | None = None
        self.follower: Follower | None = None
        self.disks: OwnDisks | None = None
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> TrainingSession:
        index = jax.process_index()
        mirror = self._together(lambda: Mirror(Store(self.url)))
        session = allgather_text(secrets.token_hex(8))[0]
        is_shared = _is_shared(mirror, session)
        if not is_shared:
            mirror = self._together(lambda: Mirror(Store(self.url), f"process-{index}"))
        self.root = mirror.root
        messages = None if is_shared else Messages(f"publishing {session}")
        self._together(lambda: self._lead(mirror, messages) if index == 0 else None)
        if messages is not None:
            self._together(lambda: self._follow(mirror, messages) if index != 0 else None)
            fetch = lambda directory, keys: mirror.fetch_part(f"{directory.parent.name}/{directory.name}", keys)  # noqa: E731
            self.disks = OwnDisks(fetch, self.flush, Messages(f"checkpoints {session}"))
        return self

    def _together(self, act: Callable[[], Result]) -> Result:
        """The result of `act` here. If it raises on one process, all raise."""
        problem, kind = "", ""
        try:
            result = act()
        except (ConfigError, StorageError) as error:
            problem, kind = str(error), type(error).__name__
        kinds, problems = allgather_text(kind), allgather_text(problem)
        for kind, problem in zip(kinds, problems, strict=True):
            if kind:
                self.stack.close()
                raise (StorageError if kind == "StorageError" else ConfigError)(problem)
        return result

    def _lead(self, mirror: Mirror, messages: Messages | None) -> None:
        """In the first process: takes the lease and fetches the run."""
        self._lock(mirror)
        leader = None if messages is None else Leader(messages)
        lease = Lease(mirror.store, mirror.id) if leader is None else Lease(mirror.store, mirror.id, leader.sign)
        lease.acquire()
        self.stack.callback(lease.release)
        bucket = mirror.fetch(owner=True, select=None if leader is None else _no_arrays)
        self.publisher = Publisher(mirror, bucket or Bucket(), lease, leader)
        self.publisher.start()
        if leader is not None:
            self.stack.callback(leader.end)
        self.stack.callback(self.publisher.close)

    def _follow(self, mirror: Mirror, messages: Messages) -> None:
        """In another process with a mirror of its own: fetches the run, without arrays."""
        self._lock(mirror)
        mirror.fetch(select=_no_arrays, trains=True)
        self.follower = Follower(mirror, messages)
        self.follower.start()

    def _lock(self, mirror: Mirror) -> None:
        if not self.stack.enter_context(mirror.try_locked("training")):
            raise ConfigError(
                f"workdir {mirror.store.address}: got a run that is training in it on this host, expected none; wait "
                "for it or stop it, or use another --workdir"
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
            if self.follower is not None and kind is None:
                self.follower.wait()
            if self.publisher is None or self.publisher.error is not None:
                return
            try:
                self.publisher.flush()
            except (StorageError, ConfigError) as error:
                if kind is None:
                    raise
                LOG.warning("%s", error)  # the error that ends the run is the one to report


def _is_shared(mirror: Mirror, session: str) -> bool:
    """True if all processes see the first one's folder of the mirror. Collective.

    Args:
      session: a word that no other run has.
    """
    seen = ""
    if jax.process_index() == 0:
        files.write_atomic(mirror.folder / SESSION, session)
    allgather_text("")
    with contextlib.suppress(OSError):
        seen = (mirror.folder / SESSION).read_text(encoding="utf-8")
    return set(allgather_text(seen)) == {session}


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


def _no_arrays(root: Path) -> tuple[list[Path], int]:
    """Selects no checkpoint, so that of each only what it says about itself is fetched."""
    return [], 0


def _selection(which: str | None, inside: str) -> Select | None:
    """Chooses checkpoints of a mirror as `checkpoint.load_run` does.

    Args:
      inside: the part of the workdir that the address names, as "checkpoints/best"; "": none.
    """
    if which is None:
        return None
    if which == NONE:
        return _no_arrays
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
