"""Where text comes from. One file a source, each defining `SOURCE`, a function from `DataConfig` to a `Dataset`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping, Protocol

from jaxformer import registry
from jaxformer.config import DataConfig

Example = Mapping[str, Any]
"""Roles to values: "source" and "target", "text" (and "pair") as str, "label" as int."""


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


def build(config: DataConfig) -> Dataset:
    """The data set that `config` describes.

    Raises:
      ConfigError: the source is unknown, or its files are missing or malformed (the message names file and line).
    """
    return registry.member(__name__, config.source, "SOURCE")(config)
