"""One transformer layer: self-attention, cross-attention if there is a memory, feed-forward."""

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
from jaxformer.nn.cache import Cache, KeyValues
from jaxformer.nn.convolution import Convolved
from jaxformer.nn.ffn import FeedForward
from jaxformer.nn.layers import Dropout, Norm
from jaxformer.nn.masks import Mask
from jaxformer.nn.moe import MoE
from jaxformer.parallel.rules import constrain
from jaxformer.types import Array

EVERYTHING = 2**30
"""A window that no distance exceeds."""


@flax.struct.dataclass
class Context:
    """What all layers of a stack share.

    Attributes:
      mask: self-attention's.
      position: what the encoding's `shared` hook returned.
      memory: the encoder's output `[B, S, D]`, when its keys and values are not precomputed.
      memory_mask: cross-attention's.
      index: the cache slot to write to, when decoding.
      convolved: the convolution that the first layer adds.
    """

    mask: Mask
    position: Any = None
    memory: Array | None = None
    memory_mask: Mask | None = None
    index: Array | None = None
    convolved: Convolved | None = None


class Block(nn.Module):
    """A layer, in the signature that `nn.scan` wants: the residual stream is the carry.

    Where the norms stand is `config.norm.order`: pre (Xiong et al. 2020) `x + f(norm(x))`, post (Vaswani et al. 2017)
    `norm(x + f(x))`, sandwich (Ding et al. 2021) `x + norm(f(norm(x)))`. A residual that is off drops the `x +`.

    Between the sub-layers, where norm, dropout and sum treat each slot for itself, the slots are divided over the
    tensor axis too (sequence parallelism, Korthikanti et al. 2022): what was an all-reduce after each sub-layer is then
    a reduce-scatter after it and an all-gather before the next, of equally many bytes.
    """

    config: StackConfig

    @nn.compact
    def __call__(
        self,
        carry: tuple[Float[Array, "B T D"], KeyValues | None],
        layer: Int[Array, ""],
        memory: KeyValues | None,
        context: Context,
    ) -> tuple[tuple[Float[Array, "B T D"], KeyValues | None], None]:
        """The residual stream after this layer, and the cache with what this layer wrote to it.

        `carry` is the two as the layers before left them, the cache the whole stack's or this layer's own. `layer` is
        its number, `memory` its own keys and values for cross-attention, if they are projected already. With the
        collection "intermediates" mutable its output is sown there.
        """
        config, (x, held) = self.config, carry
        attention = Attention(config.attention, config.encoding, config.width, name="attention")
        cache = None if held is None else Cache(held, layer if held.k.ndim == 5 else None, context.index)
        mask = of_layer(context.mask, layer)
        if config.attention.window is not None and config.attention.window_every > 1:
            banded = layer % config.attention.window_every == config.attention.window_every - 1
            mask = mask.replace(window=jnp.where(banded, config.attention.window, EVERYTHING))

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
            seen = of_layer(context.memory_mask, layer)
            look = lambda y: cross(y, seen, memory=source, layer=layer)[0]  # noqa: E731
            x = self.sublayer("cross", x, look, config.residual_cross, context)
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
        return (x, None if cache is None else cache.held), None

    def sublayer(
        self,
        name: str,
        x: Float[Array, "B T D"],
        function: Callable[[Array], Array],
        residual: bool,
        context: Context,
    ) -> Float[Array, "B T D"]:
        """`function` with the norms, dropout and residual sum of `config` around it."""
        norm, visible = self.config.norm, context.mask.query.segment != 0
        y = x if norm.order == "post" else Norm(norm, name=f"{name}_norm")(x, visible)
        y = constrain(y, "batch", "act_length", "act_embed")  # its gradient's layout: a reduce-scatter, no all-reduce
        y = function(constrain(y, "batch", "length", "act_embed"))
        y = remat.name(constrain(y, "batch", "act_length", "act_embed"), name)
        if norm.order == "sandwich":
            y = Norm(norm, name=f"{name}_post_norm")(y, visible)
        y = Dropout(self.config.dropout)(y)
        y = x + y if residual else y
        if norm.order == "post":
            y = Norm(norm, name=f"{name}_norm")(y, visible)
        return constrain(y, "batch", "act_length", "act_embed")


def of_layer(mask: Mask, layer: Int[Array, ""]) -> Mask:
    """`mask`, as a value that is each layer's own.

    Seen in the gradients' jaxprs of JAX 0.10.2 and 0.12.0.1, cause unknown: a scan whose mask is the same for all
    layers keeps every tile of the scores for the backward pass, as if the kernel had no rule of its own for it, so that
    memory grows with the square of the length.
    """
    return mask.replace(query=jax.tree.map(lambda ids: ids + 0 * layer, mask.query))
