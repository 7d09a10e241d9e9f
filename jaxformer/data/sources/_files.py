"""Shared code of sources that read local files: finding and slicing files, reading lines, errors with file and line.

An entry of `data.splits` is the name of a file (plain or .gz) or a pattern with "*". Either may end in a slice:
"all.tsv[:90%]", "all.tsv[5000:]". A slice counts the units that become examples, such as lines or rows.
"""

from __future__ import annotations

import functools
import gzip
import json
import logging
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from jaxformer.config import DataConfig
from jaxformer.data import cache
from jaxformer.data.sources import Dataset
from jaxformer.errors import ConfigError
from jaxformer.runtime import bucket_folders

READER_VERSION = 2
"""Part of every cache key; increased when the same bytes are parsed to other examples."""

MAX_LINE_BYTES = 128 << 20
"""Longest line. text8 is a line of 100 MB; a longer one is a file that has lost its newlines."""

SLICE = re.compile(r"(?P<name>.+)\[(?P<start>\d+%?)?:(?P<stop>\d+%?)?\]")

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class FileSlice:
    """A file, or the slice of it from `start` to `stop`: "90%", "5000" or None."""

    path: Path
    start: str | None = None
    stop: str | None = None

    def bounds(self, length: int) -> slice:
        """The slice of `length` units. Percentages round down, so [:p%] and [p%:] have no gap and no overlap."""
        return slice(_bound(self.start, length), _bound(self.stop, length))

    @property
    def is_complete(self) -> bool:
        return self.start is None and self.stop is None

    def __str__(self) -> str:
        return str(self.path) if self.is_complete else f"{self.path}[{self.start or ''}:{self.stop or ''}]"


def parse_slice(name: str) -> tuple[str, str | None, str | None]:
    """Splits a file name from its slice: "input.txt[:90%]" -> ("input.txt", None, "90%").

    Raises:
      ConfigError: the name ends in brackets with a colon that are no slice.
    """
    match = SLICE.fullmatch(name)
    if match is None and re.search(r"\[[^\[\]=]*:[^\[\]=]*\]$", name):
        raise ConfigError(
            f"data.splits: got {name!r}, expected FILE[:90%], FILE[90%:] or FILE[1000:2000]; correct the slice"
        )
    return (match["name"], match["start"], match["stop"]) if match else (name, None, None)


def file_slice(folder: Path, name: str) -> FileSlice:
    """The file that an entry of `data.splits` names, with its slice."""
    name, start, stop = parse_slice(name)
    return FileSlice(find_file(folder / name), start, stop)


def file_slices(folder: Path, name: str) -> list[FileSlice]:
    """The files that an entry of `data.splits` names, each with the entry's slice; sorted if it is a pattern."""
    pattern, start, stop = parse_slice(name)
    if "*" not in pattern:
        return [file_slice(folder, name)]
    found = sorted(path for path in folder.glob(pattern) if path.is_file())
    if not found:
        raise ConfigError(f"data.splits: got {pattern!r}, which matches no file in {folder}; set --config.data.dir=DIR")
    return [FileSlice(path, start, stop) for path in found]


def slices_by_split(config: DataConfig) -> dict[str, list[FileSlice]]:
    """The files of each split, in order."""
    directory = data_directory(config)
    return {
        split: [part for name in names for part in file_slices(directory, name)]
        for split, names in config.splits.items()
    }


def sliced_items(part: FileSlice, items: Iterable[T], noun: str) -> Iterator[T]:
    """The `items` of a file that its slice selects, in order.

    Args:
      part: the file and its slice.
      items: all items of the file.
      noun: plural name of the items, for errors.

    Raises:
      ConfigError: the file has no items, or its slice selects none.
    """
    empty = True
    for item in items if part.is_complete else slice_sequence(part, list(items), noun):
        empty = False
        yield item
    if empty:
        raise ConfigError(f"{part.path}: got a file without {noun}, expected some; fill it or name another")


def slice_sequence(part: FileSlice, items: Sequence[T], noun: str) -> Sequence[T]:
    """`sliced_items` for a sequence. Returns an empty one if the file has no items."""
    left = items[part.bounds(len(items))]
    if items and not left:
        raise ConfigError(f"{part}: got a slice that leaves none of {len(items)} {noun}, expected some; widen it")
    return left


def slices_key(splits: Mapping[str, Sequence[FileSlice]]) -> dict[str, list[tuple[str | None, str | None]]]:
    """The part of a cache key that contains the number of files of each split, and their slices."""
    return {split: [(part.start, part.stop) for part in parts] for split, parts in splits.items()}


def _bound(bound: str | None, length: int) -> int | None:
    if bound is None:
        return None
    return length * int(bound[:-1]) // 100 if bound.endswith("%") else int(bound)


def data_directory(config: DataConfig) -> Path:
    """The directory `data.dir`.

    Raises:
      ConfigError: `data.dir` is empty or no directory, or `data.splits` is empty or has a name that tfds cannot store.
    """
    if not config.dir:
        raise ConfigError("data.dir: got '', expected the folder of the data files; set --config.data.dir=DIR")
    path = bucket_folders.local_folder(config.dir, "data.dir")
    if not path.is_dir():
        raise ConfigError(f"data.dir: got {config.dir!r}, which is no folder; set --config.data.dir=DIR to the data")
    if not config.splits:
        raise ConfigError("data.splits: got nothing, expected files for at least 'train'")
    for split in config.splits:
        if not split.isidentifier() or split == "all":  # tfds reads "all" as the union of the others
            raise ConfigError(f"data.splits: got the name {split!r}, expected letters, digits and _, and not 'all'")
    return path


def find_file(path: Path) -> Path:
    """`path`, or the same file with .gz added or removed if only that one exists."""
    other = path.with_suffix("") if path.suffix == ".gz" else path.with_name(f"{path.name}.gz")
    if not path.is_file() and path.name and other.is_file():
        return other
    if not path.is_file():
        got = "a folder" if path.is_dir() else "a device or pipe" if path.exists() else "no such file"
        what = f"{path}: got {got}, expected a file, which data.splits names"
        raise ConfigError(
            f"{what}; set --config.data.dir=DIR to the folder that holds it, name another file "
            "(--config.data.splits.NAME=FILE), or take the split away (--config.data.splits.NAME=)"
        )
    return path


def read_text(path: Path) -> str:
    """The complete text of a file, plain or .gz, with its line ends.

    Raises:
      ConfigError: it is empty, damaged or not UTF-8 (with file and line).
    """
    with _open(path) as file:
        data = _read_checked(path, file.read)
    if not data:
        raise ConfigError(f"{path}: got an empty file, expected text")
    return _decode_utf8(data, path, 1)


def read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """(file and line, value) of every line of a JSONL file that is not blank.

    Raises:
      ConfigError: as `read_lines`, or a line is no JSON.
    """
    for number, line in read_lines(path):
        if line.strip():
            where = f"{path}:{number}"
            yield where, parse_json_line(line, lambda where=where: where)


def parse_json_line(line: str, where: Callable[[], str]) -> Any:
    """The value of a line of JSONL.

    Args:
      where: file and line, for the error.

    Raises:
      ConfigError: it is no JSON.
    """
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where()}: got malformed JSON ({error}), expected one JSON object a line") from error


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, line without its end) of a file, plain or .gz.

    Lines end at "\\n" or "\\r\\n", and in a file that has neither at "\\r" (old Mac files). Nothing else ends a line.

    Raises:
      ConfigError: it is empty, damaged or not UTF-8, or a line has no end (with file and line).
    """
    number = 0
    with _open(path) as file:
        while line := _read_checked(path, functools.partial(file.readline, MAX_LINE_BYTES + 1)):
            # Without "\n", the first line is the complete file.
            for text in line.removesuffix(b"\r").split(b"\r") if not number and b"\n" not in line else [line]:
                number += 1
                if len(text) > MAX_LINE_BYTES and not text.endswith(b"\n"):
                    got = f"{path}:{number}: got a line of more than {MAX_LINE_BYTES >> 20} MiB"
                    raise ConfigError(f"{got}, expected a text with newlines; cut it, or set data.document=file")
                yield number, _decode_utf8(text.removesuffix(b"\n").removesuffix(b"\r"), path, number)
    if not number:
        raise ConfigError(f"{path}: got an empty file, expected at least one line")


def nonempty_rows(
    rows: Iterable[tuple[str, dict[str, Any]]], split: str, roles: Iterable[str]
) -> Iterator[dict[str, Any]]:
    """Drops rows with an empty text from the training split, and refuses them in others.

    Nothing can be learned from an example with an empty side. In other splits, dropping it would silently change what
    is measured.

    Args:
      rows: (file and line, values by role).
      split: name of the split.
      roles: the roles of the rows.

    Raises:
      ConfigError: a row of a split other than "train" has an empty text.
    """
    texts = [role for role in roles if role not in ("label", "labels", "score")]
    dropped, first = 0, ""
    for where, row in rows:
        empty = next((role for role in texts if not row[role].strip()), None)
        if empty is None:
            yield row
        elif split == "train":
            dropped, first = dropped + 1, first or where
        else:
            raise ConfigError(f"{where}: got an empty {empty}, expected text; remove it from the {split} files")
    if dropped:
        logger.warning("dropped %d training examples with an empty side, the first at %s", dropped, first)


def prepared_dataset(
    config: DataConfig, kind: str, paths: Iterable[Path], settings: object, parse: cache.ParseFiles
) -> Dataset:
    """The data set that `parse` reads from `paths`, from the cache if possible."""
    paths = list(paths)
    key = cache.content_key(paths, kind, READER_VERSION, [path.suffix == ".gz" for path in paths], settings)
    directory = cache.ensure_entry(config, kind, key, parse)
    splits, classes = cache.read_entry(directory)
    return Dataset(splits=splits, key=f"{kind}-{key}", classes=classes)


def _open(path: Path) -> gzip.GzipFile | BinaryIO:
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")


def _read_checked(path: Path, read: Callable[[], bytes]) -> bytes:
    """`read()`, with damage of a gzip file as a ConfigError."""
    try:
        return read()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: got {error}, expected a whole gzip file; fetch it again") from error


def _decode_utf8(data: bytes, path: Path, line: int) -> str:
    """Decodes UTF-8 text that begins at `line` of `path`, without a byte order mark at the beginning of the file."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line += data.count(b"\n", 0, error.start)
        byte = f"0x{data[error.start]:02x}"
        raise ConfigError(f"{path}:{line}: got byte {byte}, expected UTF-8 text; convert it with iconv") from error
    return text.removeprefix("\ufeff") if line == 1 else text
