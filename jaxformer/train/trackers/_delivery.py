"""Delivery of a run's rows to its trackers, each in a thread of its own, so that none can stop the run.

The run hands rows over and goes on. A tracker that raises is left out from then on. One that is slow or hangs gets at
most `MAX_QUEUED_ROWS` rows to catch up with; further rows are dropped. At the end all trackers together have a few
seconds; one that needs longer is abandoned. What happened is one warning, and at the end a line with the number of rows
that were dropped. Nothing is lost for good: `metrics.jsonl` has every row, and the next start writes them all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxformer import registry
from jaxformer.config import Config
from jaxformer.errors import ConfigError
from jaxformer.runtime import files, secrets, threads
from jaxformer.train.trackers import Row, RunInfo, Tracker, _workdir

MAX_QUEUED_ROWS = 1000
"""Rows that wait for one tracker; further ones are dropped."""
HANG_SECONDS = 60.0
"""A call of a tracker that takes longer is warned of."""
FINISH_SECONDS = 60.0
"""Time for all trackers together at the end of a run: a database may have to be made, or rows to be uploaded."""
STOP_SECONDS = 5.0
"""The same for a run that was stopped and is resumed later; machines that are taken away give half a minute."""

MAX_REASON = 300
"""Characters of an error message in a warning."""

Log = Callable[[str], None]

_importing = threading.Lock()


class Delivery:
    """The thread that calls one tracker.

    Args:
      name: of the tracker.
      create: makes the tracker, in the thread.
      run, config, rows: arguments of `start`, `config` and `rewind`.
      log: prints a line for people.
    """

    def __init__(
        self,
        name: str,
        create: Callable[[], Tracker],
        run: RunInfo,
        config: Mapping[str, Any],
        rows: Sequence[Row],
        log: Log,
    ) -> None:
        self.name, self.log = name, log
        self.dropped, self.is_warned, self.has_failed = 0, False, False
        self.pending = 0  # rows that the tracker is being given
        self.called = time.monotonic()  # when the present call began
        self.queue: queue.SimpleQueue[Row | Sequence[Row]] = queue.SimpleQueue()
        arguments = (create, run, config, rows)
        self.thread = threading.Thread(target=self._deliver, args=arguments, name=f"tracker {name}", daemon=True)
        self.thread.start()

    def add(self, row: Row) -> None:
        """Hands a row over. Returns at once."""
        waiting = self.queue.qsize()
        if self.has_failed:
            self.dropped += 1
            return
        if waiting and time.monotonic() - self.called > HANG_SECONDS:
            self._warn(f"does not answer for {HANG_SECONDS:.0f} s; the run goes on")
        if waiting >= MAX_QUEUED_ROWS:
            self.dropped += 1
            self._warn(f"is {waiting:,} rows behind; further rows are dropped, and the run goes on")
            return
        self.queue.put(row)

    def end(self, measures: Sequence[Row]) -> None:
        """Hands over the final measures, after which nothing follows. Returns at once."""
        self.queue.put(list(measures))

    def join(self, deadline: float) -> None:
        """Waits for the thread until `deadline` of the monotonic clock, and reports what did not get to the tracker."""
        self.thread.join(max(deadline - time.monotonic(), 0.0))
        if self.thread.is_alive():
            threads.abandon(self.thread)
            self._warn("did not finish in time and is left behind")
        self.dropped += self.pending + self._drop_waiting()
        if self.dropped:
            self.log(f"tracker {self.name}: {self.dropped:,} rows were dropped; metrics.jsonl has them")

    def _deliver(
        self, create: Callable[[], Tracker], run: RunInfo, config: Mapping[str, Any], rows: Sequence[Row]
    ) -> None:
        try:
            _import(getattr(create, "modules", ()))
            tracker = create()
            tracker.start(run)
            tracker.config(config)
            tracker.rewind(rows)
            measures = None
            while measures is None:
                waiting, measures = self._take()
                self.pending = len(waiting)
                if waiting:
                    tracker.scalars(waiting)
                self.pending = 0
            tracker.finish(measures)
        except (Exception, SystemExit) as error:  # whatever a package does when its server or its disk is gone
            self.has_failed = True
            reason = " ".join(secrets.redact(str(error)).split())[:MAX_REASON]
            self._warn(f"{type(error).__name__}: {reason}; the run goes on without it")

    def _take(self) -> tuple[list[Row], Sequence[Row] | None]:
        """Waits for rows, and takes all that are there; with the final measures, if they follow."""
        rows: list[Row] = []
        item = self.queue.get()
        self.called = time.monotonic()
        while isinstance(item, Row):
            rows.append(item)
            if self.queue.empty():
                return rows, None
            item = self.queue.get()
        return rows, item

    def _drop_waiting(self) -> int:
        """Empties the queue, and ends a thread that comes back to it. Returns how many rows it held."""
        count = 0
        while not self.queue.empty():
            with contextlib.suppress(queue.Empty):
                count += isinstance(self.queue.get_nowait(), Row)
        self.queue.put([])
        return count

    def _warn(self, problem: str) -> None:
        if not self.is_warned:
            self.is_warned = True
            self.log(f"tracker {self.name}: {problem}")


def _import(modules: Sequence[str]) -> None:
    """Imports the packages of a tracker, one tracker after the other.

    Python 3.11 raises SystemError ("AST constructor recursion depth mismatch") if two threads parse source at once, as
    packages do that read their own docstrings. One that hangs while it is imported delays the others by `HANG_SECONDS`.
    """
    is_held = _importing.acquire(timeout=HANG_SECONDS)
    try:
        for module in modules:
            importlib.import_module(module)
    finally:
        if is_held:
            _importing.release()


class Deliveries:
    """All trackers of a run. Creating one starts them; the workdir must exist.

    Args:
      rows: rows of `metrics.jsonl` that the run keeps.
      log: prints a line for people.
    """

    def __init__(self, config: Config, workdir: Path, rows: Sequence[Row], log: Log) -> None:
        self.workdir, names = workdir, config.train.trackers
        self.deliveries: list[Delivery] = []
        if not names:
            return
        values = _redacted(config, workdir)
        run = _workdir.identify(workdir, log)
        for name in names:
            create = registry.member("jaxformer.train.trackers", name, "TRACKER")
            self.deliveries.append(Delivery(name, create, run, values, rows, log))

    def add(self, row: Row) -> None:
        """Hands a row to every tracker. Returns at once."""
        for delivery in self.deliveries:
            delivery.add(row)

    def close(self, is_finished: bool) -> None:
        """Ends all trackers, with the measures of a run that has finished. Returns after at most `FINISH_SECONDS`."""
        if not self.deliveries:
            return
        measures = _workdir.final_measures(self.workdir) if is_finished else []
        deadline = time.monotonic() + (FINISH_SECONDS if is_finished else STOP_SECONDS)
        for delivery in self.deliveries:
            delivery.end(measures)
        for delivery in self.deliveries:
            delivery.join(deadline)


def publish(config: Config, workdir: Path, log: Log) -> None:
    """Opens the trackers of a run that has been trained, for its final measures. The workdir's lock must be held."""
    rows = _workdir.read_rows(workdir)
    if rows:
        Deliveries(config, workdir, rows, log).close(is_finished=True)


def _redacted(config: Config, workdir: Path) -> dict[str, Any]:
    try:
        environment = files.read_json(workdir / "environment.json")
    except (ConfigError, FileNotFoundError):
        environment = {}
    return secrets.redact_json({**dataclasses.asdict(config), "environment": environment})
