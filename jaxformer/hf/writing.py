"""Writes a Hugging Face checkpoint directory: config.json and safetensors files, completely or not at all.

Files are those of the `safetensors` package (https://huggingface.co/docs/safetensors), which writes tensors that are
all in memory. Here each one is made, written and dropped, so that a checkpoint is written beside a model that fills
the memory.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.errors import ConfigError
from jaxformer.hf.reading import CONFIG_FILE, DTYPES, INDEX_FILE, WEIGHTS_FILE, is_unicode, quote

MAX_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True, eq=False)
class Deferred:
    """A tensor that is computed when it is written.

    Attributes:
      make: computes it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    def __call__(self) -> np.ndarray:
        return self.make()

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_checkpoint(
    directory: str | os.PathLike[str],
    config: Mapping[str, Any],
    tensors: Mapping[str, Callable[[], np.ndarray] | np.ndarray],
    metadata: Mapping[str, str] = {"format": "pt"},
    shard_bytes: int = MAX_SHARD_BYTES,
    config_file: str = CONFIG_FILE,
    weights_file: str = WEIGHTS_FILE,
) -> None:
    """Writes a checkpoint directory, completely or not at all.

    Every function in `tensors` is called once. The host holds one tensor of those that are `Deferred`; of other
    functions, whose shapes are unknown before they are called, it holds the arrays of one shard.

    Args:
      shard_bytes: maximum size of a shard. A larger tensor has a shard of its own.
      config_file: name of the file with the config.
      weights_file: name of the file with the tensors where there are no shards.

    Raises:
      ConfigError: the directory is not empty, or a name, an element type or the config cannot be written.
    """
    path = Path(directory).resolve()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise _occupied(path)
    if shard_bytes < 1:
        raise ConfigError(f"shard_bytes: got {shard_bytes}, expected at least 1; name a size in bytes")
    text = _config_text(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{path.name}.partial-", dir=path.parent))
    try:
        # mkdtemp's directory is closed to other users; the checkpoint has the mode of any new directory
        (target := work / "target").mkdir()
        (target / config_file).write_text(text, encoding="utf-8")
        _write_shards(target, tensors, dict(metadata), shard_bytes, weights_file)
        os.rename(target, path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another process has written it meanwhile
            raise _occupied(path) from error
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _occupied(path: Path) -> ConfigError:
    return ConfigError(f"{path}: got something there, expected no such directory or an empty one; name another one")


def _config_text(config: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(config), indent=2, sort_keys=True, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{CONFIG_FILE}: got {error}, expected JSON values; change the config") from error


def _write_shards(
    target: Path,
    tensors: Mapping[str, Callable[[], np.ndarray] | np.ndarray],
    metadata: dict[str, str],
    shard_bytes: int,
    weights_file: str,
) -> None:
    """Writes the files in the order of `tensors`, and an index if there are several."""
    shard: dict[str, np.ndarray | Deferred] = {}
    shards: list[list[str]] = []  # the tensor names of each file
    shard_size = total_size = 0

    def flush() -> None:
        _write_file(target / str(len(shards)), shard, metadata)
        shards.append(list(shard))
        shard.clear()

    for name, value in tensors.items():
        if not isinstance(value, Deferred):
            value = np.asarray(value() if callable(value) else value)
        array = _writable(name, value)
        if shard and shard_size + array.nbytes > shard_bytes:
            flush()
            shard_size = 0
        shard[name] = array
        shard_size += array.nbytes
        total_size += array.nbytes
        del array, value  # else the last array of a shard outlives it
    flush()
    if len(shards) == 1:
        os.rename(target / "0", target / weights_file)
        return
    files: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        os.rename(target / str(i), target / file)
        files.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total_size}, "weight_map": files}
    (target / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _writable(name: str, value: np.ndarray | Deferred) -> np.ndarray | Deferred:
    """The tensor, if it can be written; an array in row-major order.

    Raises:
      ConfigError: the format has no such name or element type.
    """
    if not isinstance(name, str) or name == "__metadata__" or not is_unicode(name):
        raise ConfigError(f"tensor name: got {quote(name)}, expected Unicode text; rename the tensor")
    if value.dtype.newbyteorder("<") not in DTYPES.values():
        raise ConfigError(
            f"tensor {quote(name)}: got dtype {value.dtype}, expected one of {' '.join(DTYPES)}; convert it"
        )
    return value if isinstance(value, Deferred) else np.asarray(value, order="C")


def _write_file(path: Path, tensors: Mapping[str, np.ndarray | Deferred], metadata: Mapping[str, str]) -> None:
    """Writes one file: its header's length, the header, and the tensors, those of larger elements first.

    So every tensor begins at a multiple of the size of its elements.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    order, end = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)), 0
    for name in order:
        tensor, begin = tensors[name], end
        end = begin + tensor.nbytes
        dtype = names[tensor.dtype.newbyteorder("<")]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(_bytes_of(name, tensors[name]))


def _bytes_of(name: str, tensor: np.ndarray | Deferred) -> memoryview:
    """The bytes of a tensor in the file, numbers in little-endian order."""
    array = np.ascontiguousarray(tensor() if isinstance(tensor, Deferred) else tensor)
    if array.size * array.itemsize != tensor.nbytes or array.dtype != tensor.dtype:
        raise RuntimeError(
            f"tensor {quote(name)}: got {array.dtype}{list(array.shape)}, expected {tensor.dtype}{list(tensor.shape)}"
        )
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return little.reshape(-1).view(np.uint8).data
