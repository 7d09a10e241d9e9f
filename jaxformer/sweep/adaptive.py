"""Settings of an adaptive search, as a sweep file gives them. `study` turns them into Optuna's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.sweep.space import Axis, Choice, Numbers, uniform

SAMPLERS = ("tpe", "random")
MODES = ("min", "max")


@dataclass(frozen=True)
class Pruner:
    """A rule that ends bad trials early. `options` are numbers by name."""

    name: str
    options: dict[str, int]


@dataclass(frozen=True)
class Search:
    """An adaptive search; the attributes are the arguments of `search`."""

    trials: int
    seed: int
    axes: dict[str, Axis]
    sampler: str
    startup: int
    pruner: Pruner | None
    metric: str | None
    mode: str | None

    def to_json(self) -> dict[str, Any]:
        """The settings as JSON values, without the number of trials, which may grow."""
        axes = {}
        for path, axis in self.axes.items():
            if isinstance(axis, Choice):
                axes[path] = {"choice": [label(value) for value in axis.values]}
            else:
                axes[path] = dataclasses.asdict(axis)
        pruner = None if self.pruner is None else {"name": self.pruner.name, **self.pruner.options}
        return {
            "seed": self.seed, "axes": axes, "sampler": self.sampler, "startup": self.startup, "pruner": pruner,
            "metric": self.metric, "mode": self.mode,
        }  # fmt: skip


def label(value: Any) -> str:
    """A value of a choice as the study's file has it."""
    return repr(value)


def search(
    trials: int,
    seed: int,
    axes: Mapping[str, Axis],
    *,
    sampler: str = "tpe",
    startup: int = 10,
    pruner: Pruner | None = None,
    metric: str | None = None,
    mode: str | None = None,
) -> Search:
    """A search of `trials` runs, whose values are suggested one after the other from the results so far.

    Args:
      seed: of the sampler. Suggestion n is drawn with a generator of (seed, n).
      axes: `uniform`, `log_uniform`, `integers` or `choice` by config path.
      sampler: "tpe" (tree-structured Parzen estimator: Bergstra et al., Algorithms for Hyper-Parameter Optimization,
        2011) or "random".
      startup: first trials that "tpe" draws at random.
      pruner: of `median`, `halving` or `hyperband`; None: every trial trains to its end.
      metric: measure of the final validation that is searched; None: `checkpoint.metric` of the recipe.
      mode: "min" or "max"; None: `checkpoint.mode`.

    Raises:
      ConfigError: a setting is wrong.
    """
    _check_count("search: trials", trials, 1)
    _check_count("search: seed", seed, 0)
    _check_count("search: startup", startup, 1)
    if not isinstance(axes, Mapping) or not axes:
        raise ConfigError(f"search: got axes {axes!a}, expected a dict from config paths to axes")
    for path, axis in axes.items():
        _check_axis(path, axis)
    if sampler not in SAMPLERS:
        raise ConfigError(f"search: got sampler {sampler!a}, expected one of {', '.join(SAMPLERS)}")
    if pruner is not None and not isinstance(pruner, Pruner):
        raise ConfigError(f"search: got pruner {pruner!a}, expected median(), halving(), hyperband() or None")
    if mode not in (None, *MODES):
        raise ConfigError(f"search: got mode {mode!a}, expected one of {', '.join(MODES)}")
    if metric is not None and (not isinstance(metric, str) or not metric):
        raise ConfigError(f"search: got metric {metric!a}, expected the name of a measure of the validation split")
    return Search(trials, seed, dict(axes), sampler, startup, pruner, metric, mode)


def median(startup: int = 5, warmup: int = 0) -> Pruner:
    """Prunes a trial whose best validation so far is worse than the median of finished trials at the same step.

    Args:
      startup: finished trials before any is pruned.
      warmup: steps of a trial before it is pruned.
    """
    _check_count("median: startup", startup, 1)
    _check_count("median: warmup", warmup, 0)
    return Pruner("median", {"startup": startup, "warmup": warmup})


def halving(first: int, factor: int = 4) -> Pruner:
    """Asynchronous successive halving: one in `factor` trials goes on at steps `first`, `first * factor` and so on.

    Li et al., A System for Massively Parallel Hyperparameter Tuning, 2020. Judged at the next validation.
    """
    _check_count("halving: first", first, 1)
    _check_count("halving: factor", factor, 2)
    return Pruner("halving", {"first": first, "factor": factor})


def hyperband(first: int, factor: int = 3) -> Pruner:
    """Brackets of successive halving that begin at steps `first`, `first * factor` and so on, to `train.steps`.

    Li et al., Hyperband: A Novel Bandit-Based Approach to Hyperparameter Optimization, 2018.
    """
    _check_count("hyperband: first", first, 1)
    _check_count("hyperband: factor", factor, 2)
    return Pruner("hyperband", {"first": first, "factor": factor})


def _check_count(what: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise ConfigError(f"{what}: got {value!a}, expected a whole number of {least} or more")


def _check_axis(path: Any, axis: Any) -> None:
    what = f"search: axis {path!a}"
    if not isinstance(path, str) or not isinstance(axis, (Numbers, Choice)):
        raise ConfigError(f"{what}: got {axis!a}, expected {uniform.__name__}, log_uniform, integers or choice")
    if isinstance(axis, Choice):
        labels = [label(value) for value in axis.values]
        if len(labels) < 2 or len(set(labels)) < len(labels):
            raise ConfigError(f"{what}: got choices {', '.join(labels)}, expected two or more, each once")
        return
    bounds = (axis.low, axis.high)
    are_numbers = all(type(bound) in (int, float) and math.isfinite(bound) for bound in bounds)
    if not are_numbers or axis.low >= axis.high or (axis.log and axis.low <= 0):
        expected = "0 < low < high" if axis.log else "low < high"
        raise ConfigError(f"{what}: got bounds {axis.low} and {axis.high}, expected numbers, {expected}")
    if axis.whole and not all(type(bound) is int for bound in bounds):
        raise ConfigError(f"{what}: got bounds {axis.low} and {axis.high}, expected whole numbers")
