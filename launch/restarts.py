"""Bounded restarts with exponential backoff."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

FIRST_DELAY_SECONDS = 10.0
MAX_DELAY_SECONDS = 300.0
STEADY_SECONDS = 1800.0
"""After an attempt that lasted this long, the delays begin anew: it was no failure of the start."""


@dataclass
class Restarts:
    """Counts restarts and says how long to wait before each.

    Attributes:
      limit: restarts allowed in all.
      used: restarts so far.
      in_a_row: restarts since the last attempt that lasted `STEADY_SECONDS`; the delay doubles with each.
    """

    limit: int
    used: int = 0
    in_a_row: int = 0

    def next_delay(self, lasted: float = 0.0) -> float | None:
        """Seconds to wait before the next attempt, which is counted; None if no restart is left.

        Args:
          lasted: seconds that the attempt that has just ended lasted.
        """
        if self.used >= self.limit:
            return None
        if lasted >= STEADY_SECONDS:
            self.in_a_row = 0
        delay = min(FIRST_DELAY_SECONDS * 2.0**self.in_a_row, MAX_DELAY_SECONDS)
        self.used += 1
        self.in_a_row += 1
        return delay


def add_flag(parser: argparse.ArgumentParser, default: int) -> None:
    """Adds --max-restarts."""
    parser.add_argument(
        "--max-restarts", type=int, default=default, help=f"restarts after preemptions and hangs, in all [{default}]"
    )
