"""A folder that `save_to_disk` of the `datasets` library wrote. Needs pyarrow: pip install 'jaxformer[parquet]'.

    config.dir = "folder"                                   a DatasetDict, or a Dataset, which is then "train"
    config.splits = {"train": ("train[:90%]",), "validation": ("train[90%:]",)}    default: the splits of the folder
    config.columns = {"source": "translation/de", "target": "translation/en"}      default: text, and label if any

Examples are read by random access from memory-mapped Arrow files: nothing is copied into the cache, and the library
itself is not needed. Slices count rows. The roles are source, target, text and pair (strings), label (a ClassLabel)
and score (a number). "a/b" is field b of the column a.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxformer import registry
from jaxformer.config import DataConfig
from jaxformer.data import cache
from jaxformer.data.sources import Dataset, Example, JoinedExamples, _files
from jaxformer.errors import ConfigError
from jaxformer.runtime import bucket_folders, files

TEXT_ROLES = ("source", "target", "text", "pair")
ROLES = (*TEXT_ROLES, "label", "score")
NUMBERS = r"u?int\d+|halffloat|float|double"
STRINGS = ("string", "large_string", "string_view")


def library() -> Any:
    """The module pyarrow, with pyarrow.ipc.

    Raises:
      ConfigError: it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        what = "data.source: got datasets, which needs pyarrow, expected it to be installed"
        raise ConfigError(f"{what}; pip install 'jaxformer[parquet]'") from None
    return pyarrow


@dataclasses.dataclass(frozen=True)
class SavedSplit:
    """A split of a saved folder.

    Attributes:
      folder: of its files.
      paths: Arrow files, in order.
      features: description of each column, as the library stores it.
    """

    folder: Path
    paths: tuple[Path, ...]
    features: Mapping[str, Any]


def saved_splits(config: DataConfig) -> dict[str, SavedSplit]:
    """The splits that the folder `config.dir` holds.

    Raises:
      ConfigError: it is no folder that `save_to_disk` wrote.
    """
    if not config.dir:
        raise ConfigError("data.dir: got '', expected the folder that save_to_disk wrote; set --config.data.dir=DIR")
    folder = bucket_folders.local_folder(config.dir, "data.dir")
    if (folder / "state.json").is_file():
        return {"train": _saved_split(folder)}
    if not (folder / "dataset_dict.json").is_file():
        what = f"data.dir: got {config.dir!r}, which has neither dataset_dict.json nor state.json"
        raise ConfigError(f"{what}, expected a folder that save_to_disk of the library datasets wrote; name it")
    names = _described(folder / "dataset_dict.json", "splits", list)
    return {str(name): _saved_split(folder / str(name)) for name in names}


def _saved_split(folder: Path) -> SavedSplit:
    if _described(folder / "state.json", "_indices_data_files", list, []):
        what = f"{folder}: got rows selected by an index file (datasets before 2.0), expected rows in order"
        raise ConfigError(f"{what}; load the folder and save it again")
    listed = _described(folder / "state.json", "_data_files", list)
    features = _described(folder / "dataset_info.json", "features", dict)
    names = [each.get("filename") if isinstance(each, dict) else None for each in listed]
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{folder / 'state.json'}: got files without names, expected those of Arrow files")
    paths = tuple(folder / str(name) for name in names)
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"{path}: got no such file, expected one that state.json names; copy the whole folder")
    return SavedSplit(folder, paths, features)


def _described(path: Path, key: str, kind: type, default: Any = None) -> Any:
    """A value of one of the folder's JSON files."""
    try:
        value = files.read_json(path).get(key, default)
    except OSError as error:
        raise ConfigError(f"{path}: got no such file ({error.strerror}), expected one; copy the whole folder") from None
    if not isinstance(value, kind):
        got = f"{path}: got {type(value).__name__} under {key!r}"
        raise ConfigError(f"{got}, expected a {kind.__name__}; save the folder again")
    return value


def whole_files(config: DataConfig, saved: Mapping[str, SavedSplit]) -> dict[str, list[Path]] | None:
    """The Arrow files of each split; None if a split is a slice."""
    slices = split_slices(config, saved)
    if any(start or stop for parts in slices.values() for _, start, stop in parts):
        return None
    return {split: [path for name, _, _ in parts for path in saved[name].paths] for split, parts in slices.items()}


def split_slices(
    config: DataConfig, saved: Mapping[str, SavedSplit]
) -> dict[str, list[tuple[str, str | None, str | None]]]:
    """(name in the folder, start, stop) of the parts of each split.

    Raises:
      ConfigError: the folder has no such split.
    """
    found = {}
    for split, entries in (config.splits or {name: (name,) for name in saved}).items():
        found[split] = [_files.parse_slice(entry) for entry in entries]
        for name, _, _ in found[split]:
            if name not in saved:
                expected = f"expected one of {', '.join(saved)}{registry.nearest(name, list(saved))}"
                raise ConfigError(f"data.splits.{split}: got {name!r}, {expected}")
    return found


def columns_of(config: DataConfig, saved: SavedSplit) -> dict[str, str]:
    """Role -> column, checked against the features.

    Raises:
      ConfigError: a role is unknown, or its column is missing or of another kind.
    """
    columns = dict(config.columns)
    if not columns:
        columns = {"text": "text"}
        if _is_class(saved.features.get("label")):
            columns["label"] = "label"
    for role, column in columns.items():
        if role not in ROLES:
            expected = f"expected roles among {', '.join(ROLES)}{registry.nearest(role, ROLES)}"
            raise ConfigError(f"data.columns: got {role!r}, {expected}")
        if column.split("/")[0] not in saved.features:
            expected = f"expected one of {', '.join(saved.features)}{registry.nearest(column, list(saved.features))}"
            raise ConfigError(f"data.columns.{role}: got {column!r}, {expected}; set data.columns")
        if role == "label" and not _is_class(saved.features.get(column)):
            raise ConfigError(f"data.columns.label: got {column!r}, which is no ClassLabel, expected one; name another")
    return columns


def _is_class(feature: Any) -> bool:
    return isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and isinstance(feature.get("names"), list)


def read_batches(path: Path, columns: Mapping[str, str]) -> list[list[Any]]:
    """The record batches of an Arrow file, memory-mapped: an array for each of `columns`.

    Raises:
      ConfigError: the file is damaged, or lacks a column of the kind that its role needs.
    """
    arrow = library()
    try:
        batches = list(arrow.ipc.open_stream(arrow.memory_map(str(path))))
        for batch in batches:
            batch.validate()
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise _damaged(path, str(error)) from None
    return [[_array(path, batch, role, column) for role, column in columns.items()] for batch in batches]


def _array(path: Path, batch: Any, role: str, column: str) -> Any:
    name, *fields = column.split("/")
    try:
        array = batch.column(name)
        for each in fields:
            array = array.field(each)
    except (KeyError, AttributeError):
        known = ", ".join(f"{field.name} ({field.type})" for field in batch.schema)[:160]
        raise ConfigError(f"{path}: got no column {column!r}, expected one of {known}; set data.columns") from None
    kind = str(array.type)
    if role in TEXT_ROLES:
        fits, expected = kind in STRINGS, "strings"
    else:
        fits, expected = re.fullmatch(r"u?int\d+" if role == "label" else NUMBERS, kind), "numbers"
    if not fits:
        raise ConfigError(f"{path}: got column {column!r} of type {kind}, expected {expected} for {role}")
    return array


def _value(path: Path, array: Any, row: int) -> Any:
    try:
        return array[row].as_py()
    except (ValueError, SystemError) as error:  # text that is not UTF-8, or ends before it begins
        raise _damaged(path, str(error)) from None


def read_texts(path: Path, array: Any) -> list[str | None]:
    """All values of an array of strings.

    Raises:
      ConfigError: its bytes are damaged.
    """
    try:
        array.validate(full=True)  # reading offsets that point nowhere would end the process
        return array.to_pylist()
    except ValueError as error:
        raise _damaged(path, str(error)) from None


def _damaged(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{path}: got no readable Arrow file ({' '.join(reason.split())[:120]}), expected one; fetch it again"
    )


class ArrowExamples:
    """Rows of several Arrow files, one file after the other, with random access.

    Attributes:
      paths: the files.
      columns: role -> column.
      score_range: numbers that become scores of 0 and 1.
    """

    def __init__(self, paths: Sequence[Path], columns: Mapping[str, str], score_range: Sequence[float] = (0.0, 1.0)):
        self.paths, self.columns, self.score_range = tuple(paths), dict(columns), score_range
        self._open()

    def _open(self) -> None:
        found = [(path, arrays) for path in self.paths for arrays in read_batches(path, self.columns)]
        self._batches = found
        self._ends = list(itertools.accumulate(len(arrays[0]) for _, arrays in found))

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths, "columns": self.columns, "score_range": self.score_range}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"datasets: got row {index}, expected one of {len(self)}")
        number = bisect.bisect_right(self._ends, index)
        path, arrays = self._batches[number]
        row = index - (self._ends[number - 1] if number else 0)
        found: dict[str, Any] = {}
        for (role, column), array in zip(self.columns.items(), arrays, strict=True):
            value = _value(path, array, row)
            if value is None or (role == "label" and value < 0):
                what = f"{path}: row {index} of the split: got {value if value is not None else 'null'}"
                expected = "a class" if role == "label" else "a value"
                raise ConfigError(f"{what} in column {column!r}, expected {expected}; remove the row")
            found[role] = cache.scale_score(value, self.score_range, str(path)) if role == "score" else value
        return found


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows `begin` to `end` of examples."""

    examples: ArrowExamples
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"datasets: got row {index}, expected one of {len(self)}")
        return self.examples[self.begin + index]


def build(config: DataConfig) -> Dataset:
    """The rows of `config.splits`, or of all splits of the folder.

    Raises:
      ConfigError: pyarrow or a file is missing, a file is damaged or lacks a column, a role or split is unknown, or a
        slice is empty.
    """
    saved = saved_splits(config)
    library()
    opened = functools.cache(
        lambda name: ArrowExamples(saved[name].paths, columns_of(config, saved[name]), config.score_range)
    )
    splits: dict[str, Any] = {}
    content = hashlib.sha256(repr((sorted(config.columns.items()), sorted(config.splits.items()))).encode())
    classes: tuple[str, ...] | None = None

    for split, parts in split_slices(config, saved).items():
        chosen = []
        for name, start, stop in parts:
            part = _files.FileSlice(saved[name].folder, start, stop)
            rows = _files.slice_sequence(part, range(len(opened(name))), "rows")
            if not rows:
                raise ConfigError(f"{saved[name].folder}: got a split without rows, expected some; name another")
            chosen.append(Rows(opened(name), rows[0], rows[-1] + 1))
            label = opened(name).columns.get("label")
            names = None if label is None else tuple(map(str, saved[name].features[label]["names"]))
            if names is not None and classes not in (None, names):
                raise ConfigError(f"{saved[name].folder}: got other classes than another split, expected the same")
            classes = names if names is not None else classes
            for path in saved[name].paths:
                with open(path, "rb") as file:
                    content.update(hashlib.file_digest(file, "sha256").digest())
        splits[split] = chosen[0] if len(chosen) == 1 else JoinedExamples(tuple(chosen))
    return Dataset(splits, f"datasets-{content.hexdigest()[:16]}", classes)


SOURCE = build
