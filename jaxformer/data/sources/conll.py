"""Tagged words, as the CoNLL shared tasks write them: one word a line, its tag in another column, a blank line after
each sentence.

    config.splits = {"train": ("train.conll",), "validation": ("dev.conll",), "test": ("test.conll",)}
    config.columns = {"text": "#1", "tags": "#2"}                          nothing: the first and the last column

A cut ("all.conll[:90%]") counts sentences.

Columns are separated by tabs in a line that has one, else by blanks. An example has the "text", its words with a blank
between them, and the "tags", a class id a word. Inside a word a blank becomes a no-break space, and so does a word of
nothing, which is left where emoji were taken apart: tags stay with their words. Where all tags of the training split
mark spans ("O", "B-person", "I-person": Ramshaw and Marcus 1995; in BIOES "E-person" and "S-person" too), all marks of
every kind of span are classes. Lines that begin with -DOCSTART-, as in CoNLL-2003, are no words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxformer.config import ConfigError, DataConfig
from jaxformer.data import cache
from jaxformer.data.sources import Dataset, _files

DOCUMENT = "-DOCSTART-"
NO_BREAK = "\u00a0"
COLUMNS = {"text": "first", "tags": "last"}
SPAN = re.compile("O|[BIES]-.+")
"""A tag that says where in a span a word stands."""
VERSION = 2  # of how tags become classes: part of the key, raised when the same bytes would give other classes
Sentence = tuple[str, list[str], list[str]]  # where it begins ("file:line"), its words and their tags


def build(config: DataConfig) -> Dataset:
    """The sentences of `config.splits`.

    Raises:
      ConfigError: files missing, empty, damaged or not UTF-8; a line with too few columns or without a tag; a tag that
        training does not have.
    """
    columns = {**COLUMNS, **config.columns}
    index = {role: _index(role, column) for role, column in columns.items()}
    splits = _files.by_split(config)

    def sentences(split: str) -> Iterator[Sentence]:
        for part in splits[split]:
            yield from _files.chosen(part, _sentences(part.path, index["text"], index["tags"]), "sentences")

    def parse() -> tuple[dict[str, Any], dict[str, cache.Rows]]:
        import tensorflow_datasets as tfds

        named = [split for split in splits if split == "train" or "train" not in splits]
        classes = names(tag for split in named for _, _, tags in sentences(split) for tag in tags)
        features = {
            "text": tfds.features.Text(),
            "tags": tfds.features.Sequence(tfds.features.ClassLabel(names=list(classes))),
        }
        return features, {split: _known(sentences(split), frozenset(classes)) for split in splits}

    paths = [part.path for parts in splits.values() for part in parts]
    settings = (VERSION, sorted(index.items()), _files.key_of_cuts(splits))
    return _files.prepared(config, "conll", paths, settings, parse)


def names(tags: Iterable[str]) -> tuple[str, ...]:
    """The classes of such tags: sorted; of spans every mark that the scheme has of every kind, after "O"."""
    found = set(tags)
    if not all(SPAN.fullmatch(tag) for tag in found):
        return tuple(sorted(found))
    kinds = sorted({tag[2:] for tag in found if tag != "O"})
    marks = "BIES" if any(tag.startswith(("E-", "S-")) for tag in found) else "BI"
    return ("O", *(f"{mark}-{kind}" for kind in kinds for mark in marks))


def _index(role: str, column: str) -> int:
    """The place of a column in a line's cells."""
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
    for number, line in _files.lines(path):
        cells = _cells(line)
        if cells is None:
            if words:
                yield where, words, tags
            words, tags = [], []
            continue
        here = f"{path}:{number}"
        least = max(word, tag, 1) + 1
        if len(cells) < least:
            expected = f"expected {least} at least, a word and its tag; separate them by a tab"
            raise ConfigError(f"{here}: got {len(cells)} columns, {expected}")
        if not cells[tag]:
            raise ConfigError(
                f"{here}: got no tag for {cells[word]!r}, expected one; write O for a word outside of all"
            )
        where = where if words else here
        words.append(cells[word].replace(" ", NO_BREAK) or NO_BREAK)
        tags.append(cells[tag])
    if words:
        yield where, words, tags


def _cells(line: str) -> list[str] | None:
    """Of a line, None where a sentence ends."""
    if not line.strip() or line.startswith(DOCUMENT):
        return None
    return [cell.strip(" ") for cell in line.split("\t")] if "\t" in line else line.split()


def _known(sentences: Iterable[Sentence], classes: frozenset[str]) -> Iterator[dict[str, Any]]:
    for where, words, tags in sentences:
        strange = next((tag for tag in tags if tag not in classes), None)
        if strange is not None:
            expected = f"expected one of the training split's: {', '.join(sorted(classes))}"
            raise ConfigError(f"{where}: got tag {strange!r} in this sentence, {expected}")
        yield {"text": " ".join(words), "tags": tags}


SOURCE = build
