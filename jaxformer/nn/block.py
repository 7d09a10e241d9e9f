"""One transformer layer: self-attention, cross-attention over a memory (if any), feed-forward."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable

import flax.struct
import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Bool, Float, Int

from jaxformer.config import AttentionConfig, StackConfig
from jaxformer.errors import ConfigError
from jaxformer.nn import remat
from jaxformer.nn.attention import Attention
from jaxformer.nn.cache import DeltaState, KeyValues, LayerCache, LayerMemory
from jaxformer.nn.convolution import Convolved
from jaxformer.nn.encodings.rope import ByWindow
from jaxformer.nn.ffn import FeedForward
from jaxformer.nn.gated_delta import GatedDelta
from jaxformer.nn.latent_attention import LatentAttention
from jaxformer.nn.layers import Dropout, Norm
from jaxformer.nn.masks import Mask
from jaxformer.nn.moe import MoE
from jaxformer.parallel.rules import constrain
from jaxformer.types import Array

SubLayer = Callable[[Array], Array]
"""Attention or a feed-forward layer, as a function `[B, T, D] -> [B, T, D]`."""

NO_WINDOW = 2**30
"""Attention window beyond every distance: layers without a window use it where others have one."""


class LayerContext(flax.struct.PyTreeNode):
    """Inputs that all layers of a stack share.

    Attributes:
      mask: mask of self-attention.
      position: result of the encoding's `shared` hook.
      memory: the encoder's output `[B, S, D]`; None if its keys and values are precomputed.
      memory_mask: mask of cross-attention; None without a memory.
      index: when decoding, the cache slot to write to.
      convolved: output of the convolution, which the first layer adds.
    """

    mask: Mask
    position: Any = None
    memory: Array | None = None
    memory_mask: Mask | None = None
    index: Array | None = None
    convolved: Convolved | None = None


class Block(nn.Module):
    """A transformer layer with the signature of `nn.scan`: residual stream and cache are the carry.

    `config.norm.order` places the norms around a sub-layer f: pre `x + f(norm(x))` (Xiong et al. 2020), post
    `norm(x + f(x))` (Vaswani et al. 2017), sandwich `x + norm(f(norm(x)))` (Ding et al. 2021), res_post
    `x + norm(f(x))` (Liu et al. 2022, Swin Transformer V2; OLMo et al. 2024, OLMo 2). A disabled residual drops the
    `x +`. With `config.residual_after_norm` pre order is `norm(x) + f(norm(x))`. Without `config.first_norm` attention
    reads x itself; the stack sets that for the first layer alone.

    With `config.sublayers` parallel the layer is `x + f(norm_f(x)) + g(norm_g(x))`, for attention f and feed-forward g
    (Black et al. 2022, GPT-NeoX-20B, section 2.1.2). With parallel_one_norm both read the attention's norm (GPT-J).

    Norms, dropout and residual sums act on each slot alone, so between sub-layers the slots are also sharded over the
    tensor axis (sequence parallelism, Korthikanti et al. 2022). The all-reduce after a sub-layer becomes a
    reduce-scatter after it and an all-gather before the next, which send equally many bytes.
    """

    config: StackConfig

    @nn.compact
    def __call__(
        self,
        carry: tuple[Float[Array, "B T D"], LayerMemory | None, *tuple[Float[Array, "B T G K"], ...]],
        layer: Int[Array, ""],
        memory: KeyValues | None,
        context: LayerContext,
    ) -> tuple[tuple[Float[Array, "B T D"], LayerMemory | None, *tuple[Float[Array, "B T G K"], ...]], None]:
        """Residual stream and cache after this layer. The output is sown if "intermediates" is mutable.

        Args:
          carry: residual stream and cache before this layer. The cache is that of the stack, or this layer's alone.
            With `attention.value_residual` the values of layer 0 are the third; before it, any of their shape.
          layer: index of this layer from 0.
          memory: this layer's keys and values for cross-attention, if precomputed.
        """
        config, (x, keys_values, *first_values) = self.config, carry
        if config.delta is not None:
            return self.delta_layer(x, keys_values, layer, memory, context)
        attention = self_attention(config)
        cache = None
        if isinstance(keys_values, KeyValues) and context.index is not None:
            cache = LayerCache(keys_values, layer if keys_values.stacked else None, context.index)
        mask, position = depend_on_layer(context.mask, layer), context.position
        if config.attention.window is not None and windows_differ(config.attention):
            window = jnp.where(has_window(config.attention, layer), config.attention.window, NO_WINDOW)
            mask = mask.replace(window=window)
        if isinstance(position, ByWindow):
            position = position.of_layer(has_window(config.attention, layer))

        def attend(y: Array) -> Array:
            nonlocal cache, first_values
            more: dict[str, Any] = (
                {} if config.attention.value_residual is None else {"first_values": next(iter(first_values), None)}
            )
            y, cache, *first_values = attention(y, mask, position, cache=cache, layer=layer, **more)
            return y

        if config.sublayers != "sequential":
            x = self.parallel_sublayers(x, attend, self.feed_forward(context), context)
        else:
            x = self.sequential_sublayers(x, attend, layer, memory, context)
        if context.convolved is not None:
            x = context.convolved.add(x, layer)
        self.sow("intermediates", "output", x)
        return (x, None if cache is None else cache.keys_values, *first_values), None

    def delta_layer(
        self,
        x: Float[Array, "B T D"],
        state: LayerMemory | None,
        layer: Int[Array, ""],
        memory: KeyValues | None,
        context: LayerContext,
    ) -> tuple[tuple[Float[Array, "B T D"], DeltaState | None], None]:
        """The layer with the gated delta rule in the place of attention; `context` gives it the segments alone."""
        config, segment = self.config, context.mask.query.segment
        if config.delta is None or isinstance(state, KeyValues):
            raise ConfigError("delta: got a cache of keys and values, expected a state; decode with the stack's own")
        mixer = GatedDelta(config.delta, config.width, name="gated_delta")
        before, after = state, state

        def mix(y: Array) -> Array:
            nonlocal after
            y, after = mixer(y, segment, before)
            return y

        if config.sublayers != "sequential":
            x = self.parallel_sublayers(x, mix, self.feed_forward(context), context)
        else:
            x = self.sequential_sublayers(x, mix, layer, memory, context)
        self.sow("intermediates", "output", x)
        return (x, after), None

    def sequential_sublayers(
        self,
        x: Float[Array, "B T D"],
        attend: SubLayer,
        layer: Int[Array, ""],
        memory: KeyValues | None,
        context: LayerContext,
    ) -> Float[Array, "B T D"]:
        """Self-attention, cross-attention over a memory (if any) and feed-forward, one after the other."""
        config = self.config
        x = self.sublayer("attention", x, attend, config.residual_attention, context)
        if context.memory_mask is not None:
            own = cross_attention(config.attention)
            cross = Attention(own, config.encoding, config.width, name="cross")
            source = context.memory if memory is None else memory
            memory_mask = depend_on_layer(context.memory_mask, layer)
            attend_memory = lambda y: cross(y, memory_mask, memory=source, layer=layer)[0]  # noqa: E731
            x = self.sublayer("cross", x, attend_memory, config.residual_cross, context)
        if config.ffn is not None:
            x = self.sublayer("ffn", x, self.feed_forward(context), config.residual_ffn, context)
        return x

    def feed_forward(self, context: LayerContext) -> SubLayer:
        """The feed-forward layer, or the mixture of experts in its place, as a function `[B, T, D] -> [B, T, D]`.

        Raises:
          ConfigError: the stack has none.
        """
        config = self.config
        if config.ffn is None:
            raise ConfigError("ffn: got None, expected a section for parallel sub-layers; set sublayers to sequential")
        if config.moe is None:
            return FeedForward(config.ffn, config.width, name="ffn")
        mixture = MoE(config.ffn, config.moe, config.width, name="ffn")
        return lambda y: mixture(y, context.mask.query.segment != 0)

    def parallel_sublayers(
        self, x: Float[Array, "B T D"], attend: SubLayer, ffn: SubLayer, context: LayerContext
    ) -> Float[Array, "B T D"]:
        """Self-attention and feed-forward that read the same residual stream, and are added to it together.

        Raises:
          ConfigError: there is a memory to attend to, or the norms are not in pre order.
        """
        if context.memory_mask is not None or self.config.norm.order != "pre":
            raise ConfigError(
                "sublayers: got parallel with cross-attention or with norms that are not in pre order, expected "
                "sequential; change sublayers"
            )
        y = self.normalise("attention", x, context)
        z = y if self.config.sublayers == "parallel_one_norm" else self.normalise("ffn", x, context)
        y, z = self.branch("attention", y, attend, context), self.branch("ffn", z, ffn, context)
        return constrain(x + y + z, "batch", "act_length", "act_embed")

    def sublayer(
        self,
        name: str,
        x: Float[Array, "B T D"],
        function: SubLayer,
        residual: bool,
        context: LayerContext,
    ) -> Float[Array, "B T D"]:
        """Output `[B, T, D]` of `function` wrapped in the norms, dropout and residual sum of `config`."""
        norm = self.config.norm
        is_bare = name == "attention" and not self.config.first_norm
        y = self.normalise(name, x, context) if norm.order in ("pre", "sandwich") and not is_bare else x
        x = y if self.config.residual_after_norm else x
        y = self.branch(name, y, function, context)
        y = x + y if residual else y
        if norm.order == "post":
            y = self.normalise(name, y, context)
        return constrain(y, "batch", "act_length", "act_embed")

    def normalise(self, name: str, x: Float[Array, "B T D"], context: LayerContext) -> Float[Array, "B T D"]:
        """The norm of the sub-layer `name`."""
        return Norm(self.config.norm, name=f"{name}_norm")(x, context.mask.query.segment != 0)

    def branch(
        self, name: str, y: Float[Array, "B T D"], function: SubLayer, context: LayerContext
    ) -> Float[Array, "B T D"]:
        """`function(y)`, with a norm after it (sandwich, res_post) and dropout: the summand of the residual."""
        norm = self.config.norm
        y = constrain(y, "batch", "act_length", "act_embed")  # makes the gradient's all-reduce a reduce-scatter
        y = function(constrain(y, "batch", "length", "act_embed"))
        y = remat.name_activation(constrain(y, "batch", "act_length", "act_embed"), name)
        if norm.order == "sandwich":
            y = Norm(norm, name=f"{name}_post_norm")(y, context.mask.query.segment != 0)
        elif norm.order == "res_post":
            y = self.normalise(name, y, context)
        return Dropout(self.config.dropout)(y)


def self_attention(config: StackConfig) -> Attention | LatentAttention:
    """The self-attention of a layer, named "attention"."""
    own = config.attention
    if own.latent is not None:
        return LatentAttention(own, own.latent, config.encoding, config.width, name="attention")
    return Attention(own, config.encoding, config.width, config.norm.epsilon, name="attention")


def cross_attention(config: AttentionConfig) -> AttentionConfig:
    """Config of a layer's cross-attention, from that of its self-attention."""
    unset = dict.fromkeys(("window", "sparse", "summary", "latent", "value_residual", "temperature"))
    return dataclasses.replace(config, **unset, gate=False)


def windows_differ(config: AttentionConfig) -> bool:
    """True if some layers have the window and others not, so that a layer's number decides."""
    return bool(config.window_layers) or config.window_every > 1


def has_window(config: AttentionConfig, layer: Int[Array, ""]) -> Bool[Array, ""]:
    """True if the layer with this number from 0 has the window of `config`."""
    if config.window_layers:
        return jnp.any(layer == jnp.asarray(config.window_layers))
    return layer % config.window_every == config.window_every - 1


def depend_on_layer(mask: Mask, layer: Int[Array, ""]) -> Mask:
    """`mask` with the same values, computed anew in each layer of a scan.

    A scan over layers with a loop-invariant mask keeps every tile of the scores for the backward pass, although the
    kernel has a custom gradient: memory then grows with the square of the length. The cause is unknown (seen in the
    jaxprs of JAX 0.10.2 and 0.12.0.1).
    """
    return mask.replace(query=jax.tree.map(lambda ids: ids + 0 * layer, mask.query))
