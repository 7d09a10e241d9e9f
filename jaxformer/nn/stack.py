"""A stack of layers: embedding side, scanned blocks, final norm."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Bool, Float, Int

from jaxformer.config import ConfigError, StackConfig
from jaxformer.nn import encodings, moe, remat
from jaxformer.nn.attention import Attention, shape
from jaxformer.nn.block import Block, Context
from jaxformer.nn.cache import KeyValues, precision
from jaxformer.nn.convolution import Convolution, Convolved
from jaxformer.nn.layers import Dropout, Norm
from jaxformer.nn.masks import Mask
from jaxformer.parallel import mesh, pipeline
from jaxformer.parallel.rules import constrain
from jaxformer.types import Array, PyTree, Slots

MAX_UNROLLED = 128
"""Layers of one scan iteration at most, unless the config says more: each is compiled by itself, a second or so."""


class Rows(NamedTuple):
    """What of a stack's context belongs to the rows of a batch, and is divided with them into microbatches."""

    slots: Slots
    kind: Array | None
    memory: Array | None
    memory_slots: Slots | None
    convolved: Convolved | None


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
        block = Block
        if config.remat != "none":
            # A loop keeps the compiler from merging a recomputation with the original; unrolled layers need help.
            block = nn.remat(Block, policy=remat.policy(config), prevent_cse=unroll(config) > 1)
        # Parameters are drawn in a loop: that program runs once, and unrolled it takes long to compile.
        at_once = 1 if self.is_initializing() else unroll(config)
        self.blocks = nn.scan(
            block,
            variable_axes={"params": 0, "batch_stats": 0, "intermediates": 0, moe.COLLECTION: 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=(0, 0, nn.broadcast),
            length=config.layers,
            unroll=at_once,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )(config)
        if has_final_norm(config):
            self.final_norm = Norm(config.norm)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        slots: Slots,
        memory: Float[Array, "B S D"] | KeyValues | None = None,
        memory_slots: Slots | None = None,
        held: KeyValues | None = None,
        held_slots: Slots | None = None,
        index: Int[Array, ""] | None = None,
        kind: Int[Array, "B T"] | None = None,
        seen: Bool[Array, "B T _"] | None = None,
    ) -> tuple[Float[Array, "B T D"], KeyValues | None]:
        """Runs the stack on embeddings that stand at `slots`.

        Args:
          memory: the encoder's output, or `project`'s keys and values of it.
          memory_slots: the slots of the memory.
          held: cached keys and values; `index` says where the new ones go, and `held_slots` are the
            slots of the cache with the new ones already in.
          kind: token types, for encodings in which they act.
          seen: which slots of the cache are in each new one's past, where the rules of a mask do not say.

        Returns:
          Hidden states after the final norm, and the written cache.
        """
        config = self.resolved
        encoding = encodings.get(config.encoding.kind)
        if encoding.embed is not None:
            x = x + self.position(slots).astype(x.dtype)
        visible = slots.segment != 0
        if config.embed.norm:
            x = self.embed_norm(x, visible)
        if config.attention.average_padding:
            x = jnp.where((slots.segment < 0)[..., None], jnp.zeros((), x.dtype), x)
        x = self.embed_dropout(x)
        convolved = None if config.conv is None else self.conv(x, slots.segment)
        self.sow("intermediates", "input", x)
        precomputed = isinstance(memory, KeyValues)
        parts = config.microbatches or pipeline.stages()
        if held is None and not precomputed and self.can_pipeline(x.shape[0], parts):
            x = self.pipelined(x, Rows(slots, kind, memory, memory_slots, convolved), parts)
        else:
            context = Context(
                mask=Mask(
                    slots,
                    slots if held is None else held_slots,
                    self.causal,
                    config.attention.window,
                    hidden=None if seen is None else ~seen,
                    own=held is None,
                ),
                position=self.position_of(slots, kind),
                memory=None if precomputed else memory,
                memory_mask=None if memory is None else cross_mask(slots, memory_slots),
                index=index,
                convolved=convolved,
            )
            memory = memory if precomputed else None
            if held is not None and apart(config):
                x, held = self.one_by_one(x, held, memory, context)
            else:
                (x, held), _ = self.blocks((x, held), jnp.arange(config.layers), memory, context)
        if has_final_norm(config):
            x = self.final_norm(x, visible)
        x = constrain(x, "batch", "length", "act_embed")
        self.sow("intermediates", "output", x)
        return x, held

    def one_by_one(
        self, x: Float[Array, "B T D"], held: KeyValues, memory: KeyValues | None, context: Context
    ) -> tuple[Float[Array, "B T D"], KeyValues]:
        """`blocks` against a cache, when decoding is unrolled: each layer with arrays of its own, see `unstack`."""
        block, written = Block(self.resolved, parent=None), []
        for layer, weights in enumerate(self.each()):
            seen = None if memory is None else memory.layer(layer)
            (x, own), _ = block.apply(weights, (x, held.layer(layer)), jnp.int32(layer), seen, context)
            written.append(own)
        return x, KeyValues.of_layers(written)

    def each(self) -> list[PyTree]:
        """The variables of each layer by itself, whether `unstack` has cut them apart already or not."""
        held = self.blocks.variables
        parts = {name: part if "0" in part else unstack(part, self.config.layers) for name, part in held.items()}
        return [{name: part[str(i)] for name, part in parts.items()} for i in range(self.config.layers)]

    def can_pipeline(self, rows: int, parts: int) -> bool:
        """Whether the mesh has stages, and `rows` of a batch can pass through them in `parts` microbatches.

        Where they cannot (decoding with a cache, rows that do not divide, intermediate values that are asked for) the
        layers are scanned as ever: the partitioner then brings each layer's parameters to where they are needed.
        """
        if pipeline.stages() == 1 or self.is_initializing() or self.is_mutable_collection("intermediates"):
            return False
        return self.config.norm.kind != "batch" and pipeline.divides(rows, self.config.layers, parts)

    def pipelined(self, x: Float[Array, "B T D"], rows: Rows, parts: int) -> Float[Array, "B T D"]:
        """`blocks` without a cache, each stage of the mesh running its own layers: see parallel/pipeline.py.

        Dropout draws from a key of its own for every layer and microbatch, so its masks are not those of the scan.
        """
        config, causal = self.resolved, self.causal
        block, position = Block(config, parent=None), None
        shared: dict[str, Any] = {"position": {}, "convolved": None, "key": None}
        if encodings.get(config.encoding.kind).shared is not None:
            position, shared["position"] = self.shared.unbind()
        if rows.convolved is not None:
            shared["convolved"] = rows.convolved.params
            rows = rows._replace(convolved=rows.convolved.replace(params=None))
        if self.has_rng("dropout"):
            shared["key"] = self.make_rng("dropout")

        def prepare(rows: Rows, shared: dict[str, Any]) -> tuple[Context, Array | None]:
            kinds = (rows.kind,) if encodings.get(config.encoding.kind).kinds else ()
            context = Context(
                mask=Mask(rows.slots, rows.slots, causal, config.attention.window, own=True),
                position=None if position is None else position.apply(shared["position"], rows.slots, *kinds),
                memory=rows.memory,
                memory_mask=None if rows.memory is None else cross_mask(rows.slots, rows.memory_slots),
                convolved=rows.convolved and rows.convolved.replace(params=shared["convolved"]),
            )
            return context, shared["key"]

        def layer(weights: Any, x: Array, context: tuple, number: Array, part: Array) -> tuple[Array, tuple]:
            context, key = context
            rngs = {} if key is None else {"dropout": jax.random.fold_in(jax.random.fold_in(key, number), part)}
            given = ({"params": weights}, (x, None), number, None, context)
            ((x, _), _), said = block.apply(*given, rngs=rngs, mutable=[moe.COLLECTION])
            return x, said

        if config.remat != "none":
            layer = jax.checkpoint(layer, policy=remat.policy(config), prevent_cse=False)
        x, said = pipeline.pipeline(prepare, layer, self.blocks.variables["params"], x, rows, shared, parts)
        for load in jax.tree.leaves(said, is_leaf=lambda leaf: isinstance(leaf, moe.Load)):
            self.sow(moe.COLLECTION, "load", load)
        return x

    def position_of(self, slots: Slots, kind: Int[Array, "B T"] | None = None) -> Any:
        """What all layers share of the encoding."""
        encoding = encodings.get(self.config.encoding.kind)
        if encoding.shared is None:
            return None
        return self.shared(slots, kind) if encoding.kinds else self.shared(slots)

    def project(self, memory: Float[Array, "B S D"]) -> KeyValues:
        """Cross-attention keys and values of the encoder's output, for every layer at once."""
        config = self.resolved
        attention = Attention(config.attention, config.encoding, config.width, parent=None)

        def layer(weights: Any) -> KeyValues:
            return KeyValues.by_head(*attention.apply({"params": weights}, memory, method=Attention.project))

        if apart(config):
            return KeyValues.of_layers([layer(variables["params"]["cross"]) for variables in self.each()])
        params = self.blocks.variables["params"]["cross"]
        return jax.lax.map(layer, {name: params[name] for name in ("key", "value", "key_norm") if name in params})

    def empty(self, rows: int, length: int, dtype: jnp.dtype) -> KeyValues:
        """A cache with nothing in it, for queries of `dtype`."""
        config, dtype = self.config, precision(dtype)
        _, kv_heads, head_width = shape(config.attention, config.width)
        layers = () if apart(config) else (config.layers,)
        keys = jnp.zeros((*layers, rows, kv_heads, head_width, length), dtype)
        held = KeyValues(keys, jnp.swapaxes(keys, -1, -2))
        return KeyValues.of_layers([held] * config.layers) if apart(config) else held


def cross_mask(query: Slots, memory: Slots) -> Mask:
    """Every real query slot sees the memory slots of its own segment, whatever their positions."""
    return Mask(query, memory)


def has_final_norm(config: StackConfig) -> bool:
    """Pre and sandwich order leave the residual stream unnormalised, so one more norm follows the last layer."""
    return config.norm.order != "post" if config.norm.final is None else config.norm.final


def apart(config: StackConfig) -> bool:
    """Whether decoding treats each layer as a part of the program of its own."""
    return unroll(config) >= config.layers


def unstack(blocks: PyTree, layers: int) -> dict[str, PyTree]:
    """Variables `[L, ...]` of scanned layers, as those of each layer under its number.

    Decoding does this once: in a loop over tokens the CPU compiler would cut all weights out of the stack at each.
    """
    return {str(i): jax.tree.map(lambda x: x[i], blocks) for i in range(layers)}  # noqa: B023


def unroll(config: StackConfig) -> int:
    """Layers per scan iteration. Unrolled layers run faster on CPU; elsewhere compile time matters more."""
    if config.unroll is not None:
        return config.unroll
    return min(config.layers, MAX_UNROLLED) if mesh.platform() == "cpu" else 1
