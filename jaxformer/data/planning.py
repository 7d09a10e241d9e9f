"""Plans the batches of a split: the order of its examples, cut into blocks, and which of a block share a batch.

The order is one seeded shuffle per epoch, computed index by index, so that any size of data will do. A plan depends on
the seed, the epoch and the block only. So every host plans the same global batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

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
    """Encoded examples by index: an `Encoder`, or the rows of a `ConcatenatedRows`."""

    def __len__(self) -> int: ...

    def __call__(self, indices: Sequence[int], epoch: int) -> list[Features]: ...


@dataclass
class PlannedBlock:
    """The batches of a block, and its examples.

    If planning needed their lengths, all examples of the block are encoded. Otherwise each host encodes only the
    examples of the rows that it fills.

    Attributes:
      batches: batches of indices into the block.
      encode: encodes examples of the split.
      indices: index in the split of each example of the block.
      epoch: number of the epoch.
      encoded: the encoded examples, or None if they are not encoded yet.
    """

    batches: list[PlannedBatch]
    encode: EncodedExamples
    indices: Sequence[int]
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
      buckets: batch shapes, shortest first.
      pack: True if rows hold several examples (first fit).
      seed: seed of the shuffle; None keeps the order of the data.
      max_length: longer examples are skipped; None skips none.
      size: examples per block.
      windows: True if one example may become several rows.
      skipped: number of skipped examples by block of the epoch, as of the last time that it was planned.
    """

    encode: EncodedExamples
    buckets: list[Shape]
    pack: bool
    seed: int | None
    max_length: int | None
    size: int
    windows: bool = False
    skipped: dict[int, int] = field(default_factory=dict)

    @property
    def blocks(self) -> int:
        """Blocks per epoch."""
        return -(-len(self.encode) // self.size)

    def __call__(self, number: int) -> PlannedBlock:
        """Plans block `number`."""
        epoch, block = divmod(number, self.blocks)
        indices = self._shuffled(epoch, range(block * self.size, min((block + 1) * self.size, len(self.encode))))
        encoded, lengths = None, [0] * len(indices)  # lengths do not matter if there is one bucket only
        if self.pack or len(self.buckets) > 1 or self.max_length is not None or self.windows:
            encoded = self.encode(indices, epoch)
            if self.max_length is not None:
                short = [example for example in encoded if packing.slot_count(example) <= self.max_length]
                self.skipped[block] = len(encoded) - len(short)
                encoded = short
            lengths = [packing.slot_count(example) for example in encoded]
        if self.pack:
            batches = packing.first_fit(lengths, self.buckets[-1])
        else:
            batches = packing.bucketed(lengths, self.buckets)
        if self.seed is not None:
            order = np.random.default_rng((self.seed, epoch, block)).permutation(len(batches))
            batches = [batches[index] for index in order]
        return PlannedBlock(batches, self.encode, indices, epoch, encoded)

    def tail(self) -> int:
        """Number of rows at the end of the split that no batch of an epoch has."""
        return 0

    def _shuffled(self, epoch: int, positions: range) -> Sequence[int]:
        """Indices of the examples at these positions of the epoch's pseudorandom permutation."""
        if self.seed is None:
            return positions
        seed = int(np.random.SeedSequence((self.seed, epoch)).generate_state(1)[0])
        last = len(self.encode) - 1
        shuffle = grain.experimental.index_shuffle
        return [shuffle(position, max_index=last, seed=seed, rounds=4) for position in positions]


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
        return max(self.size // self.buckets[-1].rows, 1)

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
