"""Shared code of sources that generate examples: drawing by index, and disjoint splits.

An example is drawn from a hash of its index, so each index always gives the same example. The split of an example is a
function of the example itself: a training draw that hits a held-out example is drawn again. So no held-out example
occurs in training, however long it runs.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from jaxformer.data.sources import Dataset, Example

Item = TypeVar("Item", bound=Hashable)

TRAIN_EXAMPLES = 1_000_000
"""Examples of the training split, by which epochs are counted."""
MAX_HELD_OUT_EXAMPLES = 1_000
"""Distinct examples of the validation split and of the test split."""
MAX_DRAWS = 50_000
"""Draws for the held-out splits, after which they are taken to have no more distinct examples."""


class Generator(Protocol[Item]):
    """Generates examples from items (the text or number that identifies an example). Instances must be picklable."""

    def draw(self, seed: int, /) -> Item:
        """The item of a seed, which is uniform in 0..2**64-1."""
        ...

    def split(self, item: Item, /) -> str:
        """The only split in which `item` may appear: "train", "validation" or "test"."""
        ...

    def example(self, item: Item, /) -> Example:
        """The example of an item."""
        ...


def hash64(text: str) -> int:
    """A hash of `text` in 0..2**64-1, equal in every process and version and on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def split_by_hash(text: str) -> str:
    """Split of the item that `text` identifies: 8/10 train, 1/10 validation, 1/10 test."""
    return ("test", "validation")[tenth] if (tenth := hash64(f"split {text}") % 10) < 2 else "train"


@dataclass(frozen=True)
class DrawnExamples(Generic[Item]):
    """The training split: index -> example, computed on demand."""

    generator: Generator[Item]
    length: int = TRAIN_EXAMPLES
    drawn_key: str = ""  # of the data set; with the project's code it decides every example

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < self.length:
            raise IndexError(f"example {index} of {self.length}")
        item = next(i for i in _draws(self.generator, f"train {index}") if self.generator.split(i) == "train")
        return self.generator.example(item)


@dataclass(frozen=True)
class HeldOutExamples(Generic[Item]):
    """A held-out split: a fixed list of distinct items."""

    generator: Generator[Item]
    items: tuple[Item, ...]
    drawn_key: str = ""  # as that of `DrawnExamples`

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Example:
        return self.generator.example(self.items[index])


def build_dataset(generator: Generator[Item], key: str) -> Dataset:
    """Train, validation and test split of `generator`. The held-out splits are smaller if fewer examples exist."""
    found: dict[str, dict[Item, None]] = {"validation": {}, "test": {}}  # dict as an ordered set
    for item in itertools.islice(_draws(generator, "held out"), MAX_DRAWS):
        items = found.get(generator.split(item))
        if items is not None and len(items) < MAX_HELD_OUT_EXAMPLES:
            items[item] = None
        elif all(len(items) == MAX_HELD_OUT_EXAMPLES for items in found.values()):
            break
    held_out = {split: HeldOutExamples(generator, tuple(items), key) for split, items in found.items() if items}
    return Dataset(splits={"train": DrawnExamples(generator, drawn_key=key), **held_out}, key=key)


def _draws(generator: Generator[Item], name: str) -> Iterator[Item]:
    return (generator.draw(hash64(f"{name} {attempt}")) for attempt in itertools.count())
