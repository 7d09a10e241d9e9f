"""Early stopping: a run ends once its validation has not become better for a while (`config.train.patience`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxformer.config import CheckpointConfig
from jaxformer.errors import ConfigError


class Patience:
    """Counts the evaluations in a row that were no better than the best before them.

    Better is by `checkpoint.metric` and `checkpoint.mode`; an equal value is not, nor is one that is not finite.

    Args:
      limit: number of such evaluations that ends the run; None: none does.
      config: says which measure counts.
      state: of `state()`, from a checkpoint; None: a new run.

    Attributes:
      waited: evaluations since the best one.
      best: the best value; None: there is none yet.
    """

    def __init__(self, limit: int | None, config: CheckpointConfig, state: Mapping[str, Any] | None = None) -> None:
        self.limit, self.config = limit, config
        self.waited: int = 0 if state is None else state["waited"]
        self.best: float | None = None if state is None else state["best"]

    def add(self, values: Mapping[str, float]) -> None:
        """Counts an evaluation.

        Raises:
          ConfigError: the measure is not among the values.
        """
        name = self.config.metric
        if name not in values:
            if self.limit is None:
                return
            raise ConfigError(
                f"config.checkpoint.metric: got {name!r}, expected a measure of the validation split "
                f"({', '.join(sorted(values))}) for train.patience; choose one of these"
            )
        value, sign = float(values[name]), 1 if self.config.mode == "max" else -1
        if math.isfinite(value) and (self.best is None or sign * value > sign * self.best):
            self.best, self.waited = value, 0
        else:
            self.waited += 1

    @property
    def is_exhausted(self) -> bool:
        """True if the run has to end."""
        return self.limit is not None and self.waited >= self.limit

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, as JSON values."""
        return {"waited": self.waited, "best": self.best}

    def describe(self) -> str:
        """For people: what was waited for."""
        best = "no finite value" if self.best is None else f"the best is {self.best:.6g}"
        return f"{self.waited} evaluations without a better {self.config.metric} ({best})"
