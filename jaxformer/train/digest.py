"""A hash of parameters, by which a run knows the models that it depends on again."""

from __future__ import annotations

import hashlib

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxformer.types import Array, PyTree, leaf_path


def params_digest(params: PyTree) -> str:
    """SHA-256 of paths, shapes, types and values: the same on every mesh and process. Reads one array at a time.

    A collective call in a run of several processes.
    """
    digest = hashlib.sha256()
    for path, x in sorted((leaf_path(keys), x) for keys, x in jax.tree_util.tree_leaves_with_path(params)):
        value = np.ascontiguousarray(_whole(x))
        digest.update(f"{'/'.join(path)} {value.shape} {value.dtype.str}\n".encode())
        digest.update(value.data if value.size else b"")
    return digest.hexdigest()


def _whole(x: Array) -> np.ndarray:
    """The complete array, on every process."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))
