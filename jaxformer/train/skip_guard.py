"""Skipped steps: a step whose loss or gradient is not finite, or whose gradient is a spike, changes nothing.

`train/step.py` skips it on the device. Here are the running statistics that define a spike, and `SkipGuard`, which
reports skipped steps on the host and ends the run after too many in a row.

The mean m and variance s of the gradient's norm are exponentially weighted: with d = |g| - m and a = 1 / 100, m grows
by a d, and s becomes (1 - a) (s + a d^2) (Finch 2009, "Incremental calculation of weighted mean and variance"). They
are part of the optimizer's state, so a skipped step does not change them and a resumed run continues with them.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from jaxformer.errors import ConfigError
from jaxformer.types import Array, PyTree, Sums

NORM_WINDOW = 100
"""Number of updates that the running mean covers. No norm is a spike before so many updates."""


class NormStatistics(NamedTuple):
    """Running statistics of the gradient's norm; scalars.

    Attributes:
      count: number of norms.
      mean: their weighted mean.
      variance: their weighted variance.
    """

    count: Array
    mean: Array
    variance: Array


def track_gradient_norm() -> optax.GradientTransformationExtraArgs:
    """Transformation that keeps `NormStatistics` of its argument `norm` and leaves the updates as they are.

    `norm` is the norm of the gradient before clipping.
    """

    def init(params: PyTree) -> NormStatistics:
        return NormStatistics(jnp.zeros((), jnp.int32), jnp.zeros(()), jnp.zeros(()))

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, NormStatistics]:
        weight = 1.0 / jnp.minimum(state.count + 1, NORM_WINDOW)  # the plain mean over the first updates
        deviation = extra_args["norm"].astype(jnp.float32) - state.mean
        variance = (1.0 - weight) * (state.variance + weight * deviation**2)
        return updates, NormStatistics(state.count + 1, state.mean + weight * deviation, variance)

    return optax.GradientTransformationExtraArgs(init, update)


def is_spike(state: PyTree, norm: Array, sigma: float) -> Array:
    """True if `norm` is more than `sigma` standard deviations above the running mean in the optimizer's `state`."""
    norms: NormStatistics = state[0]
    return (norms.count >= NORM_WINDOW) & (norm > norms.mean + sigma * jnp.sqrt(norms.variance))


class SkippedStep(NamedTuple):
    """Flags of a step, possibly still being computed, and the batch that it read."""

    step: int
    skipped: ArrayLike
    spiked: ArrayLike
    batch: dict[str, int]


class SkipGuard:
    """Counts skipped steps in a row, reports them, and ends the run at a limit.

    A skipped step changes the step number only: not the parameters, the moments, the count that the learning rate goes
    by, batch statistics or the moving average. Its batch is not read again.

    Args:
      limit: number of skipped steps in a row that ends the run.
      consecutive: skipped steps in a row when the run was saved.
      report: called as `report(step, values)` for each skipped step; the values are the batch, the number in a row and
        1 if it was a spike.
      newest: returns the newest checkpoint, or None.
    """

    def __init__(
        self,
        limit: int,
        consecutive: int,
        report: Callable[[int, dict[str, int]], None],
        newest: Callable[[], object],
    ) -> None:
        self.limit, self.consecutive, self.report, self.newest = limit, consecutive, report, newest
        self.pending: list[SkippedStep] = []

    def add(self, step: int, sums: Sums, batch: dict[str, int]) -> None:
        """Adds a step that the device may still be computing; checks the step before it, which is done.

        Args:
          sums: of the step.
          batch: epoch, block and number of its batch.
        """
        self.check()
        self.pending.append(SkippedStep(step, sums["skipped"][0], sums.get("spiked", (0.0,))[0], batch))

    def check(self) -> None:
        """Waits for the steps not checked yet and checks them.

        Raises:
          ConfigError: too many steps in a row were skipped.
        """
        pending, self.pending = self.pending, []
        for step, skipped, spiked, batch in pending:
            self.consecutive = self.consecutive + 1 if bool(skipped) else 0
            if self.consecutive:
                self.report(step, {**batch, "in_a_row": self.consecutive, "spike": int(bool(spiked))})
            if self.consecutive >= self.limit:
                where = ", ".join(f"{name} {number}" for name, number in batch.items())
                raise ConfigError(
                    f"train: got {self.consecutive} steps in a row whose loss or gradient is not finite or a spike "
                    f"(the last: step {step}, {where}), expected finite ones within optimizer.spike; the last good "
                    f"checkpoint is {self.newest() or 'none'}: start another --workdir from it by "
                    "config.init.directory, at a lower rate, or inspect these batches"
                )
