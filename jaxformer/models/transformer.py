"""The transformer. Encoder-only, decoder-only and encoder-decoder are three fillings of one module."""

from __future__ import annotations

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Float, Float32, Int

from jaxformer.config import ModelConfig, StackConfig
from jaxformer.nn.cache import TransformerState
from jaxformer.nn.heads import Head, last_slot
from jaxformer.nn.layers import Embed
from jaxformer.nn.stack import Stack, apart, unstack
from jaxformer.types import Array, Batch, Projection, PyTree, Slots, Stream


class Transformer(nn.Module):
    """Embeddings, stacks and head as `config` fills them (Vaswani et al. 2017, Devlin et al. 2019, GPT-2 2019).

    A model with an encoder reads `batch.source`, one with a decoder reads `batch.target`; with both, the decoder's
    queries come from the target and its cross-attention's keys and values from the encoder's output.
    """

    config: ModelConfig

    def setup(self) -> None:
        config = self.config
        dtype = jnp.dtype(config.dtype)
        encoder, decoder = config.encoder, config.decoder
        if encoder is not None:
            self.source_embed = Embed(encoder.embed, encoder.width, dtype)
            self.encoder = Stack(encoder, causal=bool(encoder.causal))
        if decoder is not None:
            if encoder is None or not config.share_embeddings:
                self.target_embed = Embed(decoder.embed, decoder.width, dtype)
            self.decoder = Stack(decoder, causal=decoder.causal is not False)
        last: StackConfig = decoder or encoder
        self.head = Head(config.head, last.width, last.embed.vocab)

    def __call__(self, batch: Batch, whole: bool = True) -> Float32[Array, "B ..."] | Projection:
        """Logits: `[B, T, V]` (T of the target if there is a decoder) or, for a classifier, `[B, C]`.

        Not `whole`: what losses and measures take instead, see `Head`.
        """
        slots = (batch.source if self.config.decoder is None else batch.target).slots
        return self.head(self.hidden(batch), slots, self.output_embed(), whole)

    def hidden(self, batch: Batch) -> Float[Array, "B T D"]:
        """The hidden states below the head."""
        memory = None if self.config.encoder is None else self.encode(batch.source)
        if self.config.decoder is None:
            return memory
        memory_slots = None if memory is None else batch.source.slots
        x = self.input_embed()(batch.target)
        return self.decoder(x, batch.target.slots, memory, memory_slots, kind=batch.target.kind)[0]

    def encode(self, source: Stream) -> Float[Array, "B S D"]:
        """The encoder's output."""
        return self.encoder(self.source_embed(source), source.slots, kind=source.kind)[0]

    def input_embed(self) -> Embed:
        """The decoder's embedding: the source's own where the two are shared."""
        shared = self.config.encoder is not None and self.config.share_embeddings
        return self.source_embed if shared else self.target_embed

    def output_embed(self) -> Embed:
        """The embedding whose table a tied head reads."""
        return self.source_embed if self.config.decoder is None else self.input_embed()

    @nn.nowrap
    def unstack(self, variables: PyTree) -> PyTree:
        """The variables as a loop over `step` reads them best."""
        decoder = self.config.decoder
        if decoder is None or not apart(decoder):
            return variables

        def cut(part: PyTree) -> PyTree:
            blocks = unstack(part["decoder"]["blocks"], decoder.layers)
            return {**part, "decoder": {**part["decoder"], "blocks": blocks}}

        held = {name: "blocks" in part.get("decoder", {}) for name, part in variables.items()}
        return {name: cut(part) if held[name] else part for name, part in variables.items()}

    def start(self, batch: Batch, length: int) -> tuple[Float32[Array, "B V"], TransformerState]:
        """Reads source and prompt (`batch.target` `[B, T]`, padded on either side) and makes room for `length` slots.

        Returns:
          Logits of the token after each row's last real one, and the state.
        """
        target = batch.target
        rows, prompt = target.tokens.shape
        if length < prompt:
            raise ValueError(f"start: got length {length}, expected room for the prompt's {prompt} slots")
        memory, memory_slots = None, None
        if self.config.encoder is not None:
            memory = self.decoder.project(self.encode(batch.source))
            memory_slots = batch.source.slots
        room = ((0, 0), (0, length - prompt))
        slots = Slots(jnp.pad(target.slots.position, room), jnp.pad(target.slots.segment, room))
        held = self.decoder.empty(rows, length, jnp.dtype(self.config.dtype))
        last = last_slot(target.slots)[:, None]
        state = TransformerState(
            held=held,
            slots=slots,
            index=jnp.zeros((), jnp.int32),
            position=jnp.take_along_axis(target.slots.position, last, axis=1)[:, 0] + 1,
            memory=memory,
            memory_slots=memory_slots,
        )
        x, state = self.advance(target, state)
        x = jnp.take_along_axis(x, last[:, :, None], axis=1)
        return self.head(x, target.slots, self.output_embed())[:, 0], state

    def step(
        self, tokens: Int[Array, "B N"], state: TransformerState
    ) -> tuple[Float32[Array, "R V"], TransformerState]:
        """Appends one token to every row, or to each of its N branches. Logits of the token after it, R = B N."""
        here, state = state.append(tokens.shape[1])
        x, state = self.advance(Stream(tokens, here), state)
        logits = self.head(x, here, self.output_embed())
        return logits.reshape(-1, logits.shape[-1]), state

    def advance(self, target: Stream, state: TransformerState) -> tuple[Float[Array, "B T D"], TransformerState]:
        """Runs the decoder over new slots that `state.slots` already describes."""
        x, held = self.decoder(
            self.input_embed()(target),
            target.slots,
            state.memory,
            state.memory_slots,
            held=state.held,
            held_slots=state.slots,
            index=state.index,
            kind=target.kind,
            seen=state.seen,
        )
        return x, state.replace(held=held, index=state.index + target.tokens.shape[1])
