"""Relative positions of Transformer-XL: a query meets the projected code of every key's distance (Dai et al. 2019).

    score_ts = (u . k_s + (q_t + v) . r(i_t - j_s) + (q_t + w) . e(same kind or not)) / sqrt(K)

besides q_t . k_s / sqrt(K), with r(n) = W_r [sin(n f), cos(n f)] for the frequencies f of sinusoids. u, v, W_r belong
to a layer; w and e, XLNet's relative segments (Yang et al. 2019, section 2.5), act where token types are given.
Distances are differences of positions, so permuted streams, memories and caches need nothing of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Float, Float32, Int

from jaxformer.config import AttentionConfig, ConfigError, EncodingConfig
from jaxformer.nn.encodings import Encoding
from jaxformer.nn.encodings.sinusoidal import sinusoids
from jaxformer.types import Array, Slots


class Kinds(NamedTuple):
    """Token types of the queries and of the keys, int32 `[B, T]` and `[B, S]`. Only their equality matters."""

    query: Array
    key: Array


class Pairs(nn.Module):
    """The kinds of a stack's slots, which are queries and keys at once; None where there are no token types."""

    config: EncodingConfig
    attention: AttentionConfig
    head_width: int

    @nn.compact
    def __call__(self, slots: Slots, kind: Int[Array, "B T"] | None = None) -> Kinds | None:
        return None if kind is None else Kinds(kind, kind)


class Weights(NamedTuple):
    """What `score` needs of a layer: its parameters, those added to queries divided by sqrt(K) as the queries are.

    Attributes:
      content, position, kind: the biases u, v, w, `[H, K]` (r_w_bias, r_r_bias and r_s_bias of the papers' code).
      kernel: W_r, `[D, H, K]`.
      relation: e, `[2, H, K]`: of two slots of one kind, and of different kinds.
      kinds: of the slots, or None.
    """

    content: Array
    position: Array
    kind: Array
    kernel: Array
    relation: Array
    kinds: Kinds | None


class Relative(nn.Module):
    """The parameters of one layer.

    Raises:
      ConfigError: the width is odd, so that its channels are not sines and as many cosines.
    """

    config: EncodingConfig
    attention: AttentionConfig
    width: int

    @nn.compact
    def __call__(self, shared: Kinds | None, query: nn.Module, key: nn.Module) -> Weights:
        heads, head_width = self.attention.heads, self.attention.head_width or self.width // self.attention.heads
        if self.width % 2:
            raise ConfigError(f"encoding.kind: got transformer_xl with width {self.width}, expected an even width")
        fan_in = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=0, out_axis=(1, 2))
        small = nn.initializers.normal(0.02)

        def make(name: str, first: tuple[int, ...], axes: tuple[str | None, ...], init=small) -> Array:
            init = nn.with_logical_partitioning(init, (*axes, "heads", "head"))
            return self.param(name, init, (*first, heads, head_width))

        scale = head_width**-0.5 if self.attention.scale else 1.0
        return Weights(
            content=make("content_bias", (), ()) * scale,
            position=make("position_bias", (), ()) * scale,
            kind=make("kind_bias", (), ()) * scale,
            kernel=make("kernel", (self.width,), ("embed",), fan_in),
            relation=make("relation", (2,), (None,)),
            kinds=shared,
        )


def score(
    config: EncodingConfig,
    shared: Weights,
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    query_position: Int[Array, "B T"],
    key_position: Int[Array, "B S"],
) -> Float32[Array, "B H T S"]:
    """The equation above without q . k; `q` is already divided by sqrt(K).

    Raises:
      ConfigError: there are token types, and the slots are a part of theirs: a tile, a device's, or a cache.
    """
    batch, slots, groups, width = k.shape
    by_group = shared.content.astype(k.dtype).reshape(groups, -1, width)
    content = jnp.einsum("gpk,bsgk->bgps", by_group, k, preferred_element_type=jnp.float32)
    content = content.reshape(batch, -1, 1, slots)
    codes = _by_angle if config.clamp is None else _by_table
    turned = q + shared.position.astype(q.dtype)
    total = content + codes(config, shared.kernel.astype(q.dtype), turned, query_position, key_position)
    if shared.kinds is None:
        return total
    same = shared.kinds.query[:, :, None] == shared.kinds.key[:, None, :]
    if same.shape != (batch, q.shape[1], slots):
        raise ConfigError(
            f"attention.kernel: got {q.shape[1]} queries and {slots} keys with token types of {same.shape[1]} and "
            f"{same.shape[2]}, expected all at once; set attention.kernel to dense, and decode without token types"
        )
    relation = shared.relation.astype(q.dtype)
    either = jnp.einsum("bthk,rhk->rbht", q + shared.kind.astype(q.dtype), relation, preferred_element_type=jnp.float32)
    return total + jnp.where(same[:, None], either[0][..., None], either[1][..., None])


def _by_angle(
    config: EncodingConfig,
    kernel: Float[Array, "D H K"],
    q: Float[Array, "B T H K"],
    query_position: Int[Array, "B T"],
    key_position: Int[Array, "B S"],
) -> Float32[Array, "B H T S"]:
    """q . r(i - j) for positions of any size, without a code for each pair.

    With a = W_r^T q for the sines and b for the cosines, and by the sine and cosine of a difference,

        sum_f a sin((i - j) f) + b cos((i - j) f)
            = sum_f (a sin(i f) + b cos(i f)) cos(j f) + (b sin(i f) - a cos(i f)) sin(j f),

    a product of something of the query with something of the key. All but the two contractions is float32.
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
    """Sines and cosines of P = D / 2 frequencies."""
    frequency = jnp.asarray(config.base ** (-2.0 * np.arange(width // 2) / width), jnp.float32)
    angle = position.astype(jnp.float32)[..., None] * frequency
    return jnp.sin(angle), jnp.cos(angle)


def _by_table(
    config: EncodingConfig,
    kernel: Float[Array, "D H K"],
    q: Float[Array, "B T H K"],
    query_position: Int[Array, "B T"],
    key_position: Int[Array, "B S"],
) -> Float32[Array, "B H T S"]:
    """q . r(clip(i - j, -c, c)): each query meets all 2 c + 1 codes and every key reads the one of its distance."""
    distances = jnp.arange(-config.clamp, config.clamp + 1)
    codes = sinusoids(distances, kernel.shape[0], config.base, concatenated=True).astype(kernel.dtype)
    rows = jnp.einsum("rd,dhk->rhk", codes, kernel)
    by_distance = jnp.einsum("bthk,rhk->bhtr", q, rows, preferred_element_type=jnp.float32)
    distance = query_position[:, :, None] - key_position[:, None, :]
    index = jnp.clip(distance, -config.clamp, config.clamp) + config.clamp
    return jnp.take_along_axis(by_distance, jnp.broadcast_to(index, (q.shape[0], *index.shape[1:]))[:, None], axis=-1)


def heads(shared: Weights) -> Weights:
    """The axes of heads; token types have none."""
    kinds = None if shared.kinds is None else Kinds(-1, -1)
    return Weights(content=0, position=0, kind=0, kernel=1, relation=1, kinds=kinds)


ENCODING = Encoding(shared=Pairs, layer=Relative, score=score, heads=heads, kinds=True)
