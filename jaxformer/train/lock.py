"""Lock of a workdir: one run at a time trains there.

On one host the kernel holds the lock (`flock`), so a process that dies in any way releases it. Between hosts a file
system need not support that, or may hold the lock of a host that is gone. There the lock is a lease: the owner renews
the file's time stamp as long as it lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax

from jaxformer.checkpoint import allgather_text
from jaxformer.errors import ConfigError
from jaxformer.runtime import files
from jaxformer.runtime.workdir_lock import FILE_NAME, LEASE_SECONDS

RENEW_SECONDS = 20.0
"""Seconds between two renewals of the time stamp."""
POLL_SECONDS = 1.0
"""Seconds between two checks of a lock whose owner may be dead."""


class WorkdirLock:
    """Context manager that holds the lock of a workdir. The first process of a run acquires it for all of them.

    Args:
      is_shared: all processes use one folder; else each acquires the lock of its own.

    Raises:
      ConfigError: another run holds it, or the hosts see different folders; on every process.
    """

    def __init__(self, workdir: Path, is_shared: bool = True) -> None:
        self.is_shared = is_shared
        self.path = workdir / FILE_NAME
        self.handle = -1
        self.ended = threading.Event()

    def __enter__(self) -> WorkdirLock:
        problem = self._acquire() if jax.process_index() == 0 or not self.is_shared else ""
        problem = next(filter(None, allgather_text(problem)), "")
        if not problem:
            without = [host for host in allgather_text("" if self.path.exists() else socket.gethostname()) if host]
            if without:
                hosts = ", ".join(sorted(set(without)))
                problem = (
                    f"workdir {self.path.parent}: got a folder that is not the same on {hosts}, "
                    "expected one that all hosts of the run share; use a folder of a shared disk"
                )
        if problem:
            raise ConfigError(problem)
        return self

    def __exit__(self, *_: Any) -> None:
        self.ended.set()
        if self.handle >= 0:
            # Emptied, not deleted: another process may have it open, waiting to lock this very file.
            os.ftruncate(self.handle, 0)
            os.close(self.handle)
            self.handle = -1

    def _acquire(self) -> str:
        """Acquires the lock. Returns the error message, empty on success."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        is_held = not _try_flock(handle)
        owner = _read_owner(handle)
        is_remote = owner.get("host", socket.gethostname()) != socket.gethostname()
        if (is_held and not is_remote) or (is_remote and not self._wait_for_lease(handle, owner)):
            os.close(handle)
            who = f"{_describe_owner(owner)} since {owner.get('started', '?')}"
            return (
                f"workdir {self.path.parent}: got a run that is training in it ({who}), expected none; wait for it or "
                "stop it, or use another --workdir"
            )
        # A file server keeps the kernel lock of a dead host for a while, NFS 3 for ever: only the lease tells. It is
        # another run's lock if that one has waited, too, and come first.
        if is_held and not _try_flock(handle) and _read_owner(handle) not in ({}, owner):
            os.close(handle)
            return self._acquire()
        if not self.path.exists():  # deleted while this process waited: the open file is no longer the lock
            os.close(handle)
            return self._acquire()
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(owner).encode() + b"\n", 0)
        self.handle = handle
        threading.Thread(target=self._renew, name="lock", daemon=True).start()
        return ""

    def _wait_for_lease(self, handle: int, owner: dict[str, Any]) -> bool:
        """Waits until the owner on another host has ended or its lease has expired; False if it renews the lease.

        A job that was requeued may start on another host before the lease of its killed predecessor has expired.
        """
        seen = os.fstat(handle).st_mtime
        quiet = _disk_time(self.path.parent) - seen
        if quiet < LEASE_SECONDS:
            print(
                f"workdir {self.path.parent}: {_describe_owner(owner)} renewed its lock {max(quiet, 0):.0f} s ago; "
                f"waiting {LEASE_SECONDS - max(quiet, 0):.0f} s for the next time (delete {self.path} if it is dead)",
                file=sys.stderr,
                flush=True,
            )
        while _disk_time(self.path.parent) - seen < LEASE_SECONDS:
            time.sleep(POLL_SECONDS)
            if not self.path.exists() or not _read_owner(handle):
                return True
            if os.fstat(handle).st_mtime != seen:
                return False
        return True

    def _renew(self) -> None:
        while not self.ended.wait(RENEW_SECONDS):
            with contextlib.suppress(OSError):  # saving reports problems of the disk
                os.utime(self.path)


def _try_flock(handle: int) -> bool:
    """Acquires the kernel's lock; False if another process holds it. True on a file system without locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # only the time stamp protects there
        pass
    return True


def _describe_owner(owner: dict[str, Any]) -> str:
    return f"process {owner.get('pid', '?')} on {owner.get('host', 'this host')}"


def _read_owner(handle: int) -> dict[str, Any]:
    """The owner in the lock file; empty if it is free. Unreadable text counts as an owner on another host."""
    text = os.pread(handle, 4096, 0)
    if not text.strip():
        return {}
    try:
        owner = files.parse_json(text.decode("utf-8", "replace"))
    except ValueError:
        owner = None
    return owner if isinstance(owner, dict) else {"host": "?"}


def _disk_time(directory: Path) -> float:
    """The time by the clock of the file system, which may differ from this host's."""
    probe = directory / f".{FILE_NAME}-{os.getpid()}"
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink()
