"""Padded batches from encoded prompts of any lengths, in few static shapes, since each shape is a compilation."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import deque
from typing import Any, Iterator, Mapping, NamedTuple, Sequence, cast

import numpy as np
from jaxtyping import Int32

from jaxformer.errors import ConfigError
from jaxformer.types import Array, Batch, Permutation, Slots, Stream

Prompt = Mapping[str, Any]
"""An encoded prompt, as a task's `prompt` makes it from a line: integer sequences by name.

It has the tokens "source" [n], "target" [m] or both; a series as the source is float32 [n, C]. Optional are
"token_type" [n] and ascending "position" [n] of the source, ascending "segment" of the only stream, and "prefix" [],
the target's slots that see each other in both directions. To score texts it has "labels" and "weights" [m] too. "order"
[n] and "targets" [k] of the source are those of `types.Permutation`.
"""

COMPILE_COST_TOKENS = 1024
"""Padding tokens that one more shape must save: a compilation takes as long as a small model needs for many more."""


class PromptBatch(NamedTuple):
    """A padded batch: row i of `batch` holds prompt `indices[i]` of the input. Further rows are empty (segment 0)."""

    indices: np.ndarray
    batch: Batch

    @property
    def rows(self) -> int:
        """Rows of the batch, empty ones included."""
        stream = self.batch.source if self.batch.target is None else self.batch.target
        return 0 if stream is None else stream.tokens.shape[0]

    @property
    def lengths(self) -> tuple[int, int]:
        """Padded lengths of source and target; 1 for a stream that the batch does not have."""
        return _padded_length(self.batch.source), _padded_length(self.batch.target)


class PromptQueue:
    """Prompts that wait for their turn.

    The longest come first, so that a batch that is too large for memory fails at once. Prompts of similar length share
    a batch.

    Attributes:
      prompts: all prompts of the call.
      pads: tokens that pad source and target.
      buckets: preferred padded lengths (see `bucket_length`).
      refill_buckets: padded lengths of the sources and of the targets that `pop_refill` chooses from.
    """

    def __init__(self, prompts: Sequence[Prompt], pads: tuple[int, int], buckets: tuple[int, ...] = ()) -> None:
        self.prompts, self.pads, self.buckets = prompts, pads, buckets
        lengths = [_prompt_lengths(prompt) for prompt in prompts]
        self.refill_buckets = (
            choose_buckets([source for source, _ in lengths], buckets),
            choose_buckets([target for _, target in lengths], buckets),
        )
        self._queue = deque(sorted(range(len(prompts)), key=lambda i: (-lengths[i][0], -lengths[i][1])))

    def __len__(self) -> int:
        """Number of prompts that wait."""
        return len(self._queue)

    def next_lengths(self, count: int) -> tuple[int, int]:
        """Padded lengths of source and target in a batch of the next `count` prompts."""
        lengths = [_prompt_lengths(self.prompts[i]) for i in itertools.islice(self._queue, count)]
        source, target = (bucket_length(max(sizes), self.buckets) for sizes in zip(*lengths, strict=True))
        return source, target

    def pop_batch(self, max_rows: int) -> PromptBatch:
        """Removes the next `max_rows` prompts; the last, smaller batch has a power of two of rows."""
        indices = self._pop(max_rows)
        rows = min(max_rows, 1 << (len(indices) - 1).bit_length())
        return PromptBatch(indices, pad_batch([self.prompts[i] for i in indices], rows, self.pads, self.buckets))

    def pop_refill(self, rows: int, lengths: tuple[int, int]) -> PromptBatch:
        """Removes up to `rows` prompts, in a batch of `rows` rows that refills a batch with padded `lengths`.

        The prompts must fit into these lengths. The shapes are few: see `choose_buckets`.
        """
        indices = self._pop(rows)
        source, target = ((*sizes, length) for sizes, length in zip(self.refill_buckets, lengths, strict=True))
        return PromptBatch(indices, pad_batch([self.prompts[i] for i in indices], rows, self.pads, source, target))

    def _pop(self, count: int) -> np.ndarray:
        return np.asarray([self._queue.popleft() for _ in range(min(count, len(self)))])


def prompt_batches(
    prompts: Sequence[Prompt], max_rows: int, pads: tuple[int, int], buckets: tuple[int, ...] = ()
) -> Iterator[PromptBatch]:
    """All prompts in batches of up to `max_rows` rows, in the order of `PromptQueue`."""
    queue = PromptQueue(prompts, pads, buckets)
    while queue:
        yield queue.pop_batch(max_rows)


def pad_batch(
    prompts: Sequence[Prompt],
    rows: int,
    pads: tuple[int, int],
    buckets: tuple[int, ...] = (),
    target_buckets: tuple[int, ...] | None = None,
    widths: tuple[int, int] | None = None,
) -> Batch:
    """Pads prompts on the right to one length per stream, and to `rows` rows with empty ones.

    Prompts with "labels" and "weights" for every target slot give a batch with both; weights are 0 in the padding.

    Args:
      pads: tokens that pad source and target.
      buckets: preferred lengths of the source, and of the target if `target_buckets` is None.
      widths: padded lengths of source and target, whatever the buckets.

    Raises:
      ConfigError: only some of the prompts have a source, or a target.
    """
    target_buckets = buckets if target_buckets is None else target_buckets
    source = _pad_stream(prompts, "source", rows, pads[0], buckets, widths and widths[0])
    target = _pad_stream(prompts, "target", rows, pads[1], target_buckets, widths and widths[1])
    if source is not None and "targets" in prompts[0]:
        return Batch(source, None, permutation=_pad_permutation(prompts, source.tokens.shape))
    if target is None or "labels" not in prompts[0]:
        return Batch(source, target)
    labels, weights = np.zeros(target.tokens.shape, np.int32), np.zeros(target.tokens.shape, np.float32)
    for row, prompt in enumerate(prompts):
        labels[row, : len(prompt["labels"])] = prompt["labels"]
        weights[row, : len(prompt["weights"])] = prompt["weights"]
    return Batch(source, target, cast(Array, labels), cast(Array, weights))


def _pad_stream(
    prompts: Sequence[Prompt], name: str, rows: int, pad: int, buckets: tuple[int, ...], width: int | None
) -> Stream | None:
    """The stream `name` of the prompts, padded to `width` or a bucket; None if no prompt has it."""
    exists = [name in prompt for prompt in prompts]
    if not any(exists):
        return None
    if not all(exists):
        raise ConfigError(
            f"prompts: got some without {name!r}, expected the same fields in all of them; encode them alike"
        )
    length = width or bucket_length(max(len(prompt[name]) for prompt in prompts), buckets)
    like = np.asarray(prompts[0][name])
    if like.dtype.kind == "f":  # a series
        tokens = np.zeros((rows, length, *like.shape[1:]), np.float32)
    else:
        tokens = np.full((rows, length), pad, np.int32)
    segment, token_type = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.int32)
    position = np.zeros((rows, length), np.int32)
    for row, prompt in enumerate(prompts):
        size = len(prompt[name])
        segment_ids = np.asarray(prompt["segment"]) if "segment" in prompt else np.ones(size, np.int32)
        tokens[row, :size], segment[row, :size] = prompt[name], segment_ids
        position[row, :size] = np.arange(size) - np.searchsorted(segment_ids, segment_ids)
        if name == "source" and "token_type" in prompt:
            token_type[row, :size] = prompt["token_type"]
        if name == "source" and "position" in prompt:
            position[row, :size] = prompt["position"]
    has_types = name == "source" and "token_type" in prompts[0]
    # Compiled programs take numpy arrays as jax arrays; transferring them to a device here would only cost time.
    slots = Slots(cast(Array, position), cast(Array, segment), _prefixes(prompts, name, tokens.shape))
    return Stream(cast(Array, tokens), slots, cast(Array, token_type) if has_types else None)


def _pad_permutation(prompts: Sequence[Prompt], shape: tuple[int, ...]) -> Permutation:
    """The orders of prompts in the `shape` of their padded source, and their targets in a power of two of columns."""
    columns = bucket_length(max(len(prompt["targets"]) for prompt in prompts))
    order, targets = np.zeros(shape, np.int32), np.full((shape[0], columns), -1, np.int32)
    for row, prompt in enumerate(prompts):
        order[row, : len(prompt["order"])] = prompt["order"]
        targets[row, : len(prompt["targets"])] = prompt["targets"]
    return Permutation(cast(Array, order), cast(Array, targets))


def _prefixes(prompts: Sequence[Prompt], name: str, shape: tuple[int, ...]) -> Int32[Array, "B T"] | None:
    """The prefix of each slot of the target, int32 of this shape; None if the prompts have none."""
    if name == "source" or "prefix" not in prompts[0]:
        return None
    prefix = np.zeros(shape, np.int32)
    for row, prompt in enumerate(prompts):
        prefix[row] = prompt["prefix"]
    return cast(Array, prefix)


def bucket_length(length: int, buckets: tuple[int, ...] = ()) -> int:
    """Padded length for sequences of up to `length` tokens: the smallest bucket that fits, else a power of two.

    A length of 1 (the start token of a seq2seq model) stays 1. Other powers of two are at least 8, so that there are
    few shapes to compile.
    """
    if length <= 1:
        return 1
    fitting = [size for size in buckets if size >= length]
    return min(fitting) if fitting else max(8, 1 << (length - 1).bit_length())


def buckets_within(buckets: tuple[int, ...], *max_lengths: int | None) -> tuple[int, ...]:
    """`buckets` and one bucket per limit, so that prompts within a limit are never padded beyond it.

    Args:
      max_lengths: numbers of positions that the model has for a stream; None: no limit.
    """
    limits = sorted({limit for limit in max_lengths if limit is not None})
    if not limits:
        return buckets
    powers = tuple(1 << i for i in range(3, limits[-1].bit_length()) if 1 << i < limits[-1])
    return tuple(sorted({*(buckets or powers), *limits}))


def choose_buckets(lengths: Sequence[int], buckets: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The padded lengths that are worth a compilation, out of those that `bucket_length` gives for `lengths`.

    They minimise the sum of all padded lengths plus `COMPILE_COST_TOKENS` for each chosen length, by dynamic
    programming.
    """
    ordered, sizes = sorted(lengths), sorted({bucket_length(length, buckets) for length in lengths})
    fitting_counts = [bisect_right(ordered, size) for size in sizes]
    # choices[i]: least cost, and its lengths, to pad the prompts that fit sizes[i], with sizes[i] as the largest.
    choices: list[tuple[int, tuple[int, ...]]] = []
    for size, count in zip(sizes, fitting_counts, strict=True):
        smaller = [(0, (), 0), *((*choice, covered) for choice, covered in zip(choices, fitting_counts))]
        choices.append(
            min(
                (cost + COMPILE_COST_TOKENS + size * (count - covered), (*chosen, size))
                for cost, chosen, covered in smaller
            )
        )
    return choices[-1][1] if choices else ()


def _prompt_lengths(prompt: Prompt) -> tuple[int, int]:
    """Lengths of source and target; 0 for a stream that the prompt does not have."""
    return len(prompt.get("source", ())), len(prompt.get("target", ()))


def _padded_length(stream: Stream | None) -> int:
    return 1 if stream is None else stream.tokens.shape[1]
