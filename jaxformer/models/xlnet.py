"""XLNet: a transformer encoder that can predict its tokens in any order, and look back at earlier texts.

Yang et al. 2019. In the order of a permutation every token is predicted from those before it. What predicts a token
must know its place and not the token, and what others read of it must hold both: so there are two streams. The content
stream h is the ordinary transformer under the permutation's mask; the query stream g starts from one learned vector and
has the same layers, with keys and values from h:

    h' = layer(q = h, kv = [memory; h], a token sees itself and its predecessors)
    g' = layer(q = g, kv = [memory; h], it sees its predecessors alone)

Fine-tuning needs none of this: without a call to `streams` the model is an ordinary encoder.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Bool, Float, Float32, Int, Num

from jaxformer.config import ConfigError, EncodingConfig, PermutationConfig, StackConfig
from jaxformer.models.transformer import Transformer
from jaxformer.nn import encodings
from jaxformer.nn.attention import Attention
from jaxformer.nn.encodings.transformer_xl import Kinds
from jaxformer.nn.ffn import FeedForward
from jaxformer.nn.heads import last_slot
from jaxformer.nn.kernels import Keys, Queries
from jaxformer.nn.layers import Dropout, Norm
from jaxformer.nn.masks import Mask, visible
from jaxformer.nn.stack import unroll
from jaxformer.types import Array, Batch, PyTree, Slots, Stream


class Streams(NamedTuple):
    """What all layers say, each time from the embeddings on.

    Attributes:
      content: `[L + 1, B, T, D]`.
      query: `[L + 1, B, M, D]`, or None without targets.
      memory: `[L, B, S, D]`: what a text that follows may look back at.
    """

    content: Array
    query: Array | None
    memory: Array

    @property
    def output(self) -> Float[Array, "B _ D"]:
        """What a head reads: the query stream if there is one."""
        return (self.content if self.query is None else self.query)[-1]


class View(NamedTuple):
    """What both streams look at.

    Attributes:
      content, query: the streams' masks; in the second, rows that see nothing see all.
      blind: bool `[B, T]`: those rows.
      kinds: of the slots, or None without token types.
      targets: `[B, M, T]`, or None.
    """

    content: Mask
    query: Mask
    blind: Array
    kinds: Kinds | None
    targets: Array | None


class TwoStreamLayer(nn.Module):
    """A layer of `nn.block.Block` in post order, under the same parameter names, for two streams at once."""

    config: StackConfig

    def setup(self) -> None:
        config = self.config
        self.attention = Attention(config.attention, config.encoding, config.width)
        self.attention_norm = Norm(config.norm)
        self.ffn = FeedForward(config.ffn, config.width)
        self.ffn_norm = Norm(config.norm)
        self.dropout = Dropout(config.dropout)

    def __call__(
        self,
        content: Float[Array, "B T D"],
        query: Float[Array, "B M D"] | None,
        memory: Float[Array, "B S D"] | None,
        view: View,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B M D"] | None]:
        """`content` and `query` after this layer; `memory` precedes the content.

        A query that sees nothing, the first of a permutation, weighs all slots alike.
        """
        attention, encoding = self.attention, encodings.get(self.config.encoding.kind)
        k, v = attention.project(content if memory is None else jnp.concatenate([memory, content], axis=1))
        position = attention.position(view.kinds, attention.query, attention.key)
        found = attention.look(attention.query(content), k, v, view.content, position, encoding)
        after = self.finish(content, found)
        if query is None:
            return after, None
        targets = view.targets.astype(query.dtype)
        q = jnp.einsum("bmhk,bmt->bthk", attention.query(query), targets)
        levelled = dataclasses.replace(encoding, score=functools.partial(level, encoding.score, view.blind))
        found = attention.look(q, k, v, view.query, position, levelled)
        return after, self.finish(query, jnp.einsum("bthk,bmt->bmhk", found, targets))

    def finish(self, x: Float[Array, "B T D"], found: Float[Array, "B T H K"]) -> Float[Array, "B T D"]:
        """The rest of the layer: projection, feed-forward, and the residual sums with their norms."""
        x = self.attention_norm(x + self.dropout(self.attention.out(found)))
        return self.ffn_norm(x + self.dropout(self.ffn(x)))


def level(
    score: Callable[..., Array],
    blind: Bool[Array, "B T"],
    config: EncodingConfig,
    shared: PyTree,
    q: Queries,
    k: Keys,
    *at: Int[Array, "B _"],
) -> Float32[Array, "B H T S"]:
    """`score` less, in rows that are `blind`, the value of q . k + score: they come to 0, gradients stay.

    The published code takes 1e30 from what is hidden. Where all is, rounding leaves nothing else of the value.
    """
    added = score(config, shared, q, k, *at)
    keys = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    whole = added + jnp.einsum("bthk,bshk->bhts", q, keys, preferred_element_type=jnp.float32)
    return added - jax.lax.stop_gradient(jnp.where(blind[:, None, :, None], whole, 0.0))


@flax.struct.dataclass
class TextState:
    """The decoding state: the text so far. `tokens` and `segment` int32 `[B, S]`, `index` the next free slot."""

    tokens: Array
    segment: Array
    index: Array

    def rows(self, index: Int[Array, " B"]) -> TextState:
        """The state whose row i is this one's row `index[i]`."""
        return self.replace(tokens=self.tokens[index], segment=self.segment[index])

    def grow(self, length: int) -> TextState:
        """The state with room for `length` slots, the new ones empty."""
        more = ((0, 0), (0, length - self.tokens.shape[1]))
        return self.replace(tokens=jnp.pad(self.tokens, more), segment=jnp.pad(self.segment, more))


class XLNet(Transformer):
    """An encoder whose parameters are those of `Transformer`, and `mask_embed` `[D]`, where the query stream starts."""

    def setup(self) -> None:
        super().setup()
        check(self.config.encoder)
        init = nn.with_logical_partitioning(nn.initializers.normal(0.02), (None,))
        self.mask_embed = self.param("mask_embed", init, (self.config.encoder.width,))

    def streams(
        self,
        source: Stream,
        hidden: Bool[Array, "B T T"] | None = None,
        targets: Num[Array, "B M T"] | None = None,
        memory: Float[Array, "L B S D"] | None = None,
    ) -> Streams:
        """Runs both streams over `source` `[B, T]`.

        Args:
          hidden: True: the row may not see the column. No slot hides from its own content stream. In
            the query stream a row that sees nothing weighs all slots alike, its own included, as the published code
            does: where the first slot of a permutation is a target, give it something to see.
          targets: where the M slots of the query stream stand, one-hot; None: no query stream.
          memory: `Streams.memory` of the text before. All of it is visible.

        What stands at padding is computed as well, as if it followed the text: it sees the text and is never seen.
        """
        config = self.config.encoder
        x, g = self.encoder.embed_dropout(self.source_embed(source)), None
        if targets is not None:
            g = jnp.broadcast_to(self.mask_embed.astype(x.dtype), (*targets.shape[:2], config.width))
            g = self.encoder.embed_dropout(g)
        held = 0 if memory is None else memory.shape[2]
        view = see(config, source, hidden, targets, held)
        layer = TwoStreamLayer(config, parent=None)
        keys = jax.random.split(self.make_rng("dropout"), config.layers) if self.has_rng("dropout") else None

        def step(before: tuple[Array, Array | None], given: tuple[Any, Array | None, Array | None]):
            weights, memory, key = given
            rngs = {} if key is None else {"dropout": key}
            after = layer.apply({"params": weights}, *before, memory, view, rngs=rngs)
            return after, after

        weights = self.encoder.blocks.variables["params"]
        _, outputs = jax.lax.scan(step, (x, g), (weights, memory, keys), unroll=unroll(config))
        content, query = jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest]), (x, g), outputs)
        return Streams(content, query, remember(self.config.permutation, content[:-1], memory))

    def logits(self, streams: Streams, slots: Slots) -> Float32[Array, "B ..."]:
        """The head's word on the streams' output."""
        return self.head(streams.output, slots, self.output_embed())

    def start(self, batch: Batch, length: int) -> tuple[Float32[Array, "B V"], TextState]:
        """Reads the prompt `batch.target` `[B, T]`, padded on either side, and makes room for `length` slots.

        Every step reads the whole text again, since tokens see what comes after them: the definition of what XLNet
        generates, not a fast way to it. The next token's slot is the one target of the query stream.
        """
        target = batch.target
        if length < target.tokens.shape[1]:
            raise ValueError(f"start: got length {length}, expected room for {target.tokens.shape[1]} prompt slots")
        if target.kind is not None:
            raise ConfigError("start: got token types, expected none: those of new tokens are unknown; leave them out")
        last = last_slot(target.slots)
        shift = jnp.max(last) - last  # the last tokens of all rows stand in one slot, as if all were padded left
        index = (jnp.arange(target.tokens.shape[1]) - shift[:, None]) % target.tokens.shape[1]
        room = ((0, 0), (0, length + 1 - target.tokens.shape[1]))
        tokens, segment = (
            jnp.pad(jnp.take_along_axis(ids, index, axis=1), room) for ids in (target.tokens, target.slots.segment)
        )
        state = TextState(tokens, segment, jnp.max(last) + 1)
        return self.predict(state), state

    def step(self, tokens: Int[Array, "B 1"], state: TextState) -> tuple[Float32[Array, "B V"], TextState]:
        """Appends `tokens` to every row. Logits of the token after them."""
        state = TextState(
            tokens=state.tokens.at[:, state.index].set(tokens[:, 0]),
            segment=state.segment.at[:, state.index].set(1),
            index=state.index + 1,
        )
        return self.predict(state), state

    def predict(self, state: TextState) -> Float32[Array, "B V"]:
        """Logits of the token that stands in the next free slot."""
        rows, length = state.tokens.shape
        slots = Slots(jnp.broadcast_to(jnp.arange(length), (rows, length)), state.segment)
        target = jnp.broadcast_to(jnp.arange(length) == state.index, (rows, 1, length))
        streams = self.streams(Stream(state.tokens, slots), targets=target.astype(jnp.float32))
        return self.logits(streams, slots)[:, 0]


def see(
    config: StackConfig,
    source: Stream,
    hidden: Bool[Array, "B T T"] | None,
    targets: Num[Array, "B M T"] | None,
    held: int,
) -> View:
    """The masks and kinds of `source` `[B, T]` behind `held` slots of memory, which all slots see."""
    slots, (rows, length) = source.slots, source.tokens.shape[:2]
    query, key = slots.segment[:, :, None], slots.segment[:, None, :]
    ones = jnp.ones_like(slots.segment)
    here = Slots(slots.position, ones)
    apart = (key <= 0) | ((query != 0) & (jnp.abs(query) != key))
    apart |= ~visible(here, here, bool(config.causal), config.attention.window)
    if hidden is not None:
        apart |= hidden
    behind = lambda ids, front: jnp.concatenate([jnp.broadcast_to(front, (rows, held)), ids], axis=1)  # noqa: E731
    keys = Slots(behind(slots.position, jnp.arange(-held, 0)), behind(ones, 1))

    def mask(apart: Array) -> Mask:
        return Mask(here, keys, hidden=jnp.pad(apart, ((0, 0), (0, 0), (held, 0))))

    blind = jnp.all(apart, axis=-1) & (held == 0)
    kinds = None if source.kind is None else Kinds(source.kind, behind(source.kind, 0))
    content, query = mask(apart & ~jnp.eye(length, dtype=bool)), mask(apart & ~blind[:, :, None])
    return View(content, query, blind, kinds, targets)


def remember(
    config: PermutationConfig | None, inputs: Float[Array, "L B T D"], memory: Float[Array, "L B S D"] | None
) -> Float[Array, "L B _ D"]:
    """The next memory: layer inputs behind the old memory. No gradient flows into it."""
    if config is not None and config.reuse is not None:
        inputs = inputs[:, :, : config.reuse]
    if memory is not None:
        inputs = jnp.concatenate([memory, inputs], axis=2)
    if config is not None and config.memory is not None:
        inputs = inputs[:, :, -config.memory :]
    return jax.lax.stop_gradient(inputs)


def check(config: StackConfig) -> None:
    """Refuses layers that two streams do not have.

    Raises:
      ConfigError: a field of the encoder is not XLNet's.
    """
    attention, norm = config.attention, config.norm
    needed = {
        "encoding.kind": (config.encoding.kind, ("transformer_xl",)),
        "norm.order": (norm.order, ("post",)),
        "norm.kind": (norm.kind, ("layer", "rms", "none")),
        "norm.final": (norm.final, (None, False)),
        "embed.norm": (config.embed.norm, (False,)),
        "attention.norm": (attention.norm, (None,)),
        "attention.output": (attention.output, (True,)),
        "attention.scale_by_layer": (attention.scale_by_layer, (False,)),
        "attention.window_every": (attention.window_every, (1,)),
        "residual_attention": (config.residual_attention, (True,)),
        "residual_ffn": (config.residual_ffn, (True,)),
        "ffn": ("a section" if config.ffn else "None", ("a section",)),
    }
    for field, (value, allowed) in needed.items():
        if value not in allowed:
            raise ConfigError(
                f"model.encoder.{field}: got {value}, expected {' or '.join(map(str, allowed))} with "
                "model.permutation; change it, or set model.permutation to None"
            )
