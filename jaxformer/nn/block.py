"""One transformer layer: self-attention, cross-attention over a memory (if any), feed-forward."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable

import flax.struct
import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Float, Int

from jaxformer.config import StackConfig
from jaxformer.nn import remat
from jaxformer.nn.attention import Attention
from jaxformer.nn.cache import KeyValues, LayerCache
from jaxformer.nn.convolution import Convolved
from jaxformer.nn.ffn import FeedForward
from jaxformer.nn.layers import Dropout, Norm
from jaxformer.nn.masks import Mask
from jaxformer.nn.moe import MoE
from jaxformer.parallel.rules import constrain
from jaxformer.types import Array

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
    `norm(x + f(x))` (Vaswani et al. 2017), sandwich `x + norm(f(norm(x)))` (Ding et al. 2021). A disabled residual
    drops the `x +`.

    Norms, dropout and residual sums act on each slot alone, so between sub-layers the slots are also sharded over the
    tensor axis (sequence parallelism, Korthikanti et al. 2022). The all-reduce after a sub-layer becomes a
    reduce-scatter after it and an all-gather before the next, which send equally many bytes.
    """

    config: StackConfig

    @nn.compact
    def __call__(
        self,
        carry: tuple[Float[Array, "B T D"], KeyValues | None],
        layer: Int[Array, ""],
        memory: KeyValues | None,
        context: LayerContext,
    ) -> tuple[tuple[Float[Array, "B T D"], KeyValues | None], None]:
        """Residual stream and cache after this layer. The output is sown if "intermediates" is mutable.

        Args:
          carry: residual stream and cache before this layer. The cache is that of the stack, or this layer's alone.
          layer: index of this layer from 0.
          memory: this layer's keys and values for cross-attention, if precomputed.
        """
        config, (x, keys_values) = self.config, carry
        attention = Attention(config.attention, config.encoding, config.width, name="attention")
        cache = None
        if keys_values is not None and context.index is not None:
            cache = LayerCache(keys_values, layer if keys_values.stacked else None, context.index)
        mask = depend_on_layer(context.mask, layer)
        if config.attention.window is not None and config.attention.window_every > 1:
            banded = layer % config.attention.window_every == config.attention.window_every - 1
            mask = mask.replace(window=jnp.where(banded, config.attention.window, NO_WINDOW))

        def attend(y: Array) -> Array:
            nonlocal cache
            y, cache = attention(y, mask, context.position, cache=cache, layer=layer)
            return y

        x = self.sublayer("attention", x, attend, config.residual_attention, context)
        if context.memory_mask is not None:
            cross = Attention(
                dataclasses.replace(config.attention, window=None), config.encoding, config.width, name="cross"
            )
            source = context.memory if memory is None else memory
            memory_mask = depend_on_layer(context.memory_mask, layer)
            attend_memory = lambda y: cross(y, memory_mask, memory=source, layer=layer)[0]  # noqa: E731
            x = self.sublayer("cross", x, attend_memory, config.residual_cross, context)
        if config.ffn is not None:
            if config.moe is None:
                ffn = FeedForward(config.ffn, config.width, name="ffn")
            else:
                mixture = MoE(config.ffn, config.moe, config.width, name="ffn")
                ffn = lambda y: mixture(y, context.mask.query.segment != 0)  # noqa: E731
            x = self.sublayer("ffn", x, ffn, config.residual_ffn, context)
        if context.convolved is not None:
            x = context.convolved.add(x, layer)
        self.sow("intermediates", "output", x)
        return (x, None if cache is None else cache.keys_values), None

    def sublayer(
        self,
        name: str,
        x: Float[Array, "B T D"],
        function: Callable[[Array], Array],
        residual: bool,
        context: LayerContext,
    ) -> Float[Array, "B T D"]:
        """Output `[B, T, D]` of `function` wrapped in the norms, dropout and residual sum of `config`."""
        norm, visible = self.config.norm, context.mask.query.segment != 0
        y = x if norm.order == "post" else Norm(norm, name=f"{name}_norm")(x, visible)
        y = constrain(y, "batch", "act_length", "act_embed")  # makes the gradient's all-reduce a reduce-scatter
        y = function(constrain(y, "batch", "length", "act_embed"))
        y = remat.name_activation(constrain(y, "batch", "act_length", "act_embed"), name)
        if norm.order == "sandwich":
            y = Norm(norm, name=f"{name}_post_norm")(y, visible)
        y = Dropout(self.config.dropout)(y)
        y = x + y if residual else y
        if norm.order == "post":
            y = Norm(norm, name=f"{name}_norm")(y, visible)
        return constrain(y, "batch", "act_length", "act_embed")


def depend_on_layer(mask: Mask, layer: Int[Array, ""]) -> Mask:
    """`mask` with the same values, computed anew in each layer of a scan.

    A scan over layers with a loop-invariant mask keeps every tile of the scores for the backward pass, although the
    kernel has a custom gradient: memory then grows with the square of the length. The cause is unknown (seen in the
    jaxprs of JAX 0.10.2 and 0.12.0.1).
    """
    return mask.replace(query=jax.tree.map(lambda ids: ids + 0 * layer, mask.query))
