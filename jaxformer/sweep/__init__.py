"""Sweeps: one recipe, a list of edits of it, a workdir for each, and a ranking at the end.

A sweep file defines `SWEEP`, a list of dicts from config paths to values, built from the functions of this package:

    from jaxformer.sweep import choice, cross, grid, log_uniform, random, seeds

    SWEEP = cross(grid({"model.encoder.norm.order": ["pre", "post"]}), seeds(3))
    SWEEP = random(20, 0, {"schedule.peak": log_uniform(1e-4, 1e-2), "task.label_smoothing": choice(0.0, 0.1)})

or a search, whose next values depend on the results so far (extra `[search]`):

    from jaxformer.sweep import choice, log_uniform, median, search

    SWEEP = search(20, 0, {"schedule.peak": log_uniform(1e-4, 1e-2)}, pruner=median(warmup=100))

`planning` checks every config before a run starts, `executors` start the unfinished runs, and `ranking` orders the
results. No module of the package imports jax.
"""

from jaxformer.sweep.adaptive import halving, hyperband, median, search
from jaxformer.sweep.space import choice, cross, grid, integers, log_uniform, random, seeds, uniform

__all__ = [
    "choice",
    "cross",
    "grid",
    "halving",
    "hyperband",
    "integers",
    "log_uniform",
    "median",
    "random",
    "search",
    "seeds",
    "uniform",
]
