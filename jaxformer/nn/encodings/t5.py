"""T5's relative position bias: a learned scalar for each head and distance bucket (Raffel et al. 2020, section 2.1)."""

from __future__ import annotations

import math

import flax.struct
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Float, Float32, Int, Int32

from jaxformer.config import AttentionConfig, EncodingConfig
from jaxformer.errors import ConfigError
from jaxformer.nn.encodings import Encoding
from jaxformer.nn.layers import parameter
from jaxformer.nn.masks import block_of_slot, full_blocks
from jaxformer.types import Array, PyTree, Slots


def bucket_of_distance(buckets: int, max_distance: int) -> Int32[np.ndarray, " distances"]:
    """Bucket of each distance n = 0 ... max_distance in one direction: `[max_distance + 1]`. The last has all beyond.

    Half of the buckets hold one distance each; the width of the other buckets grows geometrically:

        bucket(n) = n                                                        for n < E = buckets // 2
        bucket(n) = E + floor((buckets - E) log(n / E) / log(max_distance / E))     up to buckets - 1

    In double precision with a small number added, since for powers of 2 the argument of the floor is an integer.

    Raises:
      ConfigError: there are fewer than 2 buckets, or those of single distances reach `max_distance`.
    """
    exact = buckets // 2
    if exact < 1 or max_distance <= exact:
        raise ConfigError(
            f"encoding.max_distance: got {max_distance} with {buckets} buckets a direction, expected at least 2 "
            f"buckets and a distance above {exact}; change encoding.buckets or encoding.max_distance"
        )
    distance = np.arange(max_distance + 1)
    steps = np.log(np.maximum(distance, 1) / exact) / math.log(max_distance / exact) * (buckets - exact)
    far = np.minimum(exact + np.floor(steps + 1e-9), buckets - 1)
    return np.where(distance < exact, distance, far).astype(np.int32)


def bucket_of_offset(config: EncodingConfig) -> Int32[np.ndarray, " offsets"]:
    """Bucket of each key position - query position = -N ... N: `[2 N + 1]`, with N = max_distance.

    If bidirectional, later keys use the upper half of the buckets; otherwise they share bucket 0 with distance 0.

    Raises:
      ConfigError: `config.bidirectional` or `config.buckets` is None, or see `bucket_of_distance`.
    """
    if config.bidirectional is None:
        raise ConfigError("encoding.bidirectional: got None, expected True or False; resolve it from the stack's order")
    if config.buckets is None:
        raise ConfigError("encoding.buckets: got None, expected a number; set it")
    buckets = config.buckets // 2 if config.bidirectional else config.buckets
    back = bucket_of_distance(buckets, config.max_distance)
    ahead = back[1:] + buckets if config.bidirectional else np.zeros_like(back[1:])
    return np.concatenate([back[::-1], ahead])


class Tables(flax.struct.PyTreeNode):
    """The biases of a stack whose keys are slots and summaries of blocks (`attention.summary`).

    Attributes:
      slots, summaries: the tables `[R, H]` of distances in slots, and in blocks.
      full: int32 `[B]`, number of full blocks of each row.
      size: slots of a block.
    """

    slots: Array
    summaries: Array
    full: Array
    size: int = flax.struct.field(pytree_node=False)


class Table(nn.Module):
    """The learned biases `[R, H]`, shared by all layers of a stack; initial variance 1 / (H K).

    With `attention.summary` there is a second table (Guo et al. 2022, LongT5, section 3.1).
    """

    config: EncodingConfig
    attention: AttentionConfig
    head_width: int

    @nn.compact
    def __call__(self, slots: Slots) -> Float32[Array, "R H"] | Tables:
        if self.config.buckets is None:
            raise ConfigError("encoding.buckets: got None, expected a number; set it")
        heads, size = self.attention.heads, self.attention.summary
        init = nn.initializers.normal((heads * self.head_width) ** -0.5)
        shape, names = (self.config.buckets, heads), ("buckets", "heads")
        table = parameter(self, "table", init, names, shape)
        if size is None:
            return table
        summaries = parameter(self, "summary_table", init, names, shape)
        return Tables(table, summaries, full_blocks(slots, size), size)


def heads_axes(shared: Float32[Array, "R H"] | Tables) -> PyTree:
    """Index of the axis of heads of the tables; -1 for numbers of blocks."""
    return shared.replace(slots=1, summaries=1, full=-1) if isinstance(shared, Tables) else 1


def bias(
    config: EncodingConfig,
    shared: Float32[Array, "R H"] | Tables,
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    query_position: Int[Array, "B T"],
    key_position: Int[Array, "B S"],
) -> Float32[Array, "#B H T S"]:
    """Bias `[B, H, T, S]`: the table's entry for the bucket of key position - query position.

    The distance to the summary of block n, at position -1 - n, is n minus the block of the query.
    """
    offset, bucket = key_position[:, None, :] - query_position[:, :, None], bucket_of_offset(config)
    index = _index(config, offset)
    if isinstance(shared, Tables):
        block = block_of_slot(query_position, shared.full, shared.size)
        of_summary = _index(config, -1 - key_position[:, None, :] - block[:, :, None])
        index = jnp.where(key_position[:, None, :] < 0, of_summary + len(bucket), index)
        by_offset = jnp.concatenate([shared.slots[bucket], shared.summaries[bucket]])
    else:
        by_offset = shared[bucket]  # [2 N + 1, H]
    return jnp.moveaxis(by_offset[index], -1, 1).astype(jnp.float32)


def _index(config: EncodingConfig, offset: Int[Array, "B T S"]) -> Int[Array, "B T S"]:
    return jnp.clip(offset, -config.max_distance, config.max_distance) + config.max_distance


ENCODING = Encoding(shared=Table, bias=bias, heads=heads_axes)
