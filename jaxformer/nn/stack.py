"""A stack of layers: embedding side, scanned blocks, final norm."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxformer.config import ConfigError, StackConfig
from jaxformer.nn import encodings
from jaxformer.nn.attention import Attention, shape
from jaxformer.nn.block import Block, Context
from jaxformer.nn.cache import KeyValues
from jaxformer.nn.convolution import Convolution
from jaxformer.nn.layers import Dropout, Norm
from jaxformer.nn.masks import Mask
from jaxformer.parallel import mesh
from jaxformer.types import Array, Slots


class Stack(nn.Module):
    """The layers of an encoder or decoder, always scanned: parameters are stacked `[L, ...]`, compile time is flat.

    Attributes:
      causal: resolved: whether a slot sees only its past.
    """

    config: StackConfig
    causal: bool

    def setup(self) -> None:
        config = self.config
        if config.encoding.bidirectional is None:
            encoding = dataclasses.replace(config.encoding, bidirectional=not self.causal)
            config = dataclasses.replace(config, encoding=encoding)
        self.resolved = config
        encoding = encodings.get(config.encoding.kind)
        if encoding.embed is not None:
            self.position = encoding.embed(config.encoding, config.width)
        if encoding.shared is not None:
            head_width = shape(config.attention, config.width)[2]
            self.shared = encoding.shared(config.encoding, config.attention, head_width)
        if config.embed.norm:
            self.embed_norm = Norm(config.norm)
        self.embed_dropout = Dropout(config.embed.dropout)
        if config.conv is not None:
            if self.causal:
                raise ConfigError("conv: got a convolution in a causal stack, expected None; it reads the slots ahead")
            self.conv = Convolution(config.conv, config.norm, config.dropout)
        block = Block if config.remat == "none" else nn.remat(Block, prevent_cse=False)
        self.blocks = nn.scan(
            block,
            variable_axes={"params": 0, "batch_stats": 0, "intermediates": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=(0, 0, 0, nn.broadcast),
            length=config.layers,
            unroll=unroll(config),
            metadata_params={nn.PARTITION_NAME: "layers"},
        )(config)
        if has_final_norm(config):
            self.final_norm = Norm(config.norm)

    def __call__(
        self,
        x: Array,
        slots: Slots,
        memory: Array | KeyValues | None = None,
        memory_slots: Slots | None = None,
        held: KeyValues | None = None,
        held_slots: Slots | None = None,
        index: Array | None = None,
        kind: Array | None = None,
    ) -> tuple[Array, KeyValues | None]:
        """Runs the stack on embeddings `[B, T, D]` that stand at `slots`.

        Args:
          memory: the encoder's output `[B, S, D]`, or `project`'s keys and values of it.
          memory_slots: the slots of the memory.
          held: cached keys and values `[L, B, S, G, K]`; `index` says where the new ones go, and `held_slots` are the
            slots of the cache with the new ones already in.
          kind: token types `[B, T]`, for encodings in which they act.

        Returns:
          Hidden states `[B, T, D]` after the final norm, and the written cache.
        """
        config = self.resolved
        encoding = encodings.get(config.encoding.kind)
        if encoding.embed is not None:
            x = x + self.position(slots).astype(x.dtype)
        visible = slots.segment != 0
        if config.embed.norm:
            x = self.embed_norm(x, visible)
        x = self.embed_dropout(x)
        precomputed = isinstance(memory, KeyValues)
        context = Context(
            mask=Mask(slots, slots if held is None else held_slots, self.causal, config.attention.window),
            position=self.position_of(slots, kind),
            memory=None if precomputed else memory,
            memory_mask=None if memory is None else cross_mask(slots, memory_slots),
            index=index,
            convolved=None if config.conv is None else self.conv(x, slots.segment),
        )
        self.sow("intermediates", "input", x)
        x, held = self.blocks(x, jnp.arange(config.layers), held, memory if precomputed else None, context)
        if has_final_norm(config):
            x = self.final_norm(x, visible)
        self.sow("intermediates", "output", x)
        return x, held

    def position_of(self, slots: Slots, kind: Array | None = None) -> Any:
        """What all layers share of the encoding."""
        encoding = encodings.get(self.config.encoding.kind)
        if encoding.shared is None:
            return None
        return self.shared(slots, kind) if encoding.kinds else self.shared(slots)

    def project(self, memory: Array) -> KeyValues:
        """Cross-attention keys and values `[L, B, S, G, K]` of the encoder's output, for every layer at once."""
        config = self.resolved
        params = self.blocks.variables["params"]["cross"]
        attention = Attention(config.attention, config.encoding, config.width, parent=None)

        def layer(weights: Any) -> KeyValues:
            return attention.apply({"params": weights}, memory, method=Attention.project)

        return jax.lax.map(layer, {name: params[name] for name in ("key", "value", "key_norm") if name in params})

    def empty(self, rows: int, length: int, dtype: jnp.dtype) -> KeyValues:
        """A cache `[L, B, S, G, K]` with nothing in it."""
        config = self.config
        _, kv_heads, head_width = shape(config.attention, config.width)
        zeros = jnp.zeros((config.layers, rows, length, kv_heads, head_width), dtype)
        return KeyValues(zeros, zeros)


def cross_mask(query: Slots, memory: Slots) -> Mask:
    """Every real query slot sees the memory slots of its own segment, whatever their positions."""
    return Mask(query, memory)


def has_final_norm(config: StackConfig) -> bool:
    """Pre and sandwich order leave the residual stream unnormalised, so one more norm follows the last layer."""
    return config.norm.order != "post" if config.norm.final is None else config.norm.final


def unroll(config: StackConfig) -> int:
    """Layers per scan iteration. Unrolled layers run faster on CPU; elsewhere compile time matters more."""
    if config.unroll is not None:
        return config.unroll
    return config.layers if mesh.platform() == "cpu" else 1
