"""Attention, once. Who looks at whom is the mask, what position does is the encoding, how it is summed the kernel."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Float, Int

from jaxformer.config import AttentionConfig, EncodingConfig
from jaxformer.nn import encodings, kernels, remat
from jaxformer.nn.cache import Cache, KeyValues
from jaxformer.nn.kernels import Noise, Score, dense
from jaxformer.nn.layers import Dense, Norm, fan_out
from jaxformer.nn.masks import Mask
from jaxformer.parallel.rules import constrain
from jaxformer.types import Array


class Attention(nn.Module):
    """Multi-head scaled dot-product attention (Vaswani et al. 2017, section 3.2).

        head_h = softmax(q_h k_g(h)^T / sqrt(K) + score + mask) v_g(h)        y = concat(head_1 .. head_H) W_o

    MHA, GQA and MQA differ by `config.kv_heads`. Self-attention reads `x`; cross-attention reads `memory`, with
    queries from `x`.

    Attributes:
      encoding: what position does in self-attention.
      width: model width D.
    """

    config: AttentionConfig
    encoding: EncodingConfig
    width: int

    def setup(self) -> None:
        config, width = self.config, self.width
        self.heads, self.kv_heads, self.head_width = shape(config, width)
        keys = (width, self.kv_heads, self.head_width)
        key_bias = config.bias if config.key_bias is None else config.key_bias
        output_bias = config.bias if config.output_bias is None else config.output_bias
        self.query = Dense((width, self.heads, self.head_width), ("embed", "heads", "head"), bias=config.bias)
        self.key = Dense(keys, ("embed", "kv_heads", "head"), bias=key_bias)
        self.value = Dense(keys, ("embed", "kv_heads", "head"), bias=config.bias)
        if config.norm is not None:
            self.query_norm, self.key_norm = Norm(config.norm), Norm(config.norm)
        if config.output:
            self.out = Dense((self.heads, self.head_width, width), ("heads", "head", "embed"), 2, output_bias)
        layer = encodings.get(self.encoding.kind).layer
        if layer is not None:
            self.position = layer(self.encoding, config, width)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        mask: Mask,
        position: Any = None,
        memory: Float[Array, "B S D"] | KeyValues | None = None,
        cache: Cache | None = None,
        layer: Int[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B T D"], Cache | None]:
        """Attends from `x`.

        Args:
          mask: over T query slots and the S key slots: x's own, the cache's, or the memory's.
          position: what the encoding's `shared` hook returned for the slots of `x`; None in cross-attention.
          memory: for cross-attention, or the keys and values that `project` made of it.
          cache: self-attention only: written at its index, then read whole.
          layer: this layer's number from 0, for configs whose layers differ.

        Returns:
          The output and the written cache (None without one).
        """
        encoding = encodings.get(self.encoding.kind) if memory is None else encodings.Encoding()
        if memory is None:
            q, k, v = fan_out(x, self.query, self.key, self.value)
            k, v = self.named(k, v)
        else:
            q = self.query(x)
            k, v = memory.by_slot() if isinstance(memory, KeyValues) else self.project(memory)
        q = remat.name(q, "query")
        if self.config.norm is not None:
            q = self.query_norm(q)
        if encoding.layer is not None:
            position = self.position(position, self.query, self.key)
        if encoding.rotate is not None:
            q, k = encoding.rotate(self.encoding, q, position), encoding.rotate(self.encoding, k, position)
        if cache is not None:
            cache = cache.write(k, v)
            k, v = cache.read()
        o = self.look(q, k, v, mask, position, encoding, layer)
        if not self.config.output:
            return o.reshape(*x.shape[:-1], self.width), cache
        return self.out(o), cache

    def look(
        self,
        q: Float[Array, "B T H K"],
        k: Float[Array, "B S G K"],
        v: Float[Array, "B S G K"],
        mask: Mask,
        position: Any,
        encoding: encodings.Encoding,
        layer: Int[Array, ""] | None = None,
    ) -> Float[Array, "B T H K"]:
        """What queries find in keys and values, before the projection."""
        if self.config.scale:
            q = q * jnp.asarray((encoding.terms(self.encoding) * self.head_width) ** -0.5, q.dtype)
        if self.config.scale_by_layer:
            q = q / (layer + 1).astype(q.dtype)
        q = constrain(q, "batch", "length", "act_heads", None)
        score = None
        if encoding.score is not None:
            heads = None if encoding.heads is None else encoding.heads(position)
            score = Score(functools.partial(encoding.score, self.encoding), position, heads)
        o = self.weigh(q, k, v, mask, score)
        if self.config.average_padding:
            o = jnp.where((mask.query.segment < 0)[..., None, None], average(v, self.heads).astype(o.dtype), o)
        return o

    def project(self, memory: Float[Array, "B S D"]) -> tuple[Float[Array, "B S G K"], Float[Array, "B S G K"]]:
        """Keys and values of `memory`, so that decoding projects it once."""
        return self.named(*fan_out(memory, self.key, self.value))

    def named(
        self, k: Float[Array, "B S G K"], v: Float[Array, "B S G K"]
    ) -> tuple[Float[Array, "B S G K"], Float[Array, "B S G K"]]:
        """Keys, normalised if that is asked for, and values, named for rematerialisation."""
        k, v = remat.name(k, "key"), remat.name(v, "value")
        return k if self.config.norm is None else self.key_norm(k), v

    def weigh(
        self,
        q: Float[Array, "B T H K"],
        k: Float[Array, "B S G K"],
        v: Float[Array, "B S G K"],
        mask: Mask,
        score: Score | None,
    ) -> Float[Array, "B T H K"]:
        """What the kernel returns. With the collection "intermediates" mutable, the probabilities are sown too."""
        config, noise = self.config, None
        if config.dropout > 0.0 and self.has_rng("dropout"):
            noise = Noise(config.dropout, self.make_rng("dropout"))
        if self.is_mutable_collection("intermediates"):
            self.sow("intermediates", "probabilities", dense.probabilities(q, k, mask, score, None, config))
        return kernels.apply(q, k, v, mask, score, noise, config)


def average(v: Float[Array, "B S G K"], heads: int) -> Float[Array, "B 1 H K"]:
    """The mean of all values, padding included, for every query head."""
    mean = jnp.mean(v.astype(jnp.float32), axis=1, keepdims=True)
    return jnp.repeat(mean, heads // v.shape[2], axis=2)


def shape(config: AttentionConfig, width: int) -> tuple[int, int, int]:
    """Query heads H, key heads G and head width K."""
    return config.heads, config.kv_heads or config.heads, config.head_width or width // config.heads
