"""Toy tasks with a known answer: copy, reverse, sort, addition. Generated; needs no files.

    copy      qhzb   -> qhzb        reverse   qhzb -> bzhq
    sort      qhzb   -> bhqz        addition  47+105 -> 152

`config.name` is the task and, after a slash, the lengths: "reverse" (1 to 20 letters), "reverse/20" (exactly 20),
"reverse/5-10". Lengths are drawn uniformly. In addition they count the digits of each number (1 to 6 by default), and a
number does not begin with 0 unless it has one digit. Symbols are not separated: use a character tokenizer.

A tenth of the inputs is the test split's and a tenth the validation split's. A sum and the same sum with its numbers
swapped are in the same split.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Callable
from dataclasses import dataclass

from jaxformer import registry
from jaxformer.config import DataConfig
from jaxformer.data.sources import Dataset, Example, _generated
from jaxformer.errors import ConfigError

ANSWERS: dict[str, Callable[[str], str]] = {
    "copy": lambda text: text,
    "reverse": lambda text: text[::-1],
    "sort": lambda text: "".join(sorted(text)),
    "addition": lambda text: str(sum(int(number) for number in text.split("+"))),
}
DEFAULT_LENGTHS = {"copy": (1, 20), "reverse": (1, 20), "sort": (1, 20), "addition": (1, 6)}
MAX_LENGTH = 10_000


@dataclass(frozen=True)
class Algorithmic:
    """Generator of inputs of `task` with `low` to `high` letters (addition: digits per number), and their answers."""

    task: str
    low: int
    high: int

    def draw(self, seed: int) -> str:
        if self.task == "addition":
            return "+".join(self._number(seed, index) for index in range(2))
        length = self._length(seed, 0)
        letters = hashlib.shake_256(b"letters %d" % seed).digest(2 * length)
        values = (letters[i] << 8 | letters[i + 1] for i in range(0, 2 * length, 2))
        return "".join(string.ascii_lowercase[value * 26 >> 16] for value in values)

    def split(self, item: str) -> str:
        # Sorting makes a sum and its swapped form one item; strings without "+" stay as they are.
        return _generated.split_by_hash("+".join(sorted(item.split("+"))))

    def example(self, item: str) -> Example:
        return {"source": item, "target": ANSWERS[self.task](item)}

    def _length(self, seed: int, index: int) -> int:
        return self.low + _generated.hash64(f"length {index} {seed}") % (self.high - self.low + 1)

    def _number(self, seed: int, index: int) -> str:
        length = self._length(seed, index)
        low = 0 if length == 1 else 10 ** (length - 1)
        drawn = int.from_bytes(hashlib.shake_256(b"number %d %d" % (index, seed)).digest(8 + length), "big")
        return str(low + drawn % (10**length - low))


def build(config: DataConfig) -> Dataset:
    """The task `config.name`: a million training examples, up to 1000 validation and 1000 test inputs."""
    match = re.fullmatch(r"(\w+)(?:/(\d+)(?:-(\d+))?)?", config.name)
    if match is None or match[1] not in ANSWERS:
        known = tuple(ANSWERS)
        expected = f"expected {', '.join(known)}, with lengths as in 'reverse/5-10' if wanted"
        raise ConfigError(f"data.name: got {config.name!r}, {expected}{registry.nearest(config.name, known)}")
    task = match[1]
    low, high = DEFAULT_LENGTHS[task]
    if match[2]:
        low, high = int(match[2]), int(match[3] or match[2])
    if not 1 <= low <= high <= MAX_LENGTH:
        raise ConfigError(f"data.name: got lengths {low}-{high}, expected 1 <= low <= high <= {MAX_LENGTH}")
    return _generated.build_dataset(Algorithmic(task, low, high), key=f"algorithmic-1-{task}-{low}-{high}")


SOURCE = build
