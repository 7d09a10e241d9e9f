"""Running text from files, plain or .gz. Role: text.

    config.splits = {"train": ("a.txt", "b.txt.gz"), "validation": ("c.txt",)}          several files follow each other
    config.splits = {"train": ("input.txt[:90%]",), "validation": ("input.txt[90%:]",)}      one file, cut by position
    config.splits = {"train": ("books/*.txt",), ...}                                    sorted by name

`config.document` says what one example is: a "line", without its newline (empty lines stay: they are lines of the
text), or a "file", kept whole with its newlines. A cut counts lines or characters accordingly, in percent or absolute.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxformer.config import ConfigError, DataConfig
from jaxformer.data import cache
from jaxformer.data.sources import Dataset, _files
from jaxformer.data.sources._files import Part, cut

DOCUMENTS = ("line", "file")


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
    name, start, stop = cut(name)
    if "*" not in name:
        return [Part(_files.existing(folder / name), start, stop)]
    found = sorted(path for path in folder.glob(name) if path.is_file())
    if not found:
        raise ConfigError(f"data.splits: got {name!r}, which matches no file in {folder}; set --config.data.dir=DIR")
    return [Part(path, start, stop) for path in found]


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
