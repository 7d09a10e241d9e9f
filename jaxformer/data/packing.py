"""Packing: assigns examples to the rows of batches, and pads encoded examples into arrays.

A plan is a list of `PlannedBatch`: for examples of known lengths, the indices of those in each row of each batch. Plans
are global. Every host computes the same plan and then fills its own rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np

from jaxformer.errors import ConfigError
from jaxformer.types import Array, Batch, Permutation, Slots, Stream

Features = Mapping[str, np.ndarray]
"""An encoded example: arrays by name ("source", "target", "labels", "weights", ...). See `jaxformer.tasks`."""


class Shape(NamedTuple):
    """A static batch shape: `rows` rows over all hosts, of `length` slots each."""

    rows: int
    length: int


class PlannedBatch(NamedTuple):
    """One global batch: the indices of the examples in each row. Rows that are not listed stay empty.

    `continues` is True if every row goes on with the text of the same row of the batch before, False if every row
    begins a text; None where batches have no such order.
    """

    shape: Shape
    rows: list[list[int]]
    continues: bool | None = None


def shapes(lengths: Iterable[int], batch: int, tokens: int | None, multiple: int) -> list[Shape]:
    """Batch shape of each bucket, shortest first.

    Args:
      lengths: row length of each bucket, in slots.
      batch: rows of a batch; the maximum if there is a token budget.
      tokens: token budget of a batch with padding, or None.
      multiple: rows are rounded down to a multiple of this (but not to 0), so that they divide among devices.
    """
    buckets = []
    for length in sorted(set(lengths)):
        rows = batch if tokens is None else min(batch, tokens // length)
        buckets.append(Shape(max(rows // multiple, 1) * multiple, length))
    return buckets


def process_rows(rows: int, process: int, processes: int) -> slice:
    """The slice of a global batch's rows that process number `process` fills."""
    each = rows // processes
    return slice(process * each, (process + 1) * each)


def bucketed(lengths: Sequence[int], buckets: Sequence[Shape]) -> list[PlannedBatch]:
    """Plans batches with one example per row; each example goes to the shortest bucket that holds it.

    A bucket emits a batch when its rows are full. Its remaining examples move up to the next bucket, which costs less
    padding than a part-filled batch per bucket. So only the last batch of the longest bucket can have empty rows. The
    order within a bucket is kept.

    Args:
      lengths: lengths of the examples.
      buckets: shapes, shortest first; the last one holds every example.
    """
    bounds = [shape.length for shape in buckets]
    bucket = np.searchsorted(bounds, lengths) if len(lengths) else np.zeros(0, int)
    batches: list[PlannedBatch] = []
    left: list[int] = []
    for number, shape in enumerate(buckets):
        members = left + np.flatnonzero(bucket == number).tolist()
        last = number == len(buckets) - 1
        end = len(members) if last else len(members) // shape.rows * shape.rows
        for start in range(0, end, shape.rows):
            rows = members[start : min(start + shape.rows, end)]
            batches.append(PlannedBatch(shape, [[index] for index in rows]))
        left = members[end:]
    return batches


def first_fit(
    lengths: Sequence[int] | Sequence[tuple[int, ...]], shape: Shape, window: int = 256
) -> list[PlannedBatch]:
    """Plans batches with several examples per row: each goes into the first row with enough free slots.

    Of examples with a source and a target, both must fit, each in a row of its own. Only the last `window` rows are
    searched, which bounds the time. First fit needs at most 1.7 times the optimal number of rows (Johnson et al. 1974,
    https://doi.org/10.1137/0203025), of two streams 2.7 times (Garey et al. 1976,
    https://doi.org/10.1016/0097-3165(76)90001-7).

    Args:
      lengths: length of each example, or the lengths of its streams.
    """
    rows: list[list[int]] = []
    sizes = np.asarray(lengths, np.int32)
    sizes = sizes.reshape(len(sizes), -1 if len(sizes) else 1)
    # Free slots of each stream of row r, at most one row an example. One array a stream: this loop plans whole blocks.
    room = [np.zeros(len(sizes), np.int32) for _ in range(sizes.shape[1])]
    for index, needed in enumerate(sizes.tolist()):
        begin, end = max(len(rows) - window, 0), len(rows)
        fits = room[0][begin:end] >= needed[0]
        for free, length in zip(room[1:], needed[1:], strict=True):
            fits &= free[begin:end] >= length
        row = begin + int(fits.argmax()) if end else 0
        if not end or not fits[row - begin]:
            row = end
            rows.append([])
            for free in room:
                free[row] = shape.length
        rows[row].append(index)
        for free, length in zip(room, needed, strict=True):
            free[row] -= length
    return [PlannedBatch(shape, rows[start : start + shape.rows]) for start in range(0, len(rows), shape.rows)]


def slot_counts(features: Features) -> tuple[int, ...]:
    """Number of slots that each stream of an encoded example needs: of its source, its target, or both."""
    return tuple(len(features[stream]) for stream in ("source", "target") if stream in features)


def slot_count(features: Features) -> int:
    """Number of slots that an encoded example needs: the length of its longer stream."""
    return max(slot_counts(features))


def collate(rows: Sequence[Sequence[Features]], length: int, template: Features | None = None) -> Batch:
    """Pads encoded examples into the arrays of a batch.

    The examples of a row follow each other, as segments 1, 2, 3..., each with positions from 0. An example that has its
    own feature "segment" must be alone in its row. Missing weights are 1. Padding has segment, label and weight 0.

    Args:
      rows: B rows of encoded examples (see `jaxformer.tasks`); a row may be empty.
      length: T, the slots of a row.
      template: an encoded example with the batch's features; needed only if all rows may be empty.

    Returns:
      A batch of numpy arrays, int32 and float32 `[B, T]`; a source of real numbers is float32 `[B, T, C]`. Labels and
      weights of C values a slot are `[B, T, C]`. Labels of whole rows (scalars, and all float32 labels) are `[B, ...]`,
      and their weights and components `[B]`.
    """
    if template is None:
        template = next(features for row in rows for features in row)
    source = _stream(rows, length, "source", template) if "source" in template else None
    target = _stream(rows, length, "target", template) if "target" in template else None
    if target is not None and "prefix" in template:
        prefix = cast(Array, _prefixes(rows, target.tokens.shape))
        target = target._replace(slots=target.slots._replace(prefix=prefix))
    if source is not None and "token_type" in template:
        source = source._replace(token_type=cast(Array, _pad(rows, length, "token_type", np.int32)))
    if "labels" not in template:
        return Batch(source, target)
    if "targets" in template:
        return _permuted(rows, length, template, source)
    if has_row_labels(template):
        labels, weights = _row_labels(rows, template)
    else:
        values = np.shape(template["labels"])[1:]
        labels = _pad(rows, length, "labels", np.int32, values)
        filled = _occupied(rows, length, "labels").astype(np.float32)
        weights = _pad(rows, length, "weights", np.float32, values) if "weights" in template else filled
    batch = Batch(source, target, _as_jax(labels), _as_jax(weights))
    if "relation" in template:
        batch = batch._replace(relation=_as_jax(_relations(rows)))
    if "reference" in template:
        batch = batch._replace(reference=_as_jax(_references(rows, template)))
    if "component" in template:
        of_row = has_row_labels(template)
        component = _row_components(rows) if of_row else _pad(rows, length, "component", np.int32)
        batch = batch._replace(component=_as_jax(component))
    return batch


def _occupied(rows: Sequence[Sequence[Features]], length: int, name: str) -> np.ndarray:
    """True where a row has a token of the feature `name`, from the left: bool `[B, T]`."""
    used = np.array([sum(len(features[name]) for features in row) for row in rows], np.int32)
    if used.max(initial=0) > length:
        raise ValueError(
            f"{name}: got {used.max()} tokens for a row, expected at most {length}; truncate them in encode"
        )
    return np.arange(length) < used[:, None]


def _pad(
    rows: Sequence[Sequence[Features]], length: int, name: str, dtype: type, shape: tuple[int, ...] = ()
) -> np.ndarray:
    """The feature `name` of all examples, padded with 0: `[B, T]`, or `[B, T, ...]` if its slots hold arrays."""
    filled = _occupied(rows, length, name)
    pieces = [features[name] for row in rows for features in row]
    array = np.zeros((*filled.shape, *shape), dtype)
    if pieces:
        array[filled] = np.concatenate(pieces)  # row-major, which is the order of the pieces
    return array


def _stream(rows: Sequence[Sequence[Features]], length: int, name: str, template: Features) -> Stream:
    """The stream "source" or "target" of a batch, with the position and segment of each slot."""
    filled = _occupied(rows, length, name)
    segment = filled.astype(np.int32)
    position = np.where(filled, np.arange(length, dtype=np.int32), 0)
    parts = [features["segment"] for row in rows for features in row if "segment" in features]
    if parts:
        segment = _pad(rows, length, "segment", np.int32)
        position[filled] = np.concatenate([positions_within(part) for part in parts])
    elif any(len(row) > 1 for row in rows):
        lengths = [len(features[name]) for row in rows for features in row]
        numbers = [number for row in rows for number in range(1, len(row) + 1)]
        begins = np.cumsum(lengths) - lengths
        segment[filled] = np.repeat(numbers, lengths)
        position[filled] = np.arange(sum(lengths)) - np.repeat(begins, lengths)
    like = np.asarray(template[name])
    tokens = _pad(rows, length, name, np.float32 if like.dtype.kind == "f" else np.int32, like.shape[1:])
    return Stream(cast(Array, tokens), Slots(cast(Array, position), cast(Array, segment)))


def _prefixes(rows: Sequence[Sequence[Features]], shape: tuple[int, ...]) -> np.ndarray:
    """The prefix of the example in each slot of the targets: int32 `[B, T]`."""
    prefix = np.zeros(shape, np.int32)
    for number, row in enumerate(rows):
        lengths = [len(features["target"]) for features in row]
        if row:
            prefix[number, : sum(lengths)] = np.repeat([int(features["prefix"]) for features in row], lengths)
    return prefix


def _relations(rows: Sequence[Sequence[Features]]) -> np.ndarray:
    """The second label `[B]` of each row, -1 for empty rows."""
    relations = np.full(len(rows), -1, np.int32)
    for number, row in enumerate(rows):
        for features in row:
            relations[number] = features["relation"]
    return relations


def _references(rows: Sequence[Sequence[Features]], template: Features) -> np.ndarray:
    """The feature "reference" of each row with one example, float32 `[B, ...]`; 0 for empty rows."""
    values = np.zeros((len(rows), *np.shape(template["reference"])), np.float32)
    for number, row in enumerate(rows):
        for features in row:
            values[number] = features["reference"]
    return values


def positions_within(segment: np.ndarray) -> np.ndarray:
    """Positions `[n]` that restart at 0 in each segment, from ascending segment ids `[n]`."""
    return np.arange(len(segment)) - np.searchsorted(segment, segment)


def has_row_labels(features: Features) -> bool:
    """True if the labels belong to the example as a whole: a scalar, or float32. Other labels have a slot each."""
    labels = np.asarray(features["labels"])
    return labels.ndim == 0 or labels.dtype.kind == "f"


def _permuted(rows: Sequence[Sequence[Features]], length: int, template: Features, source: Stream | None) -> Batch:
    """The batch of examples with an order, whose targets, labels and weights have one length in all of them."""
    arrays = {
        "targets": np.full((len(rows), len(template["targets"])), -1, np.int32),
        "labels": np.zeros((len(rows), len(template["targets"])), np.int32),
        "weights": np.zeros((len(rows), len(template["targets"])), np.float32),
    }
    for number, row in enumerate(rows):
        if len(row) > 1:
            raise ConfigError("data.packing: got first_fit with an order of prediction, expected none or concat")
        for features in row:
            for name, array in arrays.items():
                array[number] = features[name]
    order, (targets, labels, weights) = _pad(rows, length, "order", np.int32), map(_as_jax, arrays.values())
    return Batch(source, None, labels, weights, permutation=Permutation(_as_jax(order), targets))


def _as_jax(array: np.ndarray) -> Array:
    """`array` in the type of jax's arrays, for which numpy's stand."""
    return cast(Array, array)


def _row_labels(rows: Sequence[Sequence[Features]], template: Features) -> tuple[np.ndarray, np.ndarray]:
    """Labels `[B, ...]` and weights `[B]` of tasks whose labels are of whole rows."""
    like = np.asarray(template["labels"])
    dtype = np.float32 if like.dtype.kind == "f" else np.int32
    labels, weights = np.zeros((len(rows), *like.shape), dtype), np.zeros(len(rows), np.float32)
    for number, row in enumerate(rows):
        if len(row) > 1:
            raise ConfigError("data.packing: got first_fit with labels of whole rows, expected none; change it")
        for features in row:
            labels[number] = features["labels"]
            weights[number] = features.get("weights", 1.0)
    return labels, weights


def _row_components(rows: Sequence[Sequence[Features]]) -> np.ndarray:
    """Components `[B]` of rows with one example each; 0 for an empty row."""
    return np.array([row[0]["component"] if row else 0 for row in rows], np.int32)


def padding_counts(batch: Batch) -> tuple[Array | int, int]:
    """Padding slots and all slots of both streams: numerator and denominator of the padding fraction."""
    segments = [stream.slots.segment for stream in (batch.source, batch.target) if stream is not None]
    return sum((segment == 0).sum() for segment in segments), sum(segment.size for segment in segments)
