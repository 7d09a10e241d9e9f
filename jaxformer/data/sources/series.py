"""Windows of multivariate series, from CSV files with a column for each channel; plain or .gz.

    config.splits = {"train": ("ETTh1.csv.gz[:8640]",), "validation": ("ETTh1.csv.gz[8640:11520]",)}    rows
    config.columns = {"date": "date"}    the column that is no channel

An example is a window: `config.length` steps of look-back ("values") and the `config.horizon` steps after it
("future"). A split has all windows whose horizon lies in its rows; the look-back may begin in the rows before them, as
in the published protocol of the ETT data (Zhou et al. 2021). Windows are views of the file's one array.

Means and deviations are those of the rows of the training split, of all rows and not of the windows.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.data import cache, series
from jaxformer.data.series import Table
from jaxformer.data.sources import Channels, Dataset, Example, _files
from jaxformer.data.sources._files import FileSlice
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class Part:
    """The windows of a series `values` `[N, C]` that forecast from row `first` on, `count` of them, one a row."""

    values: np.ndarray
    first: int
    count: int


@dataclass(frozen=True)
class Windows:
    """The windows of several parts: index -> example."""

    parts: tuple[Part, ...]
    look_back: int
    horizon: int

    def __len__(self) -> int:
        return sum(part.count for part in self.parts)

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        begins = np.cumsum([0, *(part.count for part in self.parts)]).tolist()
        number = bisect_right(begins, index) - 1
        part = self.parts[number]
        now = part.first + index - begins[number]
        return {
            "values": part.values[now - self.look_back : now],
            "future": part.values[now : now + self.horizon],
        }


def build(config: DataConfig) -> Dataset:
    """The windows of `config.splits`, and the channels with their means and deviations in the training rows.

    Raises:
      ConfigError: there is no horizon; a file is missing or malformed (see `series.read_table`), has no header, or
        other channels than the first; a split has fewer rows than a window needs.
    """
    if config.horizon is None:
        raise ConfigError("data.horizon: got None, expected the time steps to forecast; set --config.data.horizon=N")
    if set(config.columns) - {"date"}:
        got = ", ".join(f"{role}={column}" for role, column in config.columns.items())
        raise ConfigError(f"data.columns: got {got}, expected date=NAME or nothing; all other columns are channels")
    splits = _files.slices_by_split(config)
    tables: dict[Path, Table] = {}
    for part in (part for parts in splits.values() for part in parts):
        if part.path not in tables:
            tables[part.path] = _read(part.path, config.columns.get("date", ""), tables)
    windows = {
        split: Windows(
            tuple(_part(part, tables[part.path].values, config.length, config.horizon) for part in parts),
            config.length,
            config.horizon,
        )
        for split, parts in splits.items()
    }
    settings = (sorted(config.columns.items()), _files.slices_key(splits), config.length, config.horizon)
    key = cache.content_key(tables, "series", settings)
    names = next(iter(tables.values())).names
    if "train" not in splits:
        return Dataset(windows, f"series-{key}", channels=Channels(names))
    rows = np.concatenate([_rows(part, tables[part.path].values) for part in splits["train"]])
    deviations = rows.std(axis=0)
    deviations = np.where(deviations > 0, deviations, 1.0)  # a channel that never changes stays at 0
    channels = Channels(names, tuple(rows.mean(axis=0).tolist()), tuple(deviations.tolist()))
    return Dataset(windows, f"series-{key}", channels=channels)


def _read(path: Path, date: str, others: dict[Path, Table]) -> Table:
    """The table of a file, with the channels of the `others`."""
    table = series.read_table(_files.read_lines(path), str(path), date)
    if not table.names:
        raise ConfigError(f"{path}: got a first line of numbers, expected the names of the columns; add a header")
    first = next(iter(others.items()), None)
    if first is not None and first[1].names != table.names:
        got, expected = ", ".join(table.names), ", ".join(first[1].names)
        raise ConfigError(f"{path}: got the channels {got}, expected those of {first[0]} ({expected}); mend the files")
    return table


def _rows(part: FileSlice, values: np.ndarray) -> np.ndarray:
    return values[part.bounds(len(values))]


def _part(part: FileSlice, values: np.ndarray, look_back: int, horizon: int) -> Part:
    """The windows whose horizon lies in the rows of a slice."""
    start, stop, _ = part.bounds(len(values)).indices(len(values))
    first = max(start, look_back)
    if stop - horizon < first:
        got = f"{part}: got {max(stop - start, 0):,} rows, and {min(start, look_back):,} before them to look back to"
        expected = f"expected look-back and horizon ({look_back} + {horizon}) to fit"
        raise ConfigError(f"{got}, {expected}; lower data.length or data.horizon, or widen the slice")
    return Part(values, first, stop - horizon - first + 1)


SOURCE = build
