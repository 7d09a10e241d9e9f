"""Running text from files, plain or .gz. Role: text.

    config.splits = {"train": ("a.txt", "b.txt.gz"), "validation": ("c.txt",)}          several files follow each other
    config.splits = {"train": ("input.txt[:90%]",), "validation": ("input.txt[90%:]",)}      one file, cut by position
    config.splits = {"train": ("books/*.txt",), ...}                                    sorted by name

`config.document` says what one example is: a "line", without its newline (empty lines stay: they are lines of the
text), or a "file", kept whole with its line ends as they are. A cut counts lines or characters accordingly, in percent
or absolute.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxformer.config import ConfigError, DataConfig
from jaxformer.data import cache
from jaxformer.data.sources import Dataset, _files
from jaxformer.data.sources._files import Part

DOCUMENTS = ("line", "file")


def build(config: DataConfig) -> Dataset:
    """The text of `config.splits`.

    Raises:
      ConfigError: files missing, empty, damaged or not UTF-8, or a cut that leaves nothing.
    """
    if config.document not in DOCUMENTS:
        raise ConfigError(f"data.document: got {config.document!r}, expected one of {', '.join(DOCUMENTS)}")
    splits = _files.by_split(config)
    read = _lines if config.document == "line" else _whole

    def parse() -> tuple[dict[str, Any], dict[str, cache.Rows]]:
        import tensorflow_datasets as tfds

        rows = {split: ({"text": text} for part in parts for text in read(part)) for split, parts in splits.items()}
        return {"text": tfds.features.Text()}, rows

    paths = [part.path for parts in splits.values() for part in parts]
    return _files.prepared(config, "text", paths, (config.document, _files.key_of_cuts(splits)), parse)


def _whole(part: Part) -> Iterator[str]:
    yield _files.kept(part, _files.whole(part.path), "characters")


def _lines(part: Part) -> Iterator[str]:
    return (line for _, line in _files.chosen(part, _files.lines(part.path), "lines"))


SOURCE = build
