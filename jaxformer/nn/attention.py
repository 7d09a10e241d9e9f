"""Multi-head attention: one module for every mask, position encoding and kernel.

The mask says which keys each query attends to. The encoding says how positions change queries, keys and scores. The
kernel says how the weighted sum is computed.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Float, Float32, Int

from jaxformer.config import AttentionConfig, EncodingConfig, NormConfig, TemperatureConfig, ValueResidualConfig
from jaxformer.errors import ConfigError
from jaxformer.nn import encodings, kernels, remat
from jaxformer.nn.cache import KeyValues, LayerCache
from jaxformer.nn.kernels import AttentionBias, AttentionDropout, dense
from jaxformer.nn.layers import ChunkDense, Dense, Norm, parameter, project_jointly, zeros_parameter
from jaxformer.nn.masks import Blocks, Mask, block_of_slot, full_blocks
from jaxformer.parallel.rules import constrain
from jaxformer.types import Array, PyTree, Slots, is_zero


class Attention(nn.Module):
    """Multi-head scaled dot-product attention (Vaswani et al. 2017, section 3.2).

        head_h = softmax(q_h k_g(h)^T / sqrt(K) + bias + mask) v_g(h)        y = concat(head_1 .. head_H) W_o

    Key head g(h) = h // (H / G) serves query head h: MHA (G = H), GQA and MQA (G = 1) differ by `config.kv_heads`.
    Each head projects all of its input, or with `config.input` "chunk" the part of the channels that has its number.
    Keys and values come from `x` in self-attention and from `memory` in cross-attention; queries come from `x`. With
    `config.summary` self-attention has further keys and values: those of the normalised sums of `x` over blocks of
    slots (transient global attention; Guo et al. 2022, LongT5, section 3.1). With `config.sink` each head has a learned
    score s_h beside those of the keys: its share of the softmax goes to no value (OpenAI 2025, gpt-oss, section 2.2).
    With `config.value_residual` the values of a later layer are `first * v_1 + own * v_n`, with v_1 those of layer 0
    (Zhou et al. 2024, Value Residual Learning). They are mixed before the cache, which holds what is attended to. With
    `config.temperature` the scores of a query grow with its position (`temperature`).
    With `config.gate` head_h is multiplied by sigmoid(x W_g,h) (Qiu et al. 2025, Gated Attention for Large Language
    Models, equation 5, at the place G1).

    Attributes:
      encoding: position encoding; acts in self-attention only.
      width: model width D.
      epsilon: epsilon of the norm of summaries, that of the stack's norms.
      memory_width: width of the memory that cross-attention reads; None: `width`.
    """

    config: AttentionConfig
    encoding: EncodingConfig
    width: int
    epsilon: float = 1e-6
    memory_width: int | None = None

    def setup(self) -> None:
        config, width = self.config, self.width
        self.heads, self.kv_heads, self.head_width = head_shape(config, width)
        key_bias = config.bias if config.key_bias is None else config.key_bias
        output_bias = config.bias if config.output_bias is None else config.output_bias
        dense = functools.partial(Dense, init_scale=config.init_scale)
        project = dense if config.input == "whole" else functools.partial(ChunkDense, init_scale=config.init_scale)
        keys = (self.memory_width or width, self.kv_heads, self.head_width)
        self.query = project((width, self.heads, self.head_width), ("embed", "heads", "head"), bias=config.bias)
        self.key = project(keys, ("embed", "kv_heads", "head"), bias=key_bias)
        self.value = project(keys, ("embed", "kv_heads", "head"), bias=config.bias)
        if config.gate:
            self.gate = project((width, self.heads, self.head_width), ("embed", "heads", "head"), bias=config.bias)
        if config.norm is not None:
            self.query_norm, self.key_norm = Norm(config.norm), Norm(config.norm)
        if config.summary is not None:
            self.summary_norm = Norm(NormConfig("rms", epsilon=self.epsilon))
        if config.output:
            self.out = dense((self.heads, self.head_width, width), ("heads", "head", "embed"), 2, output_bias)
        self.sink = zeros_parameter(self, "sink", ("heads",), (self.heads,)) if config.sink else None
        residual = config.value_residual
        if residual is not None and residual.learned:
            start = jnp.asarray([residual.first, residual.own], jnp.float32)
            init = lambda key, shape: jnp.broadcast_to(start, shape)  # noqa: E731
            self.value_scales = parameter(self, "value_scales", init, (None,), (2,))
        layer = encodings.get(self.encoding.kind).layer
        if layer is not None:
            self.position = layer(self.encoding, config, width)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        mask: Mask,
        position: Any = None,
        memory: Float[Array, "B S _"] | KeyValues | None = None,
        cache: LayerCache | None = None,
        layer: Int[Array, ""] | None = None,
        first_values: Float[Array, "B T G K"] | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None, *tuple[Float[Array, "B T G K"], ...]]:
        """Attention output `[B, T, D]` for queries from `x`, and the updated cache.

        Args:
          mask: over T query slots and S key slots, those of `x`, of the cache or of the memory.
          position: result of the encoding's `shared` hook for the slots of `x`; None in cross-attention.
          memory: cross-attention only: the encoder's output, or its keys and values from `project_keys_values`.
          cache: self-attention only: new keys and values are written at its index, then all of it is attended to.
          layer: index of this layer from 0, for configs whose layers differ.
          first_values: with `config.value_residual` the values of layer 0 for the slots of `x`; layer 0 reads none.

        Returns:
          The output, and the cache after the write (None without one). With `config.value_residual` also the values of
          layer 0, for the layers after it.

        Raises:
          ConfigError: `config.value_residual` without the layer's index or `first_values`.
        """
        encoding = encodings.get(self.encoding.kind) if memory is None else encodings.Encoding()
        if memory is None:
            q, k, v = project_jointly(x, self.query, self.key, self.value)
            k, v = self.finish_keys_values(k, v)
            if self.config.value_residual is not None:
                v, first_values = self.mix_values(self.config.value_residual, v, first_values, layer)
        else:
            q = self.query(x)
            k, v = memory.to_kernel_layout() if isinstance(memory, KeyValues) else self.project_keys_values(memory)
        q = remat.name_activation(q, "query")
        if self.config.norm is not None:
            q = self.normalise(self.query_norm, q)
        if encoding.layer is not None:
            position = self.position(position, self.query, self.key)
        if encoding.rotate is not None:
            q, k = encoding.rotate(self.encoding, q, position), encoding.rotate(self.encoding, k, position)
            v = encoding.rotate(self.encoding, v, position) if self.encoding.rotate_values else v
        if memory is None and self.config.summary is not None:
            k, v, mask = self.append_summaries(x, k, v, mask, self.config.summary)
        if cache is not None:
            cache = cache.write(k, v)
            k, v = cache.read()
        o = self.attend(q, k, v, mask, position, encoding, layer)
        if self.config.gate:
            o = o * jax.nn.sigmoid(self.gate(x).astype(jnp.float32)).astype(o.dtype)
        more = () if self.config.value_residual is None or first_values is None else (first_values,)
        if not self.config.output:
            return o.reshape(*x.shape[:-1], self.width), cache, *more
        return self.out(o), cache, *more

    def mix_values(
        self,
        config: ValueResidualConfig,
        v: Float[Array, "B T G K"],
        first_values: Float[Array, "B T G K"] | None,
        layer: Int[Array, ""] | None,
    ) -> tuple[Float[Array, "B T G K"], Float[Array, "B T G K"]]:
        """The values that this layer attends to, and those of layer 0."""
        if layer is None or first_values is None:
            raise ConfigError(
                "attention.value_residual: got a layer without its index or the values of the first layer, expected "
                "both; set attention.value_residual to None"
            )
        first_values = jnp.where(layer == 0, v, first_values)
        first, own = self.value_scales.astype(v.dtype) if config.learned else (config.first, config.own)
        return jnp.where(layer == 0, v, first * first_values + own * v), first_values

    def attend(
        self,
        q: Float[Array, "B T H K"],
        k: Float[Array, "B S G K"],
        v: Float[Array, "B S G K"],
        mask: Mask,
        position: Any,
        encoding: encodings.Encoding,
        layer: Int[Array, ""] | None = None,
    ) -> Float[Array, "B T H K"]:
        """Attention output per head, before the output projection: `[B, T, H, K]`. `q` is not yet scaled."""
        if self.config.scale:
            width = self.config.scale_width or self.head_width
            q = q * jnp.asarray((encoding.terms(self.encoding) * width) ** -0.5, q.dtype)
        if self.config.scale_by_layer:
            if layer is None:
                raise ConfigError("attention.scale_by_layer: got True without a layer index, expected False; unset it")
            q = q / (layer + 1).astype(q.dtype)
        if self.config.temperature is not None:
            q = q * temperature(self.config.temperature, mask.query.position)[..., None, None].astype(q.dtype)
        q = constrain(q, "batch", "length", "act_heads", None)
        bias = None
        if encoding.bias is not None:
            heads = None if encoding.heads is None else encoding.heads(position)
            bias = AttentionBias(functools.partial(encoding.checked_bias, self.encoding), position, heads)
        if mask.blocks is not None and mask.blocks.repeats:
            bias = add_repeats(bias, mask.blocks)
        o = self.apply_kernel(q, k, v, mask, bias)
        if self.config.average_padding:
            o = jnp.where((mask.query.segment < 0)[..., None, None], mean_value(v, self.heads).astype(o.dtype), o)
        return o

    def append_summaries(
        self, x: Float[Array, "B T D"], k: Float[Array, "B S G K"], v: Float[Array, "B S G K"], mask: Mask, size: int
    ) -> tuple[Float[Array, "B _ G K"], Float[Array, "B _ G K"], Mask]:
        """Keys, values and mask with one more key for each block of `size` positions, at positions < 0.

        There are T / size of them, rounded up: a text that begins within a block can end as many. Padding is left out
        of the sums, and blocks without a full one's end are visible to nobody.
        """
        slots, count = mask.query, -(-x.shape[1] // size)
        full = full_blocks(slots, size)
        block = jnp.where(slots.segment > 0, block_of_slot(slots.position, full, size), -1)
        members = jax.nn.one_hot(block, count, dtype=x.dtype)
        sums = jnp.einsum("btd,btn->bnd", x, members, preferred_element_type=jnp.float32).astype(x.dtype)
        number = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (x.shape[0], count))
        is_full = number < full[:, None]
        more_k, more_v = self.project_keys_values(self.summary_norm(sums, is_full))
        key = Slots(
            jnp.concatenate([mask.key.position, -1 - number], axis=1),
            jnp.concatenate([mask.key.segment, is_full.astype(jnp.int32)], axis=1),
        )
        k, v = jnp.concatenate([k, more_k], axis=1), jnp.concatenate([v, more_v], axis=1)
        return k, v, mask.replace(key=key, same_slots=False, summaries=True)

    def project_keys_values(
        self, memory: Float[Array, "B S _"]
    ) -> tuple[Float[Array, "B S G K"], Float[Array, "B S G K"]]:
        """Keys and values of `memory`. Decoding computes them once and passes them as `memory`."""
        return self.finish_keys_values(*project_jointly(memory, self.key, self.value))

    def finish_keys_values(
        self, k: Float[Array, "B S G K"], v: Float[Array, "B S G K"]
    ) -> tuple[Float[Array, "B S G K"], Float[Array, "B S G K"]]:
        """Keys (normalised if `config.norm` is set) and values, both named for rematerialisation."""
        k, v = remat.name_activation(k, "key"), remat.name_activation(v, "value")
        return k if self.config.norm is None else self.normalise(self.key_norm, k), v

    def normalise(self, norm: Norm, x: Float[Array, "B T H K"]) -> Float[Array, "B T H K"]:
        """Normalised queries or keys: each head by itself, or all channels of the heads together."""
        if self.config.norm_over == "head":
            return norm(x)
        return norm(x.reshape(*x.shape[:-2], -1)).reshape(x.shape)

    def apply_kernel(
        self,
        q: Float[Array, "B T H K"],
        k: Float[Array, "B S G K"],
        v: Float[Array, "B S G K"],
        mask: Mask,
        bias: AttentionBias | None,
    ) -> Float[Array, "B T H K"]:
        """Output `[B, T, H, K]` of the kernel. Probabilities are sown if the collection "intermediates" is mutable."""
        config, dropout = self.config, None
        if not is_zero(config.dropout) and self.has_rng("dropout"):
            dropout = AttentionDropout(config.dropout, self.make_rng("dropout"))
        if self.is_mutable_collection("intermediates"):
            self.sow("intermediates", "probabilities", dense.kernel_weights(q, k, mask, bias, config, self.sink))
        return kernels.apply(q, k, v, mask, bias, dropout, config, self.sink)


def add_repeats(bias: AttentionBias | None, blocks: Blocks) -> AttentionBias:
    """`bias`, or none, with that of the keys that count several times."""

    def both(args: PyTree, q: Array, k: Array, query_position: Array, key_position: Array) -> Array:
        added = blocks.bias(query_position, key_position)
        return added if bias is None else bias.function(args, q, k, query_position, key_position) + added

    return AttentionBias(both, (), ()) if bias is None else bias._replace(function=both)


def temperature(config: TemperatureConfig, position: Int[Array, "B T"]) -> Float32[Array, "B T"]:
    """Factor on the scores of each query by its position p: 1 + rate ln(1 + floor(p / length)).

    Softmax over more keys is flatter, and the factor sharpens it again (Meta 2025, Llama 4; Nakanishi 2025,
    Scalable-Softmax).
    """
    blocks = jnp.floor(jnp.maximum(position, 0) / config.length)
    return 1.0 + config.rate * jnp.log1p(blocks)


def mean_value(v: Float[Array, "B S G K"], heads: int) -> Float[Array, "B 1 H K"]:
    """Mean of all values over the slots, padding included, for each query head."""
    mean = jnp.mean(v.astype(jnp.float32), axis=1, keepdims=True)
    return jnp.repeat(mean, heads // v.shape[2], axis=2)


def head_shape(config: AttentionConfig, width: int) -> tuple[int, int, int]:
    """Number of query heads H, number of key heads G, and head width K, as the kernel of a whole row sees them."""
    if config.latent is not None:
        return config.heads, config.heads, max(config.latent.query_width, config.latent.values_width)
    return config.heads, config.kv_heads or config.heads, config.head_width or width // config.heads
