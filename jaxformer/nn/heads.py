"""Output heads: logits over the vocabulary or over classes for each slot, or one output for each sequence."""

from __future__ import annotations

import math
from typing import Literal, overload

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Float, Int

from jaxformer.config import HeadConfig, NormConfig
from jaxformer.nn.layers import ACTIVATIONS, Dense, Dropout, Embed, Norm, parameter, soft_cap, zeros_parameter
from jaxformer.nn.products import wide_dot
from jaxformer.parallel.rules import constrain
from jaxformer.types import Array, DeferredLogits, RelationLogits, Slots

RELATIONS = 2
"""Classes of `RelationLogits.relation`: 0 where the second part of a text follows the first, 1 where it does not."""


def last_slot(slots: Slots) -> Int[Array, " B"]:
    """Index `[B]` of the last slot of each row that is not padding; 0 for an empty row."""
    index = jnp.arange(slots.segment.shape[1])
    return jnp.max(jnp.where(slots.segment > 0, index, 0), axis=1)


def pool(x: Float[Array, "B T D"], slots: Slots, pooling: str) -> Float[Array, "B D"]:
    """One vector a sequence `[B, D]`: its first slot, its last slot, or the mean over slots that are not padding.

    With pooling "end" it is the row's last slot, whether that is padding or not.
    """
    if pooling == "first":
        return x[:, 0]
    if pooling == "end":
        return x[:, -1]
    if pooling == "last":
        return jnp.take_along_axis(x, last_slot(slots)[:, None, None], axis=1)[:, 0]
    weight = (jnp.maximum(slots.segment, 0) != 0).astype(jnp.float32)  # `> 0` changes the last bits of training
    total = jnp.einsum("bt,btd->bd", weight, x.astype(jnp.float32))
    return (total / jnp.maximum(weight.sum(axis=1), 1.0)[:, None]).astype(x.dtype)


def pool_segments(x: Float[Array, "B T D"], slots: Slots, pooling: str, count: int) -> Float[Array, "B N D"]:
    """`pool` for each of the segments 1 to N = `count` of a row: `[B, N, D]`; 0 for a segment that does not occur.

    First and last are by position, since a mesh may reorder the slots.
    """
    chosen = slots.segment[:, None] == jnp.arange(1, count + 1)[:, None]  # [B, N, T]
    position = slots.position[:, None]
    if pooling == "first":
        chosen &= position == 0
    elif pooling == "last":
        chosen &= position == jnp.max(jnp.where(chosen, position, -1), axis=-1, keepdims=True)
    weight = chosen.astype(jnp.float32)
    total = jnp.einsum("bnt,btd->bnd", weight, x.astype(jnp.float32))
    return (total / jnp.maximum(weight.sum(axis=-1), 1.0)[..., None]).astype(x.dtype)


class Head(nn.Module):
    """The output of the kind `config.kind`, in float32.

    tokens: logits over the vocabulary, `[B, T, V]`; with `config.relation` also two logits of the row's pooled vector,
    `[B, 2]`. slots: class logits for each slot, `[B, T, C]` (named entities; the start and end of an answer). classes:
    class logits for each sequence, `[B, C]`. pooled: one vector a sequence,
    `[B, D']`. pair: one vector for each of a row's segments 1 and 2, `[B, 2, D']`. forecast:
    `outputs` numbers for each sequence, a linear map of all its slots (PatchTST's flatten head). none: hidden states
    `[B, T, D]`.

    Attributes:
      width: model width D.
      vocab: vocabulary size V, for kind "tokens".
      outputs: number of outputs of a sequence, for kind "forecast".
    """

    config: HeadConfig
    width: int
    vocab: int | None = None
    outputs: int | None = None

    @property
    def has_matrix(self) -> bool:
        """True if the logits of tokens come from an output matrix of the head's own."""
        return self.config.kind == "tokens" and self.config.projection and not self.config.tied

    @overload
    def __call__(
        self, x: Float[Array, "B T D"], slots: Slots, embed: Embed | None = None, full_logits: Literal[True] = True
    ) -> Float[Array, "B ..."]: ...  # decoders, which read one output a slot, have no relation

    @overload
    def __call__(
        self, x: Float[Array, "B T D"], slots: Slots, embed: Embed | None = None, full_logits: bool = True
    ) -> Float[Array, "B ..."] | DeferredLogits | RelationLogits: ...

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], slots: Slots, embed: Embed | None = None, full_logits: bool = True
    ) -> Float[Array, "B ..."] | DeferredLogits | RelationLogits:
        """Output for normalised hidden states `x`. A tied head reads the table of `embed`.

        Without `full_logits`, a token head with `config.chunk` returns `DeferredLogits` for losses and measures.
        """
        kind = self.config.kind
        if kind == "tokens":
            logits = self.token_logits(x, embed, full_logits)
            if not self.config.relation:
                return logits
            return RelationLogits(logits, self.class_logits(self.pooled_vector(x, slots), RELATIONS))
        if kind == "slots":
            if self.config.residual_width is not None:
                return self.decision(self.residual_layer(x, self.config.residual_width))
            x = self.transformed(x, self.width) if self.config.transform else x
            return self.class_logits(x if self.config.width is None else self.hidden_layer(x))
        if kind == "classes":
            y = self.pooled_vector(x, slots)
            return self.class_logits(self.transformed(y, self.width) if self.config.transform else y)
        if kind == "forecast":
            return self.forecast(x, slots)
        if kind == "none":
            return Dropout(self.config.dropout)(x).astype(jnp.float32)
        return self.pooled_vector(x, slots).astype(jnp.float32)

    def token_logits(
        self, x: Float[Array, "B T D"], embed: Embed | None, full_logits: bool
    ) -> Float[Array, "B T V"] | DeferredLogits:
        config, width = self.config, self.width
        if self.vocab is None:
            raise ValueError("head: got vocab None, expected a size; resolve the config with a tokenizer first")
        if config.transform:
            width = width if embed is None else embed.config.sum_width or width
            x = self.transformed(x, width)
        x = x if config.relation else Dropout(config.dropout)(x)
        if not config.projection:
            if width != self.vocab:
                raise ValueError(f"head.projection: got False at width {width}, expected the vocabulary, {self.vocab}")
            return constrain(x.astype(jnp.float32), "batch", "length", "act_vocab")
        if config.scale:
            x = x * jnp.asarray(width**-0.5, x.dtype)
        if config.tied:
            if embed is None:
                raise ValueError("head.tied: got a model without an embedding, expected one; set head.tied to False")
            (x, table), scale = embed.unembedding_factors(x), embed.table_scale()
        else:
            normal = nn.initializers.normal(math.sqrt(config.init_scale) * width**-0.5)
            table = parameter(self, "kernel", normal, ("embed", "vocab"), (width, self.vocab)).T
            scale = self.get_variable("params", "kernel_scale")  # of an integer kernel: see decode/int8.py
        bias = zeros_parameter(self, "bias", ("vocab",), (self.vocab,)) if config.bias else None
        if config.chunk is not None and not full_logits:
            return DeferredLogits(x, table, bias, config.chunk, config.soft_cap)
        logits = wide_dot(x, table.T)
        logits = logits if scale is None else logits * scale
        logits = logits if bias is None else logits + bias
        return constrain(soft_cap(logits, config.soft_cap), "batch", "length", "act_vocab")

    def transformed(self, x: Float[Array, "*batch D"], width: int) -> Float[Array, "*batch _"]:
        """The dense layer, activation and norm of `config.transform`, to `width` channels."""
        config = self.config
        dense = Dense((self.width, width), ("embed", None), bias=config.transform_bias, name="transform")
        norm = NormConfig(epsilon=config.epsilon, bias=config.transform_norm_bias)
        return Norm(norm, name="transform_norm")(ACTIVATIONS[config.activation](dense(x)))

    def forecast(self, x: Float[Array, "B T D"], slots: Slots) -> Float[Array, "B _"]:
        """Forecast, float32: one linear map of the states of all T slots together, those of padding set to 0."""
        if self.outputs is None:
            raise ValueError("head.horizon: got None, expected a number; resolve the config with the data first")
        x = Dropout(self.config.dropout)(jnp.where((slots.segment != 0)[..., None], x, 0).astype(x.dtype))
        shape = (x.shape[1], self.width, self.outputs)
        y = Dense(shape, (None, "embed", None), inputs=2, bias=self.config.decision_bias, name="horizon")(x)
        return y.astype(jnp.float32)

    def pooled_vector(self, x: Float[Array, "B T D"], slots: Slots) -> Float[Array, "B ..."]:
        """One vector a sequence, or two for a pair, after the hidden layer (if any)."""
        config = self.config
        pair = config.kind == "pair"
        y = pool_segments(x, slots, config.pooling, 2) if pair else pool(x, slots, config.pooling)
        y = Dropout(config.input_dropout, name="input_dropout")(y)
        return y if config.width is None else self.hidden_layer(y)

    def hidden_layer(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch _"]:
        """The dense layer of `config.width` and its activation."""
        width = self.config.width or self.width
        return ACTIVATIONS[self.config.hidden](Dense((self.width, width), ("embed", None), name="hidden")(x))

    def class_logits(self, x: Float[Array, "*batch _"], classes: int | None = None) -> Float[Array, "*batch C"]:
        """Logits over C classes, those of the config if `classes` is None, after dropout."""
        return self.decision(Dropout(self.config.dropout)(x), classes)

    def decision(self, x: Float[Array, "*batch _"], classes: int | None = None) -> Float[Array, "*batch C"]:
        """The last projection of `class_logits`."""
        classes = self.config.classes if classes is None else classes
        if classes is None:
            raise ValueError("head.classes: got None, expected a number; resolve the config with the data first")
        shape = (x.shape[-1], classes)
        decide = Dense(shape, ("embed", None), bias=self.config.decision_bias, name="decision")
        return decide(x.astype(jnp.float32))

    def residual_layer(self, x: Float[Array, "B T D"], width: int) -> Float[Array, "B T D"]:
        """The feed-forward layer of `config.residual_width`: norm(x + act(x W_in) W_out)."""
        config = self.config
        y = Dropout(config.input_dropout, name="input_dropout")(x)
        y = ACTIVATIONS[config.hidden](Dense((self.width, width), ("embed", "ffn"), name="in")(y))
        y = Dropout(config.dropout)(Dense((width, self.width), ("ffn", "embed"), name="out")(y))
        return Norm(NormConfig(epsilon=config.epsilon), name="residual_norm")(x + y)
