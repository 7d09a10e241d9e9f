"""Reads a Hugging Face checkpoint directory: config.json and safetensors files, without loading the tensors.

The `safetensors` package validates every file (https://huggingface.co/docs/safetensors): its header, and that the
tensors cover the data without holes or overlaps. Two things it does not offer are done here:

- Arrays are views on a memory map. The package returns copies, so a device could not read its own part of a tensor.
- Pages that were read are returned to the system (`Tensor.release`), so that loading needs no memory beside the model.

Checkpoints come from strangers. What the package accepts and this module refuses: a header over `MAX_HEADER_BYTES`, a
name that occurs twice, an unknown field, element types below one byte, and shapes that no array can have.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import reprlib
import stat
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxformer.errors import ConfigError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json")

MAX_CONFIG_BYTES = 16 * 1024**2
MAX_HEADER_BYTES = 25_000_000
"""Bytes of a header or an index: a quarter million tensors. Parsing takes 24 times as much memory."""
MAX_RANK = 32
MAX_TENSOR_BYTES = 2**63 - 1
"""The largest offset that a signed 64-bit integer holds."""

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "BOOL": "?", "U8": "u1", "I8": "i1",
        "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
        "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "U16": "<u2", "I16": "<i2", "F16": "<f2", "BF16": ml_dtypes.bfloat16,
        "U32": "<u4", "I32": "<i4", "F32": "<f4",
        "U64": "<u8", "I64": "<i8", "F64": "<f8", "C64": "<c8",
    }.items()
}  # fmt: skip
"""Element type in the file -> in numpy. Types below one byte are missing: numpy has no arrays of them."""

_short_repr = reprlib.Repr()
_short_repr.maxstring = _short_repr.maxother = _short_repr.maxlong = 80
quote = _short_repr.repr
"""`repr` in one short line, for values from a file in error messages."""


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor of an open file. Its values are read when its array is accessed.

    Attributes:
      file: name of the file, for messages.
      content: its bytes, a window of the memory map, uint8.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    file: str
    content: np.ndarray

    def array(self) -> np.ndarray:
        """A read-only view of the memory map: no copy, not necessarily aligned."""
        return self.content.view(self.dtype).reshape(self.shape)

    def release(self) -> None:
        """Returns the memory pages of this tensor to the system; accessing the array reads them again."""
        self._release(0, self.content.size)

    def release_part(self, part: np.ndarray) -> None:
        """Returns the pages of a view of `array()` to the system, if the view is most of what lies between its ends."""
        begin, end = np.lib.array_utils.byte_bounds(part)
        if part.nbytes * 2 > end - begin:
            first = self.content.ctypes.data
            self._release(begin - first, end - first)

    def _release(self, begin: int, end: int) -> None:
        """Returns the pages of bytes `begin` to `end` of this tensor to the system."""
        mapped = self.content
        while isinstance(mapped.base, np.ndarray):
            mapped = mapped.base
        file = mapped.base.obj if isinstance(mapped.base, memoryview) else None
        if not isinstance(file, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
            return
        offset = self.content.ctypes.data - mapped.ctypes.data
        first = -(-(offset + begin) // mmap.PAGESIZE) * mmap.PAGESIZE  # a page at either end may hold a neighbour, too
        last = (offset + end) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            file.madvise(mmap.MADV_DONTNEED, first, last - first)


def read_config(directory: str | os.PathLike[str], name: str = CONFIG_FILE) -> dict[str, Any]:
    """The config.json of a checkpoint directory, or another small JSON file in it.

    Raises:
      ConfigError: the file is missing, or is not one JSON object in which every key occurs once.
    """
    return _read_json_object(_checked_directory(directory) / name, MAX_CONFIG_BYTES)


def open_tensors(directory: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of `model.safetensors`, or of the shards in `model.safetensors.index.json`, by name.

    Raises:
      ConfigError: neither file is there, a file is damaged, or the index and the shards contradict each other.
    """
    path = _checked_directory(directory)
    # lexists: a dangling link, left by a pruned download cache, is then reported as a missing file
    if os.path.lexists(path / WEIGHTS_FILE):
        return open_file(path / WEIGHTS_FILE)
    if os.path.lexists(path / INDEX_FILE):
        return _open_shards(path)
    for name in PICKLE_FILES:
        if os.path.lexists(path / name):
            raise ConfigError(
                f"{path / name}: got a pickle, which runs the code in it when it is loaded, expected {WEIGHTS_FILE}; "
                "load it once in the library it comes from and save_pretrained(directory, safe_serialization=True)"
            )
    raise ConfigError(f"{path}: got neither {WEIGHTS_FILE} nor {INDEX_FILE}, expected one; name a checkpoint directory")


def open_file(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file, in the order of their data. They keep the memory map open.

    Raises:
      ConfigError: the file is missing or damaged.
    """
    with _open_regular(path) as (file, size):
        header, begin = _read_header(file, size, path)
        try:
            content = np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), np.uint8)
        except ValueError as error:  # the file was truncated since its size was read
            raise ConfigError(f"{path}: got {error}, expected {size} bytes; open it when it is written") from error
    tensors = [_tensor(path, name, entry, content[begin:]) for name, entry in header.items()]
    return {tensor.name: tensor for tensor in sorted(tensors, key=lambda tensor: tensor.content.ctypes.data)}


def is_flax_safetensors(path: Path) -> bool:
    """True if safetensors hold an old tree under names with dots, as the old library wrote them."""
    if not path.exists():
        return False
    try:
        with safe_open(path, framework="numpy") as file:
            return (file.metadata() or {}).get("format") == "flax"
    except SafetensorError:
        return False  # `open_tensors` says what is wrong


def is_unicode(text: str) -> bool:
    """True if UTF-8 can encode the text. JSON can escape half a surrogate pair, which it cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _checked_directory(directory: str | os.PathLike[str]) -> Path:
    path = Path(directory)
    if not os.path.isdir(path):
        raise ConfigError(f"checkpoint: got {str(path)!r}, expected a local directory; download the checkpoint first")
    return path


# --- shards -----------------------------------------------------------------------------------------------------------


def _open_shards(directory: Path) -> dict[str, Tensor]:
    """The tensors of all shards. The index names each tensor of a shard, and each shard holds what the index says."""
    index = directory / INDEX_FILE
    shards = _read_json_object(index, MAX_HEADER_BYTES).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ConfigError(f"{index}: got weight_map {quote(shards)}, expected tensor: file; save the checkpoint again")
    for name, shard in shards.items():
        _check_shard_name(index, name, shard)
    tensors: dict[str, Tensor] = {}
    for shard in dict.fromkeys(shards.values()):
        for name, tensor in open_file(directory / shard).items():
            if name not in shards:
                raise ConfigError(
                    f"{index}: got no file for tensor {quote(name)} of {shard}, expected one; save the checkpoint again"
                )
            if shards[name] != shard:
                raise ConfigError(
                    f"{directory / shard}: got tensor {quote(name)}, expected it in {shards[name]} alone, as "
                    f"{INDEX_FILE} says; save the checkpoint again"
                )
            tensors[name] = tensor
    for name, shard in shards.items():
        if name not in tensors:
            raise ConfigError(
                f"{directory / shard}: got no tensor {quote(name)}, expected it as {INDEX_FILE} says; download it again"
            )
    return tensors


def _check_shard_name(index: Path, name: str, shard: Any) -> None:
    """Refuses a shard that is not a plain file name, which could point out of the directory."""
    plain = isinstance(shard, str) and shard.isprintable() and not set(shard) & set("/\\:") and len(shard) <= 200
    if not plain or not shard.endswith(".safetensors") or shard.startswith("."):
        raise ConfigError(
            f"{index}: got file {quote(shard)} for tensor {quote(name)}, expected the name of a .safetensors file "
            "beside it; don't use this checkpoint unless you know who made it"
        )


# --- one file ---------------------------------------------------------------------------------------------------------


def _read_header(file: BinaryIO, size: int, path: Path) -> tuple[dict[str, Any], int]:
    """The entries of a validated header by tensor name, and the position of the data in the file.

    Raises:
      ConfigError: the package refuses the file, or the header says one thing twice.
    """
    length = int.from_bytes(file.read(8), "little")
    limit = min(MAX_HEADER_BYTES, size - 8)
    if size >= 8 and length > limit:
        raise ConfigError(f"{path}: got a header of {length} bytes, expected at most {limit}; download it again")
    try:
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        raise ConfigError(f"{path}: got {_one_line(error)}, expected a safetensors file; download it again") from error
    header = _parse_json_object(file.read(length), f"{path}: header")
    header.pop("__metadata__", None)
    return header, 8 + length


def _one_line(error: Exception, max_length: int = 200) -> str:
    """The message of a library's error, which may quote names from the file, in one printable line."""
    text = str(error).removeprefix("Error while deserializing header: ")
    return "".join(char if char.isprintable() else "?" for char in text)[:max_length]


def _tensor(path: Path, name: str, entry: dict[str, Any], data: np.ndarray) -> Tensor:
    """The tensor of a validated header entry; `data` are the bytes after the header.

    Raises:
      ConfigError: numpy has no array of this type or shape, or the entry has a field of unknown meaning.
    """

    def refuse(field: str, expected: str) -> NoReturn:
        value = quote(entry.get(field, entry))
        raise ConfigError(
            f"{path}: tensor {quote(name)}: {field}: got {value}, expected {expected}; download the file again"
        )

    if set(entry) != {"dtype", "shape", "data_offsets"}:
        refuse("entry", "dtype, shape and data_offsets")
    dtype, shape, (begin, end) = DTYPES.get(entry["dtype"]), entry["shape"], entry["data_offsets"]
    if dtype is None:
        refuse("dtype", f"one of {' '.join(DTYPES)}")
    # An array without elements has strides, too, so its other axes are bounded as well.
    if len(shape) > MAX_RANK or math.prod(max(size, 1) for size in shape) * dtype.itemsize > MAX_TENSOR_BYTES:
        refuse("shape", f"at most {MAX_RANK} axes and {MAX_TENSOR_BYTES} bytes")
    return Tensor(name, tuple(shape), dtype, path.name, data[begin:end])


@contextlib.contextmanager
def _open_regular(path: Path) -> Generator[tuple[BinaryIO, int]]:
    """A regular file and its size in bytes.

    Raises:
      ConfigError: the system cannot open it, or it is a directory, a pipe or a device.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for its writer
            raise ConfigError(f"{path}: got something else, expected a regular file; download it again")
        with open(path, "rb") as file:
            yield file, os.fstat(file.fileno()).st_size
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: got no such file, expected one; download it") from error
    except OSError as error:
        raise ConfigError(f"{path}: got {error.strerror}, expected a readable file; check it") from error


# --- JSON -------------------------------------------------------------------------------------------------------------


def _read_json_object(path: Path, max_bytes: int) -> dict[str, Any]:
    with _open_regular(path) as (file, size):
        if size > max_bytes:
            raise ConfigError(f"{path}: got {size:,} bytes, expected at most {max_bytes:,}; download it again")
        return _parse_json_object(file.read(max_bytes), str(path))


def _parse_json_object(content: bytes, source: str) -> dict[str, Any]:
    """A JSON object of UTF-8 text in which every key occurs once; `source` names it in errors."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values:
                raise ConfigError(f"{source}: got {quote(key)} twice, expected every name once; save it again")
            values[key] = value
        return values

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, numbers of thousands of digits, deep nesting
        raise ConfigError(f"{source}: got {error}, expected a JSON object; download it again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: got {quote(value)}, expected a JSON object; download it again")
    return value
