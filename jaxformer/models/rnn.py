"""The recurrent baseline: seq2seq, language model and classifier as fillings of one module."""

from __future__ import annotations

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Bool, Float, Float32, Int

from jaxformer.config import ConfigError, ModelConfig, RecurrentConfig
from jaxformer.nn.cells import CELLS, Carry, Marks, marks
from jaxformer.nn.heads import Head, last_slot
from jaxformer.nn.layers import Embed
from jaxformer.nn.recurrent import Decoder, Encoded, Encoder, Memory, RecurrentState, summary
from jaxformer.registry import nearest
from jaxformer.types import Array, Batch, Projection, Slots, Stream

ATTENTION = ("none", "additive", "dot")


def check(config: ModelConfig) -> None:
    """Refuses what cannot be built.

    Raises:
      ConfigError: transformer and recurrent parts are mixed, or a part's fields contradict each other.
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
    if encoder is None and decoder.attention != "none":
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
    """Embeddings, recurrent stacks and head as `config` fills them (Sutskever et al. 2014; Bahdanau et al. 2015).

    A model with an encoder reads `batch.source`, one with a decoder reads `batch.target`; see `nn/recurrent.py` for
    how the one reaches the other.
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
        last: RecurrentConfig = decoder or encoder
        self.head = Head(config.head, last.width, last.embed.vocab)

    def __call__(self, batch: Batch, whole: bool = True) -> Float32[Array, "B ..."] | Projection:
        """Logits: `[B, T, V]` (T of the target if there is a decoder) or, for a classifier, `[B, C]`.

        Not `whole`: what losses and measures take instead, see `Head`.
        """
        if self.config.recurrent_decoder is not None:
            return self.head(self.hidden(batch), batch.target.slots, self.output_embed(), whole)
        slots, encoded = batch.source.slots, self.encode(batch.source)
        if self.config.head.kind == "classes" and self.config.head.pooling == "last":
            return self.head(*self.read(encoded))
        return self.head(encoded.outputs, slots, self.output_embed(), whole)

    def hidden(self, batch: Batch) -> Float[Array, "B T D"]:
        """The hidden states below the head: the decoder's, or without one the encoder's."""
        return self.encode(batch.source).outputs if self.config.recurrent_decoder is None else self.decode(batch)[0]

    def encode(self, source: Stream) -> Encoded:
        """The encoder's outputs and states."""
        return self.encoder(self.source_embed(source), source.slots)

    def read(self, encoded: Encoded) -> tuple[Float[Array, "B 1 D"], Slots]:
        """The last thing every direction has read of each row: what "last" pooling means where the
        backward direction ends at the first slot."""
        halves = 2 if self.config.recurrent_encoder.bidirectional else 1
        last = last_slot(Slots(encoded.segment, encoded.segment))[:, None]
        segment = jnp.take_along_axis(encoded.segment, last, axis=1)
        x = summary(tuple(jnp.split(encoded.outputs, halves, axis=-1)), encoded.segment, segment)
        return x, Slots(jnp.zeros_like(segment), jnp.ones_like(segment))

    def input_embed(self) -> Embed:
        """The decoder's embedding: the source's own where the two are shared."""
        shared = self.config.recurrent_encoder is not None and self.config.share_embeddings
        return self.source_embed if shared else self.target_embed

    def output_embed(self) -> Embed:
        """The embedding whose table a tied head reads."""
        return self.source_embed if self.config.recurrent_decoder is None else self.input_embed()

    def decode(
        self, batch: Batch
    ) -> tuple[Float[Array, "B T D"], tuple[Carry, ...], Memory | None, Bool[Array, "B T S"] | None]:
        """Runs the decoder over the whole target.

        Returns:
          Hidden states, the last carries, the memory, and who of it was visible to whom.
        """
        segment = batch.target.slots.segment
        first = memory = visible = None
        if self.config.recurrent_encoder is not None:
            encoded = self.encode(batch.source)
            first, memory = self.decoder.first(encoded, segment), self.decoder.memory(encoded)
        if memory is not None:
            source = encoded.segment[:, None, :]
            visible = (segment[:, :, None] == source) & (source != 0)
        x = self.input_embed()(batch.target)
        x, carry = self.decoder(x, marks(segment), memory, visible, first=first)
        return x, carry, memory, visible

    def start(self, batch: Batch, length: int) -> tuple[Float32[Array, "B V"], RecurrentState]:
        """Reads source and prompt (`batch.target` `[B, T]`, padded on either side).

        Args:
          length: the most slots there will be; the state has the same size for any.

        Returns:
          Logits of the token after each row's last real one, and the state.
        """
        x, carry, memory, visible = self.decode(batch)
        slots = batch.target.slots
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
        """Appends `tokens` to every row. Logits of the token after them."""
        here = Slots(jnp.zeros_like(tokens), jnp.ones_like(tokens))
        goes_on = Marks(real=jnp.ones_like(tokens, bool), fresh=jnp.zeros_like(tokens, bool))
        visible = None if state.visible is None else state.visible[:, None]
        x = self.input_embed()(Stream(tokens, here))
        x, carry = self.decoder(x, goes_on, state.memory, visible, carry=state.layers)
        return self.head(x, here, self.output_embed())[:, 0], state.replace(layers=carry)
