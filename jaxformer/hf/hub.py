"""Which files of a model on the hub are read, and the directory that holds them: local, or in the hub's cache."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from jaxformer.errors import ConfigError
from jaxformer.hf import reading
from jaxformer.hf.peft.sites import CONFIG_FILE as ADAPTER_CONFIG
from jaxformer.hf.peft.sites import WEIGHTS_FILE as ADAPTER_WEIGHTS
from jaxformer.hf.tokenizer import SETTINGS_FILES, tokenizer_files
from jaxformer.runtime import hub
from jaxformer.runtime.hub import DEFAULT_DOWNLOAD, Download, ReadJson

GENERATION_FILE = "generation_config.json"

SAFETENSORS = (reading.WEIGHTS_FILE, reading.INDEX_FILE)
BINS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
MSGPACKS = ("flax_model.msgpack", "flax_model.msgpack.index.json")
"""Weights in one file, and the index of their shards."""


def locate(
    source: str | os.PathLike[str],
    download: Download = DEFAULT_DOWNLOAD,
    weights: Sequence[tuple[str, str]] = (SAFETENSORS, BINS, MSGPACKS),
    tokenizer: bool = True,
    what: str = "checkpoint",
) -> Path:
    """The directory of a model: local, or in the cache of the hub, with the files that are read of it.

    Args:
      source: a directory, or the name of a model on the hub.
      weights: formats of weights, of which the first that is there is needed; (): none.
      tokenizer: the tokenizer's files are needed, too, as far as they are there.
      what: the argument or flag that holds `source`, for errors.

    Raises:
      ConfigError: it is the name of a model that is neither in the cache nor can be downloaded.
    """
    if hub.is_name(source):
        choose = functools.partial(model_files, weights=weights, tokenizer=tokenizer)
        return hub.find(str(source), choose, download, what)
    return Path(source) / download.subfolder


def model_files(
    names: Collection[str], read_json: ReadJson, weights: Sequence[tuple[str, str]], tokenizer: bool
) -> list[str]:
    """The files to read of a model, or of an adapter, given the names of all of its files.

    Raises:
      ConfigError: it has no weights, or their index names something else than files beside it.
    """
    if ADAPTER_CONFIG in names and reading.CONFIG_FILE not in names and weights:
        return [ADAPTER_CONFIG, ADAPTER_WEIGHTS]
    chosen = [reading.CONFIG_FILE, *[name for name in (GENERATION_FILE,) if name in names and weights]]
    if tokenizer:
        chosen += tokenizer_files(names) + [name for name in SETTINGS_FILES if name in names]
    if not weights:
        return chosen
    for file, index in weights:
        if file in names:
            return [*chosen, file]
        if index in names:
            return [*chosen, index, *_shards(index, read_json, Path(file).suffix)]
    raise ConfigError(f"none of {', '.join(file for file, _ in weights)} (or their shards), expected one")


def _shards(index: str, read_json: ReadJson, ending: str) -> list[str]:
    files = read_json(index).get("weight_map")
    shards = dict.fromkeys(files.values()) if isinstance(files, dict) else {}
    plain = [name for name in shards if isinstance(name, str) and name.endswith(ending) and not set(name) & set("/\\:")]
    if not shards or len(plain) < len(shards):
        raise ConfigError(f"{index} that does not name {ending} files beside it, expected these")
    return plain
