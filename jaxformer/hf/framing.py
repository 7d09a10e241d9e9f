"""The framing of imported models: text to features as the directory's tokenizer frames it."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jaxformer.config import ModelConfig
from jaxformer.data.tokenizers import PairTemplate, Tokenizers
from jaxformer.decode.runner import max_positions
from jaxformer.errors import ConfigError
from jaxformer.hf.arguments import check_ids, shift_right
from jaxformer.hf.generation_options import decoder_start
from jaxformer.hf.origin import HuggingFaceOrigin
from jaxformer.hf.tokenizer import FramedText, frame, pairing
from jaxformer.tasks import Features, _tokens, tagging


@dataclass(frozen=True, eq=False)
class ImportedFraming:
    """Frames text as tokenizer.json does, or as the family's convention does; see `tasks.Framing` for the methods.

    Attributes:
      model: the config of the imported model.
      tokenizers: those of its directory.
      origin: its family, settings and generation defaults.
    """

    model: ModelConfig
    tokenizers: Tokenizers
    origin: HuggingFaceOrigin

    @property
    def chat_length(self) -> int | None:
        """Most tokens of a conversation and its next reply: the positions that config.json states."""
        stated = self.origin.settings("max_position_embeddings", None)
        limits = [limit for limit in (max_positions(self.model.decoder), stated) if limit is not None]
        return min(limits) if limits else None

    @property
    def pairing(self) -> PairTemplate:
        """The special tokens around two texts, from tokenizer.json or from the family's convention."""
        return pairing(self.tokenizers.source, self.origin.convention)

    def prompt(self, line: str) -> Features:
        """The framed line; an encoder-decoder also gets its decoder's start token.

        Text that is read and not continued is truncated to the model's positions.
        """
        framed, cut = self._frame(line)
        ids, model = np.asarray(framed.ids, np.int32), self.model
        stack = model.encoder or model.decoder
        if stack is None:
            raise ConfigError("model: got no encoder and no decoder, expected one to read text; use another model")
        check_ids("a token", ids, stack.embed.vocab)
        if model.encoder is None:
            return {"target": ids, **_tokens.truncation(cut)}
        features: dict[str, np.ndarray] = {"source": ids, **_tokens.truncation(cut)}
        if model.encoder.embed.kinds:
            features["token_type"] = np.asarray(framed.token_types, np.int32)
        if model.decoder is not None:
            features["target"] = decoder_start(self.origin.defaults, 1)[0]
        return features

    def word_slots(self, line: str) -> list[int | None]:
        """Slot of the first token of each word, by the characters that each token stands for.

        Raises:
          ConfigError: the tokenizer does not know these characters.
        """
        offsets, words = self._frame(line)[0].offsets, tagging.split_words(line)
        if words and not offsets:
            raise ConfigError("tag: got a tokenizer without character offsets, expected a tokenizer.json")
        slots, end = [], 0
        for word in words:
            begin = line.index(word, end)
            end = begin + len(word)
            inside = (slot for slot, (first, last) in enumerate(offsets) if first < end and last > begin)
            slots.append(next(inside, None))
        return slots

    def add_decoder_input(self, features: Features) -> Features:
        """`features`; of an encoder-decoder with the source, shifted right, as its decoder's input."""
        if not self.model.is_seq2seq:
            return features
        source = np.asarray(features["source"])[None]
        shifted = shift_right(self.origin.convention, self.origin.settings, jnp.asarray(source))
        return {**features, "target": np.asarray(shifted[0])}

    def _frame(self, line: str) -> tuple[FramedText, int]:
        """The framed line, and how many tokens were truncated."""
        framed = frame(self.tokenizers.source, self.origin.convention, line)
        generates = self.model.encoder is None and self.model.head.kind == "tokens"
        max_length = None if generates else max_positions(self.model.encoder or self.model.decoder)
        excess = 0 if max_length is None else len(framed.ids) - max_length
        if excess <= 0:
            return framed, 0
        empty = frame(self.tokenizers.source, self.origin.convention, "").ids
        prefix = next((i for i, (a, b) in enumerate(zip(empty, framed.ids, strict=False)) if a != b), len(empty))
        end = len(framed.ids) - (len(empty) - prefix)  # of the text, before the special tokens that close it
        kept = [*range(end - excess), *range(end, len(framed.ids))]
        ids, token_types = [framed.ids[i] for i in kept], [framed.token_types[i] for i in kept]
        return FramedText(ids, token_types, [framed.offsets[i] for i in kept] if framed.offsets else []), excess
