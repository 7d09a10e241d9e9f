"""What a run tells the world: a progress line, `metrics.jsonl`, TensorBoard events. Only the first process speaks."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

import jax

from jaxformer import files
from jaxformer.train.timing import Clock

LOG = logging.getLogger("jaxformer")


class MetricsFile:
    """Appends one JSON object a line: `step`, `wall_time` (Unix seconds), `split`, and the values."""

    def __init__(self, path: Path, first_step: int, measured: bool = True) -> None:
        """Opens `path`. What a killed process wrote after its last save is dropped, so no row is there twice.

        Args:
          first_step: of the state that the run starts from; rows of later steps go.
          measured: whether that state was evaluated; else rows of that are of a later try, and go too.
        """
        self.path = path
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            rows = [files.metrics_row(line) for line in lines]
            edited = [number for number, row in enumerate(rows[:-1], 1) if row is None]  # the last may be torn
            if edited:
                LOG.warning("%s: %d lines cannot be read, left out; the first is line %d", path, len(edited), edited[0])
            for row in filter(None, rows):
                if row["step"] < first_step or (row["step"] == first_step and (measured or row["split"] == "train")):
                    self.rows.append(row)
            if len(self.rows) != len(rows):
                files.write(path, "".join(json.dumps(row) + "\n" for row in self.rows))
        self.file = path.open("a", encoding="utf-8")

    def write(self, step: int, split: str, values: dict[str, float]) -> None:
        # JSON has no NaN: a value that is not finite is written as null.
        clean = {name: value if math.isfinite(value) else None for name, value in values.items()}
        row = {"step": step, "wall_time": round(time.time(), 3), "split": split, **clean}
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    """TensorBoard event files in the workdir, tags `split/name`: the rows of `metrics.jsonl` once more.

    A resumed run writes them anew from `rows`: a process that was killed may have written too many or too few.
    """

    def __init__(self, path: Path, rows: Iterable[dict[str, Any]] = ()) -> None:
        from tensorboardX import SummaryWriter  # slow to import, and only one process needs it

        for old in path.glob("events.out.tfevents.*"):
            old.unlink()
        self.writer = SummaryWriter(str(path))
        for row in rows:
            rest = {name: value for name, value in row.items() if name not in ("step", "wall_time", "split")}
            self._add(row["step"], row["split"], rest, row.get("wall_time"))
        self.writer.flush()

    def write(self, step: int, split: str, values: dict[str, float]) -> None:
        self._add(step, split, values, None)
        self.writer.flush()

    def _add(self, step: int, split: str, values: dict[str, Any], wall_time: float | None) -> None:
        for name, value in values.items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                self.writer.add_scalar(f"{split}/{name}", value, step, walltime=wall_time)

    def close(self) -> None:
        self.writer.close()


class Progress:
    """A line that a person likes to watch: redrawn on a terminal, one plain line a report elsewhere."""

    def __init__(self, clock: Clock, stream: TextIO | None = None) -> None:
        self.clock, self.stream = clock, sys.stderr if stream is None else stream
        # No stream, or a closed one: a daemon's.
        self.live = self.stream is not None and not self.stream.closed and self.stream.isatty()
        self.last_evaluation = ""

    def write(self, step: int, split: str, values: dict[str, float]) -> None:
        if split == "skipped":
            batch = ", ".join(f"{name} {values[name]:,}" for name in values if name not in ("in_a_row", "spike"))
            what = "gradient is a spike" if values["spike"] else "loss or gradient is not finite"
            self.say(f"step {step:,}  left out: its {what} ({batch})")
            return
        if split != "train":
            self.last_evaluation = f"{split} " + "  ".join(f"{k} {number(v)}" for k, v in values.items())
            self.say(f"step {step:,}  {self.last_evaluation}")
            return
        line = (
            f"step {step:,}/{self.clock.config.steps:,}  loss {values['loss']:.4f}  lr {values['learning_rate']:.2e}"
            f"  |g| {values['gradient_norm']:.2f}  {values['tokens_per_second']:,.0f} tok/s"
            f"  padding {values['padding']:.0%}  left {duration(self.clock.left(step))}"
        )
        if self.live:
            tail = f"  [{self.last_evaluation}]" if self.last_evaluation else ""
            self._print("\r\x1b[K" + line + tail, end="")
        else:
            self._print(line)

    def say(self, text: str) -> None:
        """A line that stays."""
        self._print(("\r\x1b[K" if self.live else "") + text)

    def close(self) -> None:
        if self.live:
            self._print("")

    def _print(self, text: str, end: str = "\n") -> None:
        # Nobody may be there to read it (a dropped ssh, a pipe into head, a full disk): the run matters more, and
        # metrics.jsonl has it all.
        if self.stream is None:
            return
        with contextlib.suppress(OSError, ValueError):
            print(text, end=end, file=self.stream, flush=True)


class Reports:
    """All of the above, or nothing on processes other than the first."""

    def __init__(self, workdir: Path, clock: Clock, first_step: int, measured: bool = True) -> None:
        self.progress = Progress(clock)
        self.writers: list[Any] = []
        if jax.process_index() == 0:
            file = MetricsFile(workdir / "metrics.jsonl", first_step, measured)
            self.writers = [file, TensorBoard(workdir / "tensorboard", file.rows), self.progress]

    def write(self, step: int, split: str, values: dict[str, float]) -> None:
        for writer in self.writers:
            writer.write(step, split, values)

    def skipped(self, step: int, batch: dict[str, int]) -> None:
        """A step that was left out, and its batch."""
        self.write(step, "skipped", batch)

    def say(self, text: str) -> None:
        if self.writers:
            self.progress.say(text)

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


def number(value: float) -> str:
    """Four significant digits, without an exponent where a person would write none."""
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def duration(seconds: float) -> str:
    """`1h 05m`, `4m 10s` or `12s`."""
    if not math.isfinite(seconds):
        return "?"
    seconds = int(seconds)
    hours, minutes = divmod(seconds // 60, 60)
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {seconds % 60:02d}s" if minutes else f"{seconds}s"
