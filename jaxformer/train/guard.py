"""Steps that are not finite, or a spike: `train/step.py` leaves them out, this says which, and when to give up."""

from __future__ import annotations

from typing import Any, Callable

from jaxformer.config import ConfigError
from jaxformer.types import Array, Sums


class Guard:
    """Counts the steps left out.

    A step that was left out changes nothing but the step number: neither parameters, nor moments and the count that
    the learning rate goes by, nor batch statistics, nor the average. Its batch is passed over.

    Args:
      limit: so many in a row end the run.
      row: how many in a row there were when the run was saved.
      report: called with a step and what to say of it: the batch, how many in a row, and whether it was a spike.
      newest: the newest checkpoint, or None.
    """

    def __init__(
        self, limit: int, row: int, report: Callable[[int, dict[str, int]], None], newest: Callable[[], Any]
    ) -> None:
        self.limit, self.row, self.report, self.newest = limit, row, report, newest
        self.pending: list[tuple[int, Array, Array | float, dict[str, int]]] = []

    def add(self, step: int, sums: Sums, batch: dict[str, int]) -> None:
        """A step on its way to the device; looks at the one before it, which is done by then.

        Args:
          batch: which one it is: epoch, block, batch.
        """
        self.settle()
        self.pending.append((step, sums["skipped"][0], sums.get("spiked", (0.0,))[0], batch))

    def settle(self) -> None:
        """Looks at the steps not looked at.

        Raises:
          ConfigError: there were too many in a row.
        """
        pending, self.pending = self.pending, []
        for step, skipped, spiked, batch in pending:
            self.row = self.row + 1 if float(skipped) else 0
            if self.row:
                self.report(step, {**batch, "in_a_row": self.row, "spike": int(float(spiked))})
            if self.row >= self.limit:
                where = ", ".join(f"{name} {number}" for name, number in batch.items())
                raise ConfigError(
                    f"train: got {self.row} steps in a row whose loss or gradient is not finite or a spike (the last: "
                    f"step {step}, {where}), expected finite ones within optimizer.spike; the last good checkpoint is "
                    f"{self.newest() or 'none'}: start another --workdir from it by config.init.directory, at a lower "
                    "rate, or see to these batches"
                )
