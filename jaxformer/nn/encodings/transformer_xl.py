"""Transformer-XL's relative positions: queries are multiplied with the projected code of each key's distance.

To q_t . k_s / sqrt(K) is added the bias (Dai et al. 2019, section 3.3)

    bias_ts = (u . k_s + (q_t + v) . r(i_t - j_s) + (q_t + w) . e(equal or different token types)) / sqrt(K)

with r(n) = W_r [sin(n f), cos(n f)] for the frequencies f of sinusoids. Each layer has its own u, v and W_r. The
parameters w and e are XLNet's relative segments (Yang et al. 2019, section 2.5), used if token types are given.
Distances are differences of position ids, so permuted streams, memories and caches need no special case.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Float, Float32, Int

from jaxformer.config import AttentionConfig, EncodingConfig
from jaxformer.errors import ConfigError
from jaxformer.nn.encodings import Encoding
from jaxformer.nn.encodings.sinusoidal import sinusoids
from jaxformer.nn.layers import parameter
from jaxformer.types import Array, PyTree, Slots


class TokenTypes(NamedTuple):
    """Token types of queries and keys, int32 `[B, T]` and `[B, S]`. Only their equality matters."""

    query: Array
    key: Array


class Pairs(nn.Module):
    """Token types of a stack's slots, which are both queries and keys; None without token types."""

    config: EncodingConfig
    attention: AttentionConfig
    head_width: int

    @nn.compact
    def __call__(self, slots: Slots, token_type: Int[Array, "B T"] | None = None) -> TokenTypes | None:
        return None if token_type is None else TokenTypes(token_type, token_type)


class Weights(NamedTuple):
    """Parameters of one layer for `bias`. Those added to queries are divided by sqrt(K), like the queries.

    Attributes:
      content, position, token_type: the biases u, v, w, `[H, K]` (r_w_bias, r_r_bias and r_s_bias of the papers' code).
      kernel: W_r, `[D, H, K]`.
      relation: e, `[2, H, K]`, for equal and for different token types.
      token_types: token types of the slots, or None.
    """

    content: Array
    position: Array
    token_type: Array
    kernel: Array
    relation: Array
    token_types: TokenTypes | None


class Relative(nn.Module):
    """The parameters of one layer.

    Raises:
      ConfigError: the width is odd: its channels are as many sines as cosines.
    """

    config: EncodingConfig
    attention: AttentionConfig
    width: int

    @nn.compact
    def __call__(self, shared: TokenTypes | None, query: nn.Module, key: nn.Module) -> Weights:
        heads, head_width = self.attention.heads, self.attention.head_width or self.width // self.attention.heads
        if self.width % 2:
            raise ConfigError(f"encoding.kind: got transformer_xl with width {self.width}, expected an even width")
        fan_in = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=0, out_axis=(1, 2))
        small = nn.initializers.normal(0.02)

        def make(name: str, first: tuple[int, ...], axes: tuple[str | None, ...], init=small) -> Array:
            return parameter(self, name, init, (*axes, "heads", "head"), (*first, heads, head_width))

        scale = head_width**-0.5 if self.attention.scale else 1.0
        return Weights(
            content=make("content_bias", (), ()) * scale,
            position=make("position_bias", (), ()) * scale,
            token_type=make("kind_bias", (), ()) * scale,
            kernel=make("kernel", (self.width,), ("embed",), fan_in),
            relation=make("relation", (2,), (None,)),
            token_types=shared,
        )


def bias(
    config: EncodingConfig,
    shared: Weights,
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    query_position: Int[Array, "B T"],
    key_position: Int[Array, "B S"],
) -> Float32[Array, "B H T S"]:
    """The bias of the equation above: `[B, H, T, S]`. `q` is already divided by sqrt(K).

    Raises:
      ConfigError: token types are given for other slots than those of q and k (a tile, a device's part, a cache).
    """
    batch, slots, groups, width = k.shape
    by_group = shared.content.astype(k.dtype).reshape(groups, -1, width)
    content = jnp.einsum("gpk,bsgk->bgps", by_group, k, preferred_element_type=jnp.float32)
    content = content.reshape(batch, -1, 1, slots)
    relative = _by_angle if config.clamp is None else functools.partial(_by_table, config.clamp)
    shifted, kernel = q + shared.position.astype(q.dtype), shared.kernel.astype(q.dtype)
    total = content + relative(config, kernel, shifted, query_position, key_position)
    if shared.token_types is None:
        return total
    same = shared.token_types.query[:, :, None] == shared.token_types.key[:, None, :]
    if same.shape != (batch, q.shape[1], slots):
        raise ConfigError(
            f"attention.kernel: got {q.shape[1]} queries and {slots} keys with token types of {same.shape[1]} and "
            f"{same.shape[2]}, expected all at once; set attention.kernel to dense, and decode without token types"
        )
    relation = shared.relation.astype(q.dtype)
    either = jnp.einsum(
        "bthk,rhk->rbht", q + shared.token_type.astype(q.dtype), relation, preferred_element_type=jnp.float32
    )
    return total + jnp.where(same[:, None], either[0][..., None], either[1][..., None])


def _by_angle(
    config: EncodingConfig,
    kernel: Float[Array, "D H K"],
    q: Float[Array, "B T H K"],
    query_position: Int[Array, "B T"],
    key_position: Int[Array, "B S"],
) -> Float32[Array, "B H T S"]:
    """q . r(i - j) `[B, H, T, S]` for positions of any size, without a code for each pair.

    With a = W_r^T q for the sines and b for the cosines, and by the sine and cosine of a difference,

        sum_f a sin((i - j) f) + b cos((i - j) f)
            = sum_f (a sin(i f) + b cos(i f)) cos(j f) + (b sin(i f) - a cos(i f)) sin(j f),

    which is a product of a vector of the query and a vector of the key. All but the two contractions is float32.
    """
    width = kernel.shape[0]
    a, b = jnp.split(jnp.einsum("bthk,dhk->bthd", q, kernel, preferred_element_type=jnp.float32), 2, axis=-1)
    sine, cosine = _angles(config, query_position, width)
    sine, cosine = sine[:, :, None], cosine[:, :, None]
    of_query = jnp.concatenate([a * sine + b * cosine, b * sine - a * cosine], axis=-1)
    of_key = jnp.concatenate(_angles(config, key_position, width)[::-1], axis=-1)
    of_query, of_key = of_query.astype(q.dtype), of_key.astype(q.dtype)
    return jnp.einsum("bthd,bsd->bhts", of_query, of_key, preferred_element_type=jnp.float32)


def _angles(
    config: EncodingConfig, position: Int[Array, "B T"], width: int
) -> tuple[Float32[Array, "B T P"], Float32[Array, "B T P"]]:
    """Sines and cosines `[B, T, P]` of each position at P = D / 2 frequencies."""
    frequency = jnp.asarray(config.base ** (-2.0 * np.arange(width // 2) / width), jnp.float32)
    angle = position.astype(jnp.float32)[..., None] * frequency
    return jnp.sin(angle), jnp.cos(angle)


def _by_table(
    clamp: int,
    config: EncodingConfig,
    kernel: Float[Array, "D H K"],
    q: Float[Array, "B T H K"],
    query_position: Int[Array, "B T"],
    key_position: Int[Array, "B S"],
) -> Float32[Array, "B H T S"]:
    """q . r(clip(i - j, -c, c)) `[B, H, T, S]` for c = `clamp`: queries times all 2 c + 1 codes, then a gather."""
    distances = jnp.arange(-clamp, clamp + 1)
    codes = sinusoids(distances, kernel.shape[0], config.base, concatenated=True).astype(kernel.dtype)
    rows = jnp.einsum("rd,dhk->rhk", codes, kernel)
    by_distance = jnp.einsum("bthk,rhk->bhtr", q, rows, preferred_element_type=jnp.float32)
    distance = query_position[:, :, None] - key_position[:, None, :]
    index = jnp.clip(distance, -clamp, clamp) + clamp
    return jnp.take_along_axis(by_distance, jnp.broadcast_to(index, (q.shape[0], *index.shape[1:]))[:, None], axis=-1)


def heads(shared: Weights) -> PyTree:
    """Index of the axis of heads of each leaf of `shared`; token types have none."""
    tree = jax.tree.structure(shared)
    return jax.tree.unflatten(tree, (0, 0, 0, 1, 1, -1, -1)[: tree.num_leaves])


ENCODING = Encoding(shared=Pairs, layer=Relative, bias=bias, heads=heads, uses_token_types=True)
