"""Training states as nested dicts of arrays, which stay readable whatever classes optax or flax use.

Also here: text gathered from all processes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.experimental import multihost_utils

from jaxformer.types import PyTree, leaf_path


def to_nested_dict(tree: PyTree) -> dict[str, Any]:
    """Nested dicts with the leaves of `tree` at their paths. Nodes without leaves vanish."""
    return traverse_util.unflatten_dict({leaf_path(keys): x for keys, x in jax.tree_util.tree_leaves_with_path(tree)})


def is_key(leaf: Any) -> bool:
    """True if an array, abstract or not, is a typed PRNG key."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def unwrap_key(leaf: Any) -> Any:
    """The integers of a typed PRNG key; any other array unchanged."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def stored_shape(leaf: Any) -> jax.ShapeDtypeStruct:
    """Abstract array as which `leaf` is stored, with its sharding; PRNG keys are stored as integers."""
    shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    stored = jax.eval_shape(jax.random.key_data, shape) if is_key(leaf) else shape
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=sharding)


def allgather_text(text: str) -> list[str]:
    """The `text` of every process, in process order, on all of them. Also a barrier."""
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.asarray(data.size)).reshape(-1)
    padded = np.pad(data, (0, max(int(lengths.max()), 1) - data.size))
    gathered = multihost_utils.process_allgather(padded)
    return [bytes(row[:length]).decode() for row, length in zip(gathered, lengths, strict=True)]
