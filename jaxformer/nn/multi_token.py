"""Multi-token prediction: modules that predict the tokens after the next one (DeepSeek-AI 2024, DeepSeek-V3, 2.2)."""

from __future__ import annotations

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Float, Int, Shaped

from jaxformer.config import NormConfig, StackConfig
from jaxformer.nn.cache import TransformerState
from jaxformer.nn.layers import Dense, Norm
from jaxformer.nn.stack import Stack
from jaxformer.types import Array, Slots


class PredictionModule(nn.Module):
    """Module k of DeepSeek-V3, section 2.2, equations 21 and 22: hidden states from which token t + k + 1 is predicted.

        h_k(t) = block([norm(h_{k-1}(t)) ; norm(embedding of token t + k)] W)

    h_0 are the hidden states that the head of the model reads; so are h_k, after the norm that ends a stack. Embedding
    and head are the model's.

    Attributes:
      config: a stack of one layer, `ModelConfig.multi_token_stack`.
    """

    config: StackConfig

    def setup(self) -> None:
        config = self.config
        norm = NormConfig("rms", epsilon=config.norm.epsilon)
        self.hidden_norm, self.embedding_norm = Norm(norm), Norm(norm)
        self.projection = Dense((2 * config.width, config.width), ("embed", None), bias=False)
        self.stack = Stack(config, causal=True)

    def empty_state(self, slots: Slots, position: Int[Array, " B"], length: int, dtype: jnp.dtype) -> TransformerState:
        """The state of decoding with space for `length` slots, of which prompts take `slots`; nothing is read yet.

        Args:
          position: of the token after each prompt.
        """
        rows, prompt_length = slots.segment.shape
        padding = ((0, 0), (0, length - prompt_length))
        return TransformerState(
            keys_values=self.stack.empty_cache(rows, length, dtype),
            slots=Slots(jnp.pad(slots.position, padding), jnp.pad(slots.segment, padding)),
            index=jnp.zeros((), jnp.int32),
            position=position,
        )

    def advance(
        self, x: Float[Array, "B T D"], embedded: Float[Array, "B T D"], slots: Slots, state: TransformerState
    ) -> tuple[Float[Array, "B T D"], TransformerState]:
        """`__call__` for further slots of texts that `state`, which has them already, holds the rest of."""
        h, keys_values = self.stack(
            self.join(x, embedded), slots, cache=state.keys_values, cache_slots=state.slots, index=state.index
        )
        return h, state.replace(keys_values=keys_values, index=state.index + x.shape[1])

    def join(self, x: Float[Array, "B T D"], embedded: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The input of the layer."""
        return self.projection(jnp.concatenate([self.hidden_norm(x), self.embedding_norm(embedded)], axis=-1))

    def __call__(
        self, x: Float[Array, "B T D"], embedded: Float[Array, "B T D"], slots: Slots
    ) -> Float[Array, "B T D"]:
        """The hidden states h_k from `x`, those of h_{k-1}.

        Args:
          embedded: embeddings of the tokens k slots further on.
          slots: those of `x`, padding where the text ends less than k slots further on (`slots_ahead`).
        """
        return self.stack(self.join(x, embedded), slots)[0]


def shift_left(x: Shaped[Array, "B T"], count: int) -> Shaped[Array, "B T"]:
    """Column t of the result is column t + `count` of `x`, 0 beyond the end."""
    return jnp.pad(x[:, count:], ((0, 0), (0, min(count, x.shape[1]))))


def slots_ahead(segment: Int[Array, "B T"], count: int) -> Int[Array, "B T"]:
    """`segment`, with 0 (padding) where the slot `count` further on is of another text, padding or beyond the row."""
    return jnp.where(shift_left(segment, count) == segment, segment, 0)
