"""What the two sides of `gpu.py` share, so that they are judged alike: tokens, the verdict on a run, its figures."""

from __future__ import annotations

import json
import math
import statistics
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

MARK = "ROW "
"""Begins each line of a child's output that is a row."""


class Timing(NamedTuple):
    """How a step is timed: `windows` of `steps` steps, after `batches` of warm-up; the batches come in turn."""

    windows: int
    steps: int
    batches: int


FULL, TOY = Timing(7, 4, 4), Timing(2, 2, 2)


def tokens(rows: int, length: int, vocab: int, seed: int) -> np.ndarray:
    """int32 `[rows, length]`, the n-th token with a probability of about 1 / n: a loss has something to learn."""
    shares = 1.0 / np.arange(1, vocab + 1)
    drawn = np.random.default_rng(seed).random((rows, length))
    return np.searchsorted(np.cumsum(shares / shares.sum()), drawn).clip(max=vocab - 1).astype(np.int32)


def wrong(losses: Sequence[float], batches: int) -> str | None:
    """Why a run has no figures, or None. The last pass over the batches must have a lower loss than the first."""
    if not all(map(math.isfinite, losses)):
        return "the loss was not finite"
    first, last = (statistics.fmean(part) for part in (losses[:batches], losses[-batches:]))
    return None if last < first else f"the loss did not fall: {first:.4f}, then {last:.4f}"


def figures(seconds: Sequence[float], steps: int, positions: int) -> dict[str, float]:
    """Of windows of `steps` steps: the median, and the distance of the fastest from the slowest as a share of it."""
    each = [window / steps for window in seconds]
    median = statistics.median(each)
    return {
        "tokens_per_second": positions / median,
        "step_ms": 1e3 * median,
        "spread": (max(each) - min(each)) / median,
    }


def out_of_memory(error: BaseException) -> bool:
    text = f"{type(error).__name__}: {error}"
    return "RESOURCE_EXHAUSTED" in text or "OutOfMemory" in text or "out of memory" in text.lower()


def failure(error: BaseException) -> dict[str, str]:
    """A row that says what happened: in a line, and with the end of the traceback."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    trace = "".join(traceback.format_exception(error))[-3000:]
    return {"failed": "out of memory" if out_of_memory(error) else text, "message": trace}


def guarded(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a check returns; one that breaks must not hide the others."""
    try:
        return function()
    except Exception as error:
        return failure(error)


def say(row: dict[str, Any]) -> None:
    """A row, from a child to `gpu.py`."""
    print(MARK + json.dumps(row), flush=True)
