"""Examples of a split, encoded: tokens in place of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxformer.config import Config
from jaxformer.data import concat
from jaxformer.data.packing import Features
from jaxformer.data.sources import Examples
from jaxformer.data.tokenizers import Tokenizers

if TYPE_CHECKING:
    from jaxformer.tasks import Task


class Encoder:
    """Examples of a split, encoded by the task. In evaluation a text that is too long becomes several pieces, if the
    task has `windows`.

    The generator that the task draws from depends on the seed, the epoch and the example's index only: the same on any
    host, in any batch, after any interruption.
    """

    def __init__(
        self, config: Config, tokenizers: Tokenizers, task: Task, examples: Examples, count: int, windows: bool = False
    ):
        self._config, self._tokenizers = config, tokenizers
        self._encode = task.windows if windows else lambda *given: [task.encode(*given)]
        self._examples, self._count = examples, count

    def __len__(self) -> int:
        return self._count

    def __call__(self, indices: Sequence[int], epoch: int) -> list[Features]:
        # One counter-based generator that is set to each example's key: making a new one costs ten times as much.
        bits = np.random.Philox(0)
        start = bits.state
        counter = np.zeros(4, np.uint64)
        rng = np.random.Generator(bits)
        high = np.uint64((self._config.train.seed % 2**32) << 32 | epoch % 2**32)
        encoded = []
        for index, example in zip(indices, concat.examples_at(self._examples, indices), strict=True):
            start["state"] = {"counter": counter, "key": np.array([high, index], np.uint64)}
            bits.state = start
            encoded += self._encode(self._config, self._tokenizers, example, rng)
        return encoded

    def each(self, indices: Sequence[int]) -> Iterator[Features]:
        """The same of epoch 0, a few at a time, so that not all are held at once."""
        for begin in range(0, len(indices), concat.CHUNK):
            yield from self(indices[begin : begin + concat.CHUNK], 0)
