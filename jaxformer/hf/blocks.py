"""Copies of large arrays in another order of axes, block by block: each block is read while it is in a core's cache.

A plain `target[...] = source.T` of a matrix walks through one of the two column by column and takes four times as long:
every number that it touches is on another line of memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

BLOCK_BYTES = 2**19
"""Bytes of a block: it stays in the second-level cache of a core between two passes over it."""

MIN_ROWS, MAX_ROWS = 32, 128
"""Bounds of the number of rows of a block whose rows become columns: two cache lines of numbers, and what TLBs hold."""

MIN_THREADED_BYTES = 16 * 2**20
"""Smaller copies are done before threads have started."""

MAX_THREADS = 4
"""More threads are limited by the memory, not by the cores."""

T = TypeVar("T")


def pairs(source: np.ndarray, target: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Views of the same parts of two arrays of one shape; together they are the whole arrays.

    Args:
      target: in row-major order.
    """
    source, target = _merge_axes(source, target)
    if source.nbytes <= BLOCK_BYTES:
        yield source, target
        return
    sizes, strides = source.shape, [abs(step) for step in source.strides]
    last = source.ndim - 1
    nearest = min((axis for axis in range(source.ndim) if sizes[axis] > 1), key=lambda axis: strides[axis])
    if nearest == last:
        rows = max(1, BLOCK_BYTES * sizes[0] // source.nbytes)
        for begin in range(0, sizes[0], rows):
            yield source[begin : begin + rows], target[begin : begin + rows]
        return
    rows = min(max(BLOCK_BYTES // (sizes[nearest] * source.itemsize), MIN_ROWS), MAX_ROWS)
    others = [axis for axis in range(last) if axis != nearest]
    for index in np.ndindex(*(sizes[axis] for axis in others)):
        part: list[int | slice] = [slice(None)] * source.ndim
        for axis, number in zip(others, index, strict=True):
            part[axis] = number
        for begin in range(0, sizes[last], rows):
            part[last] = slice(begin, begin + rows)
            yield source[tuple(part)], target[tuple(part)]


def contiguous(source: np.ndarray, dtype: np.dtype | None = None) -> np.ndarray:
    """The array in row-major order and of this dtype; itself if it is that already."""
    dtype = source.dtype if dtype is None else dtype
    if source.flags.c_contiguous and source.dtype == dtype:
        return source
    target = np.empty(source.shape, dtype)
    for old, new in pairs(source, target):
        new[...] = old if old.dtype == dtype else old.astype(dtype, order="K")
    return target


def in_threads(function: Callable[[T], None], entries: Sequence[T], size: int) -> None:
    """Calls `function` with every entry, in a few threads if these copy many bytes.

    The error of the first entry that has one is raised, as without threads.

    Args:
      size: bytes that are copied together.
    """
    threads = min(MAX_THREADS, len(entries), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    if threads < 2 or size < MIN_THREADED_BYTES:
        for entry in entries:
            function(entry)
        return
    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(function, entry) for entry in entries]:
            future.result()


def _merge_axes(source: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both arrays with neighbouring axes as one where the numbers of both lie one after another; `[1]` of a scalar."""
    sizes: list[int] = []
    steps: list[int] = []
    for size, step in zip(source.shape, source.strides, strict=True):
        if size == 1:
            continue
        if sizes and steps[-1] == step * size:
            sizes[-1], steps[-1] = sizes[-1] * size, step
        else:
            sizes.append(size)
            steps.append(step)
    if not sizes:
        sizes, steps = [1], [source.itemsize]
    merged = np.lib.stride_tricks.as_strided(source, sizes, steps, writeable=False)
    return merged, target.reshape(sizes)
