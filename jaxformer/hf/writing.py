"""A Hugging Face checkpoint directory, written whole or not at all. The format: see `files.py`."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.config import ConfigError
from jaxformer.hf.files import CONFIG, DTYPES, INDEX, NAMES, SINGLE, encodable, shown


@dataclass(frozen=True, eq=False)
class Waiting:
    """A tensor whose shape is known and which waits to be written: in memory, or as bytes in a file of their own."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int  # bytes
    source: np.ndarray | Path


def write(
    directory: str | os.PathLike[str],
    config: Mapping[str, Any],
    tensors: Mapping[str, Callable[[], np.ndarray] | np.ndarray],
    metadata: Mapping[str, str] = {"format": "pt"},
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a checkpoint directory, complete or not at all.

    Every function among `tensors` is called once and its array let go before the next call, so the host holds one
    tensor at a time. The tensors fill shards of at most `shard_bytes` bytes (or one tensor) in the order given; within
    a file they lie by descending element size, then name.

    Raises:
        ConfigError: the directory holds something, or a name, an element type or the config can't be written.
    """
    place = Path(directory).resolve()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise _occupied(place)
    if shard_bytes < 1:
        raise ConfigError(f"shard_bytes: got {shard_bytes}, expected at least 1; name a size in bytes")
    text = _config_text(config)
    place.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{place.name}.partial-", dir=place.parent))
    try:
        # mkdtemp's own directory is closed to others; the checkpoint gets the mode that any new directory gets
        (target := work / "target").mkdir()
        (spool := work / "spool").mkdir()
        (target / CONFIG).write_text(text, encoding="utf-8")
        _write_shards(target, _shards(_waiting(tensors, spool), shard_bytes), dict(metadata))
        os.rename(target, place)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # somebody was faster
            raise _occupied(place) from error
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _occupied(place: Path) -> ConfigError:
    return ConfigError(f"{place}: got something there, expected no such directory or an empty one; name another one")


def _config_text(config: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(config), indent=2, sort_keys=True, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{CONFIG}: got {error}, expected JSON values; change the config") from error


def _waiting(tensors: Mapping[str, Callable[[], np.ndarray] | np.ndarray], spool: Path) -> Iterator[Waiting]:
    """The tensors one by one. A header comes before its data, so what functions return is put on disk to be known."""
    for number, (name, value) in enumerate(tensors.items()):
        if not isinstance(name, str) or name == "__metadata__" or not encodable(name):
            raise ConfigError(f"tensor name: got {shown(name)}, expected Unicode text; rename the tensor")
        array = np.asarray(value() if callable(value) else value)
        dtype = array.dtype.newbyteorder("<")
        if dtype not in NAMES:
            raise ConfigError(
                f"tensor {shown(name)}: got dtype {array.dtype}, expected one of {' '.join(DTYPES)}; convert it"
            )
        source: np.ndarray | Path = array
        if callable(value):
            source = spool / str(number)
            source.write_bytes(_raw(array))
        waiting = Waiting(name, NAMES[dtype], array.shape, array.nbytes, source)
        del array, source  # a generator's locals live on while it waits
        yield waiting


def _raw(array: np.ndarray) -> memoryview:
    """The bytes of an array, little-endian, in row-major order; copied only when they are not yet so."""
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return array.reshape(-1).view(np.uint8).data


def _shards(waiting: Iterator[Waiting], shard_bytes: int) -> list[list[Waiting]]:
    shards: list[list[Waiting]] = [[]]
    filled = 0
    for tensor in waiting:
        if shards[-1] and filled + tensor.size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.size
    return shards


def _write_shards(target: Path, shards: list[list[Waiting]], metadata: dict[str, str]) -> None:
    if len(shards) == 1:
        _write_file(target / SINGLE, shards[0], metadata)
        return
    names: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(target / file, shard, metadata)
        names.update((tensor.name, file) for tensor in shard)
    size = sum(tensor.size for shard in shards for tensor in shard)
    index = {"metadata": {"total_size": size}, "weight_map": names}
    (target / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_file(path: Path, tensors: list[Waiting], metadata: dict[str, str]) -> None:
    tensors = sorted(tensors, key=lambda tensor: (-DTYPES[tensor.dtype].itemsize, tensor.name))
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.size
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    content = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    content += b" " * (-len(content) % 8)  # so the data is aligned for every element type
    with open(path, "wb") as file:
        file.write(len(content).to_bytes(8, "little") + content)
        for tensor in tensors:
            if isinstance(tensor.source, Path):
                with open(tensor.source, "rb") as spooled:
                    shutil.copyfileobj(spooled, file, 1024**2)
                tensor.source.unlink()  # so the disk holds one copy more of one tensor, not of all
            else:
                file.write(_raw(tensor.source))
