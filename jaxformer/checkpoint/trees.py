"""Trees as nested dicts of arrays, which stay readable whatever classes optax or flax hold them in; and text that all
processes share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.experimental import multihost_utils

from jaxformer.train.optim import path_of
from jaxformer.types import PyTree


def plain(tree: PyTree) -> dict[str, Any]:
    """Nested dicts with the leaves of `tree` at their paths; empty nodes vanish."""
    return traverse_util.unflatten_dict({path_of(keys): x for keys, x in jax.tree_util.tree_leaves_with_path(tree)})


def is_key(leaf: Any) -> bool:
    """Whether an array, abstract or not, is a typed PRNG key."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def key_to_data(leaf: Any) -> Any:
    """Typed keys as the integers behind them; anything else as it is."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def abstract_data(leaf: Any) -> jax.ShapeDtypeStruct:
    """The abstract array that `leaf` of a target is stored as, with its sharding."""
    shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    stored = jax.eval_shape(jax.random.key_data, shape) if is_key(leaf) else shape
    place = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=place)


def every_process(text: str) -> list[str]:
    """`text` of every process, in their order, known to all of them."""
    if jax.process_count() == 1:
        return [text]
    mine = np.frombuffer(text.encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.asarray(mine.size)).reshape(-1)
    padded = np.pad(mine, (0, max(int(lengths.max()), 1) - mine.size))
    return [
        bytes(row[:size]).decode() for row, size in zip(multihost_utils.process_allgather(padded), lengths, strict=True)
    ]
