"""The transformer: encoder-only, decoder-only or encoder-decoder, by which part of the config is None."""

from __future__ import annotations

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Float, Float32, Int

from jaxformer.config import ModelConfig, StackConfig
from jaxformer.nn.cache import TransformerState
from jaxformer.nn.heads import Head, last_slot
from jaxformer.nn.layers import Embed
from jaxformer.nn.series import SeriesInput, Statistics
from jaxformer.nn.stack import Stack, unrolls_decoding, unstack
from jaxformer.types import Array, Batch, DeferredLogits, PyTree, RelationLogits, Slots, Stream


class Transformer(nn.Module):
    """Embeddings, stacks and head of `config` (Vaswani et al. 2017, Devlin et al. 2019, GPT-2 2019).

    An encoder reads `batch.source`, a decoder reads `batch.target`. With both, the decoder's cross-attention takes its
    keys and values from the encoder's output.
    """

    config: ModelConfig

    def setup(self) -> None:
        config = self.config
        dtype = jnp.dtype(config.dtype)
        encoder, decoder = config.encoder, config.decoder
        if config.series is not None:
            self.series = SeriesInput(config.series)
        if encoder is not None:
            self.source_embed = self.make_source_embed(encoder, dtype)
            self.encoder = Stack(encoder, causal=bool(encoder.causal))
        if decoder is not None:
            if encoder is None or not config.share_embeddings:
                self.target_embed = Embed(decoder.embed, decoder.width, dtype)
            self.decoder = Stack(decoder, causal=decoder.causal is not False)
        last = last_stack(config)
        outputs = None if config.head.horizon is None else config.head.horizon * self.channels_per_row()
        self.head = Head(config.head, last.output_width or last.width, last.embed.vocab, outputs)

    @nn.nowrap
    def channels_per_row(self) -> int:
        """Channels of a series that one row holds."""
        series = self.config.series
        return 1 if series is None or series.independent else series.channels or 1

    @nn.nowrap
    def make_source_embed(self, encoder: StackConfig, dtype: jnp.dtype) -> Embed:
        """Embedding of the source. Models that share its table with another part make it differently."""
        series = self.config.series
        values = None if series is None else series.patch * self.channels_per_row()
        return Embed(encoder.embed, encoder.width, dtype, values)

    def __call__(
        self, batch: Batch, full_logits: bool = True
    ) -> Float32[Array, "B ..."] | DeferredLogits | RelationLogits:
        """Logits: `[B, T, V]` (T of the target if there is a decoder), or `[B, C]` for a classifier.

        A forecast is `[B, H, C]`, in the scale of the series.
        With `config.head.relation`, `RelationLogits`. Without `full_logits` the head may return `DeferredLogits`, for
        losses and measures.
        """
        batch, statistics = self.read(batch)
        slots = batch.side("source" if self.config.decoder is None else "target").slots
        y = self.head(self.last_hidden(batch), slots, self.output_embed(), full_logits)
        if not isinstance(y, Array) or statistics is None or self.config.head.kind != "forecast":
            return y
        return self.series.restore(y, statistics)

    def hidden(self, batch: Batch) -> Float[Array, "B T _"]:
        """Hidden states of the last stack, the input of the head."""
        return self.last_hidden(self.read(batch)[0])

    def encode(self, source: Stream) -> Float[Array, "B S D"]:
        """Output of the encoder."""
        return self.encode_slots(source if self.config.series is None else self.series.read(source)[0])

    def read(self, batch: Batch) -> tuple[Batch, Statistics | None]:
        """The batch with its source in the slots of the encoder: patches of a series, tokens as they are."""
        if self.config.series is None:
            return batch, None
        source, statistics = self.series.read(batch.side("source"))
        return batch._replace(source=source), statistics

    def last_hidden(self, batch: Batch) -> Float[Array, "B T D"]:
        """`hidden` of a batch that is in the slots of the encoder."""
        if self.config.decoder is None:
            return self.encode_slots(batch.side("source"))
        target, memory, memory_slots = batch.side("target"), None, None
        if self.config.encoder is not None:
            source = batch.side("source")
            memory, memory_slots = self.encode_slots(source), source.slots
        x = self.input_embed()(target)
        return self.decoder(x, target.slots, memory, memory_slots, token_type=target.token_type)[0]

    def encode_slots(self, source: Stream) -> Float[Array, "B S D"]:
        """Output of the encoder for a stream that is in its slots."""
        return self.encoder(self.source_embed(source), source.slots, token_type=source.token_type)[0]

    def input_embed(self) -> Embed:
        """Embedding of the decoder: that of the source if the two are shared."""
        shared = self.config.encoder is not None and self.config.share_embeddings
        return self.source_embed if shared else self.target_embed

    def output_embed(self) -> Embed:
        """Embedding whose table a tied head uses."""
        return self.source_embed if self.config.decoder is None else self.input_embed()

    @nn.nowrap
    def unstack(self, variables: PyTree) -> PyTree:
        """`variables` in the form in which a loop over `step` reads them fastest."""
        decoder = self.config.decoder
        if decoder is None or not unrolls_decoding(decoder):
            return variables

        def separate(part: PyTree) -> PyTree:
            counts = {"dense_blocks": decoder.dense_layers, "blocks": decoder.layers - decoder.dense_layers}
            stacked = {name: unstack(part["decoder"][name], n) for name, n in counts.items() if name in part["decoder"]}
            return {**part, "decoder": {**part["decoder"], **stacked}}

        shared = {"params"} if decoder.share_layers else set()
        stacked = {name: name not in shared and "blocks" in part.get("decoder", {}) for name, part in variables.items()}
        return {name: separate(part) if stacked[name] else part for name, part in variables.items()}

    def start(self, batch: Batch, length: int) -> tuple[Float32[Array, "B V"], TransformerState]:
        """Logits of the token after each prompt, and the decoding state, with space for `length` slots.

        Prompts are `batch.target` `[B, T]`, padded on either side.

        Raises:
          ValueError: `length` is less than T.
        """
        target = batch.side("target")
        rows, prompt_length = target.tokens.shape
        if length < prompt_length:
            raise ValueError(f"start: got length {length}, expected room for the prompt's {prompt_length} slots")
        memory, memory_slots = None, None
        if self.config.encoder is not None:
            source = self.read(batch)[0].side("source")
            memory, memory_slots = self.decoder.project_memory(self.encode_slots(source)), source.slots
        padding = ((0, 0), (0, length - prompt_length))
        last = last_slot(target.slots)[:, None]
        state = TransformerState(
            keys_values=self.decoder.empty_cache(rows, length, jnp.dtype(self.config.dtype)),
            slots=Slots(jnp.pad(target.slots.position, padding), jnp.pad(target.slots.segment, padding)),
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
        """Logits of the tokens after `tokens`, one for each of R = B N rows or branches, and the new state."""
        slots, state = state.append(tokens.shape[1])
        x, state = self.advance(Stream(tokens, slots), state)
        logits = self.head(x, slots, self.output_embed())
        return logits.reshape(-1, logits.shape[-1]), state

    def advance(self, target: Stream, state: TransformerState) -> tuple[Float[Array, "B T D"], TransformerState]:
        """Hidden states of new tokens (already in `state.slots`), and the state with their keys and values."""
        x, keys_values = self.decoder(
            self.input_embed()(target),
            target.slots,
            state.memory,
            state.memory_slots,
            cache=state.keys_values,
            cache_slots=state.slots,
            index=state.index,
            token_type=target.token_type,
            visible_slots=state.branch_slots,
        )
        return x, state.replace(keys_values=keys_values, index=state.index + target.tokens.shape[1])


def last_stack(config: ModelConfig) -> StackConfig:
    """Config of the stack below the head: the decoder, or without one the encoder.

    Raises:
      ValueError: there is neither.
    """
    last = config.decoder or config.encoder
    if last is None:
        raise ValueError("model: got neither encoder nor decoder, expected at least one; add one")
    return last
