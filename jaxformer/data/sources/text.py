"""Running text from files, plain or .gz. Role: text.

    config.splits = {"train": ("a.txt", "b.txt.gz"), "validation": ("c.txt",)}          several files follow each other
    config.splits = {"train": ("input.txt[:90%]",), "validation": ("input.txt[90%:]",)}      one file, cut by position
    config.splits = {"train": ("books/*.txt",), ...}                                    sorted by name

`config.document` says what one example is: a "line", without its newline (empty lines stay: they are lines of the
text), or a "file", kept whole with its newlines. A cut counts lines or characters accordingly, in percent or absolute.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxformer.config import ConfigError, DataConfig
from jaxformer.data import cache
from jaxformer.data.sources import Dataset, _files

DOCUMENTS = ("line", "file")
CUT = re.compile(r"(?P<name>.+)\[(?P<start>\d+%?)?:(?P<stop>\d+%?)?\]")


@dataclass(frozen=True)
class Part:
    """A file, or the part of it from `start` to `stop`: "90%", "5000" or None."""

    path: Path
    start: str | None = None
    stop: str | None = None

    def bounds(self, length: int) -> slice:
        """The part of `length` units. Percentages round down, so [:p%] and [p%:] meet without gap or overlap."""
        return slice(_units(self.start, length), _units(self.stop, length))


def build(config: DataConfig) -> Dataset:
    """The text of `config.splits`.

    Raises:
      ConfigError: files missing, empty, damaged or not UTF-8, or a cut that leaves nothing.
    """
    if config.document not in DOCUMENTS:
        raise ConfigError(f"data.document: got {config.document!r}, expected one of {', '.join(DOCUMENTS)}")
    folder = _files.folder(config)
    splits = {split: [p for name in names for p in _parts(folder, name)] for split, names in config.splits.items()}
    read = _lines if config.document == "line" else _whole

    def parse() -> tuple[dict[str, Any], dict[str, cache.Rows]]:
        import tensorflow_datasets as tfds

        rows = {split: ({"text": text} for part in parts for text in read(part)) for split, parts in splits.items()}
        return {"text": tfds.features.Text()}, rows

    paths = [part.path for parts in splits.values() for part in parts]
    cuts = {split: [(part.start, part.stop) for part in parts] for split, parts in splits.items()}
    return _files.prepared(config, "text", paths, (config.document, cuts), parse)


def _parts(folder: Path, name: str) -> list[Part]:
    start = stop = None
    if match := CUT.fullmatch(name):
        name, start, stop = match["name"], match["start"], match["stop"]
    if "*" not in name:
        return [Part(_files.existing(folder / name), start, stop)]
    found = sorted(path for path in folder.glob(name) if path.is_file())
    if not found:
        raise ConfigError(f"data.splits: got {name!r}, which matches no file in {folder}; set --config.data.dir=DIR")
    return [Part(path, start, stop) for path in found]


def _units(bound: str | None, length: int) -> int | None:
    if bound is None:
        return None
    return length * int(bound[:-1]) // 100 if bound.endswith("%") else int(bound)


def _whole(part: Part) -> Iterator[str]:
    text = _files.whole(part.path)
    if not (text := text[part.bounds(len(text))]):
        raise ConfigError(f"{part.path}: got an empty cut [{part.start or ''}:{part.stop or ''}], expected some text")
    yield text


def _lines(part: Part) -> Iterator[str]:
    if part.start is None and part.stop is None:
        yield from (line for _, line in _files.lines(part.path))
        return
    chosen = [line for _, line in _files.lines(part.path)]
    yield from chosen[part.bounds(len(chosen))]


SOURCE = build
