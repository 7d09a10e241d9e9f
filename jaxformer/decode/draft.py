"""A smaller model, or the model's own further module, that proposes tokens to a model (see `search/speculation.py`).

Both read the same tokens in the same slots. The draft reads its own proposals one after the other, then the model reads
all of them at once, and both take back what was wrong.

The first module of `model.multi_token` (DeepSeek-AI 2024, DeepSeek-V3, section 2.2) needs no model beside: from the
hidden state of a token and the token after it, it predicts the second one. It is a step behind: what it reads of a
token is known when the model has read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import flax.struct
import jax.numpy as jnp
from jaxtyping import Bool, Float, Float32, Int

from jaxformer.errors import ConfigError
from jaxformer.nn.cache import SlotState, TransformerState, scatter_rows
from jaxformer.types import Array, Batch, Extendable, State


class PairedState(flax.struct.PyTreeNode):
    """The state of a model and that of its draft. The methods are those of `TransformerState`, for both.

    Attributes:
      vocab: columns of the model's logits.
    """

    model: SlotState
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

    def reads(self, lookahead: int) -> int:
        """Number of times that `read` is called in a step.

        The last one reads the last proposal, so that the draft is as far as the model if all are right.
        """
        return lookahead + 1

    def start(self, batch: Batch, length: int) -> tuple[Float32[Array, "B V"], PairedState]:
        """Reads prompts into both states, of `length` slots; the model's logits of the next token.

        Raises:
          ConfigError: the state of the model or of the draft cannot take back a token.
        """
        logits, state = self.model.start(batch, length)
        _, draft = self.draft.start(batch, length)
        return logits, PairedState(_rewindable(state), _transformer("draft", draft), logits.shape[1])

    def step(self, tokens: Int[Array, "B 1"], state: State) -> tuple[Float32[Array, "B V"], PairedState]:
        """Appends tokens to both; the model's logits of the next token."""
        _, state = self.read(tokens, state)
        logits, state = self.extend(tokens, state)
        return logits[:, -1], state

    def extend(self, tokens: Int[Array, "B N"], state: State) -> tuple[Float32[Array, "B N V"], PairedState]:
        """Appends tokens that the draft has read to the model; its logits of the token after each."""
        state = _paired(state)
        logits, model = self.model.extend(tokens, state.model)
        return logits, state.replace(model=_rewindable(model))

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


class MultiTokenModel(Extendable, Protocol):
    """A model with a module that predicts the token after the next one; see `models.transformer.Transformer`."""

    def start_further(
        self, batch: Batch, length: int
    ) -> tuple[Float32[Array, "B V"], TransformerState, TransformerState, Float[Array, "B D"]]:
        """`start` for model and module, and the hidden state of the last token."""
        ...

    def extend_with_hidden(
        self, tokens: Int[Array, "B N"], state: State
    ) -> tuple[Float32[Array, "B N V"], Float[Array, "B N D"], State]:
        """`extend`, and the hidden states of the tokens."""
        ...

    def predict_further(
        self, x: Float[Array, "B N D"], tokens: Int[Array, "B N"], index: Int[Array, " B"], state: TransformerState
    ) -> tuple[Float32[Array, "B V"], TransformerState]:
        """The module's logits from hidden states and the tokens after them."""
        ...


class MultiTokenState(flax.struct.PyTreeNode):
    """The state of a model and of its module, which reads the tokens of a step in the next one.

    The module takes at most one slot more than the model: its rows are a step behind, so they may be refilled between
    what the model and what the module takes for the same tokens.

    Attributes:
      hidden: `[B, 2, D]`, the model's hidden states of the last tokens that it read.
      tokens: int32 `[B, 2]`, these tokens: the last one chosen, and its proposal.
      kept: int32 `[B]`, how many of them were right.
    """

    model: TransformerState
    module: TransformerState
    hidden: Array
    tokens: Array
    kept: Array

    def rows(self, index: Int[Array, " B"]) -> MultiTokenState:
        """The state whose row i is this one's row `index[i]`."""
        own = {name: jnp.take(getattr(self, name), index, axis=0) for name in ("hidden", "tokens", "kept")}
        return self.replace(model=self.model.rows(index), module=self.module.rows(index), **own)

    def replace_rows(self, index: Int[Array, " R"], other: MultiTokenState) -> MultiTokenState:
        """The state whose row `index[i]` is row i of `other`; indices beyond the rows are ignored."""
        own = {
            name: scatter_rows(getattr(self, name), index, getattr(other, name))
            for name in ("hidden", "tokens", "kept")
        }
        model, module = self.model.replace_rows(index, other.model), self.module.replace_rows(index, other.module)
        return self.replace(model=model, module=module, **own)

    def grow(self, length: int) -> MultiTokenState:
        """The state with `length` slots."""
        return self.replace(model=self.model.grow(length), module=self.module.grow(length + 1))

    def max_used_slots(self, active: Bool[Array, " B"]) -> Int[Array, ""]:
        """Most slots that an active row reads: those of the model."""
        return self.model.max_used_slots(active)

    def compact(self, active: Bool[Array, " B"], length: int) -> MultiTokenState:
        """The state with `length` slots, without those that no active row reads."""
        return self.replace(model=self.model.compact(active, length), module=self.module.compact(active, length + 1))

    def keep(self, count: Int[Array, " B"], of: int) -> MultiTokenState:
        """The state in which row b has included the first `count[b]` of its last `of` tokens, and not the others."""
        return self.replace(model=self.model.keep(count, of), kept=count)


@dataclass(frozen=True)
class SelfDraftedModel:
    """A model whose first module of `multi_token` proposes one token a step, as an `Extendable`."""

    model: MultiTokenModel

    def reads(self, lookahead: int) -> int:
        """Number of times that `read` is called in a step: the module reads the proposal in the next one."""
        return lookahead

    def start(self, batch: Batch, length: int) -> tuple[Float32[Array, "B V"], MultiTokenState]:
        """Reads prompts into both states, of `length` slots; the model's logits of the next token."""
        logits, state, module, last = self.model.start_further(batch, length)
        rows = logits.shape[0]
        hidden = jnp.stack([last, jnp.zeros_like(last)], axis=1)
        read = jnp.zeros((rows, 2), jnp.int32)
        return logits, MultiTokenState(state, module, hidden, read, jnp.ones(rows, jnp.int32))

    def step(self, tokens: Int[Array, "B 1"], state: State) -> tuple[Float32[Array, "B V"], MultiTokenState]:
        """Appends tokens to both; the model's logits of the next token."""
        proposed, state = self.read(tokens, state)
        proposal = jnp.argmax(proposed, axis=1).astype(tokens.dtype)[:, None]
        logits, state = self.extend(jnp.concatenate([tokens, proposal], axis=1), state)
        return logits[:, 0], state.keep(jnp.ones(len(tokens), jnp.int32), 2)

    def extend(self, tokens: Int[Array, "B 2"], state: State) -> tuple[Float32[Array, "B 2 V"], MultiTokenState]:
        """Appends the last token and its proposal to the model; its logits of the token after each."""
        state = _multi_token(state)
        logits, hidden, model = self.model.extend_with_hidden(tokens, state.model)
        return logits, state.replace(model=_transformer("model", model), hidden=hidden, tokens=tokens)

    def read(self, tokens: Int[Array, "B 1"], state: State) -> tuple[Float32[Array, "B V"], MultiTokenState]:
        """The module's logits of the token after `tokens`, which the model has not read.

        The module reads one slot or two, as many tokens as were right: after the first of two comes the proposal.
        """
        state = _multi_token(state)
        first = jnp.where(state.kept[:, None] == 2, state.tokens[:, 1:], tokens)
        index = jnp.maximum(state.kept - 1, 0)
        following = jnp.concatenate([first, tokens], axis=1)
        logits, module = self.model.predict_further(state.hidden, following, index, state.module)
        return logits, state.replace(module=module.keep(state.kept, 2))


def _multi_token(state: State) -> MultiTokenState:
    if not isinstance(state, MultiTokenState):
        raise TypeError(f"draft: got a {type(state).__name__}, expected one that `start` returns")
    return state


def _rewindable(state: State) -> SlotState:
    if not isinstance(state, SlotState):
        raise ConfigError(
            f"draft: got a model with a {type(state).__name__}, which cannot take back a token, expected a "
            "transformer; decode without a draft"
        )
    return state


def _transformer(name: str, state: State) -> TransformerState:
    if not isinstance(state, TransformerState):
        raise ConfigError(
            f"draft: got a {name} with a {type(state).__name__}, expected a transformer without the gated delta rule; "
            "decode without a draft"
        )
    return state


def _paired(state: State) -> PairedState:
    if not isinstance(state, PairedState):
        raise TypeError(f"draft: got a {type(state).__name__}, expected one that `start` returns")
    return state
