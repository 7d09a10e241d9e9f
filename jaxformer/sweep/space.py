"""Lists of edits: grids, random draws, seeds, and their products; the axes of random draws and of searches."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxformer.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

Edits = dict[str, Any]
"""Values of a config by dotted path."""

SEED = "train.seed"


@dataclass(frozen=True)
class Numbers:
    """Numbers from `low` to `high`. A call draws one.

    Attributes:
      log: the logarithm is uniform.
      whole: integers, `high` included.
    """

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def __call__(self, rng: np.random.Generator) -> Any:
        if self.whole:
            return int(rng.integers(int(self.low), int(self.high) + 1))
        if self.log:
            return round_value(math.exp(rng.uniform(math.log(self.low), math.log(self.high))))
        return round_value(rng.uniform(self.low, self.high))


@dataclass(frozen=True)
class Choice:
    """One of `values`. A call draws one."""

    values: tuple[Any, ...]

    def __call__(self, rng: np.random.Generator) -> Any:
        return self.values[int(rng.integers(len(self.values)))]


Axis = Numbers | Choice


def grid(axes: Mapping[str, Iterable[Any]]) -> list[Edits]:
    """All combinations of the axes' values; the last axis varies fastest."""
    return [dict(zip(axes, values)) for values in itertools.product(*axes.values())]


def random(count: int, seed: int, axes: Mapping[str, Axis]) -> list[Edits]:
    """`count` random draws. The first ones do not change when `count` grows or an axis is added."""
    import numpy as np  # the command line lists the executors of this package without it

    path_seeds = {path: int.from_bytes(hashlib.sha256(path.encode()).digest()[:4]) for path in axes}
    return [
        {path: draw(np.random.default_rng([seed, index, path_seeds[path]])) for path, draw in axes.items()}
        for index in range(count)
    ]


def uniform(low: float, high: float) -> Numbers:
    """A number between `low` and `high`."""
    return Numbers(low, high)


def log_uniform(low: float, high: float) -> Numbers:
    """A number whose logarithm is uniform: for learning rates and other scales."""
    return Numbers(low, high, log=True)


def integers(low: int, high: int) -> Numbers:
    """A whole number from `low` to `high`, both included."""
    return Numbers(low, high, whole=True)


def choice(*values: Any) -> Choice:
    """One of `values`, all equally likely."""
    return Choice(values)


def seeds(count: int, first: int = 0) -> list[Edits]:
    """Runs that differ in the seed only."""
    return [{SEED: first + i} for i in range(count)]


def cross(*lists: Sequence[Edits]) -> list[Edits]:
    """Every edit of the first list combined with every edit of the others; later lists win where they overlap.

    Raises:
      ConfigError: an argument is no list, such as a search.
    """
    for rows in lists:
        if not isinstance(rows, (list, tuple)):
            raise ConfigError(f"cross: got {type(rows).__name__}, expected lists of edits; a search is SWEEP by itself")
    return [{k: v for edits in row for k, v in edits.items()} for row in itertools.product(*lists)]


def round_value(value: float) -> float:
    """`value` with four significant digits: directory names contain it."""
    return float(f"{value:.4g}")
