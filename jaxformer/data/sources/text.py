"""Running text from files, plain or .gz. Role: text.

    config.splits = {"train": ("a.txt", "b.txt.gz"), "validation": ("c.txt",)}             several files, concatenated
    config.splits = {"train": ("input.txt[:90%]",), "validation": ("input.txt[90%:]",)}    slices of one file
    config.splits = {"train": ("books/*.txt",), ...}                                       a pattern, sorted by name

An example is a line without its newline if `config.document` is "line" (empty lines too), or a complete file with its
line ends if it is "file". A slice counts lines or characters accordingly, in percent or absolute.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxformer.config import DataConfig
from jaxformer.data import cache
from jaxformer.data.sources import Dataset, _files
from jaxformer.data.sources._files import FileSlice
from jaxformer.errors import ConfigError

DOCUMENTS = ("line", "file")


def build(config: DataConfig) -> Dataset:
    """The text of `config.splits`.

    Raises:
      ConfigError: a file is missing, empty, damaged or not UTF-8, or a slice is empty.
    """
    if config.document not in DOCUMENTS:
        raise ConfigError(f"data.document: got {config.document!r}, expected one of {', '.join(DOCUMENTS)}")
    splits = _files.slices_by_split(config)
    read = _lines if config.document == "line" else _complete_file

    def parse() -> tuple[dict[str, Any], dict[str, cache.ParsedRows]]:
        import tensorflow_datasets as tfds

        rows: dict[str, cache.ParsedRows] = {
            split: ({"text": text} for part in parts for text in read(part)) for split, parts in splits.items()
        }
        return {"text": tfds.features.Text()}, rows

    paths = [part.path for parts in splits.values() for part in parts]
    return _files.prepared_dataset(config, "text", paths, (config.document, _files.slices_key(splits)), parse)


def _complete_file(part: FileSlice) -> Iterator[str]:
    yield "".join(_files.slice_sequence(part, _files.read_text(part.path), "characters"))


def _lines(part: FileSlice) -> Iterator[str]:
    return (line for _, line in _files.sliced_items(part, _files.read_lines(part.path), "lines"))


SOURCE = build
