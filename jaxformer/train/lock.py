"""One run at a time in a workdir: a lock file that says whose it is.

The kernel holds the lock (`flock`), so a process that dies, however, leaves none behind on its host. Between hosts a
file system need not honour it: there the file's time stamp counts, which the owner renews for as long as it lives.
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

from jaxformer import files
from jaxformer.checkpoint import every_process
from jaxformer.config import ConfigError

NAME = "lock"
BEAT = 20.0
"""Seconds between two signs of life."""
DEAD = 120.0
"""Seconds without one after which the owner on another host counts as dead."""
POLL = 1.0
"""Seconds between two looks at the lock of an owner that may be dead."""


class Lock:
    """Holds the lock of a workdir while it is entered. The first process of a run takes it for all.

    Raises:
      ConfigError: another run has it; on every process.
    """

    def __init__(self, workdir: Path) -> None:
        self.path = workdir / NAME
        self.handle = -1
        self.ended = threading.Event()

    def __enter__(self) -> Lock:
        problem = self._take() if jax.process_index() == 0 else ""
        problem = every_process(problem)[0]
        if not problem:
            without = [host for host in every_process("" if self.path.exists() else socket.gethostname()) if host]
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

    def _take(self) -> str:
        """Takes the lock, or says who has it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        here = False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            here = True
        except OSError:  # a file system without locks: the time stamp alone has to do
            pass
        owner = _owner(handle)
        elsewhere = not here and owner.get("host", socket.gethostname()) != socket.gethostname()
        if here or (elsewhere and not self._outlives(handle, owner)):
            os.close(handle)
            who = f"{_words(owner)} since {owner.get('started', '?')}"
            return (
                f"workdir {self.path.parent}: got a run that is training in it ({who}), expected none; wait for it or "
                "stop it, or use another --workdir"
            )
        if not self.path.exists():  # deleted while this process waited: what it has open is nobody's lock any more
            os.close(handle)
            return self._take()
        own = {"host": socket.gethostname(), "pid": os.getpid(), "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(own).encode() + b"\n", 0)
        self.handle = handle
        threading.Thread(target=self._live, name="lock", daemon=True).start()
        return ""

    def _outlives(self, handle: int, owner: dict[str, Any]) -> bool:
        """Waits until the owner on another host counts as dead, or has ended; False at a sign of its life.

        A job that was put back into the queue may start on another host before the lease of its dead self has ended.
        """
        seen = os.fstat(handle).st_mtime
        quiet = _now(self.path.parent) - seen
        if quiet < DEAD:
            print(
                f"workdir {self.path.parent}: {_words(owner)} gave a sign of life {max(quiet, 0):.0f} s ago; waiting "
                f"{DEAD - max(quiet, 0):.0f} s for another (delete {self.path} if it is dead)",
                file=sys.stderr,
                flush=True,
            )
        while _now(self.path.parent) - seen < DEAD:
            time.sleep(POLL)
            if not self.path.exists() or not _owner(handle):
                return True
            if os.fstat(handle).st_mtime != seen:
                return False
        return True

    def _live(self) -> None:
        while not self.ended.wait(BEAT):
            with contextlib.suppress(OSError):  # saving will say what is wrong with the disk
                os.utime(self.path)


def _words(owner: dict[str, Any]) -> str:
    return f"process {owner.get('pid', '?')} on {owner.get('host', 'this host')}"


def _owner(handle: int) -> dict[str, Any]:
    """What the owner wrote; empty if nobody has it. Text that cannot be read is somebody's, and not of this host."""
    text = os.pread(handle, 4096, 0)
    if not text.strip():
        return {}
    try:
        owner = files.parse(text.decode("utf-8", "replace"))
    except ValueError:
        owner = None
    return owner if isinstance(owner, dict) else {"host": "?"}


def _now(directory: Path) -> float:
    """The time by the clock of the disk, which need not be this host's."""
    probe = directory / f".{NAME}-{os.getpid()}"
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink()
