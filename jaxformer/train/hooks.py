"""What a run tells the world: a progress line, `metrics.jsonl`, TensorBoard events. Only the first process speaks."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import jax


class MetricsFile:
    """Appends one JSON object a line: `step`, `wall_time` (Unix seconds), `split`, and the values."""

    def __init__(self, path: Path, first_step: int) -> None:
        """Opens `path`; rows of steps after `first_step` are dropped, so a resumed run leaves no row twice."""
        self.path = path
        if path.exists():
            rows = [line for line in path.read_text().splitlines() if _step(line) is not None]
            kept = [line for line in rows if _step(line) <= first_step]
            if len(kept) != len(path.read_text().splitlines()):
                temporary = path.with_suffix(".tmp")
                temporary.write_text("".join(line + "\n" for line in kept))
                temporary.replace(path)
        self.file = path.open("a")

    def write(self, step: int, split: str, values: dict[str, float]) -> None:
        # JSON has no NaN: a value that is not finite is written as null.
        clean = {name: value if math.isfinite(value) else None for name, value in values.items()}
        row = {"step": step, "wall_time": round(time.time(), 3), "split": split, **clean}
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def _step(line: str) -> int | None:
    """The step of a row, or None for a torn one."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row.get("step") if isinstance(row, dict) else None


class TensorBoard:
    """TensorBoard event files in the workdir, tags `split/name`."""

    def __init__(self, path: Path, first_step: int) -> None:
        from tensorboardX import SummaryWriter  # slow to import, and only one process needs it

        self.writer = SummaryWriter(str(path), purge_step=first_step + 1 if first_step else None)

    def write(self, step: int, split: str, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(f"{split}/{name}", value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class Progress:
    """A line that a person likes to watch: redrawn on a terminal, one plain line a report elsewhere."""

    def __init__(self, steps: int, first_step: int, stream: TextIO = sys.stderr) -> None:
        self.steps, self.stream = steps, stream
        self.live = stream.isatty()
        self.begun, self.first_step = time.monotonic(), first_step
        self.last_evaluation = ""

    def write(self, step: int, split: str, values: dict[str, float]) -> None:
        if split != "train":
            self.last_evaluation = f"{split} " + "  ".join(f"{k} {number(v)}" for k, v in values.items())
            self.say(f"step {step:,}  {self.last_evaluation}")
            return
        rate = (step - self.first_step) / max(time.monotonic() - self.begun, 1e-9)
        left = (self.steps - step) / max(rate, 1e-9)
        line = (
            f"step {step:,}/{self.steps:,}  loss {values['loss']:.4f}  lr {values['learning_rate']:.2e}"
            f"  |g| {values['gradient_norm']:.2f}  {values['tokens_per_second']:,.0f} tok/s"
            f"  padding {values['padding']:.0%}  left {duration(left)}"
        )
        if self.live:
            tail = f"  [{self.last_evaluation}]" if self.last_evaluation else ""
            self.stream.write("\r\x1b[K" + line + tail)
            self.stream.flush()
        else:
            print(line, file=self.stream, flush=True)

    def say(self, text: str) -> None:
        """A line that stays."""
        print(("\r\x1b[K" if self.live else "") + text, file=self.stream, flush=True)

    def close(self) -> None:
        if self.live:
            print(file=self.stream, flush=True)


class Reports:
    """All of the above, or nothing on processes other than the first."""

    def __init__(self, workdir: Path, steps: int, first_step: int) -> None:
        self.progress = Progress(steps, first_step)
        self.writers: list[Any] = []
        if jax.process_index() == 0:
            self.writers = [
                MetricsFile(workdir / "metrics.jsonl", first_step),
                TensorBoard(workdir / "tensorboard", first_step),
                self.progress,
            ]

    def write(self, step: int, split: str, values: dict[str, float]) -> None:
        for writer in self.writers:
            writer.write(step, split, values)

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
