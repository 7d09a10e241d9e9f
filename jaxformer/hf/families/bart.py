"""BART (Lewis et al. 2020): learned positions that begin at row 2, a norm over the embedding sum."""

from __future__ import annotations

from typing import Any

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

OFFSET = 2
"""Rows of the position table before position 0."""


def read_config(settings: Settings, head: str) -> ModelConfig:
    rows = settings.size("max_position_embeddings", 1024) + OFFSET
    encoding = EncodingConfig("learned", max_length=rows, offset=OFFSET)
    settings = settings.with_values({"pad_token_id": 1, **settings.values})
    dropout = settings("classifier_dropout", 0.0)
    vocab = settings.size("vocab_size", 50265)
    settings.expect("normalize_before", False)
    settings.expect("add_final_layer_norm", False)
    encoder, decoder = (
        _bart.stack_config(settings, name, encoding, vocab, embed_norm=True) for name in ("encoder", "decoder")
    )
    heads = {
        "seq2seq": lambda: HeadConfig(tied=settings("tie_word_embeddings", True), bias=True),
        "sequence": lambda: classifier_head(
            settings, "classes", pooling="last", width=decoder.width, dropout=dropout, input_dropout=dropout
        ),
        "qa": lambda: SPAN_HEAD,
        "model": lambda: NO_HEAD,
    }
    return ModelConfig(encoder=encoder, decoder=decoder, share_embeddings=True, head=heads[head]())


def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
    return _bart.write_config(model, head) | {
        "max_position_embeddings": require_stack(model, "encoder").encoding.max_length - OFFSET,
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
    return [
        *_bart.body_rows(model),
        *by_head[head],
    ]


FAMILY = Family(
    model_types=("bart",),
    heads={
        "seq2seq": "BartForConditionalGeneration",
        "sequence": "BartForSequenceClassification",
        "qa": "BartForQuestionAnswering",
        "model": "BartModel",
    },
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    prefix="model.",
    droppable_tensors=(r"lm_head\..*", r"final_logits_bias", r"classification_head\..*", r"qa_outputs\..*"),
    ignored_tensors=(r"model\.(encoder|decoder)\.version",),
    embedding_tables=_bart.EMBEDDING_TABLES,
    tied_tensors=("lm_head.weight", "model.shared.weight"),
    convention=CallConvention(
        decoder_start_token=2,
        decoder_input_from_source=True,
        prefix_tokens=("<s>",),
        separator_tokens=("</s>", "</s>"),
        suffix_tokens=("</s>",),
    ),
)
