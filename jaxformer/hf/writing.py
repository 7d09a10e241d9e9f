"""Writes a Hugging Face checkpoint directory: config.json and safetensors files, completely or not at all.

The `safetensors` package writes the files. Added here: shards and their index, and a directory that appears only when
all of it is written.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jaxformer.errors import ConfigError
from jaxformer.hf.reading import CONFIG_FILE, DTYPES, INDEX_FILE, WEIGHTS_FILE, is_unicode, quote

MAX_SHARD_BYTES = 5 * 10**9


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

    Every function in `tensors` is called once, in order, and its array is dropped when its shard is written. The host
    therefore holds the arrays of one shard.

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
    shard: dict[str, np.ndarray] = {}
    shards: list[list[str]] = []  # the tensor names of each file
    shard_size = total_size = 0

    def flush() -> None:
        _write_file(target / str(len(shards)), shard, metadata)
        shards.append(list(shard))
        shard.clear()

    for name, value in tensors.items():
        array = _writable(name, np.asarray(value() if callable(value) else value))
        if shard and shard_size + array.nbytes > shard_bytes:
            flush()
            shard_size = 0
        shard[name] = array
        shard_size += array.nbytes
        total_size += array.nbytes
        del array  # else the last array of a shard outlives it
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


def _writable(name: str, value: np.ndarray) -> np.ndarray:
    """The array in row-major order, as the package expects it.

    Raises:
      ConfigError: the format has no such name or element type.
    """
    if not isinstance(name, str) or name == "__metadata__" or not is_unicode(name):
        raise ConfigError(f"tensor name: got {quote(name)}, expected Unicode text; rename the tensor")
    array = np.asarray(value, order="C")
    if array.dtype.newbyteorder("<") not in DTYPES.values():
        raise ConfigError(
            f"tensor {quote(name)}: got dtype {array.dtype}, expected one of {' '.join(DTYPES)}; convert it"
        )
    return array


def _write_file(path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    try:
        save_file(tensors, path, metadata)
        shutil.copymode(next(path.parent.glob("*config.json")), path)  # the package's files are closed to other users
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(path)) from error
