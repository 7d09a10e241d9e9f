"""From a data set to batches: an endless training iterator whose state is three numbers, and evaluation passes.

The order of the examples is one seeded shuffle an epoch (grain's, computed index by index, so any size will do). That
order is cut into blocks. A block's examples are encoded, their lengths decide which of them share a batch
(`packing.py`), and the block's batches are put in random order. All of this depends on the seed, the epoch and the
block only, so every host plans the same global batches and fills its own rows, and (epoch, block, batch) is all that a
checkpoint needs, whatever the number of hosts that reads it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grain
import numpy as np

from jaxformer.config import Config, ConfigError
from jaxformer.data import cache, concat, cuts, packing
from jaxformer.data.cuts import Cut
from jaxformer.data.encoding import Encoder
from jaxformer.data.packing import Features, Planned, Shape
from jaxformer.data.sources import Dataset, Examples
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.types import Batch

if TYPE_CHECKING:
    from jaxformer.tasks import Task

WHOLE = 2**16
"""Up to so many examples are planned together: a block is an epoch."""
BLOCK = 2**14
"""Examples of a block of a larger data set. They are encoded before the first of their batches can be made."""
MEMORY = 512 << 20
"""Bytes for the ids of texts already split into tokens."""
PREFETCH = 2
"""Batches made ahead in the background."""
UNCUT = 2**30
"""A length that nothing exceeds."""
LOOKED_AT = 2**14
"""Training examples, spread over all of them, in which what is cut off is counted when a run starts."""

PACKINGS = ("none", "concat", "first_fit")


@dataclass
class Block:
    """A planned block: `batches` of places in the block, and what is at these places.

    Where planning needed the lengths, all of the block is encoded. Else each host encodes the rows that it fills.
    """

    batches: list[Planned]
    encode: Callable[[Sequence[int], int], list[Features]]
    indices: Sequence[int]
    epoch: int
    encoded: list[Features] | None

    def features(self, places: Sequence[int]) -> list[Features]:
        if self.encoded is not None:
            return [self.encoded[place] for place in places]
        return self.encode([self.indices[place] for place in places], self.epoch)


@dataclass
class Plan:
    """How a split becomes blocks of global batches.

    Attributes:
      encode: `(indices, epoch) -> features`, with a length: the number of examples (of rows, for packing concat).
      buckets: batch shapes, shortest first.
      pack: several examples a row (first fit).
      seed: of the order; None: the order of the data.
      longest: examples above this length are dropped; None: none are.
      size: examples of a block.
      windows: whether an example may be several pieces.
    """

    encode: Any
    buckets: list[Shape]
    pack: bool
    seed: int | None
    longest: int | None
    size: int
    windows: bool = False
    dropped: dict[int, int] = field(default_factory=dict)  # block -> examples dropped when it was last planned

    @property
    def blocks(self) -> int:
        """Blocks of an epoch."""
        return -(-len(self.encode) // self.size)

    def __call__(self, number: int) -> Block:
        """Block `number`, counted through all epochs."""
        epoch, block = divmod(number, self.blocks)
        indices = self._order(epoch, range(block * self.size, min((block + 1) * self.size, len(self.encode))))
        encoded, lengths = None, [0] * len(indices)  # enough to know where there is one bucket only
        if self.pack or len(self.buckets) > 1 or self.longest is not None or self.windows:
            encoded = self.encode(indices, epoch)
            if self.longest is not None:
                kept = [example for example in encoded if packing.size(example) <= self.longest]
                self._drop(block, len(encoded) - len(kept))
                encoded = kept
            lengths = [packing.size(example) for example in encoded]
        pack = packing.first_fit if self.pack else packing.bucketed
        batches = pack(lengths, self.buckets[-1] if self.pack else self.buckets)
        if self.seed is not None:
            turn = np.random.default_rng((self.seed, epoch, block)).permutation(len(batches))
            batches = [batches[place] for place in turn]
        return Block(batches, self.encode, indices, epoch, encoded)

    def _order(self, epoch: int, places: range) -> Sequence[int]:
        """The examples at these places of the epoch's order: a pseudorandom permutation, computed place by place."""
        if self.seed is None:
            return places
        seed = int(np.random.SeedSequence((self.seed, epoch)).generate_state(1)[0])
        last = len(self.encode) - 1
        return [grain.experimental.index_shuffle(place, max_index=last, seed=seed, rounds=4) for place in places]

    def _drop(self, block: int, count: int) -> None:
        self.dropped[block] = count


class Batches(grain.IterDataset):
    """The batches of planned blocks, in order."""

    def __init__(self, blocks: grain.IterDataset, per_epoch: int, fill: Callable[[Block, Planned], Batch]):
        super().__init__(blocks)
        self._per_epoch, self._fill = per_epoch, fill

    def __iter__(self) -> grain.DatasetIterator:
        return BatchIterator(iter(self._parent), self._per_epoch, self._fill)


class BatchIterator(grain.DatasetIterator):
    """Its state is the place of the next batch: {"epoch", "block", "batch"}."""

    def __init__(self, blocks: grain.DatasetIterator, per_epoch: int, fill: Callable[[Block, Planned], Batch]):
        super().__init__(blocks)
        self._per_epoch, self._fill = per_epoch, fill
        self._number, self._batch = 0, 0
        self._block: Block | None = None

    def __next__(self) -> Batch:
        if self._block is None:
            self._block = next(self._parent)
        empty = 0
        while self._batch >= len(self._block.batches):
            empty = empty + 1 if self._batch == 0 else 0
            if empty > self._per_epoch:
                raise ConfigError("data.skip_long: got an epoch without examples, expected some; raise data.length")
            self._block = next(self._parent)
            self._number, self._batch = self._number + 1, 0
        planned = self._block.batches[self._batch]
        self._batch += 1
        return self._fill(self._block, planned)

    def get_state(self) -> dict[str, int]:
        epoch, block = divmod(self._number, self._per_epoch)
        return {"epoch": epoch, "block": block, "batch": self._batch}

    def set_state(self, state: dict[str, int]) -> None:
        self._number = state["epoch"] * self._per_epoch + state["block"]
        self._batch = state["batch"]
        self._block = None
        self._parent.set_state({"next_index": self._number})


class Pipeline:
    """The batches of a run.

    Args:
      config: the run.
      dataset: its examples.
      tokenizers: its vocabularies.
      task: says what an example becomes.
      process_index, process_count: which host of how many this is; each fills its own slice of a batch's rows.
      multiple: rows of a batch divide by it (the number of data shards) and by `process_count`.

    Raises:
      ConfigError: no training examples; a packing that the task cannot have.
    """

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        tokenizers: Tokenizers,
        task: Task,
        process_index: int = 0,
        process_count: int = 1,
        multiple: int = 1,
    ):
        data = config.data
        if data.packing not in PACKINGS:
            raise ConfigError(f"data.packing: got {data.packing!r}, expected one of {', '.join(PACKINGS)}; change it")
        self.config, self.dataset, self.task = config, dataset, task
        self.tokenizers = tokenizers
        self._remembering = tokenizers.remembering(MEMORY)
        self._process, self._processes = process_index, process_count
        self._multiple = math.lcm(multiple, process_count)
        # A trained model may be measured on a split alone, whose first example then says which arrays a batch has.
        first = "train" if "train" in dataset.splits else next(iter(dataset.splits))
        self._count(first, data.examples)  # at least one, or it raises
        self._check(self._encoder(first, 1, config)([0], 0)[0])
        self._plan = self._planned(first, data.examples, packing.shapes(*self._budget()), train=first == "train")
        self._like = self._plan.encode([0], 0)[0]  # which arrays a batch has, also where a host's rows are all empty
        self._sizes: dict[tuple[str, int | None], dict[str, int]] = {}
        self._cuts: dict[tuple[str, int | None], Cut] = {}

    def train(self) -> grain.DatasetIterator:
        """An endless iterator over this host's rows of the training batches, numpy `[B / process_count, T]`.

        `get_state()` is {"epoch", "block", "batch"} of the batch that would come next; `set_state` goes there. The next
        block is encoded, and the next batches are filled, in the background; `close()` ends that.
        """
        self._split("train")  # or it raises: the plan may be of another
        blocks = grain.MapDataset.range(2**40).map(self._plan)
        ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
        batches = Batches(blocks.to_iter_dataset(ahead), self._plan.blocks, self._fill)
        return iter(grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=PREFETCH))

    def place(self, batches: grain.DatasetIterator) -> dict[str, Any]:
        """Where `batches` stands, as JSON values, with the shapes that the batches were planned in."""
        return {**batches.get_state(), "shapes": [list(shape) for shape in self._plan.buckets]}

    def resume(self, place: dict[str, Any]) -> grain.DatasetIterator:
        """`train()` from a `place` on: the batches that would have come, also on other numbers of hosts and devices.

        Raises:
          ConfigError: the rows of these batches do not divide among the devices; or `place` is none.
        """
        numbers = [place.get(name) for name in ("epoch", "block", "batch")]
        saved = place.get("shapes", [list(shape) for shape in self._plan.buckets])  # earlier versions: not said
        fine = all(type(n) is int and n >= 0 for n in numbers) and [shape[-1:] for shape in saved] == [
            [shape.length] for shape in self._plan.buckets
        ]
        if not fine:
            raise ConfigError(f"checkpoint: got {place} as the place in the data, expected epoch, block and batch")
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

    def evaluate(self, split: str, examples: int | None = None, rows: int | None = None) -> Iterator[Batch]:
        """One pass over a split in the order of the data: every example once, the last batch filled up with empty rows.

        A text that is too long for a row is read in several, if the task has `windows`; else it is cut, and `cut` says
        how much.

        Args:
          split: "validation", "test", "train".
          examples: only the first so many.
          rows: of a global batch; None: `config.evaluate.batch`. Rounded up to a multiple of the data shards.

        Raises:
          ConfigError: there is no such split, or it is empty.
        """
        rows = self.config.evaluate.batch if rows is None else rows
        rows = -(-rows // self._multiple) * self._multiple
        buckets = packing.shapes(self._budget()[0], rows, None, self._multiple)
        plan = self._planned(split, examples, buckets, train=False)
        return (self._fill(block, batch) for block in map(plan, range(plan.blocks)) for batch in block.batches)

    def shapes(self) -> list[Shape]:
        """The (rows, length) of the global training batches: what gets compiled."""
        return self._plan.buckets

    def size(self, split: str, examples: int | None = None) -> dict[str, int]:
        """What a split holds: "examples", and "bytes", "words" and "lines" (line ends) of the text that is predicted.

        Reads the whole split the first time. What one evaluation predicts, "labels", is its sum of weights.

        Args:
          examples: only of the first so many, as in `evaluate`.
        """
        if (split, examples) not in self._sizes:
            roles = self.task.roles
            predicted = next((role for role in ("target", "text", "source") if role in roles), None)
            chosen = _First(self._split(split), self._count(split, examples))
            self._sizes[split, examples] = cache.size(
                chosen, (predicted,) if predicted else (), self.config.data.document
            )
        return self._sizes[split, examples]

    def cut(self, split: str, examples: int | None = None) -> Cut:
        """What `evaluate` cuts off the same examples. Encodes them the first time, if any of them may be cut."""
        if (split, examples) not in self._cuts:
            count = self._count(split, examples)
            whole = self.config.data.packing == "concat" or self.task.windows is not None
            encode = self._encoder(split, count, self.config)
            self._cuts[split, examples] = Cut(count) if whole else cuts.count(encode.each(range(count)))
        return self._cuts[split, examples]

    def said(self, measured: int | None) -> list[str]:
        """What a run that starts says of text that does not fit: of training, and of the validation split it measures.

        Args:
          measured: only so many validation examples are; None: all.
        """
        data, lines = self.config.data, []
        if data.packing != "concat":
            count = self._count("train", data.examples)
            looked = [number * count // LOOKED_AT for number in range(LOOKED_AT)] if count > LOOKED_AT else range(count)
            config = self._uncut() if data.skip_long else self.config
            encoded = self._encoder("train", count, config).each(looked)
            found = cuts.too_long(encoded, data.length) if data.skip_long else cuts.count(encoded)
            lines.append(found.sentence("train", data.length, count, "left out" if data.skip_long else "cut off"))
        if "validation" in self.dataset.splits:
            lines.append(self.cut("validation", measured).sentence("validation", data.length))
        return [line for line in lines if line]

    @property
    def dropped(self) -> int:
        """Training examples that `skip_long` has left out, of an epoch's blocks planned so far."""
        return sum(self._plan.dropped.values())

    @property
    def epoch_batches(self) -> int | None:
        """Batches of a training epoch where all rows are alike, else None: then it differs between epochs."""
        plan = self._plan
        if plan.pack or len(plan.buckets) > 1 or plan.longest is not None:
            return None
        sizes = [min(plan.size, len(plan.encode) - begin) for begin in range(0, len(plan.encode), plan.size)]
        return sum(-(-size // plan.buckets[0].rows) for size in sizes)

    def _budget(self) -> tuple[set[int], int, int | None, int]:
        data = self.config.data
        lengths = {data.length}
        if data.packing == "none":
            lengths |= {bucket for bucket in data.buckets if bucket < data.length}
        return lengths, data.batch, data.tokens, self._multiple

    def _split(self, split: str) -> Examples:
        if split not in self.dataset.splits:
            known = ", ".join(self.dataset.splits)
            raise ConfigError(f"split: got {split!r}, expected one of {known}; choose one or add its files")
        return self.dataset.splits[split]

    def _count(self, split: str, limit: int | None) -> int:
        count = len(self._split(split))
        count = count if limit is None else min(limit, count)
        if count < 1:
            raise ConfigError(f"data: got no examples in split {split!r}, expected at least one; check the files")
        return count

    def _encoder(self, split: str, count: int, config: Config, windows: bool = False) -> Encoder:
        return Encoder(config, self._remembering, self.task, self._split(split), count, windows)

    def _uncut(self) -> Config:
        """The config under which nothing is cut, so that what is too long shows."""
        return dataclasses.replace(self.config, data=dataclasses.replace(self.config.data, length=UNCUT))

    def _check(self, features: Features) -> None:
        kind, task = self.config.data.packing, self.config.task.name
        if kind == "concat" and ("target" not in features or "source" in features):
            raise ConfigError(
                f"data.packing: got concat for task {task!r}, which is not language modelling, expected none or "
                "first_fit; change it"
            )
        if kind == "first_fit" and "labels" in features and np.ndim(features["labels"]) == 0:
            raise ConfigError(f"data.packing: got first_fit for task {task!r}, expected none; change it")

    def _planned(self, split: str, limit: int | None, buckets: list[Shape], train: bool) -> Plan:
        data, config = self.config.data, self.config
        count, windows = self._count(split, limit), False
        if data.packing == "concat":
            key = f"{self.dataset.key} {split} {count}"
            documents = _First(self._split(split), count)
            tokens = concat.stream(cache.root(data) / "streams", key, documents, self.tokenizers.target)
            encode, longest = concat.Rows(tokens, data.length), None
        else:
            longest = data.length if train and data.skip_long else None
            if longest is not None:
                config = self._uncut()
            windows = not train and self.task.windows is not None
            encode = self._encoder(split, count, config, windows)
        seed = config.train.seed if train and data.shuffle else None
        size = len(encode) if len(encode) <= WHOLE else BLOCK
        return Plan(encode, buckets, data.packing == "first_fit", seed, longest, size, windows)

    def _fill(self, block: Block, planned: Planned) -> Batch:
        """This host's rows of a planned batch."""
        own = packing.share(planned.shape.rows, self._process, self._processes)
        mine, rows = planned.rows[own], own.stop - own.start
        encoded = iter(block.features([place for row in mine for place in row]))
        filled = [[next(encoded) for _ in row] for row in mine]
        return packing.collate(filled + [[]] * (rows - len(filled)), planned.shape.length, self._like)


@dataclass(frozen=True)
class _First:
    """The first `count` examples of a split."""

    examples: Examples
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.examples[index]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        return concat.examples_at(self.examples, indices)
