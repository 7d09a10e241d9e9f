"""XLNet: a transformer encoder that predicts its tokens in any order, with a memory of earlier text (Yang et al. 2019).

Each token is predicted from its predecessors in a permutation (section 2.2). The hidden state that predicts a token may
depend on its position but not on the token. The hidden state that other tokens attend to depends on both. So there
are two streams (section 2.3). The content stream h is the transformer under the permutation's mask. The query stream g
starts from one learned vector and uses the same layers, with keys and values from h:

    h' = layer(q = h, kv = [memory; h], each token sees itself and its predecessors)
    g' = layer(q = g, kv = [memory; h], each token sees its predecessors only)

A batch with a `permutation` gives the logits of its targets from the query stream; in training its rows read the
memories of the batch before (Transformer-XL's recurrence, Dai et al. 2019, section 3.2). Fine-tuning uses the model as
an ordinary encoder, without either.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import flax.struct
import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Bool, Float, Float32, Int, Num

from jaxformer.config import EncodingConfig, PermutationConfig, StackConfig
from jaxformer.errors import ConfigError
from jaxformer.models.transformer import Transformer, last_stack
from jaxformer.nn import encodings, remat
from jaxformer.nn.attention import Attention
from jaxformer.nn.encodings.transformer_xl import TokenTypes
from jaxformer.nn.ffn import FeedForward
from jaxformer.nn.heads import last_slot
from jaxformer.nn.kernels import Keys, Queries
from jaxformer.nn.layers import Dropout, Norm, parameter
from jaxformer.nn.masks import Mask, visible
from jaxformer.nn.stack import unroll
from jaxformer.types import MEMORY, Array, Batch, DeferredLogits, PyTree, RelationLogits, Slots, Stream


class Streams(NamedTuple):
    """Hidden states of the two streams, from the embeddings to the output of the last layer.

    Attributes:
      content: `[L + 1, B, T, D]`.
      query: `[L + 1, B, M, D]`, or None without targets.
      memory: `[L, B, S, D]`, the memory for the text that follows.
    """

    content: Array
    query: Array | None
    memory: Array

    @property
    def output(self) -> Float[Array, "B _ D"]:
        """Input of the head: the last query states, or without targets the last content states."""
        return (self.content if self.query is None else self.query)[-1]


class StreamMasks(NamedTuple):
    """Masks and token types for both streams.

    Attributes:
      content, query: masks of the two streams. In that of the query stream, rows that see nothing see everything.
      blind: bool `[B, T]`, True for those rows.
      token_types: of the slots, or None without token types.
      targets: slots of the query stream, one-hot `[B, M, T]`, or None.
    """

    content: Mask
    query: Mask
    blind: Array
    token_types: TokenTypes | None
    targets: Array | None


class TwoStreamLayer(nn.Module):
    """A layer like `nn.block.Block` in post order, with the same parameter names, for two streams."""

    config: StackConfig

    def setup(self) -> None:
        config = self.config
        self.attention = Attention(config.attention, config.encoding, config.width)
        self.attention_norm = Norm(config.norm)
        if config.ffn is None:
            raise ConfigError("model.encoder.ffn: got None, expected a section with model.permutation; set it")
        self.ffn = FeedForward(config.ffn, config.width)
        self.ffn_norm = Norm(config.norm)
        self.dropout = Dropout(config.dropout)

    def __call__(
        self,
        content: Float[Array, "B T D"],
        query: Float[Array, "B M D"] | None,
        memory: Float[Array, "B S D"] | None,
        masks: StreamMasks,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B M D"] | None]:
        """`content` and `query` after this layer. `memory` precedes the content in keys and values.

        A query that sees nothing (the first of a permutation) attends to all slots with equal probability.
        """
        attention, encoding = self.attention, encodings.get(self.config.encoding.kind)
        k, v = attention.project_keys_values(content if memory is None else jnp.concatenate([memory, content], axis=1))
        position = attention.position(masks.token_types, attention.query, attention.key)
        o = attention.attend(attention.query(content), k, v, masks.content, position, encoding)
        next_content = self.finish(content, o)
        if query is None or masks.targets is None or encoding.bias is None:
            return next_content, None
        targets = masks.targets.astype(query.dtype)
        q = jnp.einsum("bmhk,bmt->bthk", attention.query(query), targets)
        bias = functools.partial(cancel_blind_scores, encoding.bias, masks.blind)
        o = attention.attend(q, k, v, masks.query, position, dataclasses.replace(encoding, bias=bias))
        return next_content, self.finish(query, jnp.einsum("bthk,bmt->bmhk", o, targets))

    def finish(self, x: Float[Array, "B T D"], o: Float[Array, "B T H K"]) -> Float[Array, "B T D"]:
        """Output `[B, T, D]` of the layer from attention output `o`: projection, feed-forward, residuals and norms."""
        x = self.attention_norm(x + self.dropout(self.attention.out(o)))
        return self.ffn_norm(x + self.dropout(self.ffn(x)))


def cancel_blind_scores(
    bias: Callable[..., Array],
    blind: Bool[Array, "B T"],
    config: EncodingConfig,
    shared: PyTree,
    q: Queries,
    k: Keys,
    *positions: Int[Array, "B _"],
) -> Float32[Array, "B H T S"]:
    """`bias`, minus the value of q . k + bias in `blind` rows, whose scores become 0 and keep their gradients.

    The published code subtracts 1e30 from hidden scores. If all are hidden, rounding makes them equal.
    """
    added = bias(config, shared, q, k, *positions)
    keys = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    scores = added + jnp.einsum("bthk,bshk->bhts", q, keys, preferred_element_type=jnp.float32)
    return added - jax.lax.stop_gradient(jnp.where(blind[:, None, :, None], scores, 0.0))


class TextState(flax.struct.PyTreeNode):
    """Decoding state: the text so far.

    Attributes:
      tokens, segment: int32 `[B, S]`.
      index: int32 scalar, the next free slot.
    """

    tokens: Array
    segment: Array
    index: Array

    def rows(self, index: Int[Array, " B"]) -> TextState:
        """The state whose row i is row `index[i]` of this one."""
        return self.replace(tokens=self.tokens[index], segment=self.segment[index])

    def grow(self, length: int) -> TextState:
        """The state extended to `length` slots, the new ones empty."""
        more = ((0, 0), (0, length - self.tokens.shape[1]))
        return self.replace(tokens=jnp.pad(self.tokens, more), segment=jnp.pad(self.segment, more))


class XLNet(Transformer):
    """An encoder with the parameters of `Transformer`, and `mask_embed` `[D]`, the initial query state."""

    def setup(self) -> None:
        super().setup()
        config = last_stack(self.config)
        check(config)
        self.mask_embed = parameter(self, "mask_embed", nn.initializers.normal(0.02), (None,), (config.width,))

    def __call__(
        self, batch: Batch, full_logits: bool = True
    ) -> Float32[Array, "B ..."] | DeferredLogits | RelationLogits:
        """Logits `[B, M, V]` of the targets of `batch.permutation`; without one, those of the ordinary encoder.

        If `batch.continues` is given and the collection `MEMORY` has memories, rows that continue a text read theirs.
        Where the collection is mutable, it then holds the memories for the next batch.
        """
        if batch.permutation is None:
            return cast(Array, super().__call__(batch, full_logits))
        source, (order, targets) = batch.side("source"), batch.permutation
        memory, visible_memory = None, None
        if batch.continues is not None and self.has_variable(MEMORY, "states"):
            memory = jnp.moveaxis(cast(Array, self.get_variable(MEMORY, "states")), 1, 0)
            count = jnp.where(batch.continues, cast(Array, self.get_variable(MEMORY, "count")), 0)
            visible_memory = jnp.arange(memory.shape[2]) >= memory.shape[2] - count[:, None]
        one_hot = jax.nn.one_hot(targets, order.shape[1])  # of -1 it is zero: no slot
        streams = self.streams(source, hidden_by_order(order), one_hot, memory, visible_memory)
        if memory is not None and self.is_mutable_collection(MEMORY):
            self.put_variable(MEMORY, "states", jnp.moveaxis(streams.memory, 0, 1))
            self.put_variable(MEMORY, "count", jnp.minimum(count + order.shape[1], memory.shape[2]))
        return self.head(streams.output, source.slots, self.output_embed(), full_logits)

    def streams(
        self,
        source: Stream,
        hidden: Bool[Array, "B T T"] | None = None,
        targets: Num[Array, "B M T"] | None = None,
        memory: Float[Array, "L B S D"] | None = None,
        visible_memory: Bool[Array, "B S"] | None = None,
    ) -> Streams:
        """Hidden states of both streams for `source` `[B, T]`.

        Padding is computed too, as if it followed the text: it sees the text and is never seen.

        Args:
          hidden: True where the row must not see the column. In the content stream a slot always sees itself. In the
            query stream a row that sees nothing attends to all slots equally, itself included, as in the published
            code: if the first slot of a permutation is a target, make some slot visible to it.
          targets: the M slots of the query stream, one-hot; None for no query stream.
          memory: `Streams.memory` of the preceding text.
          visible_memory: True for its slots that are visible; None: all of them.
        """
        config = last_stack(self.config)
        x, g = self.encoder.embed_dropout(self.source_embed(source)), None
        if targets is not None:
            g = jnp.broadcast_to(self.mask_embed.astype(x.dtype), (*targets.shape[:2], config.width))
            g = self.encoder.embed_dropout(g)
        if memory is not None and visible_memory is None:
            visible_memory = jnp.ones(memory.shape[1:3], bool)
        masks = stream_masks(config, source, hidden, targets, visible_memory)
        layer = TwoStreamLayer(config, parent=None)
        keys = jax.random.split(self.make_rng("dropout"), config.layers) if self.has_rng("dropout") else None

        def apply_layer(states: tuple[Array, Array | None], inputs: tuple[PyTree, Array | None, Array | None]):
            weights, memory, key = inputs
            rngs = {} if key is None else {"dropout": key}
            outputs: Any = layer.apply({"params": weights}, *states, memory, masks, rngs=rngs)
            return outputs, outputs

        weights, step = self.encoder.blocks.variables["params"], apply_layer
        if config.remat != "none":
            step = jax.checkpoint(apply_layer, policy=remat.policy(config), prevent_cse=unroll(config) > 1)
        _, outputs = jax.lax.scan(step, (x, g), (weights, memory, keys), unroll=unroll(config))
        content, query = jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest]), (x, g), outputs)
        return Streams(content, query, next_memory(self.config.permutation, content[:-1], memory))

    def logits(self, streams: Streams, slots: Slots) -> Float32[Array, "B ..."]:
        """Output of the head for the streams."""
        return self.head(streams.output, slots, self.output_embed())

    # The decoding state is not that of `Transformer`: its users pass back what they got.
    def start(  # ty: ignore[incompatible-method-override]
        self, batch: Batch, length: int
    ) -> tuple[Float32[Array, "B V"], TextState]:
        """Logits of the token after each prompt, and the decoding state, with space for `length` slots.

        Prompts are `batch.target` `[B, T]`, padded on either side. Tokens see those after them, so every step reads the
        whole text again: this defines what XLNet generates, but is slow. The slot of the next token is the only target
        of the query stream.

        Raises:
          ValueError: `length` is less than T.
          ConfigError: the prompts have token types.
        """
        target = batch.side("target")
        if length < target.tokens.shape[1]:
            raise ValueError(f"start: got length {length}, expected room for {target.tokens.shape[1]} prompt slots")
        if target.token_type is not None:
            raise ConfigError("start: got token types, expected none: those of new tokens are unknown; leave them out")
        last = last_slot(target.slots)
        shift = jnp.max(last) - last  # puts the last tokens of all rows in one slot, as with padding on the left
        index = (jnp.arange(target.tokens.shape[1]) - shift[:, None]) % target.tokens.shape[1]
        padding = ((0, 0), (0, length + 1 - target.tokens.shape[1]))
        tokens, segment = (
            jnp.pad(jnp.take_along_axis(ids, index, axis=1), padding) for ids in (target.tokens, target.slots.segment)
        )
        state = TextState(tokens, segment, jnp.max(last) + 1)
        return self.predict(state), state

    def step(  # ty: ignore[incompatible-method-override]
        self, tokens: Int[Array, "B 1"], state: TextState
    ) -> tuple[Float32[Array, "B V"], TextState]:
        """Logits of the token after `tokens`, and the new state."""
        state = TextState(
            tokens=state.tokens.at[:, state.index].set(tokens[:, 0]),
            segment=state.segment.at[:, state.index].set(1),
            index=state.index + 1,
        )
        return self.predict(state), state

    def predict(self, state: TextState) -> Float32[Array, "B V"]:
        """Logits of the token in the next free slot."""
        rows, length = state.tokens.shape
        slots = Slots(jnp.broadcast_to(jnp.arange(length), (rows, length)), state.segment)
        target = jnp.broadcast_to(jnp.arange(length) == state.index, (rows, 1, length))
        streams = self.streams(Stream(state.tokens, slots), targets=target.astype(jnp.float32))
        return self.logits(streams, slots)[:, 0]


def hidden_by_order(order: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    """True where row t must not see column s under the order of a `Permutation`.

    A slot of number n > 0 is visible to slots of higher numbers only; slots of number 0 are visible to all. That the
    slots that are not predicted see each other, whichever came first, is the published code's rule (`_local_perm`).
    """
    query, key = order[:, :, None], order[:, None, :]
    return (key > 0) & (query <= key)


def stream_masks(
    config: StackConfig,
    source: Stream,
    hidden: Bool[Array, "B T T"] | None,
    targets: Num[Array, "B M T"] | None,
    visible_memory: Bool[Array, "B S"] | None,
) -> StreamMasks:
    """Masks and token types of `source` `[B, T]` after S slots of memory, which all slots see where it is visible."""
    slots, (rows, length) = source.slots, source.tokens.shape[:2]
    if visible_memory is None:
        visible_memory = jnp.zeros((rows, 0), bool)
    memory_length = visible_memory.shape[1]
    query, key = slots.segment[:, :, None], slots.segment[:, None, :]
    ones = jnp.ones_like(slots.segment)
    same_segment = Slots(slots.position, ones)
    unseen = (key <= 0) | ((query != 0) & (jnp.abs(query) != key))
    unseen |= ~visible(same_segment, same_segment, bool(config.causal), config.attention.window)
    if hidden is not None:
        unseen |= hidden

    def prepend(ids: Array, memory: Array | int) -> Array:
        return jnp.concatenate([jnp.broadcast_to(memory, (rows, memory_length)), ids], axis=1)

    segment = prepend(ones, visible_memory.astype(ones.dtype))
    keys = Slots(prepend(slots.position, jnp.arange(-memory_length, 0)), segment)

    def mask(unseen: Array) -> Mask:
        return Mask(same_segment, keys, hidden_pairs=jnp.pad(unseen, ((0, 0), (0, 0), (memory_length, 0))))

    blind = jnp.all(unseen, axis=-1) & ~jnp.any(visible_memory, axis=-1, keepdims=True)
    token_types = None if source.token_type is None else TokenTypes(source.token_type, prepend(source.token_type, 0))
    content, query = mask(unseen & ~jnp.eye(length, dtype=bool)), mask(unseen & ~blind[:, :, None])
    return StreamMasks(content, query, blind, token_types, targets)


def next_memory(
    config: PermutationConfig | None, inputs: Float[Array, "L B T D"], memory: Float[Array, "L B S D"] | None
) -> Float[Array, "L B _ D"]:
    """The next memory: the old memory followed by the layer inputs, cut to `config.memory`, without gradients."""
    if config is not None and config.reuse is not None:
        inputs = inputs[:, :, : config.reuse]
    if memory is not None:
        inputs = jnp.concatenate([memory, inputs], axis=2)
    if config is not None and config.memory is not None:
        inputs = inputs[:, :, -config.memory :]
    return jax.lax.stop_gradient(inputs)


def check(config: StackConfig) -> None:
    """Checks that the encoder's layers are those of XLNet.

    Raises:
      ConfigError: a field of the encoder has a value that two streams do not support.
    """
    attention, norm = config.attention, config.norm
    needed = {
        "encoding.kind": (config.encoding.kind, ("transformer_xl",)),
        "norm.order": (norm.order, ("post",)),
        "norm.kind": (norm.kind, ("layer", "rms", "none")),
        "norm.final": (norm.final, (None, False)),
        "embed.norm": (config.embed.norm, (False,)),
        "embed.norm_before_positions": (config.embed.norm_before_positions, (False,)),
        "attention.norm": (attention.norm, (None,)),
        "attention.output": (attention.output, (True,)),
        "attention.scale_by_layer": (attention.scale_by_layer, (False,)),
        "attention.scale_width": (attention.scale_width, (None,)),
        "attention.soft_cap": (attention.soft_cap, (None,)),
        "attention.sink": (attention.sink, (False,)),
        "attention.gate": (attention.gate, (False,)),
        "attention.temperature": ("a section" if attention.temperature else "None", ("None",)),
        "attention.value_residual": ("a section" if attention.value_residual else "None", ("None",)),
        "attention.window_every": (attention.window_every, (1,)),
        "attention.window_layers": (attention.window_layers, ((),)),
        "attention.sparse": ("a section" if attention.sparse else "None", ("None",)),
        "attention.summary": (attention.summary, (None,)),
        "output_width": (config.output_width, (None,)),
        "residual_attention": (config.residual_attention, (True,)),
        "residual_ffn": (config.residual_ffn, (True,)),
        "ffn": ("a section" if config.ffn else "None", ("a section",)),
        "conv": ("a section" if config.conv else "None", ("None",)),
    }
    for field, (value, allowed) in needed.items():
        if value not in allowed:
            raise ConfigError(
                f"model.encoder.{field}: got {value}, expected {' or '.join(map(str, allowed))} with "
                "model.permutation; change it, or set model.permutation to None"
            )
