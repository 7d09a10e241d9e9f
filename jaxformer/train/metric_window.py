"""Sums and rates of the training steps between two log entries."""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np

from jaxformer import metrics
from jaxformer.data import packing
from jaxformer.types import Batch, Sums


class MetricWindow:
    """Sums since the last log entry. They stay on the device until they are read.

    Args:
      saved: what `state` returned, for a run resumed between two log entries.
      processes: number of processes that read different rows of a batch, this one included.
    """

    def __init__(self, saved: dict[str, Any] | None = None, processes: int = 1) -> None:
        self.processes = processes
        self._reset(saved)

    def _reset(self, saved: dict[str, Any] | None = None) -> None:
        saved = saved or {"total": {}, "slots": [0.0, 0.0], "seconds": 0.0, "steps": 0}
        self.total: Sums = {name: (np.float64(n), np.float64(d)) for name, (n, d) in saved["total"].items()}
        self.slots, self.seconds, self.steps = np.array(saved["slots"]), saved["seconds"], saved["steps"]
        self.sums: list[Sums] = []
        self.started = time.monotonic()

    def add(self, sums: Sums, batch: Batch) -> None:
        """Adds a step's sums, which the device may still be computing, and waits for the step before it."""
        if self.sums:
            # One step is in flight while the host prepares the next batch; the host never runs further ahead.
            jax.block_until_ready(self.sums[-1])
        self.sums.append(sums)
        self.slots += packing.padding_counts(batch)
        self.steps += 1

    def pause(self) -> None:
        """Waits for the last step and stops the clock, before work that is not training."""
        jax.block_until_ready(self.sums[-1:])
        self.seconds += time.monotonic() - self.started

    def resume(self) -> None:
        """Starts the clock again after `pause`."""
        self.started = time.monotonic()

    def state(self) -> dict[str, Any]:
        """JSON values from which a resumed run reports the same means and rates. Call it only while paused."""
        total = {name: [np.asarray(part).tolist() for part in pair] for name, pair in self._fetch().items()}
        return {"total": total, "slots": self.slots.tolist(), "seconds": self.seconds, "steps": self.steps}

    def flush(self) -> dict[str, float]:
        """Means over the window, with its rates, and starts a new window.

        Beside the means: `tokens_per_second` and `steps_per_second`; `padding`, the fraction of slots; `skipped`, the
        number of skipped steps, which count in the rates only; and `spiked`, how many of these were spikes.

        `tokens_per_second` counts the tokens that the model reads, source and target, without padding. With several
        processes it is the rate of this one times their number.
        """
        total = self._fetch()
        seconds = self.seconds + time.monotonic() - self.started
        values = metrics.divide(total)
        values["tokens_per_second"] = float(self.slots[1] - self.slots[0]) * self.processes / seconds
        values["steps_per_second"] = self.steps / seconds
        values["padding"] = float(self.slots[0] / max(self.slots[1], 1.0))
        values |= {name: float(np.asarray(total[name][0])) for name in ("skipped", "spiked") if name in total}
        self._reset()
        return values

    def _fetch(self) -> Sums:
        """Total of the window, fetched from the device."""
        for sums in jax.device_get(self.sums):
            self.total = metrics.add(self.total, sums) if self.total else sums
        self.sums = []
        return self.total
