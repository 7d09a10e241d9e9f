"""Shared by mBART, Blenderbot and BlenderbotSmall: variants of BART that differ in norms, positions and heads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxformer.config import EncodingConfig, HeadConfig, ModelConfig
from jaxformer.hf.families import _bart
from jaxformer.hf.table import (
    NO_HEAD,
    SPAN_HEAD,
    CallConvention,
    Family,
    Row,
    Settings,
    classifier_head,
    linear_rows,
    require_stack,
)


@dataclass(frozen=True)
class Variant:
    """Differences of a variant, and its default values.

    Attributes:
      model_type: the value in config.json.
      class_prefix: start of its class names.
      offset: rows of the position tables before position 0.
      order: norms before or after sub-layers.
      embed_norm: a norm over the embeddings of encoder and decoder.
      norms_tokens: the decoder's is over the token embeddings alone, before positions are added.
      classifies: there are classes for texts and for answers, too.
      positions, vocab, pad: default values.
      convention: how its models are called.
    """

    model_type: str
    class_prefix: str
    offset: int
    order: Literal["pre", "post"]
    embed_norm: bool
    positions: int
    vocab: int
    pad: int
    convention: CallConvention
    norms_tokens: bool = False
    classifies: bool = False


def family(variant: Variant) -> Family:
    """The family of a variant of BART."""
    heads = {"seq2seq": f"{variant.class_prefix}ForConditionalGeneration", "model": f"{variant.class_prefix}Model"}
    if variant.classifies:
        heads |= {
            "sequence": f"{variant.class_prefix}ForSequenceClassification",
            "qa": f"{variant.class_prefix}ForQuestionAnswering",
        }

    def read_config(settings: Settings, head: str) -> ModelConfig:
        settings.expect("is_encoder_decoder", True)
        table_rows = settings.size("max_position_embeddings", variant.positions) + variant.offset
        encoding = EncodingConfig("learned", max_length=table_rows, offset=variant.offset)
        settings = settings.with_values({"pad_token_id": variant.pad, **settings.values})
        vocab = settings.size("vocab_size", variant.vocab)
        encoder, decoder = (
            _bart.stack_config(settings, name, encoding, vocab, variant.embed_norm, variant.order)
            for name in ("encoder", "decoder")
        )
        if variant.norms_tokens:
            decoder = replace(decoder, embed=replace(decoder.embed, norm_before_positions=True))
        dropout = settings("classifier_dropout", 0.0) if variant.classifies else 0.0
        by_head = {
            "seq2seq": lambda: HeadConfig(tied=settings("tie_word_embeddings", True), bias=True),
            "sequence": lambda: classifier_head(
                settings, "classes", pooling="last", width=decoder.width, dropout=dropout, input_dropout=dropout
            ),
            "qa": lambda: SPAN_HEAD,
            "model": lambda: NO_HEAD,
        }
        return ModelConfig(encoder=encoder, decoder=decoder, share_embeddings=True, head=by_head[head]())

    def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
        return _bart.write_config(model, head) | {
            "max_position_embeddings": require_stack(model, "encoder").encoding.max_length - variant.offset,
            "tie_word_embeddings": model.head.tied or head != "seq2seq",
            **({"classifier_dropout": model.head.dropout} if head == "sequence" else {}),
        }

    def rows(model: ModelConfig, head: str) -> list[Row]:
        by_head = {
            "seq2seq": _bart.output_rows(model),
            "sequence": [
                *linear_rows("classification_head.dense", "head/hidden"),
                *linear_rows("classification_head.out_proj", "head/decision"),
            ],
            "qa": linear_rows("qa_outputs", "head/decision"),
            "model": [],
        }
        return [*_bart.body_rows(model), *by_head[head]]

    return Family(
        model_types=(variant.model_type,),
        heads=heads,
        read_config=read_config,
        write_config=write_config,
        rows=rows,
        prefix="model.",
        droppable_tensors=(r"lm_head\..*", r"final_logits_bias", r"classification_head\..*", r"qa_outputs\..*"),
        ignored_keys={
            "is_decoder": "of a decoder alone, whose class is not read",
            "encoder_no_repeat_ngram_size": "of generation, which does not have it and warns of it",
        },
        embedding_tables=_bart.EMBEDDING_TABLES,
        tied_tensors=("lm_head.weight", "model.shared.weight"),
        convention=variant.convention,
    )
