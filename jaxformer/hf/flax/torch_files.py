"""Reads `pytorch_model.bin` without torch and without running anything in it (`pickled.py`).

Both layouts are read: the zip archive (torch 1.6 and later), and the row of pickles before it. Tensors are views of a
memory map.
"""

from __future__ import annotations

import mmap
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxformer.errors import ConfigError
from jaxformer.hf.flax import pickled
from jaxformer.hf.flax.pickled import Refused, Storage, View
from jaxformer.hf.reading import Tensor, quote, read_config

BIN_FILE = "pytorch_model.bin"
BIN_INDEX_FILE = "pytorch_model.bin.index.json"

MAX_PICKLE_BYTES = 64 * 1024**2
"""Bytes of the pickle in an archive: names and shapes alone, of a quarter million tensors."""

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C

ReadStorage = Callable[[Storage], np.ndarray]


def open_bin(path: Path) -> dict[str, Tensor]:
    """The tensors of one file by name. Nothing in the file is run.

    Raises:
      ConfigError: the file is missing or damaged, or asks for something that a state dict does not need.
    """
    try:
        with open(path, "rb") as file:
            content = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
            views, read = (_read_zip if zipfile.is_zipfile(file) else _read_legacy)(file, content)
        return {name: _tensor(path, name, view, read) for name, view in views.items()}
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: got no such file, expected one; download it") from error
    except Refused as error:
        raise ConfigError(
            f"{path}: got {_printable(error)}, expected a state dict of tensors; nothing in it was run: don't use this "
            "file unless you know who made it"
        ) from error
    except (ValueError, KeyError, IndexError, TypeError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path}: got {_printable(error)}, expected a state dict; download the file again") from error


def open_bins(directory: Path) -> dict[str, Tensor] | None:
    """The tensors of `pytorch_model.bin` or of its shards; None if there are neither.

    Raises:
      ConfigError: a file is missing or damaged.
    """
    if (directory / BIN_FILE).exists():
        return open_bin(directory / BIN_FILE)
    if not (directory / BIN_INDEX_FILE).exists():
        return None
    tensors: dict[str, Tensor] = {}
    for shard in shard_names(directory, BIN_INDEX_FILE, ".bin"):
        tensors |= open_bin(directory / shard)
    return tensors


def shard_names(directory: Path, index: str, ending: str) -> Iterator[str]:
    """The files that an index names, each once.

    Raises:
      ConfigError: one is not the plain name of a file beside it.
    """
    files = read_config(directory, index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ConfigError(f"{directory / index}: got weight_map {quote(files)}, expected tensor: file; save it again")
    for name in dict.fromkeys(map(str, files.values())):
        if set(name) & set("/\\:") or name.startswith(".") or not name.endswith(ending):
            raise ConfigError(f"{directory / index}: got file {quote(name)}, expected a {ending} file beside it")
        yield name


def _printable(error: Exception) -> str:
    """The message of an error, which may quote the file, in one short line."""
    text = f"{type(error).__name__} {error}" if not isinstance(error, Refused) else str(error)
    return "".join(char if char.isprintable() else "?" for char in text)[:200]


def _tensor(path: Path, name: Any, view: Any, read: ReadStorage) -> Tensor:
    """A tensor of the state dict, checked to lie inside its storage."""
    if not isinstance(view, View) or not isinstance(name, str):
        raise Refused(f"{quote(name)}, which is no tensor")
    flat, size = read(view.storage), view.storage.dtype.itemsize
    last = view.offset + sum((n - 1) * step for n, step in zip(view.shape, view.strides)) if 0 not in view.shape else -1
    if last >= len(flat):
        raise Refused(f"{quote(name)} beyond its storage")
    strides = tuple(step * size for step in view.strides)
    array = np.lib.stride_tricks.as_strided(flat[view.offset :], view.shape, strides, writeable=False)
    array = np.ascontiguousarray(array)
    return Tensor(name, view.shape, array.dtype, path.name, array.reshape(-1).view(np.uint8))


def _read_zip(file: BinaryIO, content: np.ndarray) -> tuple[dict[Any, Any], ReadStorage]:
    """The state dict of an archive, and a function that reads its storages."""
    archive = zipfile.ZipFile(file)
    entries = {entry.filename.split("/", 1)[-1]: entry for entry in archive.infolist()}
    described = entries["data.pkl"]
    if described.file_size > MAX_PICKLE_BYTES or any(e.compress_type != zipfile.ZIP_STORED for e in entries.values()):
        raise Refused("an archive that torch does not write")
    if "byteorder" in entries and archive.read(entries["byteorder"]).strip() != b"little":
        raise Refused("numbers in big-endian order")
    with archive.open(described) as stream:
        views = pickled.read(stream)  # ty: ignore[invalid-argument-type]  # a reader, which is all that is used

    def read(storage: Storage) -> np.ndarray:
        entry = entries[f"data/{storage.key}"]
        header = content[entry.header_offset : entry.header_offset + 30].tobytes()
        begin = entry.header_offset + 30 + sum(int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
        size = storage.count * storage.dtype.itemsize
        if size > entry.file_size or begin + size > len(content):
            raise Refused(f"storage {quote(storage.key)} of {entry.file_size} bytes for {size}")
        return content[begin : begin + size].view(storage.dtype)

    return _state_dict(views), read


def _read_legacy(file: BinaryIO, content: np.ndarray) -> tuple[dict[Any, Any], ReadStorage]:
    """The state dict of a row of pickles, and a function that reads its storages, which follow in their keys' order."""
    file.seek(0)
    if pickled.read(file) != LEGACY_MAGIC:
        raise Refused("no file of torch")
    pickled.read(file)  # version of the protocol
    system = pickled.read(file)
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise Refused("numbers in big-endian order")
    views = _state_dict(pickled.read(file))
    keys, starts, position = pickled.read(file), {}, file.tell()
    storages = {view.storage.key: view.storage for view in views.values() if isinstance(view, View)}
    for key in map(str, keys):
        count = int(content[position : position + 8].view("<i8")[0])
        if key not in storages or count != storages[key].count:
            raise Refused("storages that no tensor describes")
        starts[key] = position + 8
        position += 8 + count * storages[key].dtype.itemsize

    def read(storage: Storage) -> np.ndarray:
        begin, size = starts[storage.key], storage.count * storage.dtype.itemsize
        if begin + size > len(content):
            raise Refused("storages that end before their last number")
        return content[begin : begin + size].view(storage.dtype)

    return views, read


def _state_dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise Refused(f"a {type(value).__name__}")
    return value
