"""Estimate of the remaining time of a run: steps, evaluations and saves at their measured durations.

Compilation is left out of them: the laps of steps whose batch has a new shape, of steps during which jax compiled
anything, and of the step after each of these, which waits for it (one step is in flight, see `metric_window.py`).
"""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import jax

from jaxformer.config import TrainConfig
from jaxformer.types import Batch

MAX_TIMED_STEPS = 200
"""Number of latest steps whose mean is the time of a step: enough to include batches of all shapes."""


MIN_TIMED_STEPS = 5
"""Steps that are timed before there is an estimate: the mean of fewer jumps."""

COMPILATION_EVENT = "/jax/core/compile/backend_compile_duration"
"""Event that jax records whenever it has compiled a program, or read it from its cache."""


class CompilationCounter:
    """Counts the programs that jax compiles in this process."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._record)

    def _record(self, event: str, duration_secs: float, **details: Any) -> None:
        self.count += event == COMPILATION_EVENT

    @staticmethod
    @functools.cache
    def shared() -> CompilationCounter:
        """The counter of the process: jax keeps listeners for ever."""
        return CompilationCounter()


class Clock:
    """Measures the durations of steps, evaluations and saves.

    Args:
      config: says how many of them there are.
      now: the time in seconds; tests replace it.
      compiled: the number of programs compiled so far; tests replace it.
    """

    def __init__(
        self,
        config: TrainConfig,
        now: Callable[[], float] = time.monotonic,
        compiled: Callable[[], int] | None = None,
    ) -> None:
        self.config, self.now = config, now
        self.compiled = compiled or (lambda: CompilationCounter.shared().count)
        self.last_count, self.follows_compilation = self.compiled(), False
        self.steps: deque[float] = deque(maxlen=MAX_TIMED_STEPS)
        self.parts = {"evaluation": 0.0, "save": 0.0}
        self.last = now()

    def lap(self) -> float:
        """Seconds since the last lap, and starts a new one."""
        before, self.last = self.last, self.now()
        return self.last - before

    def record_step(self, compiled: bool) -> None:
        """Ends the lap of a step. It does not count if it or the step before it compiled.

        Args:
          compiled: its batch has a new shape.
        """
        seconds, count = self.lap(), self.compiled()
        compiled = compiled or count != self.last_count
        self.last_count = count
        if not compiled and not self.follows_compilation:
            self.steps.append(seconds)
        self.follows_compilation = compiled

    def record_part(self, name: str, compile_seconds: float = 0.0) -> None:
        """Ends the lap of an "evaluation" or a "save", of which `compile_seconds` will not recur."""
        self.parts[name] = max(self.lap() - compile_seconds, 0.0)
        self.last_count = self.compiled()

    def remaining(self, step: int) -> float:
        """Seconds from `step` to the end of the run; NaN before enough steps have been timed.

        Evaluations and saves count 0 until the first of them has been measured.
        """
        config = self.config
        if step >= config.steps:
            return 0.0
        if len(self.steps) < MIN_TIMED_STEPS:
            return math.nan
        intervals = {"evaluation": config.evaluate_every, "save": config.checkpoint_every}
        parts = sum(self.parts[name] * _remaining_count(step, config.steps, every) for name, every in intervals.items())
        return (config.steps - step) * sum(self.steps) / len(self.steps) + parts


def is_due(step: int, every: int) -> bool:
    """True if something that happens every `every` steps (0: never) happens at `step`."""
    return every > 0 and step % every == 0


def _remaining_count(step: int, steps: int, every: int) -> int:
    """Number of times after `step` that something happens every `every` steps (0: never) and at the last step."""
    regular = (steps - 1) // every - step // every if every else 0
    return max(regular, 0) + (step < steps)


class CompiledShapes:
    """The batch shapes that a program has been compiled for.

    Args:
      program: its name in the log.
      log: logs a line.
    """

    def __init__(self, program: str, log: Callable[[str], None]) -> None:
        self.program, self.log = program, log
        self.shapes: set[tuple[tuple[int, ...], ...]] = set()

    def is_new(self, batch: Batch) -> bool:
        """True for the first batch of its shape, whose call compiles and may take minutes. Logs that."""
        shapes = tuple(x.shape for x in jax.tree.leaves(batch))
        if shapes in self.shapes:
            return False
        self.shapes.add(shapes)
        sides = [stream.tokens.shape for stream in (batch.source, batch.target) if stream is not None]
        text = " -> ".join(" x ".join(map(str, side)) for side in sides)
        self.log(f"compiling {self.program} for batch {text}")
        return True
