"""Copying: a mixture of a distribution over the vocabulary with one over the source's tokens (See et al. 2017)."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Bool, Float, Float32, Int

from jaxformer.errors import ConfigError
from jaxformer.nn.layers import Dense
from jaxformer.parallel.rules import constrain
from jaxformer.types import Array, Stream

MASKED_SCORE = -1e30
"""Score of a slot that is not visible; finite, so that a row without a visible slot has no NaN."""


class CopySource(flax.struct.PyTreeNode):
    """The source as the head copies from it; decoding computes it once and carries it in its state.

    Attributes:
      keys: `[B, S, D]`, keys of the encoder's output.
      tokens: int32 `[B, S]`, ids of the source.
      segment: int32 `[B, S]`, its segments; 0 at padding, which is never copied.
    """

    keys: Array
    tokens: Array
    segment: Array


class Copy(nn.Module):
    """A pointer-generator (See et al. 2017, section 2.2) on a distribution of its own over the slots of the source.

        p(v) = g softmax(logits)_v + (1 - g) sum_(s: token_s = v) a_s
        a = softmax(q(x) k(memory)^T / sqrt(D) + mask),   g = sigmoid(w x + b)

    x are the decoder's hidden states, where the paper also reads the context vector and the embedded input, which a
    transformer's residual stream holds already. A slot sees the source slots of its own segment; without any, g is 1.

    Attributes:
      width: width D of the decoder's hidden states.
      memory_width: width of the encoder's output.
    """

    width: int
    memory_width: int

    def setup(self) -> None:
        self.query = Dense((self.width, self.width), ("embed", None))
        self.key = Dense((self.memory_width, self.width), ("embed", None))
        self.gate = Dense((self.width, 1), ("embed", None))

    def source(self, memory: Float[Array, "B S D"], source: Stream) -> CopySource:
        """What can be copied from `source`, whose encoder's output is `memory`.

        Raises:
          ConfigError: the source holds vectors in place of token ids.
        """
        if jnp.issubdtype(source.tokens.dtype, jnp.floating):
            raise ConfigError("head.copy: got vectors in place of token ids, expected ids to copy; pass ids")
        return CopySource(self.key(memory), source.tokens, source.slots.segment)

    def __call__(
        self, logits: Float32[Array, "B T V"], x: Float[Array, "B T D"], segment: Int[Array, "B T"], copied: CopySource
    ) -> Float32[Array, "B T V"]:
        """Log-probabilities `[B, T, V]` of the mixture, for logits of the vocabulary.

        They differ from log(g softmax(logits)) only at ids of the source. With c_s the sum of the weights of all slots
        that hold the token of slot s, that difference is log(1 + exp(log c_s + log(1 - g) - log g - log softmax_s)); it
        is added for the first slot of each token. So no second array `[B, T, V]` of probabilities is made.
        """
        visible = (jnp.abs(segment)[:, :, None] == copied.segment[:, None]) & (copied.segment > 0)[:, None]
        some = jnp.any(visible, axis=-1)
        weights = self.weights(x, copied.keys, visible)
        gate = self.gate(x)[..., 0].astype(jnp.float32)
        log_generated = jax.nn.log_softmax(logits) + jnp.where(some, jax.nn.log_sigmoid(gate), 0.0)[..., None]
        log_generated = constrain(log_generated, "batch", "length", "act_vocab")

        same, first = equal_tokens(copied)
        share = jnp.einsum("bts,bsr->btr", weights, same.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
        log_copied = jnp.log(jnp.maximum(share, jnp.finfo(jnp.float32).tiny)) + jax.nn.log_sigmoid(-gate)[..., None]
        ids = jnp.broadcast_to(copied.tokens[:, None], share.shape)
        added = jax.nn.softplus(log_copied - jnp.take_along_axis(log_generated, ids, axis=-1))
        added = jnp.where(visible & first[:, None], added, 0.0)
        row, slot = jnp.arange(ids.shape[0])[:, None, None], jnp.arange(ids.shape[1])[None, :, None]
        return constrain(log_generated.at[row, slot, ids].add(added), "batch", "length", "act_vocab")

    def weights(
        self, x: Float[Array, "B T D"], keys: Float[Array, "B S D"], visible: Bool[Array, "B T S"]
    ) -> Float32[Array, "B T S"]:
        """Attention a over the source slots, float32; zeros where a query sees none."""
        scores = jnp.einsum("btd,bsd->bts", self.query(x), keys, preferred_element_type=jnp.float32)
        probabilities = jax.nn.softmax(jnp.where(visible, scores * self.width**-0.5, MASKED_SCORE), axis=-1)
        return jnp.where(visible, probabilities, 0.0)


def equal_tokens(copied: CopySource) -> tuple[Bool[Array, "B S S"], Bool[Array, "B S"]]:
    """Which slots of a segment hold the same token, and which are the first of their token in their segment."""
    tokens, segment = copied.tokens, copied.segment
    same = (tokens[:, :, None] == tokens[:, None]) & (segment[:, :, None] == segment[:, None])
    earlier = jnp.tril(jnp.ones(same.shape[1:], bool), -1)
    return same, ~jnp.any(same & earlier, axis=2)
