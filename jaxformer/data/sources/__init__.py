"""Where text comes from. One file a source, each defining `SOURCE`, a function from `DataConfig` to a `Dataset`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Iterable, Mapping, Protocol, Sequence

from jaxformer import registry
from jaxformer.config import ConfigError, DataConfig

Example = Mapping[str, Any]
"""Roles to values: "source" and "target", "text" (and "pair") as str, "label" as int, "score" as float from 0 to 1,
"tags" as a tuple of int, one for every part of "text" between blanks; "question" and "context" as str with "answers", a
tuple of str (empty: there is none), and "starts", for each the character of the context where it begins (-1: not
known)."""


class Examples(Protocol):
    """One split: random access, so that order, slices and resuming are arithmetic on indices."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...


@dataclass(frozen=True)
class Dataset:
    """The splits of a source (at least "train"; usually "validation" and "test") and the names of its classes.

    `key` changes when the content does: derived files (token caches, length indices) carry it in their names.
    """

    splits: Mapping[str, Examples]
    key: str
    classes: tuple[str, ...] | None = None


def build(config: DataConfig, roles: Sequence[str] = (), split: str | None = None) -> Dataset:
    """The data set that `config` describes.

    Args:
      roles: what its examples must have.
      split: the only one whose files are read, to measure a trained model; None: all, among them "train". The classes
        are then this split's own: see `numbered_as`.

    Raises:
      ConfigError: the source is unknown, its files are missing or malformed (the message names file and line), or its
        examples lack a role; there is no such split, or none to train on.
    """
    if split is None:
        _with_training(config.splits or ("train",))
    elif config.splits:
        if split not in config.splits:
            raise unknown(split, config.splits)
        config = dataclasses.replace(config, splits={split: config.splits[split]})
    dataset = registry.member(__name__, config.source, "SOURCE")(config)
    if split is None:
        _with_training(dataset.splits)
    elif split not in dataset.splits:
        raise unknown(split, dataset.splits)
    examples = dataset.splits[split or "train"]
    if roles and len(examples) and not examples[0].keys() >= set(roles):
        got = f"got {config.source!r}, whose examples have {', '.join(examples[0])}"
        expected = f"expected {', '.join(roles)} for the task; choose another source or task, or set data.columns"
        raise ConfigError(f"data.source: {got}, {expected}")
    return dataset


def _with_training(splits: Iterable[str]) -> None:
    if "train" not in splits:
        got = ", ".join(splits)
        raise ConfigError(f"data.splits: got {got}, expected files for at least 'train'; say which part trains")


def unknown(split: str, known: Iterable[str]) -> ConfigError:
    """The error for a split that the data does not have."""
    known = tuple(known)
    return ConfigError(f"split: got {split!r}, expected one of {', '.join(known)}{registry.nearest(split, known)}")


def numbered_as(dataset: Dataset, classes: Sequence[str]) -> Dataset:
    """`dataset` with labels and tags that count in `classes`, those of a trained model.

    Raises:
      ConfigError: it has a class that is not among them.
    """
    if dataset.classes is None or not classes or tuple(dataset.classes) == tuple(classes):
        return dataset
    strange = [name for name in dataset.classes if name not in classes]
    if strange:
        expected = f"expected those of the model: {', '.join(classes)}"
        raise ConfigError(f"data: got the classes {', '.join(map(repr, strange[:5]))}, {expected}; mend the files")
    ids = tuple(list(classes).index(name) for name in dataset.classes)
    splits = {name: Numbered(examples, ids) for name, examples in dataset.splits.items()}
    return Dataset(splits, dataset.key, tuple(classes))


@dataclass(frozen=True)
class Numbered:
    """Examples whose class `i` is `ids[i]`."""

    examples: Examples
    ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        example = dict(self.examples[index])
        if "label" in example:
            example["label"] = self.ids[example["label"]]
        if "tags" in example:
            example["tags"] = tuple(self.ids[tag] for tag in example["tags"])
        return example
