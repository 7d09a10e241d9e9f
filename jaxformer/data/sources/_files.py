"""What the sources of local files share: finding them, cutting them, reading lines, and saying what is wrong where.

An entry of `data.splits` is the name of a file, which may lie there plain or as .gz, or a pattern with "*"; either may
end in a cut: "all.tsv[:90%]", "all.tsv[5000:]". A cut counts what the source makes examples of.
"""

from __future__ import annotations

import functools
import gzip
import logging
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from jaxformer import places
from jaxformer.config import ConfigError, DataConfig
from jaxformer.data import cache
from jaxformer.data.sources import Dataset

VERSION = 2  # of how files are read: part of every key, raised when the same bytes would give other examples

MAX_LINE = 128 << 20
"""Bytes of a line: text8 is one of 100 MB, and what is longer has lost its newlines."""

CUT = re.compile(r"(?P<name>.+)\[(?P<start>\d+%?)?:(?P<stop>\d+%?)?\]")

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """A file, or the part of it from `start` to `stop`: "90%", "5000" or None."""

    path: Path
    start: str | None = None
    stop: str | None = None

    def bounds(self, length: int) -> slice:
        """The part of `length` units. Percentages round down, so [:p%] and [p%:] meet without gap or overlap."""
        return slice(_units(self.start, length), _units(self.stop, length))

    @property
    def is_whole(self) -> bool:
        return self.start is None and self.stop is None

    def __str__(self) -> str:
        return str(self.path) if self.is_whole else f"{self.path}[{self.start or ''}:{self.stop or ''}]"


def cut(name: str) -> tuple[str, str | None, str | None]:
    """The name of a file, and what is cut of it: ("input.txt", None, "90%") of "input.txt[:90%]".

    Raises:
      ConfigError: it ends in brackets with a colon that are no cut.
    """
    match = CUT.fullmatch(name)
    if match is None and re.search(r"\[[^\[\]=]*:[^\[\]=]*\]$", name):
        raise ConfigError(
            f"data.splits: got {name!r}, expected FILE[:90%], FILE[90%:] or FILE[1000:2000]; mend the cut"
        )
    return (match["name"], match["start"], match["stop"]) if match else (name, None, None)


def part(folder: Path, name: str) -> Part:
    """The one file that an entry of `data.splits` names, with its cut."""
    name, start, stop = cut(name)
    return Part(existing(folder / name), start, stop)


def parts(folder: Path, name: str) -> list[Part]:
    """The files that an entry of `data.splits` names, sorted where it is a pattern, each with the entry's cut."""
    pattern, start, stop = cut(name)
    if "*" not in pattern:
        return [part(folder, name)]
    found = sorted(path for path in folder.glob(pattern) if path.is_file())
    if not found:
        raise ConfigError(f"data.splits: got {pattern!r}, which matches no file in {folder}; set --config.data.dir=DIR")
    return [Part(path, start, stop) for path in found]


def by_split(config: DataConfig) -> dict[str, list[Part]]:
    """The files of each split, in order."""
    place = folder(config)
    return {split: [each for name in names for each in parts(place, name)] for split, names in config.splits.items()}


def chosen(each: Part, items: Iterable[T], noun: str) -> Iterator[T]:
    """What the cut of a file keeps of its `items`, in order. Every source of local files cuts with this.

    Raises:
      ConfigError: the file has no item, or its cut leaves none.
    """
    empty = True
    for item in items if each.is_whole else kept(each, list(items), noun):
        empty = False
        yield item
    if empty:
        raise ConfigError(f"{each.path}: got a file without {noun}, expected some; fill it or name another")


def kept(each: Part, items: Sequence[T], noun: str) -> Sequence[T]:
    """As `chosen`, of items that are all at hand; a file without any is the caller's to refuse."""
    left = items[each.bounds(len(items))]
    if items and not left:
        raise ConfigError(f"{each}: got a cut that leaves none of {len(items)} {noun}, expected some; widen it")
    return left


def key_of_cuts(splits: Mapping[str, Sequence[Part]]) -> dict[str, list[tuple[str | None, str | None]]]:
    """What of a key says how many files each split has, and what is cut of them."""
    return {split: [(each.start, each.stop) for each in found] for split, found in splits.items()}


def _units(bound: str | None, length: int) -> int | None:
    if bound is None:
        return None
    return length * int(bound[:-1]) // 100 if bound.endswith("%") else int(bound)


def folder(config: DataConfig) -> Path:
    """The folder of the files.

    Raises:
      ConfigError: `data.dir` is empty or no folder, or `data.splits` is empty or has a name that tfds cannot store.
    """
    if not config.dir:
        raise ConfigError("data.dir: got '', expected the folder of the data files; set --config.data.dir=DIR")
    path = places.expanded(config.dir, "data.dir")
    if not path.is_dir():
        raise ConfigError(f"data.dir: got {config.dir!r}, which is no folder; set --config.data.dir=DIR to the data")
    if not config.splits:
        raise ConfigError("data.splits: got nothing, expected files for at least 'train'")
    for split in config.splits:
        if not split.isidentifier() or split == "all":  # tfds reads "all" as the union of the others
            raise ConfigError(f"data.splits: got the name {split!r}, expected letters, digits and _, and not 'all'")
    return path


def existing(path: Path) -> Path:
    """`path`, or the same file packed (.gz added) or unpacked (.gz taken off) where only that is there."""
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
    """(line number from 1, line without its end) of a file, plain or .gz.

    Lines end at "\\n" or "\\r\\n", and in a file that has neither at "\\r" (old Mac files). Nothing else ends a line.

    Raises:
      ConfigError: it is empty, damaged or not UTF-8, or a line has no end (with file and line).
    """
    number = 0
    with _opened(path) as file:
        while line := _guarded(path, functools.partial(file.readline, MAX_LINE + 1)):
            # The first line is all of the file where "\n" does not occur.
            for text in line.removesuffix(b"\r").split(b"\r") if not number and b"\n" not in line else [line]:
                number += 1
                if len(text) > MAX_LINE and not text.endswith(b"\n"):
                    got = f"{path}:{number}: got a line of more than {MAX_LINE >> 20} MiB"
                    raise ConfigError(f"{got}, expected a text with newlines; cut it, or set data.document=file")
                yield number, _decoded(text.removesuffix(b"\n").removesuffix(b"\r"), path, number)
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

    paths = list(paths)
    key = cache.content_key(paths, kind, VERSION, [path.suffix == ".gz" for path in paths], settings)
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
