"""Reports of a run: a progress line, `metrics.jsonl`, trackers. Only the first process writes them."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import jax

from jaxformer.config import Config
from jaxformer.runtime import files, terminal, units
from jaxformer.train.timing import Clock
from jaxformer.train.trackers import Row
from jaxformer.train.trackers._delivery import Deliveries

LOG = logging.getLogger("jaxformer")

Values = Mapping[str, float]


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
        self.file, self.count = path.open("a", encoding="utf-8"), len(self.rows)

    def write(self, step: int, split: str, values: Values) -> Row:
        """Appends a row and returns it. Values that are not finite become null, since JSON has no NaN."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        row = Row(self.count, step, split, finite, round(time.time(), 3))
        self.file.write(json.dumps({"step": step, "wall_time": row.wall_time, "split": split, **finite}) + "\n")
        self.file.flush()
        self.count += 1
        return row

    def close(self) -> None:
        """Closes the file."""
        self.file.close()


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
        """The parts of a log line by name, in their order."""
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
                self.live.show(fit_parts(self.live_parts, terminal.columns(self.stream) - 1, self.stream))

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

    def __init__(
        self,
        workdir: Path,
        clock: Clock,
        first_step: int,
        evaluated: bool,
        config: Config,
        stream: TextIO | None = None,
    ) -> None:
        self.progress = ProgressLine(clock, stream)
        self.is_first = jax.process_index() == 0
        if self.is_first:
            self.file = MetricsFile(workdir / "metrics.jsonl", first_step, evaluated)
            rows = [Row.from_json(index, row) for index, row in enumerate(self.file.rows)]
            self.trackers = Deliveries(config, workdir, rows, self.progress.log)

    def write(self, step: int, split: str, values: Values) -> None:
        """Reports the values of a split ("train", "validation", "skipped") at a step."""
        if self.is_first:
            self.trackers.add(self.file.write(step, split, values))
            self.progress.write(step, split, values)

    def log_skipped(self, step: int, values: Mapping[str, int]) -> None:
        """Reports a skipped step and its batch."""
        self.write(step, "skipped", values)

    def log(self, text: str) -> None:
        """Prints a line for people."""
        if self.is_first:
            self.progress.log(text)

    def close(self, is_finished: bool) -> None:
        """Closes the file, then the trackers, with the final measures of a run that is finished."""
        if self.is_first:
            self.progress.close()
            self.file.close()
            self.trackers.close(is_finished)


def format_number(value: float) -> str:
    """Four significant digits; from 10,000 on, thousands separators and no exponent."""
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
