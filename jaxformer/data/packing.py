"""Which examples share a batch, and how encoded examples become its arrays.

A *plan* says, for a run of examples of known lengths, which go into the rows of which batch. Plans are made of indices
only and are global: every host makes the same plan and then fills its own rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxformer.config import ConfigError
from jaxformer.types import Array, Batch, Slots, Stream

Features = Mapping[str, np.ndarray]


class Shape(NamedTuple):
    """A static batch shape: `rows` (global) of `length` slots."""

    rows: int
    length: int


class Planned(NamedTuple):
    """One global batch: the examples (indices into the planned run) of each row. Rows not listed stay empty."""

    shape: Shape
    rows: list[list[int]]


def shapes(lengths: Iterable[int], batch: int, tokens: int | None, multiple: int) -> list[Shape]:
    """The batch shape of each bucket, shortest first.

    Args:
      lengths: slots of a row, one number a bucket.
      batch: rows of a batch; with a token budget the most rows.
      tokens: token budget of a batch, padding included, or None.
      multiple: rows are rounded down to a multiple of it (at least one), so that they divide among devices.
    """
    found = []
    for length in sorted(set(lengths)):
        rows = batch if tokens is None else min(batch, tokens // length)
        found.append(Shape(max(rows // multiple, 1) * multiple, length))
    return found


def share(rows: int, process: int, processes: int) -> slice:
    """The rows of a global batch that one of several processes fills."""
    each = rows // processes
    return slice(process * each, (process + 1) * each)


def bucketed(lengths: Sequence[int], buckets: Sequence[Shape]) -> list[Planned]:
    """One example a row; each example in the shortest bucket that holds it.

    A bucket emits a batch when its rows are full. Its last, unfilled rows move up to the next bucket, which costs less
    padding than a part-filled batch a bucket, so that only the longest bucket's last batch can have empty rows. Within
    a bucket the order is kept.

    Args:
      lengths: of the examples.
      buckets: shapes, shortest first; the last one holds every example.
    """
    place = np.searchsorted([shape.length for shape in buckets], lengths) if len(lengths) else np.zeros(0, int)
    batches: list[Planned] = []
    left: list[int] = []
    for number, shape in enumerate(buckets):
        members = left + np.flatnonzero(place == number).tolist()
        last = number == len(buckets) - 1
        end = len(members) if last else len(members) // shape.rows * shape.rows
        for start in range(0, end, shape.rows):
            batches.append(Planned(shape, [[index] for index in members[start : min(start + shape.rows, end)]]))
        left = members[end:]
    return batches


def first_fit(lengths: Sequence[int], shape: Shape, window: int = 256) -> list[Planned]:
    """Several examples a row: each goes into the first row with room, of the last `window` rows begun.

    First fit needs at most 1.7 times the optimal number of rows (Johnson et al. 1974); the window bounds the search.
    """
    rows: list[list[int]] = []
    room = np.zeros(len(lengths), np.int32)  # free slots of row r; at most one row an example
    for index, length in enumerate(lengths):
        begin = max(len(rows) - window, 0)
        fits = room[begin : len(rows)] >= length
        row = begin + int(fits.argmax()) if fits.any() else len(rows)
        if row == len(rows):
            rows.append([])
            room[row] = shape.length
        rows[row].append(index)
        room[row] -= length
    return [Planned(shape, rows[start : start + shape.rows]) for start in range(0, len(rows), shape.rows)]


def size(features: Features) -> int:
    """Slots that an encoded example needs: those of its longer stream."""
    return max(len(features[stream]) for stream in ("source", "target") if stream in features)


def collate(rows: Sequence[Sequence[Features]], length: int, like: Features | None = None) -> Batch:
    """The arrays of a batch, from the encoded examples of each row.

    The examples of a row follow each other, as segments 1, 2, 3..., each with positions from 0. An example that names
    the `segment` of its tokens is alone in its row. Missing weights are 1.
    Slots and rows that hold nothing have segment, label and weight 0.

    Args:
      rows: B rows of encoded examples (see `jaxformer.tasks`); a row may be empty.
      length: T, the slots of a row.
      like: an encoded example that says what the batch has; needed only when all rows may be empty.

    Returns:
      A batch of numpy arrays, int32 and float32 `[B, T]`; scalar labels (float32 if they are scores) and their weights
      are `[B]`.
    """
    if like is None:
        like = next(features for row in rows for features in row)
    source = _stream(rows, length, "source") if "source" in like else None
    target = _stream(rows, length, "target") if "target" in like else None
    if source is not None and "kind" in like:
        source = source._replace(kind=_fill(rows, length, "kind", np.int32))
    if "labels" not in like:
        return Batch(source, target)
    if np.ndim(like["labels"]) == 0:
        return Batch(source, target, *_scalars(rows, like))
    labels = _fill(rows, length, "labels", np.int32)
    if "weights" in like:
        return Batch(source, target, labels, _fill(rows, length, "weights", np.float32))
    return Batch(source, target, labels, _filled(rows, length, "labels").astype(np.float32))


def _filled(rows: Sequence[Sequence[Features]], length: int, name: str) -> np.ndarray:
    """bool `[B, T]`: the slots that the rows' features take, from the left."""
    used = np.array([sum(len(features[name]) for features in row) for row in rows], np.int32)
    if used.max(initial=0) > length:
        raise ValueError(f"{name}: got {used.max()} tokens for a row, expected at most {length}; cut them in encode")
    return np.arange(length) < used[:, None]


def _fill(rows: Sequence[Sequence[Features]], length: int, name: str, dtype: type) -> np.ndarray:
    filled = _filled(rows, length, name)
    array = np.zeros(filled.shape, dtype)
    pieces = [features[name] for row in rows for features in row]
    if pieces:
        array[filled] = np.concatenate(pieces)  # row-major, which is the order of the pieces
    return array


def _stream(rows: Sequence[Sequence[Features]], length: int, name: str) -> Stream:
    filled = _filled(rows, length, name)
    segment = filled.astype(np.int32)
    position = np.where(filled, np.arange(length, dtype=np.int32), 0)
    parts = [features["segment"] for row in rows for features in row if "segment" in features]
    if parts:
        segment = _fill(rows, length, "segment", np.int32)
        position[filled] = np.concatenate([within(part) for part in parts])
    elif any(len(row) > 1 for row in rows):
        lengths = [len(features[name]) for row in rows for features in row]
        numbers = [number for row in rows for number in range(1, len(row) + 1)]
        begins = np.cumsum(lengths) - lengths
        segment[filled] = np.repeat(numbers, lengths)
        position[filled] = np.arange(sum(lengths)) - np.repeat(begins, lengths)
    return Stream(_fill(rows, length, name, np.int32), Slots(position, segment))


def within(segment: np.ndarray) -> np.ndarray:
    """Positions `[n]` that count from 0 in each segment, of ascending segments `[n]`."""
    return np.arange(len(segment)) - np.searchsorted(segment, segment)


def _scalars(rows: Sequence[Sequence[Features]], like: Features) -> tuple[np.ndarray, np.ndarray]:
    kind = np.float32 if np.asarray(like["labels"]).dtype.kind == "f" else np.int32
    labels, weights = np.zeros(len(rows), kind), np.zeros(len(rows), np.float32)
    for number, row in enumerate(rows):
        if len(row) > 1:
            raise ConfigError("data.packing: got first_fit with one label a sequence, expected none; change it")
        for features in row:
            labels[number] = features["labels"]
            weights[number] = features.get("weights", 1.0)
    return labels, weights


def padding(batch: Batch) -> tuple[Array, Array]:
    """(slots that hold nothing, all slots) of both streams: the two sides of the padding fraction."""
    segments = [stream.slots.segment for stream in (batch.source, batch.target) if stream is not None]
    return sum((segment == 0).sum() for segment in segments), sum(segment.size for segment in segments)
