"""The one thread that computes: it decodes what arrives, and runs the tasks of other routes between two launches."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxformer.decode.engine import Engine, Job, Piece
from jaxformer.errors import ConfigError
from jaxformer.runtime.local_server import in_one_line
from jaxformer.serving import refusal
from jaxformer.serving.limits import MAX_LINES

Function = Callable[[Sequence[str]], Sequence[Any]]
"""From lines to a result for each."""


class Ticket:
    """A job that has been handed to the worker.

    Attributes:
      number: its number in the engine; None: the engine does not have it yet.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.number: int | None = None


@dataclass(frozen=True, eq=False)
class _Call:
    """Lines that wait for a function."""

    function: Function
    lines: Sequence[str]
    future: Future[Sequence[Any]]


class Worker:
    """The thread. `start` starts it; the other methods may be called by any thread.

    Attributes:
      engine: decodes; None: the model does not generate text.
      max_queue: jobs and calls that may wait.
    """

    def __init__(self, engine: Engine | None, max_queue: int) -> None:
        self.engine, self.max_queue = engine, max_queue
        self._mesh = jax.sharding.get_mesh()  # it belongs to the thread that made the model
        self._change = threading.Condition()
        self._arrived: list[Ticket] = []
        self._cancelled: list[Ticket] = []
        self._calls: list[_Call] = []
        self._running_calls = 0
        self._stops = False
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """True if requests are answered."""
        return self._thread.is_alive() and not self._stops

    @property
    def waiting(self) -> int:
        """Number of jobs and calls that wait."""
        waiting = 0 if self.engine is None else len(self.engine.waiting)
        return waiting + len(self._arrived) + len(self._calls)

    @property
    def active(self) -> int:
        """Number of jobs that are being decoded."""
        return 0 if self.engine is None else self.engine.active

    def submit(self, jobs: Sequence[Job]) -> list[Ticket]:
        """Hands over jobs; all of them, or none.

        Raises:
          Refusal: the queue is full, or the server stops.
        """
        rows = 0 if self.engine is None else self.engine.rows
        tickets = [Ticket(job) for job in jobs]
        with self._change:
            self._check_open()
            if self.waiting + self.active + len(jobs) > rows + self.max_queue:
                raise refusal.queue_full(self.waiting)
            self._arrived += tickets
            self._change.notify()
        return tickets

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """Ends jobs, so that their rows are free."""
        with self._change:
            self._cancelled += tickets
            self._change.notify()

    def call(self, function: Function, lines: Sequence[str]) -> Future[Sequence[Any]]:
        """Runs `function(lines)`, perhaps with the lines of other calls of the same function.

        Raises:
          Refusal: as `submit`.
        """
        future: Future[Sequence[Any]] = Future()
        with self._change:
            self._check_open()
            if len(self._calls) > self.max_queue:
                raise refusal.queue_full(self.waiting)
            self._calls.append(_Call(function, lines, future))
            self._change.notify()
        return future

    def stop(self, seconds: float) -> None:
        """Refuses new requests, and ends the thread when the others have ended, or after so many seconds."""
        with self._change:
            self._stops = True
            self._change.notify()
        deadline = time.monotonic() + seconds
        while self._has_work() and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        with self._change:
            self._ends = True
            self._change.notify()
        self._thread.join()

    def _check_open(self) -> None:
        if not self.is_alive:
            raise refusal.stopping()

    def _has_work(self) -> bool:
        decodes = self.engine is not None and self.engine.has_jobs
        return bool(decodes or self._arrived or self._cancelled or self._calls or self._running_calls)

    def _run(self) -> None:
        mesh = contextlib.nullcontext() if self._mesh.empty else jax.set_mesh(self._mesh)
        try:
            with mesh:
                while self._turn():
                    pass
        finally:
            with self._change:
                self._stops = True
                self._fail_all(refusal.stopping())

    def _turn(self) -> bool:
        """Waits for work and does a little of it; False: the thread should end."""
        with self._change:
            while not (self._has_work() or self._ends):
                self._change.wait()
            if self._ends:
                return False
            self._take_changes()
            calls = self._take_calls()
        _run_calls(calls)
        self._running_calls = 0
        self._step()
        return True

    def _take_changes(self) -> None:
        """Hands arrived and cancelled jobs to the engine."""
        if self.engine is not None:
            for ticket in self._arrived:
                ticket.number = self.engine.submit(ticket.job)
            for ticket in self._cancelled:
                if ticket.number is not None:
                    self.engine.cancel(ticket.number)
        self._arrived, self._cancelled = [], []

    def _take_calls(self) -> list[_Call]:
        """The first call, and others that may run with it."""
        taken: list[_Call] = []
        for call in list(self._calls):
            lines = sum(len(one.lines) for one in taken) + len(call.lines)
            if not taken or (call.function == taken[0].function and lines <= MAX_LINES):
                taken.append(call)
                self._calls.remove(call)
        self._running_calls = len(taken)
        return [call for call in taken if call.future.set_running_or_notify_cancel()]

    def _step(self) -> None:
        """Decodes a little. An error ends all jobs, and the next ones begin anew."""
        if self.engine is None or not self.engine.has_jobs:
            return
        try:
            self.engine.step()
        except Exception as error:  # such as too little memory: the next request may be smaller
            print(f"warning: {in_one_line(error)}", file=sys.stderr)
            _fail(self.engine.clear(), error)

    def _fail_all(self, error: Exception) -> None:
        """Ends what has not ended."""
        if self.engine is not None:
            _fail([ticket.job for ticket in self._arrived] + self.engine.clear(), error)
        for call in self._calls:
            if call.future.set_running_or_notify_cancel():
                call.future.set_exception(error)


def _fail(jobs: Sequence[Job], error: Exception) -> None:
    for job in jobs:
        job.deliver(Piece(np.zeros(0, np.int32), True, error))


def _run_calls(calls: Sequence[_Call]) -> None:
    """Runs calls together; one by one if a line of one is wrong, so that the others are answered."""
    if not calls:
        return
    lines = [line for call in calls for line in call.lines]
    try:
        results = calls[0].function(lines)
    except ConfigError as error:
        if len(calls) == 1:
            calls[0].future.set_exception(error)
            return
        for call in calls:
            _run_calls([call])
    except Exception as error:
        print(f"warning: {in_one_line(error)}", file=sys.stderr)
        for call in calls:
            call.future.set_exception(error)
    else:
        begin = 0
        for call in calls:
            call.future.set_result(results[begin : begin + len(call.lines)])
            begin += len(call.lines)
