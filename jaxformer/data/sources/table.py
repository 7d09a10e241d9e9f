"""Tables: TSV, CSV, JSONL, or lines that begin with a label; plain or .gz. `config.columns` names a column per role.

    config.splits = {"train": ("train.tsv.gz",), "validation": ("dev.tsv",), "test": ("test.tsv",)}
    config.splits = {"train": ("all.tsv[:90%]",), "validation": ("all.tsv[90%:]",)}    a slice counts rows, no header
    config.columns = {"text": "sentence", "label": "label"}

Roles are source, target, text, pair (str), label, labels and score. Labels are integers or strings; they become class
ids in the order of the training split's sorted names (numbers by value). "labels" is a set of them: names with commas
between, none for the empty set; in JSONL also a list. Scores are numbers from `config.score_range`, whose
ends become 0 and 1. Columns "#1", "#2" mean that the file has no header line. `config.format` is the file's format:

    tsv          cells between tabs; quotes are ordinary characters
    tsv_quoted   cells between tabs; a cell in double quotes may contain tabs, line ends and doubled quotes
    csv          the same with commas (RFC 4180)
    jsonl        one JSON object per line
    labelled     a word, a blank, the rest of the line: columns "#1" and "#2" ("POS a fine film")
    ""           by the file's name: .tsv, .csv, .jsonl or .json, and .txt for labelled

Blank lines are skipped.
"""

from __future__ import annotations

import csv
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import numpy as np

from jaxformer import registry
from jaxformer.config import DataConfig
from jaxformer.data import cache
from jaxformer.data.sources import Dataset, _files
from jaxformer.errors import ConfigError

ROLES = ("source", "target", "text", "pair", "label", "labels", "score")
TEXTS = ("source", "target", "text", "pair")
SET_SEPARATOR = ","
Row = tuple[str, dict[str, Any]]
"""Position of a row ("file:line"), and its fields by role."""


def build(config: DataConfig) -> Dataset:
    """The rows of `config.splits` under the roles of `config.columns`.

    Raises:
      ConfigError: a file is missing, empty, damaged or not UTF-8; a column is missing; JSON or rows are malformed; a
        text is empty outside of training; a label does not occur in training; a score is outside of the range.
    """
    columns = dict(config.columns)
    if not columns:
        raise ConfigError("data.columns: got nothing, expected roles and columns, as in text=sentence, label=label")
    for role in columns:
        if role not in ROLES:
            expected = f"expected roles among {', '.join(ROLES)}{registry.nearest(role, ROLES)}"
            raise ConfigError(f"data.columns: got {role!r}, {expected}")
    if "label" in columns and "labels" in columns:
        raise ConfigError("data.columns: got label and labels, expected one of them: a class, or a set of classes")
    splits = _files.slices_by_split(config)
    kinds = {part.path: file_format(part.path, config.format) for part in itertools.chain(*splits.values())}

    def rows(split: str) -> Iterator[Row]:
        for part in splits[split]:
            yield from _files.sliced_items(part, FORMATS[kinds[part.path]](part.path, columns), "rows")

    def judged(split: str, classes: tuple[str, ...]) -> Iterator[Row]:
        return _scored(_labelled(_with_sets(rows(split)), classes), config.score_range)

    def parse() -> tuple[dict[str, Any], dict[str, cache.ParsedRows]]:
        import tensorflow_datasets as tfds

        features: dict[str, Any] = {role: tfds.features.Text() for role in columns if role in TEXTS}
        if "score" in columns:
            features["score"] = tfds.features.Scalar(np.float32)
        classes: tuple[str, ...] = ()
        named = [split for split in splits if split == "train" or "train" not in splits]
        if "labels" in columns:
            sets = (row["labels"] for split in named for _, row in _with_sets(rows(split)))
            classes = _classes(label for names in sets for label in names)
            features["labels"] = tfds.features.Sequence(tfds.features.ClassLabel(names=list(classes)))
        if "label" in columns:
            classes = _classes(row["label"] for split in named for _, row in rows(split))
            features["label"] = tfds.features.ClassLabel(names=list(classes))
        return features, {split: _files.nonempty_rows(judged(split, classes), split, columns) for split in splits}

    settings = (sorted(columns.items()), _files.slices_key(splits))
    settings += (config.score_range,) if "score" in columns else ()
    paths = [part.path for part in itertools.chain(*splits.values())]
    return _files.prepared_dataset(config, "table", paths, (settings, [kinds[path] for path in paths]), parse)


def file_format(path: Path, name: str) -> str:
    """Format of a file: `data.format`, or by the file's name."""
    if name:
        if name not in FORMATS:
            expected = f"expected one of {', '.join(FORMATS)}, or '' for what the name says"
            raise ConfigError(f"data.format: got {name!r}, {expected}{registry.nearest(name, tuple(FORMATS))}")
        return name
    ending = Path(path.name.removesuffix(".gz")).suffix
    if ending not in ENDINGS:
        expected = f"expected one of {', '.join(ENDINGS)}, plain or .gz"
        raise ConfigError(f"{path}: got an unknown table format, {expected}; or set data.format")
    return ENDINGS[ending]


def _tsv(path: Path, columns: dict[str, str]) -> Iterator[Row]:
    cells = ((n, line.split("\t")) for n, line in _files.read_lines(path) if line.strip())
    return _cells(path, columns, cells, "a tab")


def _quoted(delimiter: str, word: str, path: Path, columns: dict[str, str]) -> Iterator[Row]:
    return _cells(path, columns, _unquoted(path, delimiter), word)


def _unquoted(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """(last line, cells) of each row; a cell in quotes may span several lines."""
    reader = csv.reader((line + "\n" for _, line in _files.read_lines(path)), delimiter=delimiter, strict=True)
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            what = f"{path}:{reader.line_num}: got {error}, expected cells in double quotes to end in one"
            raise ConfigError(f"{what}; double a quote inside of one, or set data.format") from error
        if cells is None:
            return
        if any(cell.strip() for cell in cells):
            yield reader.line_num, cells


def _labelled_lines(path: Path, columns: dict[str, str]) -> Iterator[Row]:
    """Rows of the first word of each line and the rest."""
    named = {role: column for role, column in columns.items() if column not in ("#1", "#2")}
    if named:
        got = ", ".join(f"{role}={column}" for role, column in named.items())
        expected = "expected label=#1, the first word of a line, and text=#2, the rest; set data.columns or data.format"
        raise ConfigError(f"{path}: got data.columns {got} for a file of labelled lines, {expected}")
    for number, line in _files.read_lines(path):
        if "\t" in line:
            expected = "expected a label, a blank and the text; set data.format=tsv for cells between tabs"
            raise ConfigError(f"{path}:{number}: got a tab in a labelled line, {expected}")
        if line.strip():
            label, _, text = line.strip(" ").partition(" ")
            row = {"#1": label, "#2": text.strip(" ")}
            yield f"{path}:{number}", {role: row[column] for role, column in columns.items()}


def _cells(path: Path, columns: dict[str, str], rows: Iterator[tuple[int, list[str]]], separator: str) -> Iterator[Row]:
    """Rows of cells by the names in the header, or by number."""
    numbered = all(column.startswith("#") for column in columns.values())
    first = next(rows, None)
    if first is None:
        raise ConfigError(f"{path}: got only blank lines, expected a table")
    header = [f"#{i}" for i in range(1, len(first[1]) + 1)] if numbered else first[1]
    index = {
        role: header.index(_known(column, header, lambda: f"{path}:{first[0]}")) for role, column in columns.items()
    }
    for number, cells in itertools.chain([first], rows) if numbered else rows:
        where = f"{path}:{number}"
        if len(cells) != len(header):
            raise ConfigError(f"{where}: got {len(cells)} cells, expected {len(header)}; {separator} separates cells")
        yield where, {role: cells[i] for role, i in index.items()}


def _jsonl(path: Path, columns: dict[str, str]) -> Iterator[Row]:
    for number, line in _files.read_lines(path):
        if line.strip():
            where = f"{path}:{number}"
            yield where, json_row(line, columns, lambda where=where: where)


def json_row(line: str, columns: dict[str, str], where: Callable[[], str]) -> dict[str, Any]:
    """The fields by role of one line of JSONL.

    Args:
      where: file and line, for errors.

    Raises:
      ConfigError: the line is no JSON object, lacks a column, or has no text there.
    """
    record = _files.parse_json_line(line, where)
    if not isinstance(record, dict):
        raise ConfigError(f"{where()}: got {type(record).__name__}, expected one JSON object a line")
    return {role: _value(record, role, column, where) for role, column in columns.items()}


FORMATS: dict[str, Callable[[Path, dict[str, str]], Iterator[Row]]] = {
    "tsv": _tsv,
    "tsv_quoted": functools.partial(_quoted, "\t", "a tab"),
    "csv": functools.partial(_quoted, ",", "a comma"),
    "jsonl": _jsonl,
    "labelled": _labelled_lines,
}
"""Reader of each `data.format`."""

ENDINGS = {".tsv": "tsv", ".csv": "csv", ".jsonl": "jsonl", ".json": "jsonl", ".txt": "labelled"}
"""Format of each file name ending."""


def _value(record: dict[str, Any], role: str, column: str, where: Callable[[], str]) -> str:
    value = record[_known(column, list(record), where)]
    if role == "labels" and isinstance(value, list) and all(type(item) in (str, int) for item in value):
        if any(SET_SEPARATOR in str(item) for item in value):
            raise ConfigError(f"{where()}: got a comma in {value!a} in column {column!r}, expected names without one")
        return SET_SEPARATOR.join(map(str, value))
    if role == "label" and isinstance(value, int):
        return str(int(value))  # false and true are classes 0 and 1
    if role == "score" and isinstance(value, (int, float)) and not isinstance(value, bool):
        return repr(value)
    if not isinstance(value, str):
        expected = {"label": "an integer or a string", "labels": "a list of names", "score": "a number"}
        expected = expected.get(role, "a string")
        raise ConfigError(f"{where()}: got {type(value).__name__} in column {column!r}, expected {expected}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON's escapes can name half a surrogate pair
        got = ascii(value[error.start])
        raise ConfigError(f"{where()}: got {got} in column {column!r}, expected text that UTF-8 can hold") from error
    return value


def _known(column: str, header: list[str], where: Callable[[], str]) -> str:
    if column not in header:
        names = ", ".join(name if name.isprintable() else ascii(name) for name in header)
        expected = f"expected one of {names}{registry.nearest(column, header)}"
        raise ConfigError(f"{where()}: got no column {column!r}, {expected}; set data.columns")
    return column


def _classes(labels: Iterator[str]) -> tuple[str, ...]:
    """The distinct labels, sorted by value if all are integers, otherwise by name."""
    found = {label for label in labels if label.strip()}
    numbers = all(label.removeprefix("-").isdecimal() for label in found)
    return tuple(sorted(found, key=int if numbers else None))


def _with_sets(rows: Iterator[Row]) -> Iterator[Row]:
    """Rows whose "labels" is a list of names, each once.

    Raises:
      ConfigError: a name occurs twice, or is empty beside others.
    """
    for where, row in rows:
        if "labels" in row:
            cell = row["labels"]
            names = [name.strip() for name in cell.split(SET_SEPARATOR)] if cell.strip() else []
            if not all(names) or len(set(names)) < len(names):
                expected = "expected names with commas between, each once"
                raise ConfigError(f"{where}: got the labels {cell!a}, {expected}; mend the data")
            row = {**row, "labels": names}
        yield where, row


def _labelled(rows: Iterator[Row], classes: tuple[str, ...]) -> Iterator[Row]:
    """Rows, with a check that their labels occur in training. Labels stay names: the tfds feature maps them to ids."""
    known = frozenset(classes)
    order = {name: number for number, name in enumerate(classes)}
    for where, row in rows:
        for label in [*([row["label"]] if "label" in row else []), *row.get("labels", ())]:
            if label not in known:
                expected = f"expected one of the training split's: {', '.join(classes)}"
                raise ConfigError(f"{where}: got label {label!r}, {expected}")
        yield where, {**row, "labels": sorted(row["labels"], key=order.__getitem__)} if "labels" in row else row


def _scored(rows: Iterator[Row], score_range: tuple[float, ...]) -> Iterator[Row]:
    """Rows with scores scaled from `score_range` to 0 to 1."""
    for where, row in rows:
        if "score" in row:
            try:
                score = float(row["score"])
            except ValueError:
                raise ConfigError(f"{where}: got score {row['score']!r}, expected a number; mend the data") from None
            row["score"] = cache.scale_score(score, score_range, where)
        yield where, row


SOURCE = build
