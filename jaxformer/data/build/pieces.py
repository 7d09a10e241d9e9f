"""The input of a build as pieces that workers read independently, grouped into shards.

Pieces are byte ranges of lines, whole files, row groups of Parquet files, record batches of Arrow files, or ranges of
the examples of any other source. They depend on the input alone, so that the shards are the same whatever the number
of workers.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from jaxformer.config import DataConfig
from jaxformer.data import sources
from jaxformer.data.sources import Dataset, _files, datasets, parquet, table, warc
from jaxformer.errors import ConfigError
from jaxformer.runtime import bucket_folders, object_store

MIN_SHARD_BYTES, MAX_SHARD_BYTES = 4 << 20, 256 << 20
USUAL_SHARDS = 256
MAX_SHARD_MB = 4096
"""Largest shard: the table counts its tokens and bytes with 32 bits."""
SAMPLED_LENGTHS = 64
"""Examples whose lengths decide how many of another source a shard holds."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of the input.

    Attributes:
      path: its file, or the address of it; "" for the examples of another source.
      begin, end: bytes, row groups, record batches or examples, by the kind of input.
      size: bytes of the input, for other sources about as many.
    """

    path: str
    begin: int
    end: int
    size: int


@dataclasses.dataclass(frozen=True)
class Input:
    """The input of one split.

    Attributes:
      data: where it comes from; `splits` names the split alone.
      split: its name.
      kind: a key of `READERS`.
      column: table, parquet and datasets: column of the text.
      by_address: files in a bucket are known by their addresses: workers on other machines fetch them there.
    """

    data: DataConfig
    split: str
    kind: str
    column: str = ""
    by_address: bool = False

    def documents(self, piece: Piece, dropped: dict[str, int]) -> Iterator[str]:
        """The texts of a piece. Rows without text are left out of "train", and counted in `dropped["empty"]`.

        Raises:
          ConfigError: the input is damaged, not UTF-8, or a row outside of "train" has no text; with file and line.
        """
        if object_store.is_url(piece.path):
            path = bucket_folders.local_file(self.data.dir, piece.path.removeprefix(f"{self._url}/"), "data.dir")
            piece = dataclasses.replace(piece, path=str(path))
        yield from READERS[self.kind](self, piece, dropped)

    @property
    def _url(self) -> str:
        return self.data.dir.rstrip("/")

    def name(self, path: Path) -> str:
        """Path or address by which workers find a file."""
        if not self.by_address or not object_store.is_url(self.data.dir):
            return str(path)
        folder = bucket_folders.local_folder(self.data.dir, "data.dir")
        return f"{self._url}/{path.relative_to(folder).as_posix()}"

    def _nonempty(self, where: Callable[[], str], text: str, dropped: dict[str, int]) -> bool:
        if text.strip():
            return True
        if self.split != "train":
            raise ConfigError(f"{where()}: got an empty text, expected some; remove it from the {self.split} files")
        dropped["empty"] = dropped.get("empty", 0) + 1
        return False


def inputs(data: DataConfig, by_address: bool = False) -> dict[str, Input]:
    """The input of each split of a data set.

    Args:
      by_address: as in `Input`.

    Raises:
      ConfigError: a file is missing, or the source has no running text.
    """
    if data.source == "shards":
        raise ConfigError("config.data.source: got shards, expected the text to build them from; name its source")
    if data.examples is not None:
        got = f"config.data.examples: got {data.examples}"
        raise ConfigError(f"{got} for a build, expected None: all is built, and training may read less")
    kind, column = _kind(data)
    if kind != "examples":
        if kind == "datasets" and not data.splits:  # the folder's own
            data = dataclasses.replace(data, splits={name: (name,) for name in datasets.saved_splits(data)})
        return {split: Input(_of_split(data, split), split, kind, column, by_address) for split in data.splits}
    dataset = _dataset(data)
    for examples in dataset.splits.values():
        if len(examples) and "text" not in examples[0]:
            got = f"config.data.source: got {data.source}, whose examples have {', '.join(examples[0])}"
            raise ConfigError(f"{got}, expected text; set config.data.columns.text, or choose another source")
    return {split: Input(data, split, kind) for split in dataset.splits}


def _of_split(data: DataConfig, split: str) -> DataConfig:
    return dataclasses.replace(data, splits={split: data.splits[split]})


def _kind(data: DataConfig) -> tuple[str, str]:
    """Kind of the input, and the column of its text. Slices of files need all of them: those go through the source."""
    if data.source == "datasets":
        saved = datasets.saved_splits(data)
        datasets.library()
        if datasets.whole_files(data, saved) is None:
            return "examples", ""
        columns = [datasets.columns_of(data, saved[name]) for name in saved]
        return "datasets", _text_column(columns[0])
    if data.source not in ("text", "table", "parquet", "warc"):
        return "examples", ""
    parts = list(itertools.chain(*_files.slices_by_split(data).values()))
    if not all(part.is_complete for part in parts):
        return "examples", ""
    if data.source == "text":
        return ("lines" if data.document == "line" else "files"), ""
    if data.source == "warc":
        warc.check(data)
        return "warc", ""
    if data.source == "parquet":
        columns = parquet.columns_of(data)
        return "parquet", _text_column(columns)
    columns = dict(data.columns)
    if {table.file_format(part.path, data.format) for part in parts} != {"jsonl"}:
        return "examples", ""
    return "jsonl", _text_column(columns)


def _text_column(columns: Mapping[str, str]) -> str:
    if "text" not in columns:
        got = ", ".join(columns) or "nothing"
        raise ConfigError(f"config.data.columns: got {got}, expected the column of the text; set data.columns.text")
    return columns["text"]


_DATASETS: dict[str, Dataset] = {}
"""Data sets of other sources that this process has opened."""


def _dataset(data: DataConfig) -> Dataset:
    if repr(data) not in _DATASETS:
        _DATASETS[repr(data)] = sources.build(data)
    return _DATASETS[repr(data)]


def identity(source: Input) -> list[Any]:
    """Names, sizes and times of the files of an input as JSON values; of another source the key of its data set.

    Files in a bucket have checksums in the place of times: the copies of several machines have different times.
    """
    if source.kind == "examples":
        return [_dataset(source.data).key]
    found, directory = [], bucket_folders.local_folder(source.data.dir, "data.dir")
    checksums = bucket_folders.checksums(source.data.dir, "data.dir") if object_store.is_url(source.data.dir) else {}
    for path in _paths(source):
        status, name = path.stat(), path.relative_to(directory).as_posix()
        found.append([name, status.st_size, checksums[name] if checksums else status.st_mtime_ns])
    return found


def _paths(source: Input) -> list[Path]:
    if source.kind == "datasets":
        return (datasets.whole_files(source.data, datasets.saved_splits(source.data)) or {})[source.split]
    return [part.path for part in itertools.chain(*_files.slices_by_split(source.data).values())]


# --- shards -----------------------------------------------------------------------------------------------------------


def shard_bytes(total: int) -> int:
    """Bytes of input in a shard, from those of all of it: about `USUAL_SHARDS` shards of 4 to 256 MiB each."""
    return min(max(-(-total // USUAL_SHARDS), MIN_SHARD_BYTES), MAX_SHARD_BYTES)


def shards(source: Input, size: int | None) -> list[list[Piece]]:
    """The pieces of each shard of an input, in order.

    Args:
      size: bytes of input in a shard; None: `shard_bytes` of the input.

    Raises:
      ConfigError: a file is empty, or damaged at its head.
    """
    units = list(_units(source))
    size = size or shard_bytes(sum(unit.size for unit in units))
    found: list[list[Piece]] = [[]]
    room = size
    for unit in units:
        for piece in _cut(source, unit, room, size):
            if found[-1] and piece.size > room:
                found, room = [*found, []], size
            found[-1].append(piece)
            room -= piece.size
    return [pieces for pieces in found if pieces]


def _cut(source: Input, unit: Piece, room: int, size: int) -> Iterator[Piece]:
    """The pieces of a file of lines or record batches or of a range of examples.

    The first one fills the shard begun before.
    """
    if source.kind not in ("lines", "jsonl", "datasets", "examples") or unit.path.endswith(".gz"):
        yield unit
        return
    count = unit.end - unit.begin
    bytes_each = max(unit.size // count, 1) if source.kind in ("datasets", "examples") else 1
    begin, room = unit.begin, max(room, 0) // bytes_each or size // bytes_each or 1
    while begin < unit.end:
        end = min(begin + room, unit.end)
        yield Piece(unit.path, begin, end, (end - begin) * bytes_each)
        begin, room = end, max(size // bytes_each, 1)


def _units(source: Input) -> Iterator[Piece]:
    """Files, row groups, or all examples of another source."""
    if source.kind == "examples":
        examples = _dataset(source.data).splits[source.split]
        sampled = range(0, len(examples), max(len(examples) // SAMPLED_LENGTHS, 1))
        mean = sum(len(examples[index]["text"].encode()) for index in sampled) // max(len(sampled), 1) + 1
        if len(examples):
            yield Piece("", 0, len(examples), mean * len(examples))
        return
    for path in _paths(source):
        if source.kind == "parquet":
            for number, group in enumerate(parquet.row_groups(_files.FileSlice(path), [source.column])):
                metadata = parquet.library().ParquetFile(path).metadata.row_group(group.number)
                yield Piece(source.name(path), number, number + 1, max(metadata.total_byte_size, 1))
            continue
        size = path.stat().st_size
        if source.kind == "datasets":
            count = len(datasets.read_batches(path, {"text": source.column}))
            if count:
                yield Piece(source.name(path), 0, count, size)
            continue
        if not size:
            raise ConfigError(f"{path}: got an empty file, expected text; fill it or name another")
        yield Piece(source.name(path), 0, size, size)


# --- reading ----------------------------------------------------------------------------------------------------------


def read_lines(piece: Piece) -> Iterator[tuple[Callable[[], str], str]]:
    """(where, line) of the lines that begin in a piece, as `_files.read_lines` reads a whole file.

    `where()` gives file and line, which is counted only for an error.
    """
    path = Path(piece.path)
    if path.suffix == ".gz":
        for number, line in _files.read_lines(path):
            yield functools.partial("{}:{}".format, path, number), line
        return
    with open(path, "rb") as file:
        position = piece.begin
        if position:  # the line that goes on from the piece before belongs to it
            file.seek(position - 1)
            position += _skip_line(file) - 1
        while position < piece.end:
            raw = file.readline(_files.MAX_LINE_BYTES + 1)
            where = functools.partial(_where, path, position)
            if len(raw) > _files.MAX_LINE_BYTES and not raw.endswith(b"\n"):
                got = f"{where()}: got a line of more than {_files.MAX_LINE_BYTES >> 20} MiB"
                raise ConfigError(f"{got}, expected a text with newlines; cut it, or set data.document=file")
            if not position and b"\n" not in raw:  # a file without newlines: lines end at carriage returns
                for number, line in _files.read_lines(path):
                    yield functools.partial("{}:{}".format, path, number), line
                return
            yield where, _decoded(raw.removesuffix(b"\n").removesuffix(b"\r"), path, position)
            position += len(raw)


def _skip_line(file: BinaryIO) -> int:
    """Reads up to the next line end, and returns the number of bytes."""
    count = 0
    while part := file.readline(1 << 20):
        count += len(part)
        if part.endswith(b"\n"):
            break
    return count


def _where(path: Path, position: int) -> str:
    return f"{path}:{_line_number(path, position)}"


def _line_number(path: Path, position: int) -> int:
    count = 1
    with open(path, "rb") as file:
        while position > 0:
            block = file.read(min(position, 1 << 20))
            count, position = count + block.count(b"\n"), position - len(block)
            if not block:
                break
    return count


def _decoded(raw: bytes, path: Path, position: int) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return _files._decode_utf8(raw, path, _line_number(path, position))  # raises, with file and line
    return text if position else text.removeprefix("\ufeff")


def _lines(source: Input, piece: Piece, dropped: dict[str, int]) -> Iterator[str]:
    for _, line in read_lines(piece):
        yield line


def _whole_files(source: Input, piece: Piece, dropped: dict[str, int]) -> Iterator[str]:
    yield _files.read_text(Path(piece.path))


def _json_lines(source: Input, piece: Piece, dropped: dict[str, int]) -> Iterator[str]:
    for where, line in read_lines(piece):
        if line.strip():
            text = table.json_row(line, {"text": source.column}, where)["text"]
            if source._nonempty(where, text, dropped):
                yield text


def _parquet_rows(source: Input, piece: Piece, dropped: dict[str, int]) -> Iterator[str]:
    for group in parquet.row_groups(_files.FileSlice(Path(piece.path)), [source.column])[piece.begin : piece.end]:
        (column,) = parquet.read_group(group, [source.column])
        for row, value in enumerate(column):
            where = functools.partial("{}: row {} of row group {}".format, group.path, row, group.number)
            if source._nonempty(where, value or "", dropped):
                yield value or ""


def _arrow_rows(source: Input, piece: Piece, dropped: dict[str, int]) -> Iterator[str]:
    path = Path(piece.path)
    batches = datasets.read_batches(path, {"text": source.column})[piece.begin : piece.end]
    for number, (array,) in enumerate(batches, piece.begin):
        for row, value in enumerate(datasets.read_texts(path, array)):
            where = functools.partial("{}: row {} of record batch {}".format, piece.path, row, number)
            if source._nonempty(where, value or "", dropped):
                yield value or ""


def _web_pages(source: Input, piece: Piece, dropped: dict[str, int]) -> Iterator[str]:
    for text in warc.documents(Path(piece.path)):
        if text.strip():
            yield text
        else:  # in any split: such a page cannot be taken out of the file
            dropped["empty"] = dropped.get("empty", 0) + 1


def _source_examples(source: Input, piece: Piece, dropped: dict[str, int]) -> Iterator[str]:
    examples = _dataset(source.data).splits[source.split]
    for begin in range(piece.begin, piece.end, 1024):
        for example in sources.examples_at(examples, range(begin, min(begin + 1024, piece.end))):
            yield example["text"]


READERS: Mapping[str, Callable[[Input, Piece, dict[str, int]], Iterator[str]]] = {
    "lines": _lines,
    "files": _whole_files,
    "jsonl": _json_lines,
    "parquet": _parquet_rows,
    "datasets": _arrow_rows,
    "warc": _web_pages,
    "examples": _source_examples,
}
"""Reader of each kind of input: `(input, piece, dropped) -> texts`."""
