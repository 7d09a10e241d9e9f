"""DeBERTa's disentangled attention: scores of content and content, content and distance, distance and content.

He et al. 2021, equation 4:

    score_ts = (q_t . k_s + q_t . a(i_t - j_s) + b(i_t - j_s) . k_s) / sqrt(terms K)

with a(r) = W_k P[row(r)] and b(r) = W_q P[row(r)], for a table P of distances that all layers of a stack share.
Distances are differences of position ids, so permuted and packed slots need no special case.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Float, Float32, Int, Int32

from jaxformer.config import AttentionConfig, EncodingConfig
from jaxformer.errors import ConfigError
from jaxformer.nn.encodings import Encoding
from jaxformer.nn.encodings.learned import Learned
from jaxformer.nn.layers import Dense, Dropout, Norm, parameter
from jaxformer.types import Array, Slots


def span(config: EncodingConfig) -> int:
    """Number of table rows for one direction: half of all rows."""
    return config.max_distance if config.buckets is None else config.buckets


def row_of_distance(config: EncodingConfig) -> Int32[np.ndarray, " distances"]:
    """Table row for each query position - key position r = -N ... N, `[2 N + 1]`, with N = max_distance.

    Without buckets each distance has its own row, clip(r + N, 0, 2 N - 1). With B buckets a direction, r becomes

        r                                                              for |r| <= M = B // 2
        sign(r) (M + ceil((M - 1) log(|r| / M) / log((N - 1) / M)))    beyond

    and the row is clip(r + B, 0, 2 B - 1) (DeBERTa v2's code). Logarithms are in single precision as in that code:
    double precision can round up to the next bucket.

    Raises:
      ConfigError: B is odd, or the buckets of single distances reach N - 1.
    """
    longest, middle = config.max_distance, span(config) // 2
    distance = np.arange(-longest, longest + 1)
    if config.buckets is not None:
        if config.buckets % 2 or middle >= longest - 1:
            raise ConfigError(
                f"encoding.buckets: got {config.buckets} with max_distance {longest}, expected an even number of at "
                f"most {2 * max(longest - 2, 0)}; change encoding.buckets or encoding.max_distance"
            )
        ratio = np.maximum(np.abs(distance), middle).astype(np.float32) / np.float32(middle)
        steps = np.log(ratio) / np.log(np.float32((longest - 1) / middle)) * np.float32(middle - 1)
        distance = np.where(np.abs(distance) <= middle, distance, np.sign(distance) * (middle + np.ceil(steps)))
    return np.clip(distance + span(config), 0, 2 * span(config) - 1).astype(np.int32)


class Absolute(nn.Module):
    """Learned absolute positions `[B, T, D]` if `config.absolute`, else zeros."""

    config: EncodingConfig
    width: int

    @nn.compact
    def __call__(self, slots: Slots) -> Float32[Array, "B T D"]:
        if not self.config.absolute:
            return jnp.zeros((*slots.position.shape, self.width))
        return Learned(self.config, self.width, name="learned")(slots)


class Table(nn.Module):
    """The table P `[R, H K]`, normalised if `config.norm` is set. R is 2 max_distance, or 2 buckets if they are set."""

    config: EncodingConfig
    attention: AttentionConfig
    head_width: int

    @nn.compact
    def __call__(self, slots: Slots) -> Float32[Array, "R D"]:
        shape = (2 * span(self.config), self.attention.heads * self.head_width)
        table = parameter(self, "table", nn.initializers.normal(0.02), ("buckets", "table"), shape)
        return table if self.config.norm is None else Norm(self.config.norm, name="norm")(table)


class Projected(NamedTuple):
    """The table projected by one layer; a term that the config disables is None.

    Attributes:
      key: a, `[R, G, K]`, multiplied with queries.
      query: b, `[R, H, K]`, multiplied with keys and scaled like the queries.
    """

    key: Array | None
    query: Array | None


class Projections(nn.Module):
    """The projections W_k and W_q of the table: separate ones, or those of the content (`share_projections`).

    Raises:
      ConfigError: the table's width H K differs from the model width.
    """

    config: EncodingConfig
    attention: AttentionConfig
    width: int

    @nn.compact
    def __call__(self, shared: Float32[Array, "R D"], query: nn.Module, key: nn.Module) -> Projected:
        config, attention, width = self.config, self.attention, self.width
        if shared.shape[1] != width:
            raise ConfigError(
                f"attention.head_width: got {shared.shape[1]} channels of all heads, expected the width {width} for "
                "encoding.kind deberta; change heads or head_width"
            )
        heads, head_width = attention.heads, width // attention.heads
        groups = attention.kv_heads or heads
        key_bias = attention.bias if attention.key_bias is None else attention.key_bias
        if not config.share_projections:
            query = Dense((width, heads, head_width), ("embed", "heads", "head"), bias=attention.bias, name="query")
            key = Dense((width, groups, head_width), ("embed", "kv_heads", "head"), bias=key_bias, name="key")
        table = Dropout(config.dropout)(shared)
        scale = (terms(config) * head_width) ** -0.5 if attention.scale else 1.0
        return Projected(
            key=key(table) if config.content_to_position else None,
            query=query(table) * scale if config.position_to_content else None,
        )


def terms(config: EncodingConfig) -> int:
    """Number of products that a score sums, 1 to 3."""
    return 1 + config.content_to_position + config.position_to_content


def bias(
    config: EncodingConfig,
    shared: Projected,
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    query_position: Int[Array, "B T"],
    key_position: Int[Array, "B S"],
) -> Float32[Array, "B H T S"]:
    """The last two terms of the scores: `[B, H, T, S]`. `q` is already divided by sqrt(terms K).

    Queries are multiplied with all R rows of a and keys with all rows of b; each pair of slots then gathers the row of
    its distance.
    """
    batch, length, heads, width = q.shape
    slots, groups = k.shape[1:3]
    distance = query_position[:, :, None] - key_position[:, None, :]
    index = jnp.clip(distance, -config.max_distance, config.max_distance) + config.max_distance
    row = jnp.asarray(row_of_distance(config))[index][:, None]  # [B, 1, T, S]
    total = jnp.zeros((batch, heads, length, slots), jnp.float32)
    if shared.key is not None:
        by_group, rows = q.reshape(batch, length, groups, -1, width), shared.key.astype(q.dtype)
        products = jnp.einsum("btgmk,rgk->bgmtr", by_group, rows, preferred_element_type=jnp.float32)
        total += jnp.take_along_axis(products.reshape(batch, heads, length, -1), row, axis=-1)
    if shared.query is not None:
        rows = shared.query.astype(k.dtype).reshape(-1, groups, heads // groups, width)
        products = jnp.einsum("bsgk,rgmk->bgmsr", k, rows, preferred_element_type=jnp.float32)
        products = products.reshape(batch, heads, slots, -1)
        total += jnp.swapaxes(jnp.take_along_axis(products, jnp.swapaxes(row, 2, 3), axis=-1), 2, 3)
    return total


def heads(shared: Projected) -> Projected:
    """Index of the axis of heads of each leaf."""
    return jax.tree.map(lambda leaf: 1, shared)


ENCODING = Encoding(embed=Absolute, shared=Table, layer=Projections, bias=bias, heads=heads, terms=terms)
