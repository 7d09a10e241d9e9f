"""Publishing from the mirrors of several processes without a shared disk: the first commands, the others upload.

Only the first process decides what is published, in which order, and holds the lease. For each checkpoint it asks the
others which files they have, divides the files, and says where they go. The others look at a sign of the lease, which
the first gives at each renewal, before each write.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxformer.checkpoint import manifest
from jaxformer.checkpoint.manifest import FileList
from jaxformer.errors import StorageError
from jaxformer.parallel.messages import Messages
from jaxformer.runtime import lease
from jaxformer.runtime.object_store import Store
from jaxformer.storage.mirror import Mirror, digest

SIGN = "lease"
"""Key of the sign of the lease: the number of its renewals, or `LOST`."""
LOST = "lost"
END = "end"
WAIT_SECONDS = 300.0
"""Seconds for which a process waits for its part of a checkpoint, or for a renewal of the lease."""
LOOK_SECONDS = 0.05


def upload(store: Store, check: Callable[[], None], folder: Path, listed: FileList, prefix: str) -> None:
    """Writes files of a checkpoint.

    Args:
      check: raises unless this run still holds the lease; called before each write.
      listed: the files, as the manifest names them.

    Raises:
      StorageError: a file differs from the manifest, so the disk returned other bytes than were written.
    """

    def write(key: str) -> None:
        content = (folder / key).read_bytes()
        if hashlib.sha256(content).hexdigest() != listed[key]["sha256"]:
            raise StorageError(
                f"{folder / key}: got other bytes than were written, expected those of its checkpoint; check the "
                "disk of the cache, then run the same command: published checkpoints are complete"
            )
        check()
        store.write(prefix + key, content)

    store.for_each(write, ((key, entry["bytes"]) for key, entry in listed.items()))


def present(folder: Path, keys: Iterable[str]) -> list[str]:
    """The files of a checkpoint that are on this disk."""
    return [key for key in keys if (folder / key).is_file()]


class Leader:
    """The first process: commands the others."""

    def __init__(self, messages: Messages) -> None:
        self.messages, self.number = messages, 0

    def sign(self, text: str) -> None:
        """Gives the sign of the lease."""
        self.messages.post(SIGN, text, overwrite=True)

    def command(self, parts: Sequence[Any] | None = None, **command: Any) -> None:
        """Sends a command, which the others carry out from now on.

        Args:
          parts: what each process, this one included, gets as `part` of the command.
        """
        for index in range(1, self.messages.count):
            own = {} if parts is None else {"part": parts[index]}
            self.messages.post(f"command/{self.number}/{index}", command | own)

    def answers(self) -> list[Any]:
        """The answers of the others to the last command, in their order.

        Raises:
          StorageError: some could not carry it out.
        """
        number, self.number = self.number, self.number + 1
        answers = [self.messages.wait(f"answer/{number}/{index}") for index in range(1, self.messages.count)]
        for index in range(1, self.messages.count):
            self.messages.forget(f"command/{number}/{index}")
            self.messages.forget(f"answer/{number}/{index}")
        for index, answer in enumerate(answers, 1):
            if "error" in answer:
                raise StorageError(f"process {index}: {answer['error']}")
        return [answer["value"] for answer in answers]

    def divide(self, name: str, marker: str, keys: Sequence[str], own: Iterable[str]) -> list[list[str]]:
        """The files of a checkpoint that each process uploads: the first process that has a file does.

        Args:
          marker: SHA-256 of the manifest.
          own: files that this process has.

        Raises:
          StorageError: nobody has some file.
        """
        self.command(do="list", name=name, marker=marker)
        parts: list[list[str]] = []
        left = set(keys)
        for held in ([*own], *self.answers()):
            parts.append([key for key in held if key in left])
            left.difference_update(held)
        if left:
            raise StorageError(
                f"checkpoint {name}: got {min(left)} on the disk of no process, expected it on one; run the same "
                "command: published checkpoints are complete"
            )
        return parts

    def end(self) -> None:
        """Lets the others end."""
        self.command(do=END)


class Follower:
    """Any other process: carries out the commands of the first, in a thread.

    Attributes:
      seen: the sign of the lease, and the time at which it was seen first.
    """

    def __init__(self, mirror: Mirror, messages: Messages) -> None:
        self.mirror, self.messages = mirror, messages
        self.seen = ("", lease.clock())
        self.thread = threading.Thread(target=self._serve, name="publish", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self.thread.start()

    def wait(self) -> None:
        """Returns when the first process has published everything."""
        self.thread.join()

    def _serve(self) -> None:
        number = 0
        while True:
            command = self.messages.wait(f"command/{number}/{self.messages.index}")
            if command["do"] == END:
                return
            try:
                answer = {"value": self._carry_out(command)}
            except Exception as error:
                answer = {"error": str(error) or type(error).__name__}
            self.messages.post(f"answer/{number}/{self.messages.index}", answer)
            number += 1

    def _carry_out(self, command: dict[str, Any]) -> Any:
        folder = self._folder(command["name"], command["marker"])
        listed = manifest.read(folder) or {}
        if command["do"] == "list":
            return present(folder, listed)
        part = {key: listed[key] for key in command["part"]}
        upload(self.mirror.store, self.check, folder, part, command["prefix"])
        return None

    def _folder(self, name: str, marker: str) -> Path:
        """This process's part of a checkpoint, once it is there. It stays until the first process has published it."""
        folder = self.mirror.root / "checkpoints" / name
        end = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                if digest((folder / manifest.FILE_NAME).read_bytes()) == marker:
                    return folder
            time.sleep(LOOK_SECONDS)
        raise StorageError(f"{folder}: got no such checkpoint within {WAIT_SECONDS:.0f} s, expected the run to save it")

    def check(self) -> None:
        """Returns once the first process has renewed the lease not long ago; it may be late under load.

        Raises:
          StorageError: it has lost the lease, or does not renew it.
        """
        end = time.monotonic() + WAIT_SECONDS
        while not self._is_renewed():
            if time.monotonic() > end:
                raise self._lost()
            time.sleep(LOOK_SECONDS)

    def _is_renewed(self) -> bool:
        sign, now = str(self.messages.look(SIGN)), lease.clock()
        if sign != self.seen[0]:
            self.seen = (sign, now)
        if sign == LOST:
            raise self._lost()
        return now - self.seen[1] <= lease.LEASE_SECONDS - lease.MARGIN_SECONDS

    def _lost(self) -> StorageError:
        return StorageError(
            f"workdir {self.mirror.store.address}: got a lease that is lost or was not renewed, expected the first "
            "process to hold it; nothing more is published"
        )
