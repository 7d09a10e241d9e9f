"""Parquet files, with a column for each role. Needs pyarrow: pip install 'jaxformer[parquet]'.

    config.splits = {"train": ("part-*.parquet",), "validation": ("dev.parquet",)}
    config.columns = {"text": "content"}        default: the column "text"

Examples are read by random access, a row group at a time: nothing is copied into the cache. Slices of files
("all.parquet[:90%]") count rows. The roles are source, target, text and pair.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxformer import registry
from jaxformer.config import DataConfig
from jaxformer.data.sources import Dataset, Example, _files
from jaxformer.errors import ConfigError

ROLES = ("source", "target", "text", "pair")
MAX_CACHED_GROUPS = 4
"""Row groups of a split kept in memory."""


class RowGroup(NamedTuple):
    """Rows `begin` to `end` of row group `number` of a file."""

    path: Path
    number: int
    begin: int
    end: int


def library() -> Any:
    """The module pyarrow.parquet.

    Raises:
      ConfigError: it is not installed.
    """
    try:
        import pyarrow.parquet
    except ImportError:
        what = "data.source: got parquet, which needs pyarrow, expected it to be installed"
        raise ConfigError(f"{what}; pip install 'jaxformer[parquet]'") from None
    return pyarrow.parquet


def columns_of(config: DataConfig) -> dict[str, str]:
    """Role -> column."""
    columns = dict(config.columns) or {"text": "text"}
    for role in columns:
        if role not in ROLES:
            expected = f"expected roles among {', '.join(ROLES)}{registry.nearest(role, ROLES)}"
            raise ConfigError(f"data.columns: got {role!r}, {expected}")
    return columns


def row_groups(part: _files.FileSlice, columns: Sequence[str]) -> list[RowGroup]:
    """The row groups of a file within its slice.

    Raises:
      ConfigError: the file is damaged, has no rows or lacks a column of text.
    """
    arrow = library()
    try:
        metadata = arrow.ParquetFile(part.path)
        kinds = {field.name: str(field.type) for field in metadata.schema_arrow}
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(
            f"{part.path}: got no readable parquet file ({reason}), expected one; fetch it again"
        ) from None
    for column in columns:
        if column not in kinds:
            expected = f"expected one of {', '.join(kinds)}{registry.nearest(column, list(kinds))}"
            raise ConfigError(f"{part.path}: got no column {column!r}, {expected}; set data.columns")
        if kinds[column] not in ("string", "large_string", "string_view"):
            raise ConfigError(f"{part.path}: got column {column!r} of type {kinds[column]}, expected strings")
    counts = [metadata.metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    if not sum(counts):
        raise ConfigError(f"{part.path}: got a file without rows, expected some; fill it or name another")
    chosen = _files.slice_sequence(part, range(sum(counts)), "rows")
    groups, first = [], 0
    for number, count in enumerate(counts):
        begin, end = max(chosen[0], first), min(chosen[-1] + 1, first + count)
        if begin < end:
            groups.append(RowGroup(part.path, number, begin - first, end - first))
        first += count
    return groups


def read_group(group: RowGroup, columns: Sequence[str]) -> list[list[str | None]]:
    """The values of each column in a row group.

    Raises:
      ConfigError: it cannot be read.
    """
    try:
        table = library().ParquetFile(group.path).read_row_group(group.number, columns=list(columns))
        return [table.column(column).slice(group.begin, group.end - group.begin).to_pylist() for column in columns]
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:120]
        what = f"{group.path}: got a damaged row group {group.number} ({reason})"
        raise ConfigError(f"{what}, expected a whole file; fetch it again") from None


def checked(value: str | None, group: RowGroup, row: int, column: str) -> str:
    """A value of a column that must not be null."""
    if value is None:
        where = f"{group.path}: row {row} of row group {group.number}"
        raise ConfigError(f"{where}: got null in column {column!r}, expected text; remove the row")
    return value


class ParquetExamples:
    """The rows of a split."""

    def __init__(self, groups: Sequence[RowGroup], columns: dict[str, str]):
        self.groups, self.columns = groups, columns
        self._ends = list(itertools.accumulate(group.end - group.begin for group in groups))
        self._start()

    def _start(self) -> None:
        self._read = functools.lru_cache(maxsize=MAX_CACHED_GROUPS)(
            lambda number: read_group(self.groups[number], list(self.columns.values()))
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"groups": self.groups, "columns": self.columns, "_ends": self._ends}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"parquet: got row {index}, expected one of {len(self)}")
        number = bisect.bisect_right(self._ends, index)
        group, row = self.groups[number], index - (self._ends[number - 1] if number else 0)
        values = zip(self.columns.items(), self._read(number), strict=True)
        return {role: checked(column[row], group, group.begin + row, name) for (role, name), column in values}


def build(config: DataConfig) -> Dataset:
    """The rows of `config.splits` under the roles of `config.columns`.

    Raises:
      ConfigError: pyarrow or a file is missing, a file is damaged or lacks a column, or a role is unknown.
    """
    columns, splits = columns_of(config), _files.slices_by_split(config)
    library()
    groups = {
        split: [group for part in parts for group in row_groups(part, list(columns.values()))]
        for split, parts in splits.items()
    }
    content = hashlib.sha256(repr((sorted(columns.items()), _files.slices_key(splits))).encode())
    for part in itertools.chain(*splits.values()):
        with open(part.path, "rb") as file:
            content.update(hashlib.file_digest(file, "sha256").digest())
    examples = {split: ParquetExamples(each, columns) for split, each in groups.items()}
    return Dataset(examples, f"parquet-{content.hexdigest()[:16]}")


SOURCE = build
