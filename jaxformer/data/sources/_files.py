"""What the sources of local files share: finding them, reading lines, and saying exactly what is wrong where."""

from __future__ import annotations

import functools
import gzip
import logging
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from jaxformer import places
from jaxformer.config import ConfigError, DataConfig
from jaxformer.data import cache
from jaxformer.data.sources import Dataset

VERSION = 1  # of how files are read: part of every key, raised when the same bytes would give other examples

MAX_LINE = 128 << 20
"""Bytes of a line: text8 is one of 100 MB, and what is longer has lost its newlines."""

CUT = re.compile(r"(?P<name>.+)\[(?P<start>\d+%?)?:(?P<stop>\d+%?)?\]")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """A file, or the part of it from `start` to `stop`: "90%", "5000" or None."""

    path: Path
    start: str | None = None
    stop: str | None = None

    def bounds(self, length: int) -> slice:
        """The part of `length` units. Percentages round down, so [:p%] and [p%:] meet without gap or overlap."""
        return slice(_units(self.start, length), _units(self.stop, length))


def cut(name: str) -> tuple[str, str | None, str | None]:
    """The name of a file, and what is cut of it: ("input.txt", None, "90%") of "input.txt[:90%]"."""
    match = CUT.fullmatch(name)
    return (match["name"], match["start"], match["stop"]) if match else (name, None, None)


def _units(bound: str | None, length: int) -> int | None:
    if bound is None:
        return None
    return length * int(bound[:-1]) // 100 if bound.endswith("%") else int(bound)


def folder(config: DataConfig) -> Path:
    """The folder of the files.

    Raises:
      ConfigError: `data.dir` is empty or no folder, or `data.splits` has no training split or a
        name that tfds cannot store.
    """
    if not config.dir:
        raise ConfigError("data.dir: got '', expected the folder of the data files; set --config.data.dir=DIR")
    path = places.expanded(config.dir, "data.dir")
    if not path.is_dir():
        raise ConfigError(f"data.dir: got {config.dir!r}, which is no folder; set --config.data.dir=DIR to the data")
    if "train" not in config.splits:
        got = ", ".join(config.splits) or "nothing"
        raise ConfigError(f"data.splits: got {got}, expected files for at least 'train'")
    for split in config.splits:
        if not split.isidentifier() or split == "all":  # tfds reads "all" as the union of the others
            raise ConfigError(f"data.splits: got the name {split!r}, expected letters, digits and _, and not 'all'")
    return path


def existing(path: Path) -> Path:
    """`path`, which must be a file."""
    if not path.is_file():
        got = "a folder" if path.is_dir() else "a device or pipe" if path.exists() else "no such file"
        what = f"{path}: got {got}, expected a file, which data.splits names"
        raise ConfigError(f"{what}; set --config.data.dir=DIR to the folder that holds it")
    return path


def whole(path: Path) -> str:
    """The text of a file, plain or .gz, newlines as they are.

    Raises:
      ConfigError: it is empty, damaged or not UTF-8 (with file and line).
    """
    with _opened(path) as file:
        data = _guarded(path, file.read)
    if not data:
        raise ConfigError(f"{path}: got an empty file, expected text")
    return _decoded(data, path, 1)


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, line without its newline) of a file, plain or .gz. Only "\\n" ends a line.

    Raises:
      ConfigError: it is empty, damaged or not UTF-8, or a line has no end (with file and line).
    """
    number = 0
    with _opened(path) as file:
        while line := _guarded(path, functools.partial(file.readline, MAX_LINE + 1)):
            number += 1
            if len(line) > MAX_LINE and not line.endswith(b"\n"):
                got = f"{path}:{number}: got a line of more than {MAX_LINE >> 20} MiB"
                raise ConfigError(f"{got}, expected a text with newlines; cut it, or set data.document=file")
            yield number, _decoded(line.removesuffix(b"\n"), path, number)
    if not number:
        raise ConfigError(f"{path}: got an empty file, expected at least one line")


def complete(rows: Iterable[tuple[str, dict[str, Any]]], split: str, roles: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Rows of (where, row) whose texts all say something.

    Nothing can be learned from an example with an empty side, so training drops it. In any other split that would
    change what a score is measured on, unseen.

    Raises:
      ConfigError: an empty text in a split that is not "train".
    """
    texts = [role for role in roles if role not in ("label", "score")]
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


def prepared(config: DataConfig, kind: str, paths: Iterable[Path], settings: object, parse: cache.Parse) -> Dataset:
    """The data set that `parse` reads from `paths`, through the cache."""
    import tensorflow_datasets as tfds

    key = cache.content_key(paths, kind, VERSION, settings)
    directory = cache.entry(config, kind, key, parse)
    info = tfds.builder_from_directory(directory).info
    columns = {role: role for role in sorted(info.features)}
    splits = {
        name: cache.Records(str(directory), name, columns, split.num_examples) for name, split in info.splits.items()
    }
    return Dataset(splits=splits, key=f"{kind}-{key}", classes=cache.classes(info.features))


def _opened(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")


def _guarded(path: Path, read: Any) -> bytes:
    try:
        return read()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: got {error}, expected a whole gzip file; fetch it again") from error


def _decoded(data: bytes, path: Path, line: int) -> str:
    """UTF-8 text that begins at `line` of `path`; a byte order mark at the very beginning is no text."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line += data.count(b"\n", 0, error.start)
        byte = f"0x{data[error.start]:02x}"
        raise ConfigError(f"{path}:{line}: got byte {byte}, expected UTF-8 text; convert it with iconv") from error
    return text.removeprefix("\ufeff") if line == 1 else text
