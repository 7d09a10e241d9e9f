"""Reports of a run: a progress line, `metrics.jsonl`, TensorBoard events. Only the first process writes them."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

import jax

from jaxformer.runtime import files, terminal, units
from jaxformer.train.timing import Clock

LOG = logging.getLogger("jaxformer")

Values = Mapping[str, float]


class Writer(Protocol):
    """A destination of reports."""

    def write(self, step: int, split: str, values: Values) -> None:
        """Writes the values of a split ("train", "validation", "skipped") at a step."""
        ...

    def close(self) -> None:
        """Writes what is buffered."""
        ...


class MetricsFile:
    """`metrics.jsonl`: one JSON object per line with `step`, `wall_time` (Unix seconds), `split` and the values.

    Attributes:
      rows: the rows that were in the file and are kept.
    """

    def __init__(self, path: Path, first_step: int, evaluated: bool = True) -> None:
        """Opens `path` and drops the rows that a killed process wrote after its last save, so no row occurs twice.

        Args:
          first_step: step of the state that the run starts from; rows of later steps are dropped.
          evaluated: True if that state was evaluated. Otherwise its evaluation rows are dropped too, since the run
            evaluates it again.
        """
        self.path = path
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            rows = [files.parse_metrics_row(line) for line in lines]
            edited = [number for number, row in enumerate(rows[:-1], 1) if row is None]  # the last may be incomplete
            if edited:
                LOG.warning("%s: %d lines cannot be read, left out; the first is line %d", path, len(edited), edited[0])
            for row in filter(None, rows):
                if row["step"] < first_step or (row["step"] == first_step and (evaluated or row["split"] == "train")):
                    self.rows.append(row)
            if len(self.rows) != len(rows):
                files.write_atomic(path, "".join(json.dumps(row) + "\n" for row in self.rows))
        self.file = path.open("a", encoding="utf-8")

    def write(self, step: int, split: str, values: Values) -> None:
        """Appends a row. Values that are not finite become null, since JSON has no NaN."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        row = {"step": step, "wall_time": round(time.time(), 3), "split": split, **finite}
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    def close(self) -> None:
        """Closes the file."""
        self.file.close()


class TensorBoard:
    """TensorBoard event files in the workdir with the rows of `metrics.jsonl`, under tags `split/name`.

    A resumed run writes them anew from `rows`, since a killed process may have written too many or too few.
    """

    def __init__(self, path: Path, rows: Iterable[dict[str, Any]] = ()) -> None:
        from tensorboardX import SummaryWriter  # slow to import, and only one process needs it

        for events in path.glob("events.out.tfevents.*"):
            events.unlink()
        self.writer = SummaryWriter(str(path))
        for row in rows:
            values = {name: value for name, value in row.items() if name not in ("step", "wall_time", "split")}
            self._add(row["step"], row["split"], values, row.get("wall_time"))
        self.writer.flush()

    def write(self, step: int, split: str, values: Values) -> None:
        """Adds the values as scalars."""
        self._add(step, split, values, None)
        self.writer.flush()

    def _add(self, step: int, split: str, values: Mapping[str, Any], wall_time: float | None) -> None:
        for name, value in values.items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                self.writer.add_scalar(f"{split}/{name}", value, step, walltime=wall_time)

    def close(self) -> None:
        """Closes the event file."""
        self.writer.close()


SPARK_VALUES = 16
"""Latest losses in the sparkline of the live line."""


class ProgressLine:
    """Progress for people: one line that is redrawn on a terminal, one plain line per report elsewhere.

    The live line is as wide as the terminal: where it is narrow, the less important values are left out. It has a
    sparkline of the latest losses where the encoding allows. A terminal that cannot redraw, as with TERM=dumb, gets
    plain lines.
    """

    def __init__(self, clock: Clock, stream: TextIO | None = None) -> None:
        self.clock, self.stream = clock, sys.stderr if stream is None else stream
        self.live = terminal.LiveLine(self.stream) if terminal.can_redraw(self.stream) else None
        self.losses: deque[float] = deque(maxlen=SPARK_VALUES)
        self.last_evaluation = ""
        self.live_parts: dict[str, str] = {}

    def write(self, step: int, split: str, values: Values) -> None:
        """Prints or redraws the line of a report."""
        if split == "skipped":
            batch = ", ".join(f"{name} {values[name]:,}" for name in values if name not in ("in_a_row", "spike"))
            reason = "gradient is a spike" if values["spike"] else "loss or gradient is not finite"
            text = f"step {step:,}  skipped: its {reason} ({batch})"
            self.log(terminal.coloured(text, terminal.YELLOW, self.stream))
            return
        if split != "train":
            self.last_evaluation = f"{split} " + "  ".join(f"{k} {format_number(v)}" for k, v in values.items())
            self.log(f"step {step:,}  {self.last_evaluation}")
            return
        self.losses.append(values["loss"])
        parts = self._parts(step, values)
        if self.live is None:
            self._print("  ".join(parts.values()))
            return
        if terminal.can_encode(terminal.BLOCKS, self.stream):
            parts["spark"] = terminal.sparkline(list(self.losses))
        if self.last_evaluation:
            parts["evaluation"] = f"[{self.last_evaluation}]"
        self.live_parts = parts
        self._show()

    def _parts(self, step: int, values: Values) -> dict[str, str]:
        """The words of a line by their meaning, in the order of a log."""
        return {
            "step": f"step {step:,}/{self.clock.config.steps:,}",
            "loss": f"loss {values['loss']:.4f}",
            "rate": f"lr {values['learning_rate']:.2e}",
            "norm": f"|g| {values['gradient_norm']:.2f}",
            "speed": f"{values['tokens_per_second']:,.0f} tok/s",
            "padding": f"padding {values['padding']:.0%}",
            "left": f"left {units.format_duration(self.clock.remaining(step))}",
        }

    def log(self, text: str) -> None:
        """Prints a line that is not redrawn, above the live line."""
        if self.live is not None:
            with contextlib.suppress(OSError, ValueError):
                self.live.clear()
        self._print(text)
        self._show()

    def close(self) -> None:
        """Ends the line that is being redrawn."""
        if self.live is not None:
            with contextlib.suppress(OSError, ValueError):
                self.live.end()

    def _show(self) -> None:
        """Draws the live line, as wide as the terminal is now."""
        if self.live is not None and self.live_parts:
            with contextlib.suppress(OSError, ValueError):
                self.live.show(fit_parts(self.live_parts, terminal.columns() - 1, self.stream))

    def _print(self, text: str) -> None:
        # The reader may be gone (a dropped ssh, a pipe into head, a full disk). metrics.jsonl has everything.
        if self.stream is None:
            return
        with contextlib.suppress(OSError, ValueError):
            print(text, file=self.stream, flush=True)


LIVE_ORDER = ("step", "loss", "spark", "left", "speed", "rate", "norm", "padding", "evaluation")
"""Parts of the live line, from left to right."""
LIVE_PRIORITY = ("step", "left", "loss", "spark", "speed", "rate", "norm", "evaluation", "padding")
"""Parts of the live line, the most important first."""


def fit_parts(parts: Mapping[str, str], width: int, stream: TextIO | None = None) -> str:
    """The parts of the live line that fit into `width` columns, the important ones before the others.

    Args:
      stream: where the line goes: its sparkline has a colour where the stream allows.
    """
    if len(parts["step"]) > width:
        return parts["step"][: max(width, 0)]
    kept: set[str] = set()
    used = -2
    for name in LIVE_PRIORITY:
        if name in parts and used + 2 + len(parts[name]) <= width:
            kept.add(name)
            used += 2 + len(parts[name])
    shown = {name: parts[name] for name in LIVE_ORDER if name in kept}
    if "spark" in shown:
        shown["spark"] = terminal.coloured(shown["spark"], terminal.CYAN, stream)
    return "  ".join(shown.values())


class Reporter:
    """All reports of a run on the first process; nothing on the others."""

    def __init__(self, workdir: Path, clock: Clock, first_step: int, evaluated: bool = True) -> None:
        self.progress = ProgressLine(clock)
        self.writers: list[Writer] = []
        if jax.process_index() == 0:
            file = MetricsFile(workdir / "metrics.jsonl", first_step, evaluated)
            self.writers = [file, TensorBoard(workdir / "tensorboard", file.rows), self.progress]

    def write(self, step: int, split: str, values: Values) -> None:
        """Reports the values of a split at a step."""
        for writer in self.writers:
            writer.write(step, split, values)

    def log_skipped(self, step: int, values: Mapping[str, int]) -> None:
        """Reports a skipped step and its batch."""
        self.write(step, "skipped", values)

    def log(self, text: str) -> None:
        """Prints a line for people."""
        if self.writers:
            self.progress.log(text)

    def close(self) -> None:
        """Closes all files."""
        for writer in self.writers:
            writer.close()


def format_number(value: float) -> str:
    """Four significant digits; from 10,000 on, thousands separators and no exponent."""
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
