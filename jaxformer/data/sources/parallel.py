"""Translation pairs from two aligned text files per split, plain or .gz: line i of one translates line i of the other.

    config.dir = "data/multi30k"
    config.splits = {"train": ("train.en.gz", "train.de.gz"), "validation": ("val.en", "val.de")}

The first file of a split is the source. A slice ("all.en[:90%]") counts lines and must be the same for both files.
Other split names ("test_2017") are allowed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxformer.config import DataConfig
from jaxformer.data import cache
from jaxformer.data.sources import Dataset, _files
from jaxformer.data.sources._files import FileSlice
from jaxformer.errors import ConfigError

ROLES = ("source", "target")


def build(config: DataConfig) -> Dataset:
    """The pairs of `config.splits`.

    Raises:
      ConfigError: a file is missing, empty, damaged or not UTF-8, the files of a pair differ in length, or a line is
        empty outside of training.
    """
    folder = _files.data_directory(config)
    pairs: dict[str, tuple[FileSlice, FileSlice]] = {}
    for split, names in config.splits.items():
        if len(names) != 2:
            raise ConfigError(f"data.splits.{split}: got {len(names)} files, expected two: source and target")
        source, target = (_files.file_slice(folder, name) for name in names)
        pairs[split] = source, target
        if (source.start, source.stop) != (target.start, target.stop):
            raise ConfigError(
                f"data.splits.{split}: got different slices, {source} and {target}, expected the same slice of both"
            )

    def parse() -> tuple[dict[str, Any], dict[str, cache.ParsedRows]]:
        import tensorflow_datasets as tfds

        features = {role: tfds.features.Text() for role in ROLES}
        return features, {split: _files.nonempty_rows(_lines(*pair), split, ROLES) for split, pair in pairs.items()}

    paths = [part.path for pair in pairs.values() for part in pair]
    return _files.prepared_dataset(config, "parallel", paths, _files.slices_key(pairs), parse)


def _lines(source: FileSlice, target: FileSlice) -> Iterator[tuple[str, dict[str, str]]]:
    return _files.sliced_items(source, _aligned(source.path, target.path), "lines")


def _aligned(source: Path, target: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """(file and line, pair) of two files with the same number of lines."""
    for one, other in itertools.zip_longest(_files.read_lines(source), _files.read_lines(target)):
        if one is None or other is None:
            counts = [sum(1 for _ in _files.read_lines(path)) for path in (source, target)]
            shorter, longer = (source, target) if one is None else (target, source)
            what = f"{shorter}:{min(counts)}: the file ends here, but {longer} has {max(counts)} lines"
            raise ConfigError(f"{what}; expected as many, line i of one translating line i of the other")
        number, text = one
        yield f"{source}:{number}", {"source": text, "target": other[1]}


SOURCE = build
