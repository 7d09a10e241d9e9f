"""Encodes the examples of a split: text in, features out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from jaxformer.config import Config
from jaxformer.data.packing import Features, slot_count
from jaxformer.data.sources import Example, Examples, examples_at
from jaxformer.data.token_shards import ShardedDocuments
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.errors import ConfigError

CHUNK_EXAMPLES = 1024
"""Examples encoded at a time by `Encoder.iterate`."""
READ_EXAMPLES = 256
"""Examples read at a time: whole documents of a corpus take more memory than the features of their beginnings."""


class EncodingTask(Protocol):
    """The part of a task that the data pipeline reads; `jaxformer.tasks.Task` explains the attributes."""

    @property
    def roles(self) -> tuple[str, ...]: ...

    @property
    def encode(self) -> Callable[..., Features]: ...

    @property
    def encode_windows(self) -> Callable[..., list[Features]] | None: ...

    @property
    def encode_row(self) -> Callable[..., Features] | None: ...

    @property
    def row_length(self) -> Callable[[Config], int]: ...

    @property
    def reads_other_text(self) -> Callable[[Config], bool]: ...

    @property
    def slots(self) -> Callable[[Config, int], int] | None: ...


class Generators:
    """Numpy generators that depend on the seed, the epoch and the index of an example only.

    One counter-based generator whose key is set for each example: a new generator costs ten times as much.
    """

    def __init__(self, seed: int, epoch: int):
        self._bits = np.random.Philox(0)
        self._state = self._bits.state
        self._high = np.uint64((seed % 2**32) << 32 | epoch % 2**32)
        self._generator = np.random.Generator(self._bits)

    def __call__(self, index: int) -> np.random.Generator:
        """The generator of the example `index`, valid until the next call."""
        self._state["state"] = {"counter": np.zeros(4, np.uint64), "key": np.array([self._high, index], np.uint64)}
        self._bits.state = self._state
        return self._generator


class Encoder:
    """Encodes the examples of a split with the task's `encode`.

    The random generator given to the task depends only on the seed, the epoch and the index of the example. So an
    example is encoded alike on any host, in any batch and after any interruption.

    Args:
      config: the config of the run.
      tokenizers: the tokenizers of the two sides; None: the task reads no text.
      task: the task.
      examples: the split.
      count: number of examples to use, from the first on.
      windows: True to encode an example that is too long as several, with the task's `encode_windows` (evaluation).

    Raises:
      ConfigError: `windows`, and the task has no `encode_windows`; or the task reads another example, and there is one.
    """

    def __init__(
        self,
        config: Config,
        tokenizers: Tokenizers | None,
        task: EncodingTask,
        examples: Examples,
        count: int,
        windows: bool = False,
    ):
        if windows and task.encode_windows is None:
            raise ConfigError(f"task: got {config.task.name!r}, expected a task that reads long texts in windows")
        self._config, self._tokenizers, self._task = config, tokenizers, task
        self._encode_windows = task.encode_windows if windows else None
        self._reads_other = task.reads_other_text(config)
        self._others = min(max(count, 2), len(examples))
        if self._reads_other and self._others < 2:
            raise ConfigError("data: got a split of one example, expected more: the task draws texts of other examples")
        self._documents = examples if task.slots is not None and isinstance(examples, ShardedDocuments) else None
        if self._documents is not None:
            examples = self._documents.without_text()
        self._examples, self._count = examples, count

    def __len__(self) -> int:
        return self._count

    def known_lengths(self, indices: Sequence[int]) -> list[int] | None:
        """Slots of the encoded examples at `indices`, if they are known without encoding them; else None."""
        slots = self._task.slots
        if slots is None or self._documents is None or self._encode_windows is not None:
            return None
        return [slots(self._config, count) for count in self._documents.lengths(indices)]

    def __call__(self, indices: Sequence[int], epoch: int) -> list[Features]:
        """The encoded examples at `indices` in `epoch`."""
        generators = Generators(self._config.train.seed, epoch)
        encoded: list[Features] = []
        for index, example in self._read(indices):
            rng = generators(index)
            if self._reads_other:
                example = {**example, "other": self._examples[self._other(index, rng)]["text"]}
            if self._encode_windows is not None:
                encoded += self._encode_windows(self._config, self._tokenizers, example, rng)
            else:
                encoded.append(self._task.encode(self._config, self._tokenizers, example, rng))
                self._check_slots(example, encoded[-1])
        return encoded

    def _check_slots(self, example: Example, features: Features) -> None:
        """Raises a ConfigError if a task has `slots` of another one, as one that is derived from it may."""
        if self._documents is None or self._task.slots is None:
            return
        expected, found = self._task.slots(self._config, len(example["text"].ids)), slot_count(features)
        if found != expected:
            raise ConfigError(
                f"task: got {found} slots of a document of {len(example['text'].ids)} tokens from the task's encode, "
                f"expected the {expected} of its `slots`; correct it, or set it to None"
            )

    def _read(self, indices: Sequence[int]) -> Iterator[tuple[int, Example]]:
        for begin in range(0, len(indices), READ_EXAMPLES):
            some = indices[begin : begin + READ_EXAMPLES]
            yield from zip(some, examples_at(self._examples, some), strict=True)

    def _other(self, index: int, rng: np.random.Generator) -> int:
        """The index of another example, each as likely."""
        other = int(rng.integers(self._others - 1))
        return other + (other >= index)

    def iterate(self, indices: Sequence[int]) -> Iterator[Features]:
        """The encoded examples at `indices` in epoch 0, encoded in chunks to bound the memory."""
        for begin in range(0, len(indices), CHUNK_EXAMPLES):
            yield from self(indices[begin : begin + CHUNK_EXAMPLES], 0)
