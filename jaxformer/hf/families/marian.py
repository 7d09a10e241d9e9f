"""MarianMT (Junczys-Dowmunt et al. 2018): BART with sinusoids and without the norm over the embedding sum."""

from __future__ import annotations

from typing import Any

from jaxformer.config import EncodingConfig, HeadConfig, ModelConfig
from jaxformer.hf.families import _bart
from jaxformer.hf.table import NO_HEAD, CallConvention, Family, Row, Settings, require_stack


def read_config(settings: Settings, head: str) -> ModelConfig:
    settings.expect("static_position_embeddings", True)
    settings.expect("normalize_before", False)
    settings.expect("add_final_layer_norm", False)
    settings.expect("normalize_embedding", False)
    positions = settings.size("max_position_embeddings", 1024)
    encoding = EncodingConfig("sinusoidal", max_length=positions, concatenated=True)
    settings = settings.with_values({"pad_token_id": 58100, **settings.values})
    shared, vocab = settings("share_encoder_decoder_embeddings", True), settings.size("vocab_size", 58101)
    own = settings.size("decoder_vocab_size", vocab)
    target = vocab if shared else own
    top = HeadConfig(tied=settings("tie_word_embeddings", True), bias=True)
    return ModelConfig(
        encoder=_bart.stack_config(settings, "encoder", encoding, vocab),
        decoder=_bart.stack_config(settings, "decoder", encoding, target),
        share_embeddings=shared,
        head=top if head == "seq2seq" else NO_HEAD,
    )


def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
    settings = _bart.write_config(model, head)
    return settings | {
        "max_position_embeddings": require_stack(model, "encoder").encoding.max_length,
        "decoder_vocab_size": require_stack(model, "decoder").embed.vocab,
        "share_encoder_decoder_embeddings": model.share_embeddings,
        "static_position_embeddings": True,
        "tie_word_embeddings": model.head.tied or head != "seq2seq",
    }


def rows(model: ModelConfig, head: str) -> list[Row]:
    top = _bart.output_rows(model) if head == "seq2seq" else []
    return [
        *_bart.body_rows(model),
        *top,
    ]


FAMILY = Family(
    model_types=("marian",),
    heads={"seq2seq": "MarianMTModel", "model": "MarianModel"},
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    prefix="model.",
    droppable_tensors=(r"lm_head\..*", r"final_logits_bias"),
    embedding_tables=_bart.EMBEDDING_TABLES,
    ignored_tensors=(r"model\.(encoder|decoder)\.embed_positions\.weight",),
    tied_tensors=("lm_head.weight", "model.shared.weight"),
    convention=CallConvention(decoder_scales_embeddings=True, suffix_tokens=("</s>",)),
)
