"""Messages between the processes of a run, through the coordinator's key-value store.

Unlike collectives they may be sent from any thread while the devices train. A wait has no time limit of its own: when a
process dies, the coordinator's heartbeats end the others.
"""

from __future__ import annotations

import json
from typing import Any, Protocol, cast

import jax
from jax._src import distributed as internal  # the key-value store of the coordinator has no public name

POLL_SECONDS = 5.0
"""Seconds after which a wait asks again."""


class Client(Protocol):
    """The part of JAX's coordination client that messages use."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...
    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...
    def key_value_try_get(self, key: str) -> str: ...
    def key_value_delete(self, key: str) -> None: ...


class Messages:
    """Messages of the processes of this run.

    Args:
      topic: prefix of the keys. Every process makes one object of a topic, which is used once in the life of a process.

    Attributes:
      count: number of processes.
      index: index of this one.
    """

    def __init__(self, topic: str) -> None:
        self.topic = f"jaxformer/{topic}"
        self.client = cast("Client", internal.global_state.client)
        self.count, self.index = internal.global_state.num_processes, internal.global_state.process_id
        self.exchanged = 0

    def post(self, key: str, value: Any, overwrite: bool = False) -> None:
        """Sends a JSON value."""
        self.client.key_value_set(f"{self.topic}/{key}", json.dumps(value), allow_overwrite=overwrite)

    def wait(self, key: str) -> Any:
        """The value that some process has sent or will send."""
        while True:
            try:
                return json.loads(self.client.blocking_key_value_get(f"{self.topic}/{key}", int(POLL_SECONDS * 1000)))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise

    def look(self, key: str) -> Any:
        """The value if it has been sent, else None."""
        try:
            return json.loads(self.client.key_value_try_get(f"{self.topic}/{key}"))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" not in str(error):
                raise
            return None

    def forget(self, key: str) -> None:
        """Deletes a value that nobody will wait for any more."""
        self.client.key_value_delete(f"{self.topic}/{key}")

    def exchange(self, value: Any) -> list[Any]:
        """All-gather of a JSON value of at most 4 MiB: that of every process, in process order. Also a barrier."""
        number = self.exchanged
        self.exchanged += 1
        self.post(f"exchange/{number}/{self.index}", value)
        values = [self.wait(f"exchange/{number}/{index}") for index in range(self.count)]
        if number:  # all have sent this value, so all have read the one before
            self.forget(f"exchange/{number - 1}/{self.index}")
        return values
