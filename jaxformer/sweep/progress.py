"""Progress of a running sweep: a table that is redrawn on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from jaxformer.config import CheckpointConfig
from jaxformer.runtime import files, terminal, units
from jaxformer.sweep.planning import Run

DRAW_SECONDS = 1.0
"""Seconds between two drawings of the table."""

MAX_TAIL_BYTES = 1 << 16
"""The end of `metrics.jsonl` that is read for the step and the newest validation."""


class Table:
    """Counts of runs done, running, failed and left, the best measure so far, and the time left.

    On a terminal that can redraw, a line for each running run stands below, and all of it is redrawn in place on
    stderr; lines about runs go to stdout above it. Elsewhere the counts are a line after each run that ends.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        checkpoint: CheckpointConfig,
        workers: int,
        stream: TextIO | None = None,
        total: int | None = None,
        has_estimate: bool = True,
    ) -> None:
        """Begins with the finished ones of `runs`.

        Args:
          checkpoint: names the measure.
          workers: runs at the same time.
          stream: where the table is drawn; None: stderr.
          total: number of runs in the end, of a search; None: `runs` are all.
          has_estimate: tell the time left from the time that finished runs took; not if all have begun together.
        """
        self.has_estimate = has_estimate
        self.stream = sys.stderr if stream is None else stream
        self.block = terminal.LiveBlock(self.stream) if terminal.can_redraw(self.stream) else None
        self.checkpoint, self.workers = checkpoint, workers
        self.total = len(runs) if total is None else total
        self.counts = {"finished": 0, "pruned": 0, "failed": 0, "stopped": 0}
        self.best: tuple[float, str] | None = None
        self.running: dict[Path, tuple[Run, float]] = {}
        self.seconds: list[float] = []
        self.drawn = -math.inf
        for run in runs:
            if run.is_finished:
                self.count(run, "finished")

    def close(self) -> None:
        """Removes the table from the terminal."""
        if self.block is not None:
            with contextlib.suppress(OSError, ValueError):  # the terminal is gone
                self.block.clear()

    def log(self, text: str) -> None:
        """Prints a line above the table."""
        self.close()
        print(text, flush=True)
        self.drawn = -math.inf

    def start(self, run: Run) -> None:
        """Reports that a run has started."""
        self.running[run.workdir] = (run, time.monotonic())
        self.log(f"started   {run.workdir.name}")

    def end(self, run: Run, how: str, why: str = "") -> None:
        """Reports that a run is finished, pruned, failed or stopped. `why` follows its name."""
        begun = self.running.pop(run.workdir, (run, None))[1]
        if begun is not None and how == "finished":
            self.seconds.append(time.monotonic() - begun)
        self.count(run, how)
        word = f"{how:<9}"
        if how == "failed":
            word = terminal.coloured(word, terminal.RED, sys.stdout)
        self.log(f"{word} {run.workdir.name}{' ' * bool(why)}{why}")
        if self.block is None and self.total > 1:
            self.log(self.summary())

    def draw(self) -> None:
        """Redraws the table, at most once a second."""
        if self.block is None or time.monotonic() - self.drawn < DRAW_SECONDS:
            return
        self.drawn = time.monotonic()
        lines = [self.summary()]
        for run, begun in self.running.values():
            lines.append(self._row(run, time.monotonic() - begun))
        try:
            self.block.show("\n".join(lines))
        except (OSError, ValueError):  # the terminal is gone; the runs go on
            self.block = None

    def summary(self) -> str:
        """The counts, the best measure and the time left, in one line, the important ones first."""
        done = self.counts["finished"]
        left = max(self.total - sum(self.counts.values()) - len(self.running), 0)
        parts = [f"{done} of {self.total} done", f"{len(self.running)} running"]
        parts += [f"{self.counts[how]} {how}" for how in ("pruned", "failed", "stopped") if self.counts[how]]
        parts.append(f"{left} left")
        text = ", ".join(parts)
        if self.has_estimate and self.seconds and left + len(self.running):
            seconds = statistics.fmean(self.seconds) * (left + len(self.running) / 2) / max(self.workers, 1)
            text += f"; about {units.format_duration(seconds)} to go"
        if self.best is not None:
            text += f"; best {self.checkpoint.metric} {self.best[0]:.5g} of {self.best[1]}"
        return text

    def count(self, run: Run, how: str) -> None:
        """Counts a run that has ended."""
        self.counts[how] += 1
        value = (run.result or {}).get(self.checkpoint.metric) if how == "finished" else None
        if isinstance(value, (int, float)) and math.isfinite(value):
            sign = 1 if self.checkpoint.mode == "min" else -1
            if self.best is None or sign * value < sign * self.best[0]:
                self.best = (float(value), run.workdir.name)

    def _row(self, run: Run, seconds: float) -> str:
        """A running run: its share of the steps, newest validation and time, before its name, which may be cut."""
        step, value = newest(run.workdir, self.checkpoint.metric)
        steps = run.config.train.steps
        shown = "" if value is None else f"{value:.5g}"
        time_shown = units.format_duration(seconds)
        return f"{step:>8,}/{steps:,} {step / max(steps, 1):>5.0%} {shown:>10} {time_shown:>8}  {run.workdir.name}"


def newest(workdir: Path, metric: str) -> tuple[int, float | None]:
    """The step of the last row of `metrics.jsonl`, and the newest validation's `metric`; 0 and None without them.

    The last row counts, not the highest step: a run that resumes from an earlier step repeats steps.
    """
    step, value = 0, None
    for row in rows(workdir):
        step = row["step"]
        if row["split"] == "validation" and isinstance(row.get(metric), (int, float)):
            value = float(row[metric])
    return step, value


def rows(workdir: Path) -> list[dict[str, Any]]:
    """The whole rows at the end of `metrics.jsonl`; none if there is no file."""
    try:
        with open(workdir / "metrics.jsonl", "rb") as file:
            file.seek(max(file.seek(0, 2) - MAX_TAIL_BYTES, 0))
            content = file.read()
    except OSError:
        return []
    lines = content.decode("utf-8", "replace").split("\n")[:-1]  # the last may be incomplete
    return [row for row in map(files.parse_metrics_row, lines) if row is not None]
