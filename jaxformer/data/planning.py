"""Plans the batches of a split: the order of its examples, cut into blocks, and which of a block share a batch.

The order is one seeded shuffle per epoch, computed index by index, so that any size of data will do. A mixture draws
from several splits, each in such an order of its own. A plan depends on the seed, the epoch and the block only. So
every host plans the same global batches.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import grain
import numpy as np

from jaxformer.data import packing
from jaxformer.data.packing import Features, PlannedBatch, Shape
from jaxformer.errors import ConfigError

MAX_SINGLE_BLOCK = 2**16
"""Splits of up to this many examples are planned as one block per epoch."""
BLOCK_EXAMPLES = 2**14
"""Examples per block of a larger split. A block must be encoded before its first batch can be filled."""


def block_size(examples: int) -> int:
    """Examples per block of a split of this size."""
    return examples if examples <= MAX_SINGLE_BLOCK else BLOCK_EXAMPLES


class EncodedExamples(Protocol):
    """Encoded examples by index: an `Encoder`, or the rows of a `ConcatenatedRows`; of a mixture by `Draw`."""

    def __len__(self) -> int: ...

    def __call__(self, indices: Sequence[Any], epoch: int) -> list[Features]: ...


class Order(Protocol):
    """The order in which examples are trained on, in blocks that are numbered through all epochs."""

    @property
    def size(self) -> int:
        """Examples per block."""
        ...

    @property
    def blocks(self) -> int:
        """Blocks per epoch."""
        ...

    def __call__(self, number: int) -> Sequence[Any]:
        """The examples of block `number`, as `EncodedExamples` takes them."""
        ...


SMALL_EPOCH = 2**12
"""Most examples of an epoch that is permuted at once.

Grain permutes 2^16 numbers at least and passes over those that are too large, which takes 0.03 s for the whole of a
small epoch: 8 ms for each of four examples."""


@dataclass(frozen=True)
class ShuffledOrder:
    """Every example of a split once an epoch.

    Attributes:
      examples: number of examples.
      size: examples per block.
      seed: seed of the shuffle; None keeps the order of the data.
    """

    examples: int
    size: int
    seed: int | None

    @property
    def blocks(self) -> int:
        """Blocks per epoch."""
        return -(-self.examples // self.size)

    def __call__(self, number: int) -> Sequence[int]:
        """Indices of the examples of block `number`."""
        epoch, block = divmod(number, self.blocks)
        return self.indices(epoch, range(block * self.size, min((block + 1) * self.size, self.examples)))

    def indices(self, epoch: int, positions: range) -> Sequence[int]:
        """Indices of the examples at these positions of the epoch's pseudorandom permutation."""
        if self.seed is None:
            return positions
        if self.examples <= SMALL_EPOCH:
            return _permutation(self.examples, self.seed, epoch)[positions.start : positions.stop]
        return _shuffle(self.examples, self.seed, epoch, positions)


def _shuffle(examples: int, seed: int, epoch: int, positions: range) -> Sequence[int]:
    """The indices at these positions of an epoch's permutation."""
    seed = int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])
    shuffle = grain.experimental.index_shuffle
    return [shuffle(position, max_index=examples - 1, seed=seed, rounds=4) for position in positions]


@functools.lru_cache(maxsize=256)
def _permutation(examples: int, seed: int, epoch: int) -> Sequence[int]:
    """All of an epoch's permutation, kept since runs of one process often share it."""
    return tuple(_shuffle(examples, seed, epoch, range(examples)))


class Draw(NamedTuple):
    """An example of a mixture: number of its part, index in the part's split, and epoch of the part."""

    part: int
    index: int
    epoch: int


@dataclass(frozen=True)
class MixedOrder:
    """Examples of several splits, each in proportion to its share.

    After n blocks, floor(n * size * share) examples of each part have been drawn, so any stretch of blocks has its
    share to within one example. Inside a block the order is a seeded permutation. A part goes through its own epochs:
    each of its examples once, in an order of its own.

    Attributes:
      parts: order of each part.
      shares: share of each part, in units of `SHARE_UNIT`: integers, so that all machines draw alike.
      size: examples per block, to within one for each part.
      seed: seed of the order inside a block; None: parts take turns evenly.
    """

    parts: tuple[ShuffledOrder, ...]
    shares: tuple[int, ...]
    size: int
    seed: int | None

    @property
    def blocks(self) -> int:
        """Blocks per epoch: of as many examples as all parts have."""
        return -(-sum(part.examples for part in self.parts) // self.size)

    def drawn(self, number: int) -> list[int]:
        """Examples of each part that the blocks before block `number` hold."""
        return [number * self.size * share // SHARE_UNIT for share in self.shares]

    def __call__(self, number: int) -> list[Draw]:
        """The examples of block `number`."""
        draws: list[Draw] = []
        for part, (begin, end) in enumerate(zip(self.drawn(number), self.drawn(number + 1), strict=True)):
            draws += self._draws(part, begin, end)
        if self.seed is None:
            counts = np.bincount([draw.part for draw in draws], minlength=len(self.parts))
            places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts if count] or [[]])
            order = np.argsort(places, kind="stable")
        else:
            order = np.random.default_rng((self.seed, number)).permutation(len(draws))
        return [draws[place] for place in order]

    def _draws(self, part: int, begin: int, end: int) -> list[Draw]:
        """Examples number `begin` to `end` of a part, counted through all of its epochs."""
        order, found = self.parts[part], []
        while begin < end:
            epoch, first = divmod(begin, order.examples)
            last = min(first + end - begin, order.examples)
            found += [Draw(part, int(index), epoch) for index in order.indices(epoch, range(first, last))]
            begin += last - first
        return found


SHARE_UNIT = 2**32
"""A share of 1."""


def shares(
    weights: Sequence[float], sizes: Sequence[int], temperature: float | None, limit: int | None
) -> tuple[int, ...]:
    """The share of each part in units of `SHARE_UNIT`, at least one unit.

    It is proportional to weight * min(size, limit) ** (1 / temperature) (Raffel et al. 2020, section 3.5.2; there all
    weights are 1), or to the weight alone.

    Args:
      weights: positive weights.
      sizes: number of examples of each part.
      temperature: None: sizes do not matter.
      limit: larger sizes count as this; None: no limit.
    """
    counts = [size if limit is None else min(size, limit) for size in sizes]
    scaled = [
        weight if temperature is None else weight * count ** (1.0 / temperature)
        for weight, count in zip(weights, counts, strict=True)
    ]
    total = sum(scaled)
    return tuple(max(round(value / total * SHARE_UNIT), 1) for value in scaled)


def mixture_block_size(sizes: Sequence[int]) -> int:
    """Examples per block of a mixture: as many as its parts have, at most `BLOCK_EXAMPLES`, and some of every part."""
    return max(min(sum(sizes), BLOCK_EXAMPLES), 2 * len(sizes))


@dataclass
class PlannedBlock:
    """The batches of a block, and its examples.

    If planning needed their lengths and did not know them, all examples of the block are encoded. Otherwise each host
    encodes only the examples of the rows that it fills.

    Attributes:
      batches: batches of indices into the block.
      encode: encodes examples of the split.
      indices: index in the split of each example of the block, or its `Draw`.
      epoch: number of the epoch.
      encoded: the encoded examples, or None if they are not encoded yet.
    """

    batches: list[PlannedBatch]
    encode: EncodedExamples
    indices: Sequence[Any]
    epoch: int
    encoded: list[Features] | None

    def features(self, members: Sequence[int]) -> list[Features]:
        """The encoded examples at these indices into the block."""
        if self.encoded is not None:
            return [self.encoded[member] for member in members]
        return self.encode([self.indices[member] for member in members], self.epoch)


@dataclass
class BlockPlanner:
    """Computes block n of a split. Blocks are numbered through all epochs.

    Attributes:
      encode: `(indices, epoch) -> features`; its length is the number of examples (rows if data.packing is concat).
      order: the examples of each block.
      buckets: batch shapes, shortest first.
      pack: True if rows hold several examples (first fit).
      seed: seed of the order of batches; None keeps that of their examples.
      max_length: longer examples are skipped; None skips none.
      windows: True if one example may become several rows.
      skipped: number of skipped examples by block of the epoch, as of the last time that it was planned.
    """

    encode: EncodedExamples
    order: Order
    buckets: list[Shape]
    pack: bool
    seed: int | None
    max_length: int | None
    windows: bool = False
    skipped: dict[int, int] = field(default_factory=dict)

    @property
    def blocks(self) -> int:
        """Blocks per epoch."""
        return self.order.blocks

    def __call__(self, number: int) -> PlannedBlock:
        """Plans block `number`."""
        epoch, block = divmod(number, self.blocks)
        indices = self.order(number)
        encoded, lengths = None, [0] * len(indices)  # lengths do not matter if there is one bucket only
        if self.pack or len(self.buckets) > 1 or self.max_length is not None or self.windows:
            known = getattr(self.encode, "known_lengths", None)  # of an `Encoder` or a mixture
            lengths = None if known is None else known(indices)
            if lengths is None:
                encoded = self.encode(indices, epoch)
                lengths = [packing.slot_count(example) for example in encoded]
            if self.max_length is not None:
                fits = [length <= self.max_length for length in lengths]
                self.skipped[block] = fits.count(False)
                indices, lengths = list(itertools.compress(indices, fits)), list(itertools.compress(lengths, fits))
                encoded = None if encoded is None else list(itertools.compress(encoded, fits))
        if self.pack:
            counts = lengths if encoded is None else [packing.slot_counts(example) for example in encoded]
            batches = packing.first_fit(counts, self.buckets[-1])
        else:
            batches = packing.bucketed(lengths, self.buckets)
        if self.seed is not None:
            order = np.random.default_rng((self.seed, epoch, block)).permutation(len(batches))
            batches = [batches[index] for index in order]
        return PlannedBlock(batches, self.encode, indices, epoch, encoded)

    def tail(self) -> int:
        """Number of rows at the end of the split that no batch of an epoch has."""
        return 0


@dataclass
class RunningTextPlanner(BlockPlanner):
    """Plans batches of a running text whose rows each go on from the same row of the batch before.

    The rows of an encoded text, those of an epoch, are divided into as many equal parts as a batch has rows. Row i of
    batch t is row t of part i. Each part begins anew in every epoch. Up to one batch of rows at the end of the text
    belongs to no part and is not read, nor is a last row that is shorter than the others.

    Attributes:
      full_rows: number of rows of the text that are not shorter than the others.
    """

    full_rows: int = 0

    @property
    def part(self) -> int:
        """Rows of the text in each part, which are the batches of an epoch.

        Raises:
          ConfigError: the text has fewer rows than a batch.
        """
        rows = self.buckets[-1].rows
        if self.full_rows < rows:
            raise ConfigError(
                f"config.data.batch: got {rows}, expected at most {self.full_rows} with task.recurrence: the training "
                f"text has no more rows of {self.buckets[-1].length} tokens; lower it, or data.length"
            )
        return self.full_rows // rows

    @property
    def blocks(self) -> int:
        """Blocks per epoch."""
        return -(-self.part // self._block_batches)

    @property
    def _block_batches(self) -> int:
        return max(self.order.size // self.buckets[-1].rows, 1)

    def __call__(self, number: int) -> PlannedBlock:
        """Plans block `number`."""
        epoch, block = divmod(number, self.blocks)
        shape, part = self.buckets[-1], self.part
        steps = range(block * self._block_batches, min((block + 1) * self._block_batches, part))
        indices = [row * part + step for step in steps for row in range(shape.rows)]
        batches = [
            PlannedBatch(shape, [[count * shape.rows + row] for row in range(shape.rows)], continues=step > 0)
            for count, step in enumerate(steps)
        ]
        return PlannedBlock(batches, self.encode, indices, epoch, None)

    def tail(self) -> int:
        """Number of rows at the end of the text that belong to no part."""
        return len(self.encode) - self.part * self.buckets[-1].rows
