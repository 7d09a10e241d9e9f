"""Prints the command of every unfinished run, for other schedulers."""

from __future__ import annotations

import shlex

from jaxformer.sweep.planning import Plan


def check(plan: Plan, workers: int) -> None:
    """Accepts every plan."""


def execute(plan: Plan, workers: int) -> int:
    """Prints a line for each unfinished run; `workers` has no effect."""
    for run in plan.unfinished:
        print(shlex.join(run.command))
    return 0
