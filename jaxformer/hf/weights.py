"""The tensors of a directory, whatever file they lie in: safetensors, `pytorch_model.bin`, `flax_model.msgpack`.

The first that is there counts, in this order, whole or in shards. Nothing in a `.bin` is run (`flax/pickled.py`). Trees
of the other library's Flax classes, in msgpack or in safetensors, are read under the names of its torch classes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.errors import ConfigError
from jaxformer.hf import quantized, reading
from jaxformer.hf.hub import BINS, MSGPACKS, SAFETENSORS
from jaxformer.hf.reading import Tensor

TORCH_NAMES = {"kernel": "weight", "scale": "weight", "embedding": "weight"}
"""Last part of a leaf's path -> of the tensor's name; others are equal."""


@dataclass(frozen=True, eq=False)
class HeldTensor(Tensor):
    """A tensor in memory.

    Attributes:
      values: its array, in any order of axes.
    """

    values: np.ndarray

    def array(self) -> np.ndarray:
        """The array."""
        return self.values


def has_weights(directory: Path) -> bool:
    """True if the directory holds weights of one of the formats."""
    return any(os.path.lexists(directory / name) for files in (SAFETENSORS, BINS, MSGPACKS) for name in files)


def open_weights(directory: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a directory by the names of the other library's torch classes.

    Raises:
      ConfigError: there are none, or a file is damaged.
    """
    path = Path(directory)
    if any(os.path.lexists(path / name) for name in SAFETENSORS) or not has_weights(path):
        tensors = reading.open_tensors(path)
        if not reading.is_flax_safetensors(path / reading.WEIGHTS_FILE):
            return quantized.dequantized(tensors, path)
        leaves = {tuple(name.split(".")): tensor.array() for name, tensor in tensors.items()}
        return of_leaves(leaves, reading.WEIGHTS_FILE)
    if any(os.path.lexists(path / name) for name in BINS):
        return quantized.dequantized(_flax_files().torch_files.open_bins(path) or {}, path)
    return of_leaves(_flax_files().read_msgpack(path) or {}, MSGPACKS[0])


def of_leaves(leaves: Mapping[tuple[str, ...], np.ndarray], file: str) -> dict[str, Tensor]:
    """The tensors of a tree of the Flax classes: a matrix `kernel` is turned, and names end in `weight`.

    Args:
      file: where the tree is from, for messages.
    """
    tensors: dict[str, Tensor] = {}
    for path, leaf in leaves.items():
        values = leaf.T if path[-1] == "kernel" and leaf.ndim == 2 else leaf
        name = ".".join((*path[:-1], TORCH_NAMES.get(path[-1], path[-1])))
        if name in tensors:
            raise ConfigError(f"{file}: got two leaves that mean {name}, expected one; save it again")
        tensors[name] = HeldTensor(name, values.shape, values.dtype, file, np.empty(0, np.uint8), values)
    return tensors


def _flax_files() -> Any:
    """The readers of the Flax classes, imported where a directory needs them: with them come all of these classes."""
    from jaxformer.hf.flax import files

    return files
