"""Lease of a folder in a bucket: an object that its owner renews, and that others take over once it has expired.

Every write of it is conditional on the generation that the writer saw, so of two processes one wins. Expiry is measured
by the waiting process, from when it first saw the generation: the clocks of hosts are never compared.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxformer.errors import ConfigError, StorageError
from jaxformer.runtime import files
from jaxformer.runtime.object_store import ABSENT, Conflict, Store, Stored

KEY = "lock"
RENEW_SECONDS = 20.0
"""Seconds between two renewals."""
LEASE_SECONDS = 120.0
"""Seconds without renewal after which an owner counts as dead."""
RELEASE_SECONDS = 5.0
"""Seconds for which a run that ends tries to release its lease, which otherwise expires."""
MARGIN_SECONDS = 30.0
"""The owner stops publishing so long before the lease expires, unless it can renew it first."""
SIGNS_OF_LIFE = 2
"""Renewals after which a waiting run counts the owner as alive."""
GRACE_SECONDS = 3.0
"""Seconds in which requests of a killed process of this host, which are under way, may still arrive."""
POLL_SECONDS = 1.0
"""Seconds between two looks at a lease that may have expired."""


class Lease:
    """The lease of the folder in `store`.

    Args:
      mirror: id of this host's mirror. Its file lock says that no other process works there, so a lease with this id
        is that of a dead process, and need not expire.
      key: the object.
      sign: called at each renewal with a text that differs from the one before, and with "lost".
      holder: who holds such a lease, for errors.

    Attributes:
      lost: another process has taken over.
    """

    def __init__(
        self,
        store: Store,
        mirror: str,
        sign: Callable[[str], None] = lambda text: None,
        key: str = KEY,
        holder: str = "a run that is training in it",
    ) -> None:
        self.store, self.mirror, self.sign, self.key, self.holder = store, mirror, sign, key, holder
        self.what = f"{store.what.removeprefix('--')} {store.address}"
        self.token, self.count = secrets.token_hex(8), 0
        self.generation = ABSENT
        self.renewed = -math.inf
        self.lost = False
        self.mutex, self.ended = threading.Lock(), threading.Event()
        self.started = time.strftime("%Y-%m-%dT%H:%M:%S%z")

    def acquire(self) -> None:
        """Takes the lease, once the owner has released it or it has expired.

        Raises:
          ConfigError: another process holds and renews it.
        """
        while True:
            found = self.store.read(self.key)
            owner = owner_of(found)
            if found is not None and owner:
                if owner.get("mirror") == self.mirror:
                    time.sleep(GRACE_SECONDS)
                else:
                    found = self._wait(found, owner)
            if self.take(ABSENT if found is None else found.generation):
                return

    def take(self, generation: bytes) -> bool:
        """Takes the lease if it has this generation. False if another process was faster."""
        if not self._write(generation):
            return False
        threading.Thread(target=self._renew_regularly, name="lease", daemon=True).start()
        return True

    def _wait(self, found: Stored, owner: dict[str, Any]) -> Stored | None:
        """The lease once it is free, or has not changed for `LEASE_SECONDS`.

        It may change once, since a request of a process that was killed may still arrive.

        Raises:
          ConfigError: it changed `SIGNS_OF_LIFE` times.
        """
        print(
            f"{self.what}: {_describe(owner)} has its lock; waiting up to {LEASE_SECONDS:.0f} s for "
            f"signs of life (delete the object {self.key} if that process is dead)",
            file=sys.stderr,
            flush=True,
        )
        limit, changes = clock() + LEASE_SECONDS, 0
        while clock() < limit:
            time.sleep(POLL_SECONDS)
            now = self.store.read(self.key)
            if now is None or not owner_of(now):
                return now
            if now.generation != found.generation:
                found, changes = now, changes + 1
                limit = clock() + LEASE_SECONDS
                if changes == SIGNS_OF_LIFE:
                    raise self._held(owner_of(now))
        return found

    def _held(self, owner: dict[str, Any]) -> ConfigError:
        return ConfigError(
            f"{self.what}: got {self.holder} ({_describe(owner)} since {owner.get('started', '?')}), expected none; "
            f"wait for it or stop it, or use another {self.store.what}"
        )

    def _write(self, generation: bytes, seconds: float | None = None) -> bool:
        """Writes the lease if it has this generation. False if another process was faster."""
        self.count += 1
        content = {"host": socket.gethostname(), "pid": os.getpid(), "started": self.started, "mirror": self.mirror}
        value = json.dumps(content | {"token": self.token, "renewal": self.count}).encode() + b"\n"
        for _ in range(2):
            begun = clock()  # before the request: others count from when the write appears
            try:
                self.generation = self.store.write(self.key, value, generation, seconds)
            except Conflict:
                # The answer to an earlier write of this process may have been lost.
                now = self.store.read(self.key, seconds)
                if now is None or owner_of(now).get("token") != self.token:
                    return False
                generation = now.generation
                if now.value != value:
                    continue
                self.generation = generation
            self.renewed = begun
            self.sign(f"{self.token} {self.count}")
            return True
        return False

    def renew(self, seconds: float | None = None) -> None:
        """Renews the lease.

        Raises:
          StorageError: another process has taken over, or the storage does not answer.
        """
        with self.mutex:
            if not self.lost and not self._write(self.generation, seconds):
                self.lost = True
                self.sign("lost")
            if self.lost:
                raise StorageError(
                    f"{self.what}: got another run that has taken over its lock, expected to hold it; "
                    "nothing more is published: stop one of the two"
                )

    def check(self) -> None:
        """Raises StorageError unless this process holds the lease, and will for a while. Called before each write."""
        if self.lost or clock() - self.renewed > LEASE_SECONDS - MARGIN_SECONDS:
            self.renew()

    def release(self) -> None:
        """Empties the object, for the next run. If the storage does not answer, the lease expires."""
        self.ended.set()
        with self.mutex, contextlib.suppress(Conflict, StorageError, ConfigError):
            if not self.lost:
                self.store.write(self.key, b"", self.generation, RELEASE_SECONDS)

    def _renew_regularly(self) -> None:
        while not self.ended.wait(RENEW_SECONDS):
            # An outage is reported by `check`: it matters only if there is something to publish.
            with contextlib.suppress(StorageError, ConfigError):
                self.renew(RENEW_SECONDS)


def owner_of(found: Stored | None) -> dict[str, Any]:
    """The owner of a lease; empty if it is free. Unreadable text counts as an owner."""
    if found is None or not found.value.strip():
        return {}
    try:
        owner = files.parse_json(found.value.decode("utf-8", "replace"))
    except ValueError:
        owner = None
    owner = owner if isinstance(owner, dict) and owner else {"host": "?"}
    return {name: value for name, value in owner.items() if name != "renewal"}


def clock() -> float:
    """A clock that also runs while the machine is suspended, where there is one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _describe(owner: dict[str, Any]) -> str:
    return f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"
