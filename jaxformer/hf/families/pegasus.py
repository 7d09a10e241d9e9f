"""Pegasus (Zhang et al. 2020): Marian in pre-norm order, and so the form our pre-norm translators are written in."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxformer.config import EncodingConfig, HeadConfig, ModelConfig
from jaxformer.hf.families import _bart
from jaxformer.hf.table import HIDDEN, Convention, Family, Row, Settings, side
from jaxformer.nn.encodings.sinusoidal import sinusoids


def read(settings: Settings, head: str) -> ModelConfig:
    positions, vocab = settings.size("max_position_embeddings", 1024), settings.size("vocab_size", 50265)
    encoding = EncodingConfig("sinusoidal", max_length=positions, concatenated=True)
    settings = settings.replaced({"pad_token_id": 0, **settings.values})
    encoder, decoder = (_bart.stack(settings, name, encoding, vocab, order="pre") for name in ("encoder", "decoder"))
    top = HeadConfig(tied=settings("tie_word_embeddings", True), bias=True) if head == "seq2seq" else HIDDEN
    return ModelConfig(encoder=encoder, decoder=decoder, share_embeddings=True, head=top)


def write(model: ModelConfig, head: str) -> dict[str, Any]:
    return _bart.write(model, head) | {
        "max_position_embeddings": side(model, "encoder").encoding.max_length,
        "tie_word_embeddings": model.head.tied or head != "seq2seq",
    }


def rows(model: ModelConfig, head: str) -> list[Row]:
    top = _bart.output(model) if head == "seq2seq" else []
    return [*_bart.embeddings(model), *_bart.rows(model, "encoder"), *_bart.rows(model, "decoder"), *top]


def constants(model: ModelConfig) -> dict[str, np.ndarray]:
    """The sinusoids of both sides, which the other library stores."""
    found = {}
    for name in ("encoder", "decoder"):
        stack = side(model, name)
        positions = np.arange(stack.encoding.max_length)
        table = sinusoids(positions, stack.width, stack.encoding.base, concatenated=True)
        found[f"model.{name}.embed_positions.weight"] = np.asarray(table)
    return found


FAMILY = Family(
    types=("pegasus",),
    heads={"seq2seq": "PegasusForConditionalGeneration", "model": "PegasusModel"},
    read=read,
    write=write,
    rows=rows,
    prefix="model.",
    spare=(r"lm_head\..*", r"final_logits_bias"),
    tables=_bart.TABLES,
    ignored=(r"model\.(encoder|decoder)\.embed_positions\.weight",),
    constants=constants,
    output=("lm_head.weight", "model.shared.weight"),
    convention=Convention(after=("</s>",)),
)
