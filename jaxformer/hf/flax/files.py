"""Weights in directories of Flax classes: `flax_model.msgpack`, safetensors, `pytorch_model.bin`, whole or sharded."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

import jax
import numpy as np
import safetensors.numpy
from flax import serialization, traverse_util

from jaxformer.errors import ConfigError
from jaxformer.hf import convert, hub, quantized, reading
from jaxformer.hf.flax import configs, torch_files
from jaxformer.hf.flax.layout import Path
from jaxformer.hf.flax.spec import Spec
from jaxformer.hf.origin import BODIES
from jaxformer.hf.reading import Tensor
from jaxformer.runtime.hub import Download
from jaxformer.types import PyTree

log = logging.getLogger("jaxformer")

FLAX_FILE = "flax_model.msgpack"
FLAX_INDEX_FILE = "flax_model.msgpack.index.json"

Leaves = dict[Path, np.ndarray]


def locate(
    source: str | os.PathLike[str], arguments: Mapping[str, Any], subfolder: str, from_pt: bool
) -> tuple[FilePath, Download, dict[str, Any]]:
    """The directory of a model, how it was found, and the arguments that are not of a download.

    Raises:
      ConfigError: it is the name of a model that is neither in the hub's cache nor can be downloaded.
    """
    download, others = configs.split_downloads(source, arguments, subfolder)
    weights = (hub.MSGPACKS, hub.SAFETENSORS, hub.BINS)[from_pt:]
    return hub.locate(source, download, weights, tokenizer=False, what="from_pretrained"), download, others


def of_config(download: Download) -> dict[str, Any]:
    """The arguments for a config of another model: those that say how, and not what."""
    return {name: getattr(download, name) for name in ("token", "cache_dir", "local_files_only")}


def read_leaves(directory: FilePath, spec: Spec, from_pt: bool) -> tuple[Leaves, list[str]]:
    """The leaves of the old tree that a directory holds, and the names of what no leaf needs.

    Files are tried in this order: msgpack, safetensors, `.bin`; with `from_pt` without the first.

    Raises:
      ConfigError: there is none of them, or it is damaged.
    """
    if not directory.is_dir():
        raise ConfigError(f"from_pretrained: got {str(directory)!r}, expected a local directory; download it first")
    if not from_pt:
        leaves = read_msgpack(directory)
        if leaves is None and reading.is_flax_safetensors(directory / reading.WEIGHTS_FILE):
            tensors = reading.open_tensors(directory)
            leaves = {tuple(name.split(".")): tensor.array() for name, tensor in tensors.items()}
        if leaves is not None:
            return _with_prefix_of(spec, leaves)
    if any(os.path.lexists(directory / name) for name in (reading.WEIGHTS_FILE, reading.INDEX_FILE)):
        return _from_tensors(spec, quantized.dequantized(reading.open_tensors(directory), directory))
    tensors = torch_files.open_bins(directory)
    if tensors is None:
        files = ", ".join((FLAX_FILE, reading.WEIGHTS_FILE, torch_files.BIN_FILE)[from_pt:])
        raise ConfigError(f"{directory}: got none of {files} (or their shards), expected one; name another directory")
    return _from_tensors(spec, quantized.dequantized(tensors, directory))


def read_msgpack(directory: FilePath) -> Leaves | None:
    """The leaves of `flax_model.msgpack` or of its shards; None if there are neither."""
    if (directory / FLAX_FILE).exists():
        return _restore(directory / FLAX_FILE)
    if not (directory / FLAX_INDEX_FILE).exists():
        return None
    leaves: Leaves = {}
    for shard in torch_files.shard_names(directory, FLAX_INDEX_FILE, ".msgpack"):
        leaves |= _restore(directory / shard)
    return leaves


def _restore(path: FilePath) -> Leaves:
    try:
        tree = serialization.msgpack_restore(path.read_bytes())
        flat = traverse_util.flatten_dict(tree)
        leaves = {tuple("/".join(map(str, keys)).split("/")): np.asarray(value) for keys, value in flat.items()}
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: got no such file, expected it as {FLAX_INDEX_FILE} says; download it") from error
    except Exception as error:  # msgpack and numpy raise errors of many kinds for damaged files
        raise ConfigError(
            f"{path}: got {reading.quote(str(error))}, expected a tree of arrays; save it again"
        ) from error
    strange = [path for path, value in leaves.items() if value.dtype == object]
    if strange:
        raise ConfigError(f"{path}: got {'/'.join(strange[0])} that is no array, expected arrays; save it again")
    return leaves


def _with_prefix_of(spec: Spec, leaves: Leaves) -> tuple[Leaves, list[str]]:
    """The leaves under the names of this class, and those that it has no use for.

    A file of a bare body lacks the body's name, and one with a head has it.
    """
    prefix = tuple(spec.family.prefix.rstrip(".").split(".")) if spec.family.prefix else ()
    if prefix:
        has = any(path[: len(prefix)] == prefix for path in leaves)
        if spec.head in BODIES and has:
            leaves = {path[len(prefix) :] if path[: len(prefix)] == prefix else path: x for path, x in leaves.items()}
        elif spec.head not in BODIES and not has:
            leaves = {path if path in spec.leaves else (*prefix, *path): x for path, x in leaves.items()}
    unused = sorted("/".join(path) for path in set(leaves) - set(spec.leaves))
    return {path: x for path, x in leaves.items() if path in spec.leaves}, unused


def _from_tensors(spec: Spec, tensors: Mapping[str, Tensor]) -> tuple[Leaves, list[str]]:
    """The leaves that tensors of the newer library hold, and the names of tensors without a leaf."""
    family, leaves = spec.family, {}
    named = convert.canonical_tensors(family, tensors)
    if spec.head not in BODIES and family.prefix and not any(name.startswith(family.prefix) for name in tensors):
        named |= {name: tensors[name] for name in tensors if name not in named and not name.startswith(family.prefix)}
    if family.embedding_tables is not None:
        shared, *others = family.embedding_tables
        copies = [name for name in others if name in named]
        if shared not in named and copies:
            named[shared] = named[copies[0]]
        named = {name: tensor for name, tensor in named.items() if name not in copies}
    if family.tied_tensors is not None and spec.config.head.tied:
        named.pop(family.tied_tensors[0], None)
    unused = set(named)
    for entry in spec.table:
        for index in np.ndindex(entry.count):
            name = entry.row.name(index)
            if name in named:
                array = named[name].array()
                leaves[entry.leaf(index)] = array.T if entry.transposed and array.ndim == 2 else array
                unused.discard(name)
    return leaves, sorted(unused)


def save_leaves(directory: FilePath, params: PyTree, max_shard_bytes: int) -> None:
    """Writes `flax_model.msgpack`, or shards of at most `max_shard_bytes` and their index."""
    flat = {path: np.asarray(jax.device_get(x)) for path, x in traverse_util.flatten_dict(params).items()}
    shards: list[dict[Path, np.ndarray]] = [{}]
    for path, array in flat.items():
        if shards[-1] and sum(x.nbytes for x in shards[-1].values()) + array.nbytes > max_shard_bytes:
            shards.append({})
        shards[-1][path] = array
    for name in [*directory.glob("flax_model*.msgpack"), directory / FLAX_INDEX_FILE]:
        name.unlink(missing_ok=True)
    if len(shards) == 1:
        _write(directory / FLAX_FILE, serialization.msgpack_serialize(traverse_util.unflatten_dict(flat)))
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        name = f"flax_model-{i + 1:05d}-of-{len(shards):05d}.msgpack"
        _write(directory / name, serialization.msgpack_serialize(traverse_util.unflatten_dict(shard)))
        weight_map |= {"/".join(path): name for path in shard}
    index: dict[str, Any] = {"metadata": {"total_size": sum(x.nbytes for x in flat.values())}, "weight_map": weight_map}
    _write(directory / FLAX_INDEX_FILE, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())


def save_safetensors(directory: FilePath, params: PyTree) -> None:
    """Writes `model.safetensors` with the leaves under their paths, joined by dots, as the old library did."""
    flat = {".".join(path): np.ascontiguousarray(x) for path, x in traverse_util.flatten_dict(params).items()}
    _write(directory / reading.WEIGHTS_FILE, safetensors.numpy.save(flat, {"format": "flax"}))
    for name in [*directory.glob("flax_model*.msgpack"), directory / FLAX_INDEX_FILE]:
        name.unlink(missing_ok=True)  # it would be read first


def _write(path: FilePath, content: bytes) -> None:
    """Writes a file that appears whole."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)
