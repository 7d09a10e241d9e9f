"""From hidden states to decisions: a vocabulary row for every slot, or one class for a sequence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxformer.config import HeadConfig, NormConfig
from jaxformer.nn.layers import Dense, Dropout, Embed, Norm
from jaxformer.parallel.rules import constrain
from jaxformer.types import Array, Slots


def last_slot(slots: Slots) -> Array:
    """int32 `[B]`: the index of the last real slot of each row (0 where a row is empty)."""
    index = jnp.arange(slots.segment.shape[1])
    return jnp.max(jnp.where(slots.segment != 0, index, 0), axis=1)


def pool(x: Array, slots: Slots, how: str) -> Array:
    """One vector `[B, D]` a sequence of `x` `[B, T, D]`: its first slot, the mean of its real ones, or its last one."""
    if how == "first":
        return x[:, 0]
    if how == "last":
        return jnp.take_along_axis(x, last_slot(slots)[:, None, None], axis=1)[:, 0]
    weight = (slots.segment != 0).astype(jnp.float32)
    total = jnp.einsum("bt,btd->bd", weight, x.astype(jnp.float32))
    return (total / jnp.maximum(weight.sum(axis=1), 1.0)[:, None]).astype(x.dtype)


class Head(nn.Module):
    """Float32 logits: `[B, T, V]` for kind "tokens", `[B, C]` for kind "classes".

    Attributes:
      width: model width D.
      vocab: rows of the vocabulary, for kind "tokens".
    """

    config: HeadConfig
    width: int
    vocab: int | None = None

    @nn.compact
    def __call__(self, x: Array, slots: Slots, embed: Embed | None = None) -> Array:
        """`x` `[B, T, D]` normalised hidden states; `embed` is the table a tied head reads."""
        return self.tokens(x, embed) if self.config.kind == "tokens" else self.classes(x, slots)

    def tokens(self, x: Array, embed: Embed | None) -> Array:
        config, width = self.config, self.width
        if self.vocab is None:
            raise ValueError("head: got vocab None, expected a size; resolve the config with a tokenizer first")
        if config.transform:
            x = jax.nn.gelu(Dense((width, width), ("embed", None), name="transform")(x), approximate=False)
            x = Norm(NormConfig(), name="transform_norm")(x)
        x = Dropout(config.dropout)(x)
        if config.tied:
            if embed is None:
                raise ValueError("head.tied: got a model without an embedding, expected one; set head.tied to False")
            logits = embed.attend(x)
        else:
            init = nn.with_logical_partitioning(nn.initializers.normal(width**-0.5), ("embed", "vocab"))
            kernel = self.param("kernel", init, (width, self.vocab)).astype(x.dtype)
            logits = jnp.einsum("...d,dv->...v", x, kernel, preferred_element_type=jnp.float32)
        if config.bias:
            zeros = nn.with_logical_partitioning(nn.initializers.zeros_init(), ("vocab",))
            logits = logits + self.param("bias", zeros, (self.vocab,))
        return constrain(logits, "batch", "length", "act_vocab")

    def classes(self, x: Array, slots: Slots) -> Array:
        config, width = self.config, self.width
        if config.classes is None:
            raise ValueError("head.classes: got None, expected a number; resolve the config with the data first")
        y = pool(x, slots, config.pooling)
        if config.width is not None:
            y = jnp.tanh(Dense((width, config.width), ("embed", None), name="hidden")(y))
            width = config.width
        y = Dropout(config.dropout)(y).astype(jnp.float32)
        return Dense((width, config.classes), ("embed", None), name="decision")(y)
