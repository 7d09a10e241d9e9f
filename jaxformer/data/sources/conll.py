"""Tagged words in the format of the CoNLL shared tasks: a word per line with its tag, a blank line after each sentence.

    config.splits = {"train": ("train.conll",), "validation": ("dev.conll",), "test": ("test.conll",)}
    config.columns = {"text": "#1", "tags": "#2"}                          default: the first and the last column

A slice ("all.conll[:90%]") counts sentences.

Columns are separated by tabs in a line that contains one, else by blanks. An example has the "text" (words with blanks
between them) and the "tags", a class id per word. A blank inside a word becomes a no-break space, as does an empty word
(corpora have them where emoji were split), so that tags stay aligned with words. If all tags of the training split mark
spans ("O", "B-person", "I-person": Ramshaw and Marcus 1995; in BIOES also "E-person" and "S-person"), the classes are
all marks of every span type. Lines that begin with -DOCSTART-, as in CoNLL-2003, end a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxformer.config import DataConfig
from jaxformer.data import cache
from jaxformer.data.sources import Dataset, _files
from jaxformer.errors import ConfigError

DOCUMENT = "-DOCSTART-"
NO_BREAK = "\u00a0"
COLUMNS = {"text": "first", "tags": "last"}
SPAN = re.compile("O|[BIES]-.+")
"""A tag that marks the position of a word in a span."""
VERSION = 2
"""Part of the cache key; increased when the same tags map to other classes."""
Sentence = tuple[str, list[str], list[str]]
"""Position of a sentence ("file:line"), its words and their tags."""


def build(config: DataConfig) -> Dataset:
    """The sentences of `config.splits`.

    Raises:
      ConfigError: a file is missing, empty, damaged or not UTF-8; a line has too few columns or no tag; a tag does not
        occur in training.
    """
    columns = {**COLUMNS, **config.columns}
    index = {role: _index(role, column) for role, column in columns.items()}
    splits = _files.slices_by_split(config)

    def sentences(split: str) -> Iterator[Sentence]:
        for part in splits[split]:
            yield from _files.sliced_items(part, _sentences(part.path, index["text"], index["tags"]), "sentences")

    def parse() -> tuple[dict[str, Any], dict[str, cache.ParsedRows]]:
        import tensorflow_datasets as tfds

        named = [split for split in splits if split == "train" or "train" not in splits]
        classes = names(tag for split in named for _, _, tags in sentences(split) for tag in tags)
        features = {
            "text": tfds.features.Text(),
            "tags": tfds.features.Sequence(tfds.features.ClassLabel(names=list(classes))),
        }
        return features, {split: _known(sentences(split), frozenset(classes)) for split in splits}

    paths = [part.path for parts in splits.values() for part in parts]
    settings = (VERSION, sorted(index.items()), _files.slices_key(splits))
    return _files.prepared_dataset(config, "conll", paths, settings, parse)


def names(tags: Iterable[str]) -> tuple[str, ...]:
    """Class names of these tags, sorted. For span tags: "O", then every mark of the scheme for every span type."""
    found = set(tags)
    if not all(SPAN.fullmatch(tag) for tag in found):
        return tuple(sorted(found))
    types = sorted({tag[2:] for tag in found if tag != "O"})
    marks = "BIES" if any(tag.startswith(("E-", "S-")) for tag in found) else "BI"
    return ("O", *(f"{mark}-{span}" for span in types for mark in marks))


def _index(role: str, column: str) -> int:
    """Index of a column in the cells of a line."""
    if role not in COLUMNS:
        raise ConfigError(f"data.columns: got {role!r}, expected the roles text and tags")
    if column == COLUMNS[role]:
        return 0 if role == "text" else -1
    number = column.removeprefix("#")
    if column == number or not number.isdecimal() or int(number) < 1:
        raise ConfigError(f"data.columns.{role}: got {column!r}, expected the number of a column, as #1 or #4")
    return int(number) - 1


def _sentences(path: Path, word: int, tag: int) -> Iterator[Sentence]:
    where, words, tags = "", [], []
    for number, line in _files.read_lines(path):
        cells = _cells(line)
        if cells is None:
            if words:
                yield where, words, tags
            words, tags = [], []
            continue
        position = f"{path}:{number}"
        min_columns = max(word, tag, 1) + 1
        if len(cells) < min_columns:
            expected = f"expected {min_columns} at least, a word and its tag; separate them by a tab"
            raise ConfigError(f"{position}: got {len(cells)} columns, {expected}")
        if not cells[tag]:
            raise ConfigError(
                f"{position}: got no tag for {cells[word]!r}, expected one; write O for a word outside of all"
            )
        where = where if words else position
        words.append(cells[word].replace(" ", NO_BREAK) or NO_BREAK)
        tags.append(cells[tag])
    if words:
        yield where, words, tags


def _cells(line: str) -> list[str] | None:
    """The cells of a line, or None at the end of a sentence."""
    if not line.strip() or line.startswith(DOCUMENT):
        return None
    return [cell.strip(" ") for cell in line.split("\t")] if "\t" in line else line.split()


def _known(sentences: Iterable[Sentence], classes: frozenset[str]) -> Iterator[dict[str, Any]]:
    for where, words, tags in sentences:
        unknown = next((tag for tag in tags if tag not in classes), None)
        if unknown is not None:
            expected = f"expected one of the training split's: {', '.join(sorted(classes))}"
            raise ConfigError(f"{where}: got tag {unknown!r} in this sentence, {expected}")
        yield {"text": " ".join(words), "tags": tags}


SOURCE = build
