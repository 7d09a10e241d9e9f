"""From encoded prompts of any length to few batches of few static shapes, and back to the order of the input."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import deque
from typing import Iterator, Mapping, NamedTuple, Sequence

import numpy as np

from jaxformer.config import ConfigError
from jaxformer.types import Batch, Slots, Stream

Prompt = Mapping[str, np.ndarray | Sequence[int]]
"""Integers `source` [n] and/or `target` [m], optional `kind` and ascending `position` [n] of the source and, of the
only stream, ascending `segment`: what a task's `prompt` makes of a line. To score texts, `labels` and `weights` [m]
too, as its `encode` makes them."""


SIDES = ("source", "target")
WORTH = 1024
"""Tokens of padding that one more shape must save: a compilation takes as long as a small model reads many more."""


class Job(NamedTuple):
    """A batch of prompts: `index[i]` is the place of row i among the inputs; rows beyond are empty (segment 0)."""

    index: np.ndarray
    batch: Batch


class Waiting:
    """Prompts that nobody has read yet: of similar length together, the longest first, so that too little memory shows
    at once."""

    def __init__(self, prompts: Sequence[Prompt], pad: tuple[int, int], buckets: tuple[int, ...] = ()) -> None:
        """Tokens `pad` fill source and target. Lengths are those of `buckets`, and beyond them powers of two."""
        self.prompts, self.pad, self.buckets = prompts, pad, buckets
        self.fewer = tuple(fewer_buckets([len(prompt.get(side, ())) for prompt in prompts], buckets) for side in SIDES)
        order = sorted(range(len(prompts)), key=lambda i: tuple(-len(prompts[i].get(side, ())) for side in SIDES))
        self.left = deque(order)

    def __len__(self) -> int:
        return len(self.left)

    def slots(self, count: int) -> tuple[int, ...]:
        """Of source and target of a batch of the next `count` prompts."""
        coming = [self.prompts[i] for i in itertools.islice(self.left, count)]
        return tuple(bucket(max(len(prompt.get(side, ())) for prompt in coming), self.buckets) for side in SIDES)

    def take(self, count: int) -> Job:
        """The next `count` prompts; if there are fewer, in a batch of the next power of two."""
        index = self._next(count)
        height = min(count, 1 << (len(index) - 1).bit_length())
        return Job(index, stack([self.prompts[i] for i in index], height, self.pad, self.buckets))

    def take_into(self, slots: tuple[int, ...], count: int) -> Job:
        """The next `count` prompts or as many as there are, in `count` rows, to be read into a batch with so many slots
        of source and target, which are enough for them. Shapes are few: see `fewer_buckets`."""
        index = self._next(count)
        sizes = [(*lengths, own) for lengths, own in zip(self.fewer, slots, strict=True)]
        return Job(index, stack([self.prompts[i] for i in index], count, self.pad, *sizes))

    def _next(self, count: int) -> np.ndarray:
        return np.asarray([self.left.popleft() for _ in range(min(count, len(self.left)))])


def jobs(prompts: Sequence[Prompt], rows: int, pad: tuple[int, int], buckets: tuple[int, ...] = ()) -> Iterator[Job]:
    """All prompts in batches of `rows` rows; see `Waiting`."""
    waiting = Waiting(prompts, pad, buckets)
    while waiting:
        yield waiting.take(rows)


def stack(
    prompts: Sequence[Prompt],
    rows: int,
    pad: tuple[int, int],
    buckets: tuple[int, ...] = (),
    target_buckets: tuple[int, ...] | None = None,
) -> Batch:
    """Prompts padded on the right to one length a side, and to `rows` rows with empty ones.

    `buckets` are the source's, and the target's where it has no others. Where prompts come with `labels` and `weights`
    for every target slot, so does the batch, with weight 0 in the padding.
    """
    sizes = (buckets, buckets if target_buckets is None else target_buckets)
    source, target = (_side(prompts, side, rows, *how) for side, *how in zip(SIDES, pad, sizes, strict=True))
    if target is None or "labels" not in prompts[0]:
        return Batch(source, target)
    labels, weights = np.zeros(target.tokens.shape, np.int32), np.zeros(target.tokens.shape, np.float32)
    for row, prompt in enumerate(prompts):
        labels[row, : len(prompt["labels"])] = prompt["labels"]
        weights[row, : len(prompt["weights"])] = prompt["weights"]
    return Batch(source, target, labels, weights)


def _side(prompts: Sequence[Prompt], side: str, rows: int, pad: int, buckets: tuple[int, ...]) -> Stream | None:
    given = [side in prompt for prompt in prompts]
    if not any(given):
        return None
    if not all(given):
        raise ConfigError(
            f"prompts: got some without {side!r}, expected the same fields in all of them; encode them alike"
        )
    length = bucket(max(len(prompt[side]) for prompt in prompts), buckets)
    tokens = np.full((rows, length), pad, np.int32)
    segment, kind = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.int32)
    position = np.zeros((rows, length), np.int32)
    for row, prompt in enumerate(prompts):
        size = len(prompt[side])
        part = np.asarray(prompt["segment"]) if "segment" in prompt else np.ones(size, np.int32)
        tokens[row, :size], segment[row, :size] = prompt[side], part
        position[row, :size] = np.arange(size) - np.searchsorted(part, part)
        if side == "source" and "kind" in prompt:
            kind[row, :size] = prompt["kind"]
        if side == "source" and "position" in prompt:
            position[row, :size] = prompt["position"]
    typed = side == "source" and "kind" in prompts[0]
    return Stream(tokens, Slots(position, segment), kind if typed else None)


def bucket(length: int, buckets: tuple[int, ...] = ()) -> int:
    """The static length for sequences up to `length`: the smallest bucket that holds it, else a power of two.

    A length of 1 (a seq2seq model's start token) stays 1; others are at least 8, since a shape is a compilation.
    """
    if length <= 1:
        return 1
    fitting = [size for size in buckets if size >= length]
    return min(fitting) if fitting else max(8, 1 << (length - 1).bit_length())


def within(buckets: tuple[int, ...], *rooms: int | None) -> tuple[int, ...]:
    """`buckets`, and one as large as each room, so that what fits into a table of positions is not padded beyond it."""
    known = sorted({room for room in rooms if room is not None})
    if not known:
        return buckets
    powers = tuple(1 << i for i in range(3, known[-1].bit_length()) if 1 << i < known[-1])
    return tuple(sorted({*(buckets or powers), *known}))


def fewer_buckets(lengths: Sequence[int], buckets: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Of the static lengths that `bucket` gives these lengths the ones that are worth a program each.

    They make the sum of all padded lengths and of `WORTH` for every one of them the least that it can be.
    """
    ordered, sizes = sorted(lengths), sorted({bucket(length, buckets) for length in lengths})
    below = [bisect_right(ordered, size) for size in sizes]
    best: list[tuple[int, tuple[int, ...]]] = []
    for size, count in zip(sizes, below, strict=True):  # the best of all choices whose largest length is `size`
        last = [(0, (), 0), *((*choice, less) for choice, less in zip(best, below))]
        best.append(min((cost + WORTH + size * (count - less), (*chosen, size)) for cost, chosen, less in last))
    return best[-1][1] if best else ()
