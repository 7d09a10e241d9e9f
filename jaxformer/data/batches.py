"""Training batches: an endless iterator over planned blocks, whose state is three numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import grain
import numpy as np

from jaxformer.data import loaders, packing
from jaxformer.data.packing import Features, PlannedBatch, Shape
from jaxformer.data.planning import BlockPlanner, PlannedBlock
from jaxformer.errors import ConfigError
from jaxformer.types import Batch

PREFETCHED_BATCHES = 2
"""Batches filled ahead in the background."""

Fill = Callable[[int, PlannedBlock, PlannedBatch], Any]


class Batches(grain.IterDataset):
    """The batches of planned blocks, in order.

    Args:
      blocks: planned blocks, endless.
      per_epoch: blocks per epoch.
      fill: makes the arrays of a planned batch, given the number of its block, the block and the batch.
    """

    def __init__(self, blocks: grain.IterDataset, per_epoch: int, fill: Fill):
        super().__init__(blocks)
        self._per_epoch, self._fill = per_epoch, fill

    def __iter__(self) -> grain.DatasetIterator:
        return BatchIterator(iter(self._parent), self._per_epoch, self._fill)


class BatchIterator(grain.DatasetIterator):
    """Iterator over batches whose state is the position of the next one: {"epoch", "block", "batch"}."""

    def __init__(self, blocks: grain.DatasetIterator, per_epoch: int, fill: Fill):
        super().__init__(blocks)
        self._per_epoch, self._fill = per_epoch, fill
        self._number, self._batch = 0, 0
        self._block: PlannedBlock | None = None

    def __next__(self) -> Any:
        block: PlannedBlock = next(self._parent) if self._block is None else self._block
        empty = 0
        while self._batch >= len(block.batches):
            empty = empty + 1 if self._batch == 0 else 0
            if empty > self._per_epoch:
                raise ConfigError("data.skip_long: got an epoch without examples, expected some; raise data.length")
            block = next(self._parent)
            self._number, self._batch = self._number + 1, 0
        self._block = block
        planned = block.batches[self._batch]
        self._batch += 1
        return self._fill(self._number, block, planned)

    def get_state(self) -> dict[str, int]:
        epoch, block = divmod(self._number, self._per_epoch)
        return {"epoch": epoch, "block": block, "batch": self._batch}

    def set_state(self, state: dict[str, int]) -> None:
        self._number = state["epoch"] * self._per_epoch + state["block"]
        self._batch = state["batch"]
        self._block = None
        self._parent.set_state({"next_index": self._number})


class TrainingBatches:
    """The training batches of a plan, as this host reads them: of a data set (`Pipeline`) or of several (`Mixture`).

    These set `_plan`, which plans block n, and `_template`, an encoded example for hosts whose rows are all empty.

    Args:
      process_index, process_count: number of this host, and of hosts; each fills its own slice of a batch's rows.
      multiple: the rows of a batch are a multiple of this, and of `process_count`.
      workers: loader processes of this host; 0: threads of this process fill the batches.
    """

    _plan: BlockPlanner
    _template: Features

    def __init__(self, process_index: int, process_count: int, multiple: int, workers: int = 0) -> None:
        self._workers = workers
        self._process, self._processes = process_index, process_count
        self._multiple = math.lcm(multiple, process_count)

    def train(self) -> grain.DatasetIterator:
        """An endless iterator over this host's rows of the training batches, numpy `[B / process_count, T]`.

        `get_state()` returns {"epoch", "block", "batch"} of the next batch; `set_state` seeks to it. A background
        thread encodes the next block and fills the next batches until `close()`, or the loader processes do; from the
        first `next` on, or from `start_prefetch()`.
        """
        if self._workers:
            return loaders.LoadedBatches(self, self._workers)
        batches = self._batches(lambda number, block, planned: self.fill(block, planned))
        return iter(grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=PREFETCHED_BATCHES))

    def planned_batches(self) -> grain.DatasetIterator:
        """As `train()`, of (number of the block, block, planned batch): nothing is filled."""
        return iter(self._batches(lambda *planned: planned))

    def _batches(self, fill: Fill) -> Batches:
        blocks = grain.MapDataset.range(2**40).map(self._planned)
        ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
        return Batches(blocks.to_iter_dataset(ahead), self._plan.blocks, fill)

    def data_state(self, batches: grain.DatasetIterator) -> dict[str, Any]:
        """The position of `batches` as JSON values, with the shapes of its batches: what a checkpoint stores."""
        return {**batches.get_state(), "shapes": [list(shape) for shape in self._plan.buckets]}

    def resume(self, data_state: dict[str, Any]) -> grain.DatasetIterator:
        """`train()` from a saved `data_state` on: the same batches on any number of hosts and devices.

        Raises:
          ConfigError: the rows of the saved batches do not divide among the devices, or `data_state` is malformed.
        """
        numbers = [data_state.get(name) for name in ("epoch", "block", "batch")]
        saved = data_state.get("shapes", [list(shape) for shape in self._plan.buckets])  # absent in old checkpoints
        fine = all(type(n) is int and n >= 0 for n in numbers) and [shape[-1:] for shape in saved] == [
            [shape.length] for shape in self._plan.buckets
        ]
        if not fine:
            raise ConfigError(f"checkpoint: got {data_state} as the state of the data, expected epoch, block and batch")
        shapes = [Shape(*map(int, shape)) for shape in saved]
        uneven = [shape.rows for shape in shapes if shape.rows % self._multiple]
        if uneven:
            raise ConfigError(
                f"data: got batches of {', '.join(map(str, uneven))} rows in the checkpoint, expected multiples of "
                f"{self._multiple} (devices that share a batch, times microbatches); resume on as many devices as "
                "before, or a number that divides theirs"
            )
        self._plan.buckets = shapes
        batches = self.train()
        batches.set_state(dict(zip(("epoch", "block", "batch"), numbers, strict=True)))
        return batches

    def shapes(self) -> list[Shape]:
        """The (rows, length) of the global training batches, each of which is compiled once."""
        return self._plan.buckets

    @property
    def skipped_examples(self) -> int:
        """Training examples that `data.skip_long` left out of the blocks planned in this epoch."""
        return sum(self._plan.skipped.values())

    def _planned(self, number: int) -> PlannedBlock:
        """Block `number`, as it is planned ahead in the background."""
        return self._plan(number)

    def note(self, number: int) -> Any:
        """Facts of block `number`, planned in this process, that `learn` takes over in another one."""
        block = number % self._plan.blocks
        return {"skipped": self._plan.skipped.get(block)}

    def learn(self, number: int, note: Any) -> None:
        """Takes over what a loader process noted of block `number`."""
        if note["skipped"] is not None:
            self._plan.skipped[number % self._plan.blocks] = note["skipped"]

    def fill(self, block: PlannedBlock, planned: PlannedBatch) -> Batch:
        """This host's rows of a planned batch."""
        part = packing.process_rows(planned.shape.rows, self._process, self._processes)
        members, rows = planned.rows[part], part.stop - part.start
        encoded = iter(block.features([member for row in members for member in row]))
        filled = [[next(encoded) for _ in row] for row in members]
        batch = packing.collate(filled + [[]] * (rows - len(filled)), planned.shape.length, self._template)
        if planned.continues is None:
            return batch
        flags: Any = np.full(rows, planned.continues)  # numpy's array stands for jax's
        return batch._replace(continues=flags)
