"""What sources that make their own examples share: drawing by index, and held-out sets that training cannot reach.

An example is drawn from a hash of its index, so any index can be asked for at any time and always gives the same
example. Which split an example may appear in is a function of the example alone, never of the index: a training draw
that lands on a held-out example is drawn again. So no held-out example occurs in training, however long it lasts.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from jaxformer.data.sources import Dataset, Example

Item = TypeVar("Item", bound=Hashable)

TRAIN = 1_000_000  # training indices: an epoch, as far as anybody counts them here
HELD_OUT = 1_000  # distinct examples of the validation and of the test split
PATIENCE = 50_000  # draws after which a split is taken to have no more distinct examples


class Generator(Protocol[Item]):
    """A family of examples. Instances must be picklable, for loader processes."""

    def draw(self, seed: int) -> Item:
        """The item of a seed, uniform in 0..2**64-1."""
        ...

    def split(self, item: Item) -> str:
        """The only split in which `item` may appear: "train", "validation" or "test"."""
        ...

    def example(self, item: Item) -> Example: ...


def digest(text: str) -> int:
    """A hash of `text` in 0..2**64-1: the same in every process, version and machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def tenths(text: str) -> str:
    """The split of whatever `text` identifies: eight tenths train, a tenth validation, a tenth test."""
    return ("test", "validation")[tenth] if (tenth := digest(f"split {text}") % 10) < 2 else "train"


@dataclass(frozen=True)
class Drawn(Generic[Item]):
    """The training split: index -> example, computed when asked for."""

    generator: Generator[Item]
    length: int = TRAIN

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < self.length:
            raise IndexError(f"example {index} of {self.length}")
        item = next(i for i in _draws(self.generator, f"train {index}") if self.generator.split(i) == "train")
        return self.generator.example(item)


@dataclass(frozen=True)
class Listed(Generic[Item]):
    """A held-out split: a fixed list of distinct items."""

    generator: Generator[Item]
    items: tuple[Item, ...]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Example:
        return self.generator.example(self.items[index])


def dataset(generator: Generator, key: str) -> Dataset:
    """Train, validation and test of `generator`. The held-out splits are shorter where fewer examples exist."""
    wanted: dict[str, dict] = {"validation": {}, "test": {}}
    for item in itertools.islice(_draws(generator, "held out"), PATIENCE):
        chosen = wanted.get(generator.split(item))
        if chosen is not None and len(chosen) < HELD_OUT:
            chosen[item] = None
        elif all(len(items) == HELD_OUT for items in wanted.values()):
            break
    held_out = {split: Listed(generator, tuple(items)) for split, items in wanted.items() if items}
    return Dataset(splits={"train": Drawn(generator), **held_out}, key=key)


def _draws(generator: Generator[Item], name: str) -> Iterator[Item]:
    return (generator.draw(digest(f"{name} {attempt}")) for attempt in itertools.count())
