"""A batch on its way, in which waiting prompts take the places of those that are done.

Outputs end at different lengths, and a pass costs the same however many of its rows still matter. So the loop over
tokens stops when one in `SHARE` of a batch's places is free, and the next prompts are read into these. Only the last
ones find nobody to follow them.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Executor
from typing import Any, Callable, Iterator

import jax
import numpy as np

from jaxformer.decode.batching import Job, Waiting
from jaxformer.decode.programs import Now, Programs, Status
from jaxformer.types import Collecting, PyTree, Refilling

SHARE = 4
"""One of so many places must be free; as many prompts are then read together."""
WASTE = 4
"""What has fewer slots than one in so many of a batch's is not read into it: it would pay for all of them."""

Begin = Callable[[Job, int | None], Now]
Send = Callable[..., tuple[Now, Status]]


def directly(program: Callable[..., tuple[Now, Status]], *given: Any) -> tuple[Now, Status]:
    """Calls a program where everything else is called."""
    return program(*given)


def from_thread(worker: Executor) -> Send:
    """Calls programs from `worker`. A CPU runs what one thread sends it one after the other, and so no two lanes at
    once that are sent by the same."""
    here = jax.sharding.get_mesh()

    def call(program: Callable[..., tuple[Now, Status]], *given: Any) -> tuple[Now, Status]:
        with contextlib.nullcontext() if here.empty else jax.set_mesh(here):
            return program(*given)

    return lambda *given: worker.submit(call, *given).result()


class Lane:
    """One batch: begun with `job`, then `go` and `ended` and `refill` by turns as long as it is `busy`.

    Attributes:
      index: the place among the inputs of every row's prompt; FREE: the row has none.
      size: new tokens that a state without anything in it has room for.
      used: its slots that are taken.
    """

    FREE = -1

    def __init__(
        self, programs: Programs, variables: PyTree, begin: Begin, job: Job, refills: bool, send: Send
    ) -> None:
        """Reads a job.

        Args:
          begin: reads one, for a batch with so many slots for prompts (None: the job's own).
          refills: whether others may follow into places that are free.
          send: calls the loop's program.
        """
        self.programs, self.variables, self.begin, self.send = programs, variables, begin, send
        self.now = begin(job, None)
        self.slots = slots(job)
        self.index = np.full(job.batch.target.tokens.shape[0], self.FREE)
        self.index[: len(job.index)] = job.index
        self.refills = refills and isinstance(self.now.state, Refilling)
        self.room = programs.room(self.now.state, self.slots[1])
        self.size, self.used = self.room.sizes[0], self.slots[1]
        self.status: Status | None = None

    @property
    def busy(self) -> bool:
        return bool((self.index != self.FREE).any())

    @property
    def share(self) -> int:
        """Prompts that are read at once into places that are free."""
        return max(len(self.index) // SHARE, 1)

    def accepts(self, waiting: Waiting) -> bool:
        """Whether the next prompts fit in here."""
        if not self.refills or not waiting:
            return False
        coming = waiting.slots(self.share)
        return all(new <= own <= new * WASTE for new, own in zip(coming, self.slots))

    def go(self, waiting: Waiting) -> None:
        """Sends the loop on its way. Returns at once; `ended` waits for it."""
        rows, free = len(self.index), int((self.index == self.FREE).sum())
        enough = min(free + self.share, rows) if self.accepts(waiting) else rows
        given = self.variables, self.now, np.int32(enough), np.int32(self._passes())
        self.now, self.status = self.send(self.programs.advance, *given)

    def ready(self) -> bool:
        """Whether `ended` would not wait."""
        return self.status.done.is_ready()

    def ended(self) -> Iterator[tuple[int, Any]]:
        """The prompts that are done, as places among the inputs, with their rows of `Hypotheses`. Makes room."""
        done = np.asarray(self.status.done) & (self.index != self.FREE)
        if done.any():
            found = jax.device_get(self.programs.found(self.now.search))
            for row in np.flatnonzero(done):
                yield int(self.index[row]), jax.tree.map(lambda x: x[row], found)  # noqa: B023
            self.index[done] = self.FREE
        self.used += int(self.status.passes) * self.room.slots
        if self.busy and self._passes() < 1:
            self._make_room(int(self.status.needed) if isinstance(self.now.state, Collecting) else self.used)

    def _passes(self) -> int:
        """That there is room for."""
        slots = self.room.slots
        return (self.room.total(self.size) - self.used) // slots if slots else self.room.sizes[-1]

    def _make_room(self, needed: int) -> None:
        """By dropping slots that nobody reads, in a room of the size that the others need."""
        self.size = self.room.size(needed)
        if needed < self.used:
            state, self.used = self.programs.collect(self.now, self.room, self.size), needed
        else:
            state = self.programs.grow(self.now.state, self.room, self.size)
        self.now = self.now._replace(state=state)

    def refill(self, waiting: Waiting) -> None:
        """Reads the next prompts into what is free."""
        rows, share = len(self.index), self.share
        while self.accepts(waiting) and (self.index == self.FREE).sum() >= share:
            job = waiting.take_into(self.slots, share)
            places = np.full(share, rows)
            places[: len(job.index)] = np.flatnonzero(self.index == self.FREE)[: len(job.index)]
            self.now = self.programs.put(self.now, places, self.begin(job, self.slots[1]))
            self.used = max(self.used, slots(job)[1])
            self.index[places[: len(job.index)]] = job.index


def slots(job: Job) -> tuple[int, int]:
    """Of source and target of a job's batch; 1 for a side that it does not have."""
    sides = (job.batch.source, job.batch.target)
    return tuple(1 if side is None else side.tokens.shape[1] for side in sides)
