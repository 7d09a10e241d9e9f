"""A table of a sweep's runs from their files alone: for runs that other processes, or other machines, train."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from jaxformer.config import CheckpointConfig
from jaxformer.runtime import terminal, workdir_lock
from jaxformer.sweep import progress
from jaxformer.sweep.planning import Run

STATES = ("running", "silent", "stopped", "waiting", "done")
"""The order of the table. Silent: the process is dead, or its host cannot be seen. Stopped: it has saved and ended, or
failed. Waiting: it has not begun."""


@dataclass(frozen=True)
class Status:
    """The state of a run, read from its files.

    Attributes:
      state: one of `STATES`.
      step: of the last row of `metrics.jsonl`.
      loss: of the last training row.
      value: the newest validation's measure.
      rate: steps a second in the last training row.
    """

    state: str
    step: int
    loss: float | None
    value: float | None
    rate: float | None


def read_status(run: Run, metric: str) -> Status:
    """The status of a run."""
    step, loss, value, rate = 0, None, None, None
    for row in progress.rows(run.workdir):
        step = row["step"]
        if row["split"] == "validation":
            value = _number(row.get(metric))
        elif row["split"] == "train":
            loss, rate = _number(row.get("loss")), _number(row.get("steps_per_second"))
    state = "done" if run.is_finished else _state(run.workdir, step)
    return Status(state, step, loss, value, rate)


def _state(workdir: Path, step: int) -> str:
    """State of a run without a result, by the text and the time stamp of its lock.

    The kernel's lock is not tried: a run that starts meanwhile would find it held.
    """
    lock = workdir / workdir_lock.FILE_NAME
    try:
        age, content = time.time() - lock.stat().st_mtime, lock.read_text(errors="replace")
    except OSError:
        return "stopped" if step else "waiting"
    if not content.strip():
        return "stopped"
    return "running" if age < workdir_lock.LEASE_SECONDS else "silent"


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


class Watch:
    """The table of `runs`, a line for each, those that are training first.

    Args:
      checkpoint: names the measure.
    """

    def __init__(self, runs: Sequence[Run], checkpoint: CheckpointConfig) -> None:
        self.runs, self.checkpoint = runs, checkpoint
        self.done: dict[Path, Status] = {}

    def text(self) -> str:
        """The table as it is now: counts, a head, the runs."""
        found = [(run, self._status(run)) for run in self.runs]
        found.sort(key=lambda each: STATES.index(each[1].state))
        counts = {state: sum(status.state == state for _, status in found) for state in STATES}
        parts = [f"{counts['done']} of {len(found)} done"]
        parts += [f"{counts[state]} {state}" for state in STATES[:-1] if counts[state]]
        metric = self.checkpoint.metric
        lines = [
            ", ".join(parts),
            f"{'state':<8} {'step':>17} {'loss':>9} {f'val. {metric}'[:12]:>12} {'steps/s':>8}  run",
        ]
        for run, status in found:
            step = f"{status.step:,}/{run.config.train.steps:,}"
            loss, value, rate = ("" if x is None else f"{x:.4g}" for x in (status.loss, status.value, status.rate))
            lines.append(f"{status.state:<8} {step:>17} {loss:>9} {value:>12} {rate:>8}  {run.workdir.name}")
        return "\n".join(lines)

    @property
    def is_over(self) -> bool:
        """True if every run is done."""
        return len(self.done) == len(self.runs)

    def _status(self, run: Run) -> Status:
        if run.workdir not in self.done:
            status = read_status(run, self.checkpoint.metric)
            if status.state != "done":
                return status
            self.done[run.workdir] = status
        return self.done[run.workdir]


def watch(
    runs: Sequence[Run],
    checkpoint: CheckpointConfig,
    stream: TextIO | None = None,
    update: Callable[[], None] = lambda: None,
    seconds: float = progress.DRAW_SECONDS,
) -> int:
    """Redraws the table on a terminal until every run is done or Ctrl-C; elsewhere prints it once. Returns 0.

    Args:
      update: called before each drawing; brings the files of the runs.
      seconds: between two drawings.
    """
    stream = sys.stdout if stream is None else stream
    table = Watch(runs, checkpoint)
    if terminal.can_redraw(stream):
        block = terminal.LiveBlock(stream)
        try:
            while True:
                update()
                block.show(table.text())
                if table.is_over:
                    break
                time.sleep(seconds)
        finally:
            block.clear()
    print(table.text(), file=stream, flush=True)
    return 0
