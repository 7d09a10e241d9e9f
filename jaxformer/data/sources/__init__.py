"""Sources of text, one module each. A module defines `SOURCE`, a function from `DataConfig` to a `Dataset`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Iterable, Mapping, Protocol, Sequence

from jaxformer import registry
from jaxformer.config import DataConfig
from jaxformer.errors import ConfigError

Example = Mapping[str, Any]
"""Values by role.

"source", "target", "text", "pair", "question", "context": str. "label": int. "labels": tuple of int, a set of classes,
in ascending order. "score": float from 0 to 1. "tags": tuple
of int, one per part of "text" between blanks. "answers": tuple of str, empty if there is none. "starts": tuple of int,
the character of the context where each answer begins (-1: unknown). "messages": tuple of {"role", "content"}, the turns
of a conversation (`jaxformer.data.chat`). "chosen", "rejected": str, two replies to it. "values": float [T, C], a
series. "future": float [H, C], the values after it."""


class Examples(Protocol):
    """The examples of a split, with random access: shuffling, slicing and resuming are arithmetic on indices."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...


@dataclass(frozen=True)
class Channels:
    """Names of the channels of a series, with mean and deviation of each in the training part (() without one)."""

    names: tuple[str, ...]
    means: tuple[float, ...] = ()
    deviations: tuple[float, ...] = ()


@dataclass(frozen=True)
class Dataset:
    """The splits of a source, and the names of its classes.

    Attributes:
      splits: examples by split: "train", usually "validation" and "test".
      key: a hash of the content, part of the names of derived files (token streams).
      classes: class names, or None.
      channels: what the numbers of a series are, or None.
      parts: data sets of a mixture by the names of its components; {}: it is one data set. A mixture has the examples
        of all of them in its own splits.
    """

    splits: Mapping[str, Examples]
    key: str
    classes: tuple[str, ...] | None = None
    channels: Channels | None = None
    parts: Mapping[str, Dataset] = dataclasses.field(default_factory=dict)

    @property
    def components(self) -> Mapping[str, Dataset]:
        """The data sets of a mixture by name; `{"": self}` for one data set."""
        return self.parts or {"": self}


@dataclass(frozen=True)
class FirstExamples:
    """The first `count` examples of a split."""

    examples: Examples
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Example]:
        return examples_at(self.examples, indices)


@dataclass(frozen=True)
class JoinedExamples:
    """The examples of several splits, one split after the other."""

    parts: tuple[Examples, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, index: int) -> Example:
        for part in self.parts:
            if index < len(part):
                return part[index]
            index -= len(part)
        raise IndexError("joined examples: got an index beyond the last one")


def examples_at(examples: Examples, indices: Sequence[int]) -> Sequence[Example]:
    """The examples at `indices`, read with one call of `__getitems__` if the split has that method."""
    read_many = getattr(examples, "__getitems__", None)
    if read_many is not None:
        return read_many(list(indices))
    return [examples[index] for index in indices]


def build(config: DataConfig, roles: Sequence[str] = (), split: str | None = None, trains: bool = True) -> Dataset:
    """Builds the data set that `config` describes.

    Args:
      config: the data section.
      roles: roles that the examples must have.
      split: the only split to read, to evaluate a trained model; its classes are then the split's own (see
        `with_classes`). None reads all splits.
      trains: True if the splits must include "train" where all are read.

    Raises:
      ConfigError: the source is unknown, its files are missing or malformed (the message names file and line), its
        examples lack a role, or there is no such split.
    """
    named = named_splits(config)
    if split is None:
        if trains:
            _check_has_train(named or ("train",))
    elif named:
        if split not in named:
            raise unknown_split(split, named)
        config = dataclasses.replace(config, splits={split: named[split]})
    dataset = registry.member(__name__, config.source, "SOURCE")(config)
    if split is None and trains:
        _check_has_train(dataset.splits)
    elif split is not None and split not in dataset.splits:
        raise unknown_split(split, dataset.splits)
    read = split or ("train" if trains else next(iter(dataset.splits)))
    examples = dataset.splits[read]
    if roles and len(examples) and not examples[0].keys() >= set(roles):
        got = f"got {config.source!r}, whose examples have {', '.join(examples[0])}"
        expected = f"expected {', '.join(roles)} for the task; choose another source or task, or set data.columns"
        raise ConfigError(f"data.source: {got}, {expected}")
    return dataset


def named_splits(config: DataConfig) -> Mapping[str, Sequence[str]]:
    """The splits that `config` names; {}: those that the data itself has. The index of token shards has its own."""
    return {} if config.source == "shards" else config.splits


def _check_has_train(splits: Iterable[str]) -> None:
    if "train" not in splits:
        got = ", ".join(splits)
        raise ConfigError(f"data.splits: got {got}, expected files for at least 'train'; say which part trains")


def unknown_split(split: str, known: Iterable[str]) -> ConfigError:
    """The error for a split that does not exist."""
    known = tuple(known)
    return ConfigError(f"split: got {split!r}, expected one of {', '.join(known)}{registry.nearest(split, known)}")


def with_classes(dataset: Dataset, classes: Sequence[str]) -> Dataset:
    """`dataset` with labels and tags as indices into `classes`, the classes of a trained model.

    Raises:
      ConfigError: the data set has a class that is not in `classes`.
    """
    if dataset.classes is None or not classes or tuple(dataset.classes) == tuple(classes):
        return dataset
    unknown = [name for name in dataset.classes if name not in classes]
    if unknown:
        expected = f"expected those of the model: {', '.join(classes)}"
        got = f"got the classes {', '.join(map(repr, unknown[:5]))}{_first_of(unknown[0], dataset)}"
        raise ConfigError(f"data: {got}, {expected}; mend the files")
    ids = tuple(list(classes).index(name) for name in dataset.classes)
    splits = {name: RelabelledExamples(examples, ids) for name, examples in dataset.splits.items()}
    return dataclasses.replace(dataset, splits=splits, classes=tuple(classes))


def _first_of(name: str, dataset: Dataset) -> str:
    """Where an error says that the first example of a class lies, such as " ('d' in example 7 of test)"."""
    number = (dataset.classes or ()).index(name)
    for split, examples in dataset.splits.items():
        for index in range(len(examples)):
            example = examples[index]
            if number in (example.get("label"), *example.get("labels", ()), *example.get("tags", ())):
                return f" ({name!r} in example {index + 1} of {split})"
    return ""


def check_channels(dataset: Dataset, names: Sequence[str]) -> None:
    """Raises a ConfigError if a data set of series has other channels than those that a model was trained on."""
    if dataset.channels is not None and names and dataset.channels.names != tuple(names):
        got, expected = ", ".join(dataset.channels.names), ", ".join(names)
        raise ConfigError(f"data: got the channels {got}, expected those of the model: {expected}; mend the files")


@dataclass(frozen=True)
class RelabelledExamples:
    """Examples in which class `i` is replaced by class `ids[i]`."""

    examples: Examples
    ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        example = dict(self.examples[index])
        if "label" in example:
            example["label"] = self.ids[example["label"]]
        if "labels" in example:
            example["labels"] = tuple(sorted(self.ids[label] for label in example["labels"]))
        if "tags" in example:
            example["tags"] = tuple(self.ids[tag] for tag in example["tags"])
        return example
