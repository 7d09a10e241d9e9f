"""Where text comes from. One file a source, each defining `SOURCE`, a function from `DataConfig` to a `Dataset`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping, Protocol, Sequence

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


def build(config: DataConfig, roles: Sequence[str] = ()) -> Dataset:
    """The data set that `config` describes.

    Args:
      roles: what its examples must have.

    Raises:
      ConfigError: the source is unknown, its files are missing or malformed (the message names file and line), or its
        examples lack a role.
    """
    dataset = registry.member(__name__, config.source, "SOURCE")(config)
    examples = dataset.splits["train"]
    if roles and len(examples) and not examples[0].keys() >= set(roles):
        got = f"got {config.source!r}, whose examples have {', '.join(examples[0])}"
        expected = f"expected {', '.join(roles)} for the task; choose another source or task, or set data.columns"
        raise ConfigError(f"data.source: {got}, {expected}")
    return dataset
