"""A stack of layers: position encoding and norm of the input, scanned blocks, final norm."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Bool, Float, Int

from jaxformer.config import StackConfig
from jaxformer.config.layer_groups import has_unlike_layers, layer_groups
from jaxformer.errors import ConfigError
from jaxformer.nn import encodings, moe, remat
from jaxformer.nn.attention import Attention, head_shape
from jaxformer.nn.block import Block, LayerContext, cross_attention
from jaxformer.nn.cache import DeltaState, KeyValues, LayerMemory, MemoryKeyValues, StackKeyValues, cache_dtype
from jaxformer.nn.convolution import Convolution, Convolved
from jaxformer.nn.layers import Dense, Dropout, Norm
from jaxformer.nn.masks import Blocks, Mask
from jaxformer.parallel import mesh, pipeline
from jaxformer.parallel.rules import constrain
from jaxformer.types import Array, PyTree, Slots

MAX_UNROLLED = 128
"""Largest number of layers in one scan iteration by default: each is compiled separately, about a second a layer."""


class RowInputs(NamedTuple):
    """The inputs of a stack that have rows, and are divided with them into microbatches."""

    slots: Slots
    token_type: Array | None
    memory: Array | None
    memory_slots: Slots | None
    convolved: Convolved | None


class Stack(nn.Module):
    """The layers of an encoder or decoder, scanned: parameters are stacked `[L, ...]`, compile time is constant in L.

    With `config.share_layers` (ALBERT, Lan et al. 2020, section 3.1) there is one set of parameters, without axis L.

    Attributes:
      causal: a slot sees only its past (`config.causal` with its default resolved).
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
            self.position = encoding.embed(config.encoding, config.embed.sum_width or config.width)
        if encoding.shared is not None:
            latent = config.attention.latent
            head_width = head_shape(config.attention, config.width)[2] if latent is None else latent.rope_width
            self.shared = encoding.shared(config.encoding, config.attention, head_width)
        if config.embed.norm:
            self.embed_norm = Norm(config.norm)
        self.embed_dropout = Dropout(config.embed.dropout)
        if config.embed.sum_width is not None:
            shape = (config.embed.sum_width, config.width)
            self.embed_projection = Dense(shape, (None, "embed"), bias=config.embed.projection_bias)
        if config.conv is not None:
            if self.causal:
                raise ConfigError("conv: got a convolution in a causal stack, expected None; it reads the slots ahead")
            self.conv = Convolution(config.conv, config.norm, config.dropout)
        if config.layers:  # a scan of length 0 would have parameters of shape [0, ...]
            for group in layer_groups(config):
                setattr(self, group.name, self.scanned_blocks(group.stack))
        if has_final_norm(config):
            self.final_norm = Norm(config.norm)
        if config.output_width is not None:
            self.output_projection = Dense((config.width, config.output_width), ("embed", None), bias=False)

    def scanned_blocks(self, config: StackConfig) -> nn.Module:
        """The layers as one module, whose parameters are stacked, or those of each layer (`config.share_layers`)."""
        block: Any = Block
        if config.remat != "none":
            # In a loop the compiler cannot merge a recomputation with the original; unrolled layers need prevent_cse.
            block = nn.remat(Block, policy=remat.policy(config), prevent_cse=unroll(config) > 1)
        # Initialisation runs once, and an unrolled program takes long to compile.
        layers_per_iteration = 1 if self.is_initializing() else unroll(config)
        stacked: dict[Any, Any] = {"batch_stats": 0, "intermediates": 0, moe.COLLECTION: 0}
        scanned: Any = nn.scan(
            block,
            variable_axes=stacked if config.share_layers else {"params": 0, **stacked},
            variable_broadcast="params" if config.share_layers else False,
            split_rngs={"params": not config.share_layers, "dropout": True},
            in_axes=(0, 0, nn.broadcast),
            length=config.layers,
            unroll=layers_per_iteration,
            metadata_params={nn.PARTITION_NAME: "layers"},
            # The check traces the layer a second time. Without it initial values would be others, from the same key.
            check_constancy_invariants=self.is_initializing(),
        )
        return scanned(config)

    def __call__(
        self,
        x: Float[Array, "B T _"],
        slots: Slots,
        memory: Float[Array, "B S _"] | KeyValues | tuple[KeyValues, ...] | None = None,
        memory_slots: Slots | None = None,
        cache: StackKeyValues | None = None,
        cache_slots: Slots | None = None,
        index: Int[Array, ""] | None = None,
        token_type: Int[Array, "B T"] | None = None,
        visible_slots: Bool[Array, "B T _"] | None = None,
    ) -> tuple[Float[Array, "B T _"], StackKeyValues | None]:
        """Hidden states `[B, T, D]` after the final norm and the last projection, if any, and the updated cache.

        Args:
          x: embeddings of the tokens at `slots`.
          memory: the encoder's output, or its keys and values from `project_memory`.
          memory_slots: the slots of the memory.
          cache: cached keys and values; new ones are written from slot `index` on.
          cache_slots: the slots of the cache, the new ones included.
          token_type: token types, for encodings that use them.
          visible_slots: which cache slots each new slot sees, where the rules of a mask do not say.
        """
        config = self.resolved
        x = self.prepare_input(x, slots)
        convolved = None if config.conv is None else self.conv(x, slots.segment)
        self.sow("intermediates", "input", x)
        projected = memory if isinstance(memory, (KeyValues, tuple)) else None
        encoded = None if isinstance(memory, (KeyValues, tuple)) else memory
        parts = config.microbatches or pipeline.stages()
        if cache is None and projected is None and self.can_pipeline(x.shape[0], parts):
            x = self.apply_pipelined(x, RowInputs(slots, token_type, encoded, memory_slots, convolved), parts)
        else:
            context = self.layer_context(
                RowInputs(slots, token_type, encoded, memory_slots, convolved), cache_slots, index, visible_slots
            )
            if isinstance(cache, tuple):
                x, cache = self.apply_unrolled(x, cache, projected, context)
            elif config.layers:
                first_values = self.first_values(x)
                for blocks, numbers in self.layer_groups():
                    carry = (x, cache, *first_values)
                    (x, cache, *first_values), _ = blocks(carry, jnp.asarray(numbers), projected, context)
        x = constrain(self.finish(x, slots), "batch", "length", "act_embed")
        self.sow("intermediates", "output", x)
        return x, cache

    def finish(self, x: Float[Array, "B T D"], slots: Slots) -> Float[Array, "B T _"]:
        """Hidden states after the final norm and the last projection, if any, from the output of the last layer."""
        if has_final_norm(self.resolved):
            x = self.final_norm(x, slots.segment != 0)
        return x if self.resolved.output_width is None else self.output_projection(x)

    def layer_context(
        self,
        rows: RowInputs,
        cache_slots: Slots | None = None,
        index: Int[Array, ""] | None = None,
        visible_slots: Bool[Array, "B T _"] | None = None,
    ) -> LayerContext:
        """The inputs that all layers share; see `__call__`. Without `cache_slots` the keys are the rows' own slots."""
        slots, memory_slots = rows.slots, rows.memory_slots
        mask = self_attention_mask(self.resolved, self.causal, slots, cache_slots)
        return LayerContext(
            mask=mask if visible_slots is None else mask.replace(hidden_pairs=~visible_slots),
            position=self.shared_position(slots, rows.token_type),
            memory=rows.memory,
            memory_mask=None if memory_slots is None else cross_mask(slots, memory_slots),
            index=index,
            convolved=rows.convolved,
        )

    def prepare_input(self, x: Float[Array, "B T _"], slots: Slots) -> Float[Array, "B T D"]:
        """Input `[B, T, D]` of the first layer: embeddings plus positions, with norm and dropout as configured."""
        config = self.resolved
        if config.embed.norm and config.embed.norm_before_positions:
            if config.embed.scale:  # undone by the norm but for its epsilon
                x = x * jnp.asarray(config.width**-0.5, x.dtype)
            x = self.embed_norm(x, slots.segment != 0)
        if encodings.get(config.encoding.kind).embed is not None:
            x = x + self.position(slots).astype(x.dtype)
        if config.embed.dropout_first:
            x = self.embed_dropout(x)
        if config.embed.norm and not config.embed.norm_before_positions:
            x = self.embed_norm(x, slots.segment != 0)
        if config.attention.average_padding:
            x = jnp.where((slots.segment < 0)[..., None], jnp.zeros((), x.dtype), x)
        if not config.embed.dropout_first:
            x = self.embed_dropout(x)
        return x if config.embed.sum_width is None else self.embed_projection(x)

    def apply_unrolled(
        self,
        x: Float[Array, "B T D"],
        cache: tuple[LayerMemory, ...],
        memory: StackKeyValues | None,
        context: LayerContext,
    ) -> tuple[Float[Array, "B T D"], tuple[LayerMemory, ...]]:
        """`blocks` for unrolled decoding: each layer reads its own parameters and its own cache, see `unstack`."""
        written, first_values = [], self.first_values(x)
        forms = [group.stack for group in layer_groups(self.resolved) for _ in group.numbers]
        for i, (form, variables) in enumerate(zip(forms, self.layer_variables(), strict=True)):
            cross = memory[i] if isinstance(memory, tuple) else None
            block = Block(form, parent=None)
            carry = (x, cache[i], *first_values)
            (x, layer_cache, *first_values), _ = block.apply(variables, carry, jnp.int32(i), cross, context)
            written.append(layer_cache)
        return x, tuple(written)

    @nn.nowrap
    def first_values(self, x: Float[Array, "B T D"]) -> list[Float[Array, "B T G K"]]:
        """Zeros, which layer 0 gets in the place of the first layer's values; [] without `attention.value_residual`."""
        own = self.config.attention
        if own.value_residual is None:
            return []
        _, kv_heads, head_width = head_shape(own, self.config.width)
        return [constrain(jnp.zeros((*x.shape[:2], kv_heads, head_width), x.dtype), "batch", "length", None, None)]

    def layer_variables(self) -> list[PyTree]:
        """Variables of each layer, whether they are shared, stacked or already separated by `unstack`."""
        return [each for group in self.layer_groups() for each in self._group_variables(*group)]

    def layer_groups(self) -> list[tuple[nn.Module, range]]:
        """The scanned layers in groups of one form, each with the numbers of its layers."""
        return [(getattr(self, group.name), group.numbers) for group in layer_groups(self.config)]

    def _group_variables(self, blocks: nn.Module, numbers: range) -> list[PyTree]:
        """Variables of each layer of one of the `layer_groups`."""
        variables = blocks.variables
        parts = {
            name: part if "0" in part else unstack(part, len(numbers))
            for name, part in variables.items()
            if not (self.config.share_layers and name == "params")
        }
        if self.config.share_layers and "params" in variables:
            parts["params"] = {str(i): variables["params"] for i in range(len(numbers))}
        return [{name: part[str(i)] for name, part in parts.items()} for i in range(len(numbers))]

    def can_pipeline(self, rows: int, parts: int) -> bool:
        """True if the mesh has stages, and `rows` can pass through them in `parts` microbatches.

        Otherwise (with a cache, rows that do not divide, or intermediates requested) the layers are scanned as usual,
        and the partitioner gathers each layer's parameters.
        """
        if pipeline.stages() == 1 or self.is_initializing() or self.is_mutable_collection("intermediates"):
            return False
        if self.config.layers == 0 or self.config.share_layers or has_unlike_layers(self.config):
            return False
        if self.config.attention.value_residual is not None:
            return False
        return self.config.norm.kind != "batch" and pipeline.can_pipeline(rows, self.config.layers, parts)

    def apply_pipelined(self, x: Float[Array, "B T D"], rows: RowInputs, parts: int) -> Float[Array, "B T D"]:
        """`blocks` without a cache, each stage of the mesh running its own layers (see parallel/pipeline.py).

        Dropout uses a separate key for each layer and microbatch, so its masks differ from those of the scan.
        """
        config, causal = self.resolved, self.causal
        encoding = encodings.get(config.encoding.kind)
        block, position = Block(config, parent=None), None
        shared: dict[str, Any] = {"position": {}, "convolved": None, "key": None}
        if encoding.shared is not None:
            position, shared["position"] = self.shared.unbind()
        if rows.convolved is not None:
            shared["convolved"] = rows.convolved.params
            rows = rows._replace(convolved=rows.convolved.replace(params=None))
        if self.has_rng("dropout"):
            shared["key"] = self.make_rng("dropout")

        def prepare(rows: RowInputs, shared: dict[str, Any]) -> tuple[LayerContext, Array | None]:
            token_types = (rows.token_type,) if encoding.uses_token_types else ()
            convolved = rows.convolved
            context = LayerContext(
                mask=self_attention_mask(config, causal, rows.slots),
                position=None if position is None else position.apply(shared["position"], rows.slots, *token_types),
                memory=rows.memory,
                memory_mask=None if rows.memory_slots is None else cross_mask(rows.slots, rows.memory_slots),
                convolved=None if convolved is None else convolved.replace(params=shared["convolved"]),
            )
            return context, shared["key"]

        def apply_layer(weights: PyTree, x: Array, context: tuple, number: Array, part: Array) -> tuple[Array, PyTree]:
            context, key = context
            rngs = {} if key is None else {"dropout": jax.random.fold_in(jax.random.fold_in(key, number), part)}
            inputs = ({"params": weights}, (x, None), number, None, context)
            ((x, _), _), sown = block.apply(*inputs, rngs=rngs, mutable=[moe.COLLECTION])
            return x, sown

        layer = apply_layer
        if config.remat != "none":
            layer = jax.checkpoint(apply_layer, policy=remat.policy(config), prevent_cse=False)
        x, sown = pipeline.pipeline(prepare, layer, self.blocks.variables["params"], x, rows, shared, parts)
        for load in jax.tree.leaves(sown, is_leaf=lambda leaf: isinstance(leaf, moe.Load)):
            self.sow(moe.COLLECTION, "load", load)
        return x

    def shared_position(self, slots: Slots, token_type: Int[Array, "B T"] | None = None) -> PyTree:
        """Result of the encoding's `shared` hook, which all layers use; None without one."""
        encoding = encodings.get(self.config.encoding.kind)
        if encoding.shared is None:
            return None
        return self.shared(slots, token_type) if encoding.uses_token_types else self.shared(slots)

    def project_memory(self, memory: Float[Array, "B S _"]) -> MemoryKeyValues:
        """Keys and values of the encoder's output for cross-attention, for all layers."""
        config = self.resolved
        attention = cross_attention(config, parent=None)

        def layer(weights: PyTree) -> KeyValues:
            projected: Any = attention.apply({"params": weights}, memory, method=Attention.project_keys_values)
            return KeyValues.from_kernel_layout(*projected)

        if unrolls_decoding(config):
            return tuple(layer(variables["params"]["cross"]) for variables in self.layer_variables())
        params = self.blocks.variables["params"]["cross"]
        if config.share_layers:
            projected = layer(params)
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (config.layers, *x.shape)), projected)
        read = ("key", "value", "key_norm", "sink")  # a sink is no key, but `setup` looks for it
        return jax.lax.map(layer, {name: params[name] for name in read if name in params})

    def empty_cache(self, rows: int, length: int, dtype: jnp.dtype) -> StackKeyValues:
        """A cache of zeros with `length` slots for `rows` rows, for queries of `dtype`."""
        config = self.config
        _, kv_heads, head_width = head_shape(config.attention, config.width)
        layers, latent = () if unrolls_decoding(config) else (config.layers,), config.attention.latent
        empty = lambda *shape: jnp.zeros((*layers, rows, *shape), cache_dtype(dtype))  # noqa: E731
        if latent is not None:
            zeros = KeyValues(empty(1, latent.rank, length), empty(1, length, latent.rope_width))
        else:
            zeros = KeyValues(empty(kv_heads, head_width, length), empty(kv_heads, length, head_width))
        if not unrolls_decoding(config):
            return zeros
        delta, without = config.delta, set(config.delta_layers)
        state = None if delta is None else DeltaState.empty(delta, rows, cache_dtype(dtype))
        return tuple(state if state is not None and i in without else zeros for i in range(config.layers))


def self_attention_mask(config: StackConfig, causal: bool, slots: Slots, cache_slots: Slots | None = None) -> Mask:
    """Mask of self-attention over the slots themselves or those of a cache.

    With blocks of slots (`attention.sparse`) positions are the numbers of the slots in their row.

    Raises:
      ConfigError: there are blocks in a causal stack or with a cache.
    """
    own = config.attention
    key = slots if cache_slots is None else cache_slots
    mask = Mask(slots, key, causal, own.window, same_slots=cache_slots is None)
    if own.sparse is None and own.summary is None:
        return mask
    if causal or cache_slots is not None:
        name = "sparse" if own.summary is None else "summary"
        raise ConfigError(
            f"attention.{name}: got it in a causal stack or with a cache, expected None: it reads whole rows"
        )
    if own.sparse is None:
        return mask
    length = slots.segment.shape[1]
    number = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), slots.segment.shape)
    numbered = Slots(number, slots.segment)
    return mask.replace(query=numbered, key=numbered, blocks=Blocks.of(own.sparse, length))


def cross_mask(query: Slots, memory: Slots) -> Mask:
    """Mask of cross-attention: each query slot sees the memory slots of its own segment, at any position."""
    return Mask(query, memory)


def has_final_norm(config: StackConfig) -> bool:
    """True if a norm follows the last layer: by default in all orders but post, whose residual stream has none."""
    return config.norm.order != "post" if config.norm.final is None else config.norm.final


def unrolls_decoding(config: StackConfig) -> bool:
    """True if decoding compiles each layer as a separate part of the program; caches of unlike layers need it."""
    return config.delta is not None or unroll(config) >= config.layers


def unstack(blocks: PyTree, layers: int) -> dict[str, PyTree]:
    """Variables of each layer by its index, from variables `[L, ...]` of scanned layers.

    Decoding separates them once before its loop over tokens. Inside the loop the CPU compiler would slice all weights
    out of the stack at each token.
    """
    return {str(i): jax.tree.map(lambda x: x[i], blocks) for i in range(layers)}  # noqa: B023


def unroll(config: StackConfig) -> int:
    """Number of layers in one scan iteration. Unrolled layers run faster on CPU; elsewhere they only compile longer."""
    if config.unroll is not None:
        return config.unroll
    return min(config.layers, MAX_UNROLLED) if mesh.platform() == "cpu" else 1
