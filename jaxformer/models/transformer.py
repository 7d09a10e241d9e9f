"""The transformer: encoder-only, decoder-only or encoder-decoder, by which part of the config is None."""

from __future__ import annotations

from typing import TypeVar, cast

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Float, Float32, Int

from jaxformer.config import ModelConfig, StackConfig
from jaxformer.config.layer_groups import layer_groups
from jaxformer.errors import ConfigError
from jaxformer.nn.cache import SlotState, TransformerState
from jaxformer.nn.copying import Copy, CopySource
from jaxformer.nn.heads import Head, last_slot
from jaxformer.nn.layers import Dense, Embed
from jaxformer.nn.multi_token import PredictionModule, shift_left, slots_ahead
from jaxformer.nn.series import SeriesInput, Statistics
from jaxformer.nn.stack import Stack, unrolls_decoding, unstack
from jaxformer.types import Array, Batch, DeferredLogits, MultiTokenLogits, PyTree, RelationLogits, Slots, Stream

State = TypeVar("State", bound=SlotState)


class Transformer(nn.Module):
    """Embeddings, stacks and head of `config` (Vaswani et al. 2017, Devlin et al. 2019, GPT-2 2019).

    An encoder reads `batch.source`, a decoder reads `batch.target`. With both, the decoder's cross-attention takes its
    keys and values from the encoder's output. Where the two have different widths, a linear map with a bias stands
    between them (`memory_projection`).
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
        if encoder is not None and decoder is not None and projects_memory(config):
            shape = (output_width(encoder), decoder.memory_width or decoder.width)
            self.memory_projection = Dense(shape, ("embed", None))
        if config.multi_token is not None:
            stack = config.multi_token_stack
            self.multi_token = [PredictionModule(stack) for _ in range(config.multi_token.depth)]
        last = last_stack(config)
        outputs = None if config.head.horizon is None else config.head.horizon * self.channels_per_row()
        self.head = Head(config.head, last.output_width or last.width, last.embed.vocab, outputs)
        if config.head.copy and encoder is not None:
            self.copying = Copy(last.output_width or last.width, encoder.output_width or encoder.width)

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
    ) -> Float32[Array, "B ..."] | DeferredLogits | RelationLogits | MultiTokenLogits:
        """Logits: `[B, T, V]` (T of the target if there is a decoder), or `[B, C]` for a classifier.

        A forecast is `[B, H, C]`, in the scale of the series.
        With `config.head.copy` the logits are log-probabilities. With `config.head.relation`, `RelationLogits`. Without
        `full_logits` the head may return `DeferredLogits`, for losses and measures, and a model with
        `config.multi_token` returns `MultiTokenLogits`.
        """
        batch, statistics = self.read(batch)
        slots = batch.side("source" if self.config.decoder is None else "target").slots
        x, copied = self.run_stacks(batch)
        if copied is not None:
            return self.copying(self.head(x, slots, self.output_embed()), x, slots.segment, copied)
        y = self.head(x, slots, self.output_embed(), full_logits)
        if self.config.multi_token is not None and (self.is_initializing() or not full_logits):
            further = self.further_logits(batch.side("target"), x, full_logits)
            return y if full_logits else MultiTokenLogits(cast(Array, y), further)
        if not isinstance(y, Array) or statistics is None or self.config.head.kind != "forecast":
            return y
        return self.series.restore(y, statistics)

    def further_logits(
        self, target: Stream, x: Float[Array, "B T D"], full_logits: bool
    ) -> tuple[Float32[Array, "B T V"] | DeferredLogits, ...]:
        """Logits of the tokens after the next one, one entry for each module, from the hidden states `x`.

        Where the text ends before the token that a module reads, its logits mean nothing.
        """
        found = []
        for count, module in enumerate(self.multi_token, start=1):
            slots = target.slots._replace(segment=slots_ahead(target.slots.segment, count))
            embedded = self.input_embed()(Stream(shift_left(target.tokens, count), slots))
            x = module(x, embedded, slots)
            found.append(cast(Array, self.head(x, slots, self.output_embed(), full_logits)))
        return tuple(found)

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
        return self.run_stacks(batch)[0]

    def run_stacks(self, batch: Batch) -> tuple[Float[Array, "B T D"], CopySource | None]:
        """`last_hidden`, and what the head may copy from the source (None where it does not copy)."""
        if self.config.decoder is None:
            return self.encode_slots(batch.side("source")), None
        target, memory, memory_slots, copied = batch.side("target"), None, None, None
        if self.config.encoder is not None:
            source = batch.side("source")
            encoded = self.encode_slots(source)
            memory, memory_slots = self.memory(encoded), source.slots
            copied = self.copying.source(encoded, source) if self.config.head.copy else None
        x = self.input_embed()(target)
        return self.decoder(x, target.slots, memory, memory_slots, token_type=target.token_type)[0], copied

    def encode_slots(self, source: Stream) -> Float[Array, "B S D"]:
        """Output of the encoder for a stream that is in its slots."""
        return self.encoder(self.source_embed(source), source.slots, token_type=source.token_type)[0]

    def memory(self, states: Float[Array, "B S _"]) -> Float[Array, "B S _"]:
        """The encoder's output in the decoder's width, as cross-attention reads it."""
        return self.memory_projection(states) if projects_memory(self.config) else states

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
            counts = {group.name: group.stack.layers for group in groups}
            stacked = {name: unstack(part["decoder"][name], n) for name, n in counts.items() if name in part["decoder"]}
            return {**part, "decoder": {**part["decoder"], **stacked}}

        shared, groups = {"params"} if decoder.share_layers else set(), layer_groups(decoder)
        found = {name for name, part in variables.items() if any(g.name in part.get("decoder", {}) for g in groups)}
        return {name: separate(part) if name in found - shared else part for name, part in variables.items()}

    def start(self, batch: Batch, length: int) -> tuple[Float32[Array, "B V"], SlotState]:
        """Logits of the token after each prompt, and the decoding state, with space for `length` slots.

        Prompts are `batch.target` `[B, T]`, padded on either side.

        Raises:
          ValueError: `length` is less than T.
        """
        logits, _, state = self.read_prompts(batch, length)
        return logits, state

    def read_prompts(self, batch: Batch, length: int) -> tuple[Float32[Array, "B V"], Float[Array, "B T D"], SlotState]:
        """`start`, and the hidden states of the prompts."""
        target = batch.side("target")
        rows, prompt_length = target.tokens.shape
        if length < prompt_length:
            raise ValueError(f"start: got length {length}, expected room for the prompt's {prompt_length} slots")
        memory, memory_slots, copied = None, None, None
        if self.config.encoder is not None:
            source = self.read(batch)[0].side("source")
            encoded = self.encode_slots(source)
            memory, memory_slots = self.decoder.project_memory(self.memory(encoded)), source.slots
            copied = self.copying.source(encoded, source) if self.config.head.copy else None
        padding = ((0, 0), (0, length - prompt_length))
        last = last_slot(target.slots)[:, None]
        kind = TransformerState if self.decoder.config.delta is None else SlotState
        state = kind(
            keys_values=self.decoder.empty_cache(rows, length, jnp.dtype(self.config.dtype)),
            slots=Slots(jnp.pad(target.slots.position, padding), jnp.pad(target.slots.segment, padding)),
            index=jnp.zeros((), jnp.int32),
            position=jnp.take_along_axis(target.slots.position, last, axis=1)[:, 0] + 1,
            memory=memory,
            memory_slots=memory_slots,
            copied=copied,
        )
        hidden, state = self.advance(target, state)
        x = jnp.take_along_axis(hidden, last[:, :, None], axis=1)
        segment = jnp.take_along_axis(target.slots.segment, last, axis=1)
        return self.decoded_logits(x, target.slots, segment, state)[:, 0], hidden, state

    def step(self, tokens: Int[Array, "B N"], state: SlotState) -> tuple[Float32[Array, "R V"], SlotState]:
        """Logits of the tokens after `tokens`, one for each of R = B N rows or branches, and the new state."""
        slots, state = state.append(tokens.shape[1])
        x, state = self.advance(Stream(tokens, slots), state)
        logits = self.decoded_logits(x, slots, slots.segment, state)
        return logits.reshape(-1, logits.shape[-1]), state

    def extend(self, tokens: Int[Array, "B N"], state: SlotState) -> tuple[Float32[Array, "B N V"], SlotState]:
        """Logits of the tokens after each of `tokens`, which follow one another in every row, and the new state.

        Raises:
          ConfigError: rotations of a token depend on the number of tokens after it, which are not known yet.
        """
        logits, _, state = self.extend_with_hidden(tokens, state)
        return logits, state

    def extend_with_hidden(
        self, tokens: Int[Array, "B N"], state: SlotState
    ) -> tuple[Float32[Array, "B N V"], Float[Array, "B N D"], SlotState]:
        """`extend`, and the hidden states of the tokens."""
        stack = last_stack(self.config)
        scaling = stack.encoding.scaling
        if scaling is not None and scaling.kind in ("dynamic", "longrope"):
            raise ConfigError(
                f"decode.speculate: got {scaling.kind} scaling of the encoding, under which tokens that are proposed "
                "change how others are rotated, expected another encoding; set decode.speculate to 0"
            )
        learned = stack.encoding.kind == "learned"
        positions = stack.encoding.max_length - stack.encoding.offset if learned else None
        slots, state = state.append_sequence(tokens.shape[1], positions)
        x, state = self.advance(Stream(tokens, slots), state)
        return self.decoded_logits(x, slots, slots.segment, state), x, state

    def start_further(
        self, batch: Batch, length: int
    ) -> tuple[Float32[Array, "B V"], SlotState, TransformerState, Float[Array, "B D"]]:
        """`start` for the model and the first module of `multi_token`: logits, both states and the last hidden state.

        The module has read what the prompts hold: all slots but the last, whose next token is not known. Its state has
        space for `length + 1` slots.
        """
        logits, x, state = self.read_prompts(batch, length)
        target, module = batch.side("target"), self.multi_token[0]
        slots = target.slots._replace(segment=slots_ahead(target.slots.segment, 1))
        own = module.empty_state(slots, state.position - 1, length + 1, jnp.dtype(self.config.dtype))
        embedded = self.input_embed()(Stream(shift_left(target.tokens, 1), slots))
        _, own = module.advance(x, embedded, slots, own)
        last = last_slot(target.slots)[:, None, None]
        return logits, state, own, jnp.take_along_axis(x, last, axis=1)[:, 0]

    def predict_further(
        self,
        x: Float[Array, "B N D"],
        tokens: Int[Array, "B N"],
        index: Int[Array, " B"],
        state: TransformerState,
    ) -> tuple[Float32[Array, "B V"], TransformerState]:
        """Logits of the first module of `multi_token` after slot `index` of N further ones, and its state.

        Args:
          x: hidden states of the model.
          tokens: the tokens after each of them, which are known.
        """
        slots, state = state.append_sequence(tokens.shape[1], None)
        h, state = self.multi_token[0].advance(x, self.input_embed()(Stream(tokens, slots)), slots, state)
        h = jnp.take_along_axis(h, index[:, None, None], axis=1)
        return self.head(h, slots, self.output_embed())[:, 0], state

    def decoded_logits(
        self, x: Float[Array, "B N D"], slots: Slots, segment: Int[Array, "B N"], state: SlotState
    ) -> Float32[Array, "B N V"]:
        """Logits of hidden states `x` of these segments in decoding, mixed with what is copied, if anything."""
        logits = self.head(x, slots, self.output_embed())
        return logits if state.copied is None else self.copying(logits, x, segment, state.copied)

    def advance(self, target: Stream, state: State) -> tuple[Float[Array, "B T D"], State]:
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


def output_width(stack: StackConfig) -> int:
    """Width of a stack's output."""
    return stack.output_width or stack.width


def projects_memory(config: ModelConfig) -> bool:
    """True if the encoder's output has another width than the decoder reads, and is projected to it."""
    encoder, decoder = config.encoder, config.decoder
    if encoder is None or decoder is None:
        return False
    return output_width(encoder) != (decoder.memory_width or decoder.width)


def last_stack(config: ModelConfig) -> StackConfig:
    """Config of the stack below the head: the decoder, or without one the encoder.

    Raises:
      ValueError: there is neither.
    """
    last = config.decoder or config.encoder
    if last is None:
        raise ValueError("model: got neither encoder nor decoder, expected at least one; add one")
    return last
