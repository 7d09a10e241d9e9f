"""The recurrent baseline: seq2seq, language model or classifier, by which part of the config is None."""

from __future__ import annotations

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Bool, Float, Float32, Int

from jaxformer.config import ModelConfig, RecurrentConfig
from jaxformer.errors import ConfigError
from jaxformer.nn.cells import CELLS, Boundaries, Carry, segment_boundaries
from jaxformer.nn.heads import Head, last_slot
from jaxformer.nn.layers import Embed
from jaxformer.nn.recurrent import Decoder, Encoder, EncoderOutput, Memory, RecurrentState, source_summary
from jaxformer.registry import nearest
from jaxformer.types import Array, Batch, DeferredLogits, RelationLogits, Slots, Stream

ATTENTION = ("none", "additive", "dot")


def check(config: ModelConfig) -> None:
    """Checks that the config describes a recurrent model.

    Raises:
      ConfigError: transformer and recurrent parts are mixed, or fields contradict each other.
    """
    if config.encoder is not None or config.decoder is not None:
        raise ConfigError("model: got transformer and recurrent parts, expected one kind; set the other's to None")
    parts = {"recurrent_encoder": config.recurrent_encoder, "recurrent_decoder": config.recurrent_decoder}
    if not any(parts.values()):
        raise ConfigError("model: got no part, expected a recurrent_encoder or a recurrent_decoder; add one")
    for name, part in parts.items():
        if part is not None:
            check_part(f"model.{name}", part)
    encoder, decoder = parts.values()
    if encoder is not None and encoder.attention != "none":
        raise ConfigError(
            f"model.recurrent_encoder.attention: got {encoder.attention!r}, expected 'none'; set the decoder's instead"
        )
    if decoder is not None and decoder.bidirectional:
        raise ConfigError("model.recurrent_decoder.bidirectional: got True, expected False; a decoder reads forwards")
    if encoder is None and decoder is not None and decoder.attention != "none":
        raise ConfigError(
            f"model.recurrent_decoder.attention: got {decoder.attention!r} without an encoder, expected 'none'; "
            "add a recurrent_encoder or set it to 'none'"
        )
    if config.share_embeddings and encoder is not None and decoder is not None:
        sides = [(part.width, part.embed) for part in (encoder, decoder)]
        if sides[0] != sides[1]:
            raise ConfigError(
                "model.share_embeddings: got sides with unlike width or embed, expected equal; make them so"
            )


def check_part(path: str, part: RecurrentConfig) -> None:
    """Checks the fields of one side, at `path` in the config.

    Raises:
      ConfigError: a field has a value that is unknown or out of range.
    """
    for field, known in (("cell", tuple(CELLS)), ("attention", ATTENTION)):
        value = getattr(part, field)
        if value not in known:
            raise ConfigError(
                f"{path}.{field}: got {value!r}, expected one of {', '.join(known)}{nearest(value, known)}"
            )
    for field in ("layers", "width"):
        if getattr(part, field) < 1:
            raise ConfigError(f"{path}.{field}: got {getattr(part, field)}, expected at least 1; raise it")
    if part.bidirectional and part.width % 2:
        raise ConfigError(f"{path}.width: got {part.width}, expected an even number for two directions; change it")


class Recurrent(nn.Module):
    """Embeddings, recurrent stacks and head of `config` (Sutskever et al. 2014; Bahdanau et al. 2015).

    An encoder reads `batch.source`, a decoder reads `batch.target`. `nn.recurrent.Decoder` says how the encoder's
    states reach the decoder.
    """

    config: ModelConfig

    def setup(self) -> None:
        config = self.config
        check(config)
        dtype = jnp.dtype(config.dtype)
        encoder, decoder = config.recurrent_encoder, config.recurrent_decoder
        if encoder is not None:
            self.source_embed = Embed(encoder.embed, encoder.width, dtype)
            self.encoder = Encoder(encoder)
        if decoder is not None:
            if encoder is None or not config.share_embeddings:
                self.target_embed = Embed(decoder.embed, decoder.width, dtype)
            self.decoder = Decoder(decoder, encoder)
        last = decoder or encoder
        if last is not None:
            self.head = Head(config.head, last.width, last.embed.vocab)

    def __call__(
        self, batch: Batch, full_logits: bool = True
    ) -> Float32[Array, "B ..."] | DeferredLogits | RelationLogits:
        """Logits: `[B, T, V]` (T of the target if there is a decoder), or `[B, C]` for a classifier.

        Without `full_logits` the head may return `DeferredLogits`, for losses and measures.
        """
        if self.config.recurrent_decoder is not None:
            return self.head(self.hidden(batch), batch.side("target").slots, self.output_embed(), full_logits)
        source = batch.side("source")
        encoded = self.encode(source)
        if self.config.head.kind == "classes" and self.config.head.pooling == "last":
            return self.head(*self.final_states(encoded))
        return self.head(encoded.outputs, source.slots, self.output_embed(), full_logits)

    def hidden(self, batch: Batch) -> Float[Array, "B T D"]:
        """Hidden states of the decoder, or without one those of the encoder: the input of the head."""
        if self.config.recurrent_decoder is None:
            return self.encode(batch.side("source")).outputs
        return self.decode(batch)[0]

    def encode(self, source: Stream) -> EncoderOutput:
        """Outputs and states of the encoder."""
        return self.encoder(self.source_embed(source), source.slots)

    def final_states(self, encoded: EncoderOutput) -> tuple[Float[Array, "B 1 D"], Slots]:
        """Final output of each direction over a row's last segment, as a single slot: the input of "last" pooling.

        The backward direction ends at the first slot.
        """
        encoder = self.config.recurrent_encoder
        halves = 2 if encoder is not None and encoder.bidirectional else 1
        last = last_slot(Slots(encoded.segment, encoded.segment))[:, None]
        segment = jnp.take_along_axis(encoded.segment, last, axis=1)
        x = source_summary(tuple(jnp.split(encoded.outputs, halves, axis=-1)), encoded.segment, segment)
        return x, Slots(jnp.zeros_like(segment), jnp.ones_like(segment))

    def input_embed(self) -> Embed:
        """Embedding of the decoder: that of the source if the two are shared."""
        shared = self.config.recurrent_encoder is not None and self.config.share_embeddings
        return self.source_embed if shared else self.target_embed

    def output_embed(self) -> Embed:
        """Embedding whose table a tied head uses."""
        return self.source_embed if self.config.recurrent_decoder is None else self.input_embed()

    def decode(
        self, batch: Batch
    ) -> tuple[Float[Array, "B T D"], tuple[Carry, ...], Memory | None, Bool[Array, "B T S"] | None]:
        """Hidden states of the target, the last carries, the memory, and which memory slots each slot sees."""
        target = batch.side("target")
        segment = target.slots.segment
        first = memory = visible = encoded = None
        if self.config.recurrent_encoder is not None:
            encoded = self.encode(batch.side("source"))
            first, memory = self.decoder.initial_states(encoded, segment), self.decoder.memory(encoded)
        if memory is not None and encoded is not None:
            source = encoded.segment[:, None, :]
            visible = (segment[:, :, None] == source) & (source != 0)
        x = self.input_embed()(target)
        x, carry = self.decoder(x, segment_boundaries(segment), memory, visible, first=first)
        return x, carry, memory, visible

    def start(self, batch: Batch, length: int) -> tuple[Float32[Array, "B V"], RecurrentState]:
        """Logits of the token after each prompt, and the decoding state.

        Prompts are `batch.target` `[B, T]`, padded on either side. The state has the same size for any `length`.

        Raises:
          ValueError: `length` is less than T.
        """
        x, carry, memory, visible = self.decode(batch)
        slots = batch.side("target").slots
        if length < slots.segment.shape[1]:
            raise ValueError(
                f"start: got length {length}, expected room for the prompt's {slots.segment.shape[1]} slots"
            )
        last = last_slot(slots)[:, None, None]
        x = jnp.take_along_axis(x, last, axis=1)
        if visible is not None:
            visible = jnp.take_along_axis(visible, last, axis=1)[:, 0]
        return self.head(x, slots, self.output_embed())[:, 0], RecurrentState(carry, memory, visible)

    def step(self, tokens: Int[Array, "B 1"], state: RecurrentState) -> tuple[Float32[Array, "B V"], RecurrentState]:
        """Logits of the token after `tokens`, and the new state."""
        slots = Slots(jnp.zeros_like(tokens), jnp.ones_like(tokens))
        no_boundary = Boundaries(real=jnp.ones_like(tokens, bool), starts=jnp.zeros_like(tokens, bool))
        visible = None if state.visible is None else state.visible[:, None]
        x = self.input_embed()(Stream(tokens, slots))
        x, carry = self.decoder(x, no_boundary, state.memory, visible, carry=state.layers)
        return self.head(x, slots, self.output_embed())[:, 0], state.replace(layers=carry)
