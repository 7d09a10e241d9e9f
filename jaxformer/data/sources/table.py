"""Tables: TSV with a header line, or JSONL, plain or .gz. `config.columns` names the column of each role.

    config.splits = {"train": ("train.tsv.gz",), "validation": ("dev.tsv",), "test": ("test.tsv",)}
    config.columns = {"text": "sentence", "label": "label"}

Roles are source, target, text, pair (str), label and score. Labels are integers or strings; they become class ids in
the order of the training split's sorted names (numbers by value). Scores are numbers from `config.score_range`, whose
ends become 0 and 1. Columns "#1", "#2" say that the file has no header line.
A TSV cell is what stands between two tabs: there is no quoting. Blank lines are skipped.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer import registry
from jaxformer.config import ConfigError, DataConfig
from jaxformer.data import cache
from jaxformer.data.sources import Dataset, _files

ROLES = ("source", "target", "text", "pair", "label", "score")
Row = tuple[str, dict[str, Any]]  # where it stands ("file:line"), and its fields by role


def build(config: DataConfig) -> Dataset:
    """The rows of `config.splits` under the roles of `config.columns`.

    Raises:
      ConfigError: files missing, empty, damaged or not UTF-8; a column missing; malformed JSON or rows; an empty text
        outside training; a label that training does not have; a score outside of the range.
    """
    folder = _files.folder(config)
    columns = dict(config.columns)
    if not columns:
        raise ConfigError("data.columns: got nothing, expected roles and columns, as in text=sentence, label=label")
    for role in columns:
        if role not in ROLES:
            expected = f"expected roles among {', '.join(ROLES)}{registry.nearest(role, ROLES)}"
            raise ConfigError(f"data.columns: got {role!r}, {expected}")
    splits = {s: [_files.existing(folder / name) for name in names] for s, names in config.splits.items()}
    for path in itertools.chain(*splits.values()):
        _reader(path)

    def rows(split: str) -> Iterator[Row]:
        return itertools.chain.from_iterable(_reader(path)(path, columns) for path in splits[split])

    def judged(split: str, classes: tuple[str, ...]) -> Iterator[Row]:
        return _scored(_labelled(rows(split), classes), config.score_range)

    def parse() -> tuple[dict[str, Any], dict[str, cache.Rows]]:
        import tensorflow_datasets as tfds

        features: dict[str, Any] = {role: tfds.features.Text() for role in columns if role not in ("label", "score")}
        if "score" in columns:
            features["score"] = tfds.features.Scalar(np.float32)
        classes: tuple[str, ...] = ()
        if "label" in columns:
            classes = _classes(row["label"] for _, row in rows("train"))
            features["label"] = tfds.features.ClassLabel(names=list(classes))
        return features, {split: _files.complete(judged(split, classes), split, columns) for split in splits}

    settings = (sorted(columns.items()), {split: len(paths) for split, paths in splits.items()})
    settings += (config.score_range,) if "score" in columns else ()
    kinds = [_reader(path).__name__ for path in itertools.chain(*splits.values())]
    return _files.prepared(config, "table", itertools.chain(*splits.values()), (settings, kinds), parse)


def _reader(path: Path) -> Any:
    name = path.name.removesuffix(".gz")
    if name.endswith(".tsv"):
        return _tsv
    if name.endswith((".jsonl", ".json")):
        return _jsonl
    raise ConfigError(f"{path}: got an unknown table format, expected .tsv or .jsonl, plain or .gz")


def _tsv(path: Path, columns: dict[str, str]) -> Iterator[Row]:
    rows = ((n, line.rstrip("\r").split("\t")) for n, line in _files.lines(path) if line.strip())
    numbered = all(column.startswith("#") for column in columns.values())
    first = next(rows, None)
    if first is None:
        raise ConfigError(f"{path}: got only blank lines, expected a table")
    header = [f"#{i}" for i in range(1, len(first[1]) + 1)] if numbered else first[1]
    index = {role: header.index(_known(column, header, f"{path}:{first[0]}")) for role, column in columns.items()}
    for number, cells in itertools.chain([first], rows) if numbered else rows:
        where = f"{path}:{number}"
        if len(cells) != len(header):
            raise ConfigError(f"{where}: got {len(cells)} cells, expected {len(header)}; cells are separated by tabs")
        yield where, {role: cells[i] for role, i in index.items()}


def _jsonl(path: Path, columns: dict[str, str]) -> Iterator[Row]:
    for number, line in _files.lines(path):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: got malformed JSON ({error}), expected one JSON object a line") from error
        if not isinstance(record, dict):
            raise ConfigError(f"{where}: got {type(record).__name__}, expected one JSON object a line")
        yield where, {role: _value(record, role, column, where) for role, column in columns.items()}


def _value(record: dict[str, Any], role: str, column: str, where: str) -> str:
    value = record[_known(column, list(record), where)]
    if role == "label" and isinstance(value, int):
        return str(int(value))  # false and true are classes 0 and 1
    if role == "score" and isinstance(value, (int, float)) and not isinstance(value, bool):
        return repr(value)
    if not isinstance(value, str):
        expected = {"label": "an integer or a string", "score": "a number"}.get(role, "a string")
        raise ConfigError(f"{where}: got {type(value).__name__} in column {column!r}, expected {expected}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON's escapes can name half a surrogate pair
        got = ascii(value[error.start])
        raise ConfigError(f"{where}: got {got} in column {column!r}, expected text that UTF-8 can hold") from error
    return value


def _known(column: str, header: list[str], where: str) -> str:
    if column not in header:
        names = ", ".join(name if name.isprintable() else ascii(name) for name in header)
        expected = f"expected one of {names}{registry.nearest(column, header)}"
        raise ConfigError(f"{where}: got no column {column!r}, {expected}; set data.columns")
    return column


def _classes(labels: Iterator[str]) -> tuple[str, ...]:
    """The distinct labels, sorted: by value when all are integers, by name otherwise."""
    found = {label for label in labels if label.strip()}
    numbers = all(label.removeprefix("-").isdecimal() for label in found)
    return tuple(sorted(found, key=int if numbers else None))


def _labelled(rows: Iterator[Row], classes: tuple[str, ...]) -> Iterator[Row]:
    """Rows whose labels are known. They stay names: the feature turns them into ids."""
    known = frozenset(classes)
    for where, row in rows:
        if "label" in row and row["label"] not in known:
            expected = f"expected one of the training split's: {', '.join(classes)}"
            raise ConfigError(f"{where}: got label {row['label']!r}, {expected}")
        yield where, row


def _scored(rows: Iterator[Row], score_range: tuple[float, ...]) -> Iterator[Row]:
    """Rows whose scores are numbers of the range, as shares of it."""
    for where, row in rows:
        if "score" in row:
            try:
                score = float(row["score"])
            except ValueError:
                raise ConfigError(f"{where}: got score {row['score']!r}, expected a number; mend the data") from None
            row["score"] = cache.scaled(score, score_range, where)
        yield where, row


SOURCE = build
