"""Hugging Face checkpoint directories on disk: config.json and safetensors files, read lazily.

A safetensors file is an 8-byte little-endian length, a JSON header of that many bytes, and the tensors' bytes:

    {"__metadata__": {text: text}, name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}

with offsets counted from the end of the header, which tile the rest of the file without holes. Files come from
strangers: nothing is believed before it is checked against the file's real size, and nothing is allocated by a number
that a file names. Opening maps the files and reads the headers only.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import reprlib
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from jaxformer.config import ConfigError

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")

MAX_CONFIG = 16 * 1024**2  # bytes of a config.json
MAX_HEADER = 25_000_000  # bytes of a header or an index: a quarter million tensors; parsing takes 24 times as much
MAX_RANK = 32
MAX_BYTES = 2**63 - 1  # what a signed offset can say

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(kind)
    for name, kind in {
        "BOOL": "?", "U8": "u1", "I8": "i1",
        "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
        "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "U16": "<u2", "I16": "<i2", "F16": "<f2", "BF16": ml_dtypes.bfloat16,
        "U32": "<u4", "I32": "<i4", "F32": "<f4",
        "U64": "<u8", "I64": "<i8", "F64": "<f8", "C64": "<c8",
    }.items()
}  # fmt: skip
"""The format's name of an element type -> numpy's. Types narrower than a byte have no numpy array to go to."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}

_words = reprlib.Repr()  # short and of one line whatever a file holds
_words.maxstring = _words.maxother = _words.maxlong = 80
shown = _words.repr


@dataclass(frozen=True, eq=False)
class Tensor:
    """One tensor of an open file. Nothing of it is read until its array is looked into."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    file: str
    """Name of the file that holds it."""
    content: np.ndarray
    """Its bytes, uint8, a window on the mapped file."""

    def array(self) -> np.ndarray:
        """A read-only view on the mapped file: no copy, not necessarily aligned."""
        return self.content.view(self.dtype).reshape(self.shape)

    def release(self) -> None:
        """Gives the pages that reading brought into memory back to the system; reading again brings them back."""
        mapped = self.content
        while isinstance(mapped.base, np.ndarray):
            mapped = mapped.base
        file = mapped.base.obj if isinstance(mapped.base, memoryview) else None
        if not isinstance(file, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
            return
        begin = self.content.ctypes.data - mapped.ctypes.data
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages only: the rest is a neighbour's
        last = (begin + self.content.size) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            file.madvise(mmap.MADV_DONTNEED, first, last - first)


class Tensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name, in the order of its files."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._tensors = dict(tensors)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"Tensors({len(self)} tensors, {sum(t.content.nbytes for t in self.values()):,} bytes)"


def read_config(directory: str | os.PathLike[str], name: str = CONFIG) -> dict[str, Any]:
    """The config.json of a checkpoint directory, or another small JSON file of it.

    Raises:
        ConfigError: there is none, or it is not one JSON object with every key once.
    """
    return _read_object(_directory(directory) / name, MAX_CONFIG)


def open_tensors(directory: str | os.PathLike[str]) -> Tensors:
    """Opens `model.safetensors`, or the shards that `model.safetensors.index.json` names; the former goes first.

    Raises:
        ConfigError: neither is there, or a file is damaged or says one thing twice. Then no tensor is returned.
    """
    place = _directory(directory)
    # lexists: a link to nowhere, left of a pruned download cache, is then named as what is missing
    if os.path.lexists(place / SINGLE):
        return Tensors(_open_file(place / SINGLE))
    if os.path.lexists(place / INDEX):
        return Tensors(_open_shards(place))
    for name in PICKLED:
        if os.path.lexists(place / name):
            raise ConfigError(
                f"{place / name}: got a pickle, which runs the code in it when it is loaded, expected {SINGLE}; "
                "load it once in the library it comes from and save_pretrained(directory, safe_serialization=True)"
            )
    raise ConfigError(f"{place}: got neither {SINGLE} nor {INDEX}, expected one of them; name a checkpoint directory")


def _directory(directory: str | os.PathLike[str]) -> Path:
    place = Path(directory)
    if not os.path.isdir(place):
        raise ConfigError(f"checkpoint: got {str(place)!r}, expected a local directory; download the checkpoint first")
    return place


def _open_shards(place: Path) -> dict[str, Tensor]:
    """The tensors of all shards of an index, which must agree with the shards in both directions."""
    index = place / INDEX
    names = _read_object(index, MAX_HEADER).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ConfigError(f"{index}: got weight_map {shown(names)}, expected tensor: file; save the checkpoint again")
    for name, shard in names.items():
        _check_shard(index, name, shard)
    tensors: dict[str, Tensor] = {}
    for shard in dict.fromkeys(names.values()):
        for name, tensor in _open_file(place / shard).items():
            if name not in names:
                raise ConfigError(
                    f"{index}: got no file for tensor {shown(name)} of {shard}, expected one; save the checkpoint again"
                )
            if names[name] != shard:
                raise ConfigError(
                    f"{place / shard}: got tensor {shown(name)}, expected it in {names[name]} alone, as {INDEX} says; "
                    "save the checkpoint again"
                )
            tensors[name] = tensor
    for name, shard in names.items():
        if name not in tensors:
            raise ConfigError(
                f"{place / shard}: got no tensor {shown(name)}, expected it as {INDEX} says; download the file again"
            )
    return tensors


def _check_shard(index: Path, name: str, shard: Any) -> None:
    """A shard is a plain file name, so that an index can't point out of its directory. The file may be a link."""
    plain = isinstance(shard, str) and shard.isprintable() and not set(shard) & set("/\\:") and len(shard) <= 200
    if not plain or not shard.endswith(".safetensors") or shard.startswith("."):
        raise ConfigError(
            f"{index}: got file {shown(shard)} for tensor {shown(name)}, expected the name of a .safetensors file "
            "beside it; don't use this checkpoint unless you know who made it"
        )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """A regular file and its size in bytes; what the system refuses is a ConfigError."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for its writer
            raise ConfigError(f"{path}: got something else, expected a regular file; download it again")
        with open(path, "rb") as file:
            yield file, os.fstat(file.fileno()).st_size
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: got no such file, expected one; download it") from error
    except OSError as error:
        raise ConfigError(f"{path}: got {error.strerror}, expected a readable file; check it") from error


def _read_object(path: Path, limit: int) -> dict[str, Any]:
    with _opened(path) as (file, size):
        if size > limit:
            raise ConfigError(f"{path}: got {size:,} bytes, expected at most {limit:,}; download it again")
        return _parse_object(file.read(limit), str(path))


def _parse_object(content: bytes, where: str) -> dict[str, Any]:
    """A JSON object of UTF-8 text in which every key occurs once."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise ConfigError(f"{where}: got {shown(twice)} twice, expected every name once; save it again")
        return found

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        found = json.loads(content.decode("utf-8"), object_pairs_hook=once, parse_constant=refuse)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, numbers of thousands of digits, deep nesting
        raise ConfigError(f"{where}: got {error}, expected a JSON object; download it again") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: got {shown(found)}, expected a JSON object; download it again")
    return found


def _open_file(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file, in the order of their bytes. The file stays mapped while one is alive."""
    with _opened(path) as (file, size):
        header, begin = _read_header(file, size, path)
        entries = [_entry(path, name, entry, size - begin) for name, entry in header.items()]
        entries.sort(key=lambda entry: entry[3:])
        _check_tiling(path, entries, size - begin)
        try:
            content = np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), np.uint8)
        except ValueError as error:  # it became shorter meanwhile
            raise ConfigError(f"{path}: got {error}, expected {size} bytes; open it when it is written") from error
    return {
        name: Tensor(name, shape, dtype, path.name, content[begin + start : begin + end])
        for name, shape, dtype, start, end in entries
    }


def _read_header(file: BinaryIO, size: int, path: Path) -> tuple[dict[str, Any], int]:
    """The header without its `__metadata__`, and where the data begins in the file."""
    if size < 8:
        raise ConfigError(f"{path}: got {size} bytes, expected a safetensors file; download it again")
    length = int.from_bytes(file.read(8), "little")
    bound = min(MAX_HEADER, size - 8)
    if length > bound:
        raise ConfigError(f"{path}: got a header of {length} bytes, expected at most {bound}; download it again")
    content = file.read(length)
    if content[:1] != b"{":
        raise ConfigError(f"{path}: got a header that begins with {content[:1]!r}, expected '{{'; download it again")
    header = _parse_object(content, f"{path}: header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ConfigError(f"{path}: got __metadata__ {shown(metadata)}, expected text by text; save the file again")
    return header, 8 + length


Entry = tuple[str, tuple[int, ...], np.dtype, int, int]
"""Name, shape, dtype, begin and end of a tensor; the latter two count from the end of the header."""


def _entry(path: Path, name: str, entry: Any, size: int) -> Entry:
    """A header's entry, checked by itself: `size` is that of the data."""

    def wrong(what: str, got: Any, expected: str) -> ConfigError:
        words = f"{what}: got {shown(got)}, expected {expected}"
        return ConfigError(f"{path}: tensor {shown(name)}: {words}; download the file again")

    if not encodable(name):
        raise wrong("name", name, "Unicode text")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise wrong("entry", entry, "dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise wrong("dtype", dtype, f"one of {' '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(type(axis) is int and 0 <= axis <= MAX_BYTES for axis in shape):
        raise wrong("shape", shape, "whole numbers from 0")
    width = DTYPES[dtype].itemsize
    # An array of no element must still have strides, so its other axes are bounded too.
    if len(shape) > MAX_RANK or math.prod(max(axis, 1) for axis in shape) * width > MAX_BYTES:
        raise wrong("shape", shape, f"at most {MAX_RANK} axes and {MAX_BYTES} bytes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(offset) is int for offset in offsets):
        raise wrong("data_offsets", offsets, "two whole numbers")
    begin, end = offsets
    if not 0 <= begin <= end <= size:
        raise wrong("data_offsets", offsets, f"0 <= begin <= end <= {size}, the bytes after the header")
    expected = math.prod(shape) * width
    if end - begin != expected:
        raise wrong("data_offsets", offsets, f"{expected} bytes for {dtype} of shape {shown(shape)}")
    return name, tuple(shape), DTYPES[dtype], begin, end


def _check_tiling(path: Path, entries: list[Entry], size: int) -> None:
    """Entries sorted by their offsets fill `size` bytes exactly: bytes of nobody or of two could hide something."""
    reached = 0
    for name, _, _, begin, end in entries:
        if begin != reached:
            what = "an overlap" if begin < reached else "a hole"
            raise ConfigError(
                f"{path}: tensor {shown(name)}: got {what}, begin {begin}, expected {reached}, where the tensor before "
                "it ends; download the file again"
            )
        reached = end
    if reached != size:
        raise ConfigError(
            f"{path}: got {size} bytes after the header, expected {reached}, where the last tensor ends; "
            "download the file again"
        )


def encodable(text: Any) -> bool:
    """Half a surrogate pair can be escaped in JSON but not written in UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
