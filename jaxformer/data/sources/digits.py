"""Handwritten digits of 8 x 8 pixels from scikit-learn (its copy of the test set of Alpaydin and Kaynak 1998).

    config.name = "2"          patches of 2 x 2 pixels: a series of 16 steps with 4 channels each (the default)
    config.name = "4"          patches of 4 x 4 pixels: 4 steps of 16 channels
    config.name = "2/pairs"    two digits, one above the other, with their words: "a seven above a two"

Patches run from left to right and from top to bottom; pixels are from 0 to 16. The 1,797 images are shuffled once with
a fixed seed: 1,197 train, 300 validate, 300 test. Pairs are drawn from the images of their own split, each by a hash of
its index: 20,000 for training, 500 for validation and test.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from jaxformer.config import DataConfig
from jaxformer.data.sources import Channels, Dataset, Example, _generated
from jaxformer.errors import ConfigError

SIZE, HELD_OUT, TRAIN_PAIRS, HELD_OUT_PAIRS = 8, 300, 20_000, 500
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def cut_image(image: Float[np.ndarray, "H W"], side: int) -> Float[np.ndarray, "T C"]:
    """The square patches of an image, row by row, with their pixels as channels."""
    height, width = image.shape
    blocks = image.reshape(height // side, side, width // side, side)
    return np.swapaxes(blocks, 1, 2).reshape(-1, side * side)


@dataclass(frozen=True)
class Images:
    """Images `[n, 8, 8]` with their labels, as examples to classify."""

    images: np.ndarray
    labels: np.ndarray
    side: int

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Example:
        return {"values": cut_image(self.images[index], self.side), "label": int(self.labels[index])}


@dataclass(frozen=True)
class Pairs:
    """`count` pairs of `images`, one above the other, with their words."""

    images: Images
    name: str
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < self.count:
            raise IndexError(f"pair {index} of {self.count}")
        above, below = (_generated.hash64(f"{self.name} {index} {part}") % len(self.images) for part in range(2))
        image = np.concatenate([self.images.images[above], self.images.images[below]])
        first, second = (WORDS[self.images.labels[number]] for number in (above, below))
        article = {word: "an" if word == "eight" else "a" for word in WORDS}
        text = f"{article[first]} {first} above {article[second]} {second}"
        return {"values": cut_image(image, self.images.side), "target": text}


def build(config: DataConfig) -> Dataset:
    """The images, or pairs of them, as `config.name` says.

    Raises:
      ConfigError: the name is unknown, or scikit-learn is not installed.
    """
    side, slash, kind = (config.name or "2").partition("/")
    if side not in ("1", "2", "4", "8") or (slash and kind != "pairs"):
        expected = "expected the side of a patch (1, 2, 4 or 8), and /pairs for captions, as in 2/pairs"
        raise ConfigError(f"data.name: got {config.name!r}, {expected}")
    images, labels = _load()
    order = np.random.RandomState(0).permutation(len(images))  # its stream never changes
    bounds = {"train": (2 * HELD_OUT, None), "validation": (0, HELD_OUT), "test": (HELD_OUT, 2 * HELD_OUT)}
    splits = {
        name: Images(images[order[start:stop]], labels[order[start:stop]], int(side))
        for name, (start, stop) in bounds.items()
    }
    pixels = np.concatenate([cut_image(image, int(side)) for image in splits["train"].images])
    deviations = pixels.std(axis=0)
    channels = Channels(
        tuple(f"pixel {number + 1}" for number in range(pixels.shape[1])),
        tuple(pixels.mean(axis=0).tolist()),
        tuple(np.where(deviations > 0, deviations, 1.0).tolist()),
    )
    if kind == "pairs":
        counts = {"train": TRAIN_PAIRS, "validation": HELD_OUT_PAIRS, "test": HELD_OUT_PAIRS}
        pairs = {name: Pairs(split, name, counts[name]) for name, split in splits.items()}
        return Dataset(pairs, f"digits-1-{config.name}", channels=channels)
    return Dataset(splits, f"digits-1-{side}", tuple(map(str, range(10))), channels)


def _load() -> tuple[np.ndarray, np.ndarray]:
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ImportError as error:
        raise ConfigError("data.source: got digits, which reads scikit-learn's; pip install scikit-learn") from error
    data = datasets.load_digits()
    return data.images.astype(np.float64), data.target.astype(np.int64)


SOURCE = build
