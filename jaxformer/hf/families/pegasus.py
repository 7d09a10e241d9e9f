"""Pegasus (Zhang et al. 2020): Marian in pre-norm order, and so the form our pre-norm translators are written in."""

from __future__ import annotations

from typing import Any

from jaxformer.config import EncodingConfig, HeadConfig, ModelConfig
from jaxformer.hf.families import _bart
from jaxformer.hf.table import HIDDEN, Family, Row, Settings, side


def read(settings: Settings, head: str) -> ModelConfig:
    positions, vocab = settings.size("max_position_embeddings", 1024), settings.size("vocab_size", 50265)
    encoding = EncodingConfig("sinusoidal", max_length=positions, concatenated=True)
    settings = Settings({"pad_token_id": 0, **settings.values}, settings.where)
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


FAMILY = Family(
    types=("pegasus",),
    heads={"seq2seq": "PegasusForConditionalGeneration", "model": "PegasusModel"},
    read=read,
    write=write,
    rows=rows,
    prefix="model.",
    spare=(r"lm_head\..*", r"final_logits_bias"),
    copies=((r"model\.(encoder|decoder)\.embed_tokens\.weight", "model.shared.weight"),),
    ignored=(r"model\.(encoder|decoder)\.embed_positions\.weight",),
    output=("lm_head.weight", "model.shared.weight"),
)
