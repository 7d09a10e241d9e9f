"""Translation pairs from two aligned text files a split, plain or .gz: line i of one translates line i of the other.

    config.dir = "data/multi30k"
    config.splits = {"train": ("train.en.gz", "train.de.gz"), "validation": ("val.en", "val.de")}

The first file of a split is the source. A cut ("all.en[:90%]", and the same of the other) counts lines. Any other split
name ("test_2017") is as good as these.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxformer.config import ConfigError, DataConfig
from jaxformer.data import cache
from jaxformer.data.sources import Dataset, _files
from jaxformer.data.sources._files import Part

ROLES = ("source", "target")


def build(config: DataConfig) -> Dataset:
    """The pairs of `config.splits`.

    Raises:
      ConfigError: files missing, empty, damaged, not UTF-8 or of different lengths, or an empty line outside training.
    """
    folder = _files.folder(config)
    pairs: dict[str, tuple[Part, Part]] = {}
    for split, names in config.splits.items():
        if len(names) != 2:
            raise ConfigError(f"data.splits.{split}: got {len(names)} files, expected two: source and target")
        one, other = pairs[split] = tuple(_files.part(folder, name) for name in names)
        if (one.start, one.stop) != (other.start, other.stop):
            got = f"got {one} and {other}, which are cut differently"
            raise ConfigError(f"data.splits.{split}: {got}, expected the same cut of both")

    def parse() -> tuple[dict[str, Any], dict[str, cache.Rows]]:
        import tensorflow_datasets as tfds

        features = {role: tfds.features.Text() for role in ROLES}
        return features, {split: _files.complete(_lines(*pair), split, ROLES) for split, pair in pairs.items()}

    paths = [part.path for pair in pairs.values() for part in pair]
    return _files.prepared(config, "parallel", paths, _files.key_of_cuts(pairs), parse)


def _lines(source: Part, target: Part) -> Iterator[tuple[str, dict[str, str]]]:
    return _files.chosen(source, _aligned(source.path, target.path), "lines")


def _aligned(source: Path, target: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """(where, pair) of two files with as many lines."""
    for one, other in itertools.zip_longest(_files.lines(source), _files.lines(target)):
        if one is None or other is None:
            counts = [sum(1 for _ in _files.lines(path)) for path in (source, target)]
            shorter, longer = (source, target) if one is None else (target, source)
            what = f"{shorter}:{min(counts)}: the file ends here, but {longer} has {max(counts)} lines"
            raise ConfigError(f"{what}; expected as many, line i of one translating line i of the other")
        number, text = one
        yield f"{source}:{number}", {"source": text, "target": other[1]}


SOURCE = build
