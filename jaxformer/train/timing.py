"""How long a run will still take: its steps, evaluations and saves by what each took so far, compilation left out."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

import jax

from jaxformer.config import TrainConfig
from jaxformer.types import Batch

MAX_STEPS = 200
"""So many of the last steps are the rate that the time left is estimated from: batches of all shapes are among them."""


class Clock:
    """Measures the parts of a run.

    Args:
      config: says how many steps, evaluations and saves there are.
      now: seconds; another clock in tests.
    """

    def __init__(self, config: TrainConfig, now: Callable[[], float] = time.monotonic) -> None:
        self.config, self.now = config, now
        self.steps: deque[float] = deque(maxlen=MAX_STEPS)
        self.parts = {"evaluation": 0.0, "save": 0.0}
        self.last = now()

    def lap(self) -> float:
        """Seconds since the last lap."""
        before, self.last = self.last, self.now()
        return self.last - before

    def step(self, compiled: bool) -> None:
        """A step is done. One that was compiled first says nothing of those to come."""
        seconds = self.lap()
        if not compiled:
            self.steps.append(seconds)

    def part(self, name: str, compiling: float = 0.0) -> None:
        """An "evaluation" or a "save" is done, of which `compiling` seconds will not come again."""
        self.parts[name] = max(self.lap() - compiling, 0.0)

    def left(self, step: int) -> float:
        """Seconds from `step` to the end; NaN before any step has been timed. A kind of part that has not happened yet
        counts nothing."""
        if not self.steps:
            return math.nan
        config = self.config
        every = {"evaluation": config.evaluate_every, "save": config.checkpoint_every}
        parts = sum(self.parts[name] * _times(step, config.steps, often) for name, often in every.items())
        return (config.steps - step) * sum(self.steps) / len(self.steps) + parts


def _times(step: int, steps: int, every: int) -> int:
    """How often something that happens every so many steps (0: never) and at the last one happens after `step`."""
    regular = (steps - 1) // every - step // every if every else 0
    return max(regular, 0) + (step < steps)


class Shapes:
    """The shapes of batches that a program has been compiled for.

    Args:
      what: the program, in the line that says that it is being compiled.
      say: prints a line.
    """

    def __init__(self, what: str, say: Callable[[str], None]) -> None:
        self.what, self.say = what, say
        self.seen: set[tuple[tuple[int, ...], ...]] = set()

    def is_new(self, batch: Batch) -> bool:
        """True, and said, at the first batch of its shape: the next call with it compiles, which may take minutes."""
        shapes = tuple(x.shape for x in jax.tree.leaves(batch))
        if shapes in self.seen:
            return False
        self.seen.add(shapes)
        sides = [stream.tokens.shape for stream in (batch.source, batch.target) if stream is not None]
        self.say(f"compiling {self.what} for batch {' -> '.join(' x '.join(map(str, side)) for side in sides)}")
        return True
