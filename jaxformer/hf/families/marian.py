"""MarianMT (Junczys-Dowmunt et al. 2018): BART with sinusoids and without the norm over the embedding sum."""

from __future__ import annotations

from typing import Any

from jaxformer.config import ConfigError, EncodingConfig, HeadConfig, ModelConfig
from jaxformer.hf.families import _bart
from jaxformer.hf.table import HIDDEN, Convention, Family, Row, Settings


def read(settings: Settings, head: str) -> ModelConfig:
    settings.expect("static_position_embeddings", True)
    settings.expect("normalize_before", False)
    settings.expect("add_final_layer_norm", False)
    settings.expect("normalize_embedding", False)
    positions = settings.size("max_position_embeddings", 1024)
    encoding = EncodingConfig("sinusoidal", max_length=positions, concatenated=True)
    settings = settings.replaced({"pad_token_id": 58100, **settings.values})
    shared, vocab = settings("share_encoder_decoder_embeddings", True), settings.size("vocab_size", 58101)
    own = settings.size("decoder_vocab_size", vocab)
    target = vocab if shared else own
    top = HeadConfig(tied=settings("tie_word_embeddings", True), bias=True)
    return ModelConfig(
        encoder=_bart.stack(settings, "encoder", encoding, vocab),
        decoder=_bart.stack(settings, "decoder", encoding, target),
        share_embeddings=shared,
        head=top if head == "seq2seq" else HIDDEN,
    )


def write(model: ModelConfig, head: str) -> dict[str, Any]:
    settings = _bart.write(model, head)
    if model.decoder is None:
        raise ConfigError("export: got a model without decoder, expected one for Marian")
    return settings | {
        "max_position_embeddings": model.encoder.encoding.max_length,
        "decoder_vocab_size": model.decoder.embed.vocab,
        "share_encoder_decoder_embeddings": model.share_embeddings,
        "static_position_embeddings": True,
        "tie_word_embeddings": model.head.tied or head != "seq2seq",
    }


def rows(model: ModelConfig, head: str) -> list[Row]:
    top = _bart.output(model) if head == "seq2seq" else []
    return [*_bart.embeddings(model), *_bart.rows(model, "encoder"), *_bart.rows(model, "decoder"), *top]


FAMILY = Family(
    types=("marian",),
    heads={"seq2seq": "MarianMTModel", "model": "MarianModel"},
    read=read,
    write=write,
    rows=rows,
    prefix="model.",
    spare=(r"lm_head\..*", r"final_logits_bias"),
    tables=_bart.TABLES,
    ignored=(r"model\.(encoder|decoder)\.embed_positions\.weight",),
    output=("lm_head.weight", "model.shared.weight"),
    convention=Convention(after=("</s>",)),
)
