"""ALBERT (Lan et al. 2020): one set of parameters for all layers, and a factorised embedding."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxformer.config import HeadConfig, ModelConfig
from jaxformer.errors import ConfigError
from jaxformer.hf.families import _bert, _projected
from jaxformer.hf.table import (
    SPAN_HEAD,
    CallConvention,
    Family,
    Row,
    Settings,
    attention_rows,
    choice_head,
    classifier_head,
    linear_rows,
    norm_rows,
    require_ffn,
    require_stack,
)

LAYER = "albert.encoder.albert_layer_groups.0.albert_layers.0"
PROJECTIONS = ("attention.query", "attention.key", "attention.value", "attention.dense")


def read_config(settings: Settings, head: str) -> ModelConfig:
    settings.expect("num_hidden_groups", 1)
    settings.expect("inner_group_num", 1)
    stack = dataclasses.replace(_projected.stack_config(settings, head, always=True), share_layers=True)
    dropout = settings("classifier_dropout_prob", None)
    dropout = stack.dropout if dropout is None else settings("classifier_dropout_prob", 0.1)
    tokens = HeadConfig(
        tied=settings("tie_word_embeddings", True),
        bias=True,
        transform=True,
        activation=require_ffn(stack).activation,
        epsilon=stack.norm.epsilon,
    )
    by_head = {
        "masked_lm": lambda: tokens,
        "pretraining": lambda: dataclasses.replace(tokens, relation=True, width=stack.width, dropout=dropout),
        "sequence": lambda: classifier_head(settings, "classes", width=stack.width, dropout=dropout),
        "token": lambda: classifier_head(settings, "slots", dropout=dropout),
        "multiple_choice": lambda: choice_head(width=stack.width, dropout=dropout),
        "qa": lambda: SPAN_HEAD,
        "model": lambda: HeadConfig(kind="pooled", tied=False, width=stack.width),
        "bare": lambda: HeadConfig(kind="none", tied=False),
    }
    return ModelConfig(encoder=stack, head=by_head[head]())


def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
    stack = require_stack(model, "encoder")
    if not stack.share_layers:
        raise ConfigError("export: got layers with parameters of their own, expected share_layers for ALBERT")
    settings = {k: v for k, v in _projected.write_config(model, head).items() if k != "classifier_dropout"}
    has_dropout = head in ("pretraining", "sequence", "token", "multiple_choice")
    return settings | ({"classifier_dropout_prob": model.head.dropout} if has_dropout else {})


def rows(model: ModelConfig, head: str) -> list[Row]:
    stack, layer = require_stack(model, "encoder"), "encoder/blocks"
    body = [
        *_projected.embedding_rows(model, "albert", "encoder.embedding_hidden_mapping_in"),
        *attention_rows(LAYER, f"{layer}/attention", stack.attention, stack.width, PROJECTIONS),
        *norm_rows(f"{LAYER}.attention.LayerNorm", f"{layer}/attention_norm"),
        *linear_rows(f"{LAYER}.ffn", f"{layer}/ffn/in"),
        *linear_rows(f"{LAYER}.ffn_output", f"{layer}/ffn/out"),
        *norm_rows(f"{LAYER}.full_layer_layer_norm", f"{layer}/ffn_norm"),
    ]
    pooler = linear_rows("albert.pooler", "head/hidden")
    classifier = linear_rows("classifier", "head/decision")
    tokens = [
        *linear_rows("predictions.dense", "head/transform"),
        *norm_rows("predictions.LayerNorm", "head/transform_norm"),
        Row("predictions.bias", "head/bias"),
        *([] if model.head.tied else [Row("predictions.decoder.weight", "head/kernel", "V E -> E V")]),
    ]
    by_head = {
        "masked_lm": tokens,
        "pretraining": [*tokens, *pooler, *linear_rows("sop_classifier.classifier", "head/decision")],
        "sequence": [*pooler, *classifier],
        "token": classifier,
        "multiple_choice": [*pooler, *classifier],
        "qa": linear_rows("qa_outputs", "head/decision"),
        "model": pooler,
        "bare": [],
    }
    return body + by_head[head]


FAMILY = Family(
    model_types=("albert",),
    heads={
        **{head: name for head, name in _bert.head_classes("Albert").items() if head != "causal_lm"},
        "pretraining": "AlbertForPreTraining",
    },
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    prefix="albert.",
    droppable_tensors=(
        r"predictions\..*",
        r"sop_classifier\..*",
        r"albert\.pooler\..*",
        r"classifier\..*",
        r"qa_outputs\..*",
    ),
    ignored_tensors=(r"albert\.embeddings\.position_ids",),
    duplicate_tensors=(("predictions.decoder.bias", "predictions.bias"),),
    tied_tensors=("predictions.decoder.weight", "albert.embeddings.word_embeddings.weight"),
    relation="sentence_order",
    convention=CallConvention(
        prefix_tokens=("[CLS]",),
        separator_tokens=("[SEP]",),
        suffix_tokens=("[SEP]",),
        renamed={"seq_relationship_logits": "sop_logits", "next_sentence_label": "sentence_order_label"},
    ),
)
