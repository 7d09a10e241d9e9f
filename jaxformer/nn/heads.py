"""From hidden states to decisions: a vocabulary row or a class for every slot, or one class for a sequence."""

from __future__ import annotations

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Float, Int

from jaxformer.config import HeadConfig, NormConfig
from jaxformer.nn.layers import ACTIVATIONS, Dense, Dropout, Embed, Norm
from jaxformer.nn.products import wide_dot
from jaxformer.parallel.rules import constrain
from jaxformer.types import Array, Projection, Slots


def last_slot(slots: Slots) -> Int[Array, " B"]:
    """The index of the last real slot of each row (0 where a row is empty)."""
    index = jnp.arange(slots.segment.shape[1])
    return jnp.max(jnp.where(slots.segment > 0, index, 0), axis=1)


def pool(x: Float[Array, "B T D"], slots: Slots, how: str) -> Float[Array, "B D"]:
    """One vector a sequence: its first slot, the mean of its real ones, or its last one."""
    if how == "first":
        return x[:, 0]
    if how == "last":
        return jnp.take_along_axis(x, last_slot(slots)[:, None, None], axis=1)[:, 0]
    weight = (jnp.maximum(slots.segment, 0) != 0).astype(jnp.float32)  # > 0 rounds otherwise: committed losses
    total = jnp.einsum("bt,btd->bd", weight, x.astype(jnp.float32))
    return (total / jnp.maximum(weight.sum(axis=1), 1.0)[:, None]).astype(x.dtype)


def pool_segments(x: Float[Array, "B T D"], slots: Slots, how: str, count: int) -> Float[Array, "B N D"]:
    """As `pool`, one vector for each of the segments 1 to N = `count` of a row; 0 for one that is not there.

    By positions, not by the order of the slots, which a mesh may change.
    """
    here = slots.segment[:, None] == jnp.arange(1, count + 1)[:, None]  # [B, N, T]
    position = slots.position[:, None]
    if how == "first":
        here &= position == 0
    elif how == "last":
        here &= position == jnp.max(jnp.where(here, position, -1), axis=-1, keepdims=True)
    weight = here.astype(jnp.float32)
    total = jnp.einsum("bnt,btd->bnd", weight, x.astype(jnp.float32))
    return (total / jnp.maximum(weight.sum(axis=-1), 1.0)[..., None]).astype(x.dtype)


class Head(nn.Module):
    """What `config.kind` names, in float32.

    tokens: logits `[B, T, V]`. slots: a class for every slot, `[B, T, C]` (named entities; with two classes, the start
    and end of an answer). classes: one decision a sequence, `[B, C]`. pooled: one vector a sequence, `[B, D']`. pair:
    one for each of a row's segments 1 and 2, `[B, 2, D']`. none: the hidden states `[B, T, D]` themselves.

    Attributes:
      width: model width D.
      vocab: rows of the vocabulary, for kind "tokens".
    """

    config: HeadConfig
    width: int
    vocab: int | None = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], slots: Slots, embed: Embed | None = None, whole: bool = True
    ) -> Float[Array, "B ..."] | Projection:
        """`x` are normalised hidden states; `embed` is the table a tied head reads.

        Not `whole`: with `config.chunk`, what token logits are made of in place of the logits, for losses and measures.
        """
        kind = self.config.kind
        if kind == "tokens":
            return self.tokens(x, embed, whole)
        if kind == "slots":
            return self.decide(x)
        if kind == "classes":
            return self.decide(self.pooled(x, slots))
        if kind == "none":
            return Dropout(self.config.dropout)(x).astype(jnp.float32)
        return self.pooled(x, slots).astype(jnp.float32)

    def tokens(self, x: Float[Array, "B T D"], embed: Embed | None, whole: bool) -> Float[Array, "B T V"] | Projection:
        config, width = self.config, self.width
        if self.vocab is None:
            raise ValueError("head: got vocab None, expected a size; resolve the config with a tokenizer first")
        if config.transform:
            x = ACTIVATIONS[config.activation](Dense((width, width), ("embed", None), name="transform")(x))
            x = Norm(NormConfig(epsilon=config.epsilon), name="transform_norm")(x)
        x = Dropout(config.dropout)(x)
        if config.scale:
            x = x * jnp.asarray(width**-0.5, x.dtype)
        if config.tied:
            if embed is None:
                raise ValueError("head.tied: got a model without an embedding, expected one; set head.tied to False")
            (x, table), scale = embed.factors(x), embed.scale()
        else:
            init = nn.with_logical_partitioning(nn.initializers.normal(width**-0.5), ("embed", "vocab"))
            table = self.param("kernel", init, (width, self.vocab)).T
            scale = self.get_variable("params", "kernel_scale")  # of a kernel of integers: see decode/int8.py
        zeros = nn.with_logical_partitioning(nn.initializers.zeros_init(), ("vocab",))
        bias = self.param("bias", zeros, (self.vocab,)) if config.bias else None
        if config.chunk is not None and not whole:
            return Projection(x, table, bias, config.chunk)
        logits = wide_dot(x, table.T)
        logits = logits if scale is None else logits * scale
        logits = logits if bias is None else logits + bias
        return constrain(logits, "batch", "length", "act_vocab")

    def pooled(self, x: Float[Array, "B T D"], slots: Slots) -> Float[Array, "B ..."]:
        """One vector a sequence (of a pair two), through the hidden layer if there is one."""
        config = self.config
        pair = config.kind == "pair"
        y = pool_segments(x, slots, config.pooling, 2) if pair else pool(x, slots, config.pooling)
        y = Dropout(config.input_dropout, name="input_dropout")(y)
        if config.width is None:
            return y
        return ACTIVATIONS[config.hidden](Dense((self.width, config.width), ("embed", None), name="hidden")(y))

    def decide(self, x: Float[Array, "*batch _"]) -> Float[Array, "*batch C"]:
        """The classes' logits."""
        config = self.config
        if config.classes is None:
            raise ValueError("head.classes: got None, expected a number; resolve the config with the data first")
        x = Dropout(config.dropout)(x).astype(jnp.float32)
        return Dense((x.shape[-1], config.classes), ("embed", None), bias=config.decision_bias, name="decision")(x)
