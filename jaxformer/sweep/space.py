"""Lists of edits: grids, random draws, seeds, and their products."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

Edits = dict[str, Any]
"""Values of a config by dotted path."""

Draw = Callable[["np.random.Generator"], Any]
"""Draws one value."""

SEED = "train.seed"


def grid(axes: Mapping[str, Iterable[Any]]) -> list[Edits]:
    """All combinations of the axes' values; the last axis varies fastest."""
    return [dict(zip(axes, values)) for values in itertools.product(*axes.values())]


def random(count: int, seed: int, axes: Mapping[str, Draw]) -> list[Edits]:
    """`count` random draws. The first ones do not change when `count` grows or an axis is added."""
    import numpy as np  # the command line lists the executors of this package without it

    path_seeds = {path: int.from_bytes(hashlib.sha256(path.encode()).digest()[:4]) for path in axes}
    return [
        {path: draw(np.random.default_rng([seed, index, path_seeds[path]])) for path, draw in axes.items()}
        for index in range(count)
    ]


def uniform(low: float, high: float) -> Draw:
    """A number between `low` and `high`."""
    return lambda rng: _round(rng.uniform(low, high))


def log_uniform(low: float, high: float) -> Draw:
    """A number whose logarithm is uniform: for learning rates and other scales."""
    return lambda rng: _round(math.exp(rng.uniform(math.log(low), math.log(high))))


def integers(low: int, high: int) -> Draw:
    """A whole number from `low` to `high`, both included."""
    return lambda rng: int(rng.integers(low, high + 1))


def choice(*values: Any) -> Draw:
    """One of `values`, all equally likely."""
    return lambda rng: values[int(rng.integers(len(values)))]


def seeds(count: int, first: int = 0) -> list[Edits]:
    """Runs that differ in the seed only."""
    return [{SEED: first + i} for i in range(count)]


def cross(*lists: Sequence[Edits]) -> list[Edits]:
    """Every edit of the first list combined with every edit of the others; later lists win where they overlap."""
    return [{k: v for edits in row for k, v in edits.items()} for row in itertools.product(*lists)]


def _round(value: float) -> float:
    return float(f"{value:.4g}")  # directory names contain the values
