"""A smaller model that proposes tokens to a larger one (see `search/speculation.py`).

Both read the same tokens in the same slots. The draft reads its own proposals one after the other, then the model reads
all of them at once, and both take back what was wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import flax.struct
import jax.numpy as jnp
from jaxtyping import Bool, Float32, Int

from jaxformer.errors import ConfigError
from jaxformer.nn.cache import TransformerState
from jaxformer.types import Array, Batch, Extendable, State


class PairedState(flax.struct.PyTreeNode):
    """The state of a model and that of its draft. The methods are those of `TransformerState`, for both.

    Attributes:
      vocab: columns of the model's logits.
    """

    model: TransformerState
    draft: TransformerState
    vocab: int = flax.struct.field(pytree_node=False)

    def rows(self, index: Int[Array, " B"]) -> PairedState:
        """The state whose row i is this one's row `index[i]`."""
        return self.replace(model=self.model.rows(index), draft=self.draft.rows(index))

    def replace_rows(self, index: Int[Array, " R"], other: PairedState) -> PairedState:
        """The state whose row `index[i]` is row i of `other`; indices beyond the rows are ignored."""
        return self.replace(
            model=self.model.replace_rows(index, other.model), draft=self.draft.replace_rows(index, other.draft)
        )

    def grow(self, length: int) -> PairedState:
        """The state with `length` slots."""
        return self.replace(model=self.model.grow(length), draft=self.draft.grow(length))

    def max_used_slots(self, active: Bool[Array, " B"]) -> Int[Array, ""]:
        """Most slots that an active row reads: the same in both."""
        return self.model.max_used_slots(active)

    def compact(self, active: Bool[Array, " B"], length: int) -> PairedState:
        """The state with `length` slots, without those that no active row reads."""
        return self.replace(model=self.model.compact(active, length), draft=self.draft.compact(active, length))

    def keep(self, count: Int[Array, " B"], of: int) -> PairedState:
        """The state in which row b has included the first `count[b]` of its last `of` tokens, and not the others."""
        return self.replace(model=self.model.keep(count, of), draft=self.draft.keep(count, of))


@dataclass(frozen=True)
class DraftedModel:
    """A model with a draft, as an `Extendable`.

    Its `extend` is that of the model alone: the draft has read the tokens when it proposed them, with `read`.
    """

    model: Extendable
    draft: Extendable

    def start(self, batch: Batch, length: int) -> tuple[Float32[Array, "B V"], PairedState]:
        """Reads prompts into both states, of `length` slots; the model's logits of the next token.

        Raises:
          ConfigError: the state of the model or of the draft cannot take back a token.
        """
        logits, state = self.model.start(batch, length)
        _, draft = self.draft.start(batch, length)
        return logits, PairedState(_transformer("model", state), _transformer("draft", draft), logits.shape[1])

    def step(self, tokens: Int[Array, "B 1"], state: State) -> tuple[Float32[Array, "B V"], PairedState]:
        """Appends tokens to both; the model's logits of the next token."""
        _, state = self.read(tokens, state)
        logits, state = self.extend(tokens, state)
        return logits[:, -1], state

    def extend(self, tokens: Int[Array, "B N"], state: State) -> tuple[Float32[Array, "B N V"], PairedState]:
        """Appends tokens that the draft has read to the model; its logits of the token after each."""
        state = _paired(state)
        logits, model = self.model.extend(tokens, state.model)
        return logits, state.replace(model=_transformer("model", model))

    def read(self, tokens: Int[Array, "B 1"], state: State) -> tuple[Float32[Array, "B V"], PairedState]:
        """Appends tokens to the draft; its logits of the next token, with as many columns as the model's.

        Equal numbers of columns get equal noise when a token is drawn, so that the two models draw the same token more
        often than not even where their distributions differ.
        """
        state = _paired(state)
        logits, draft = self.draft.extend(tokens, state.draft)
        logits = logits[:, 0, : state.vocab]
        missing = ((0, 0), (0, state.vocab - logits.shape[1]))
        return jnp.pad(logits, missing, constant_values=-jnp.inf), state.replace(draft=_transformer("draft", draft))


def _transformer(name: str, state: State) -> TransformerState:
    if not isinstance(state, TransformerState):
        raise ConfigError(
            f"draft: got a {name} with a {type(state).__name__}, which cannot take back a token, expected a "
            "transformer; decode without a draft"
        )
    return state


def _paired(state: State) -> PairedState:
    if not isinstance(state, PairedState):
        raise TypeError(f"draft: got a {type(state).__name__}, expected one that `start` returns")
    return state
