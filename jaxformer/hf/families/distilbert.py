"""DistilBERT (Sanh et al. 2019): BERT without token types and pooler."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxformer.config import (
    AttentionConfig,
    EmbedConfig,
    EncodingConfig,
    FeedForwardConfig,
    HeadConfig,
    ModelConfig,
    NormConfig,
    StackConfig,
)
from jaxformer.errors import ConfigError
from jaxformer.hf.reading import Tensor
from jaxformer.hf.table import (
    NO_HEAD,
    CallConvention,
    Family,
    Row,
    Settings,
    attention_rows,
    choice_head,
    classifier_head,
    hf_activation,
    linear_rows,
    norm_rows,
    require_ffn,
    require_stack,
)

EPSILON = 1e-12
"""Epsilon of all norms, for which the library has no key."""

POSITIONS = "distilbert.embeddings.position_embeddings.weight"


def read_config(settings: Settings, head: str) -> ModelConfig:
    dropout, width = settings("dropout", 0.1), settings.size("dim", 768)
    positions = settings.size("max_position_embeddings", 512)
    activation = settings.activation("activation", "gelu")
    encoder = StackConfig(
        layers=settings.size("n_layers", 6),
        width=width,
        embed=EmbedConfig(
            vocab=settings.size("vocab_size", 30522), norm=True, dropout=dropout, pad=settings("pad_token_id", 0)
        ),
        encoding=EncodingConfig(
            "sinusoidal" if settings("sinusoidal_pos_embds", False) else "learned", max_length=positions
        ),
        attention=AttentionConfig(heads=settings.size("n_heads", 12), dropout=settings("attention_dropout", 0.1)),
        ffn=FeedForwardConfig(width=settings.size("hidden_dim", 3072), activation=activation),
        norm=NormConfig(order="post", epsilon=EPSILON),
        dropout=dropout,
    )
    classified = {"width": width, "hidden": "relu", "dropout": settings("seq_classif_dropout", 0.2)}
    by_head = {
        "masked_lm": lambda: HeadConfig(
            tied=settings("tie_word_embeddings", True),
            bias=True,
            transform=True,
            activation=activation,
            epsilon=EPSILON,
        ),
        "sequence": lambda: classifier_head(settings, "classes", **classified),
        "token": lambda: classifier_head(settings, "slots", dropout=dropout),
        "multiple_choice": lambda: choice_head(**classified),
        "qa": lambda: HeadConfig(kind="slots", tied=False, classes=2, dropout=settings("qa_dropout", 0.1)),
        "model": lambda: NO_HEAD,
    }
    return ModelConfig(encoder=encoder, head=by_head[head]())


def resolve(model: ModelConfig, tensors: dict[str, Tensor]) -> ModelConfig:
    """The model with the positions of the file: a table counts, even where config.json says that it is of sinusoids.

    The library computes with the table, and writes one in either case; older Flax files have none beside sinusoids.
    """
    stack = require_stack(model, "encoder")
    if stack.encoding.kind != "sinusoidal" or POSITIONS not in tensors:
        return model
    table = tensors[POSITIONS].array()
    if table.shape == (stack.encoding.max_length, stack.width) and np.allclose(table, _sinusoids(model), atol=1e-6):
        del tensors[POSITIONS]
        return model
    encoding = dataclasses.replace(stack.encoding, kind="learned")
    return dataclasses.replace(model, encoder=dataclasses.replace(stack, encoding=encoding))


def _sinusoids(model: ModelConfig) -> np.ndarray:
    """The table `[max_length, D]` that the library makes: sine and cosine of a pair alternate."""
    stack = require_stack(model, "encoder")
    channel = np.arange(stack.width)
    angle = np.arange(stack.encoding.max_length)[:, None] / np.power(10000.0, 2 * (channel // 2) / stack.width)
    return np.where(channel % 2 == 0, np.sin(angle), np.cos(angle)).astype(np.float32)


def constant_tensors(model: ModelConfig) -> dict[str, np.ndarray]:
    """The table of sinusoids, which the library reads."""
    return {} if require_stack(model, "encoder").encoding.kind == "learned" else {POSITIONS: _sinusoids(model)}


def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
    stack = require_stack(model, "encoder")
    ffn, dropouts = require_ffn(stack), {"qa": "qa_dropout", "sequence": "seq_classif_dropout"}
    if stack.norm.epsilon != EPSILON:
        raise ConfigError(f"export: got norm.epsilon {stack.norm.epsilon}, expected {EPSILON} for DistilBERT")
    name = dropouts.get("sequence" if head == "multiple_choice" else head)
    return {
        "dim": stack.width,
        "n_layers": stack.layers,
        "n_heads": stack.attention.heads,
        "hidden_dim": ffn.width or 4 * stack.width,
        "activation": hf_activation(ffn.activation),
        "dropout": stack.dropout,
        "attention_dropout": stack.attention.dropout,
        "max_position_embeddings": stack.encoding.max_length,
        "sinusoidal_pos_embds": stack.encoding.kind == "sinusoidal",
        "vocab_size": stack.embed.vocab,
        "pad_token_id": stack.embed.pad,
        "tie_word_embeddings": model.head.tied or head != "masked_lm",
        **({name: model.head.dropout} if name else {}),
    }


def rows(model: ModelConfig, head: str) -> list[Row]:
    stack = require_stack(model, "encoder")
    hf_layer, param_layer = "distilbert.transformer.layer.{layer}", "encoder/blocks"
    names = ("q_lin", "k_lin", "v_lin", "out_lin")
    learned = [Row(POSITIONS, "encoder/position/table")] if stack.encoding.kind == "learned" else []
    body = [
        Row("distilbert.embeddings.word_embeddings.weight", "source_embed/table"),
        *learned,
        *norm_rows("distilbert.embeddings.LayerNorm", "encoder/embed_norm"),
        *attention_rows(f"{hf_layer}.attention", f"{param_layer}/attention", stack.attention, stack.width, names),
        *norm_rows(f"{hf_layer}.sa_layer_norm", f"{param_layer}/attention_norm"),
        *linear_rows(f"{hf_layer}.ffn.lin1", f"{param_layer}/ffn/in"),
        *linear_rows(f"{hf_layer}.ffn.lin2", f"{param_layer}/ffn/out"),
        *norm_rows(f"{hf_layer}.output_layer_norm", f"{param_layer}/ffn_norm"),
    ]
    untied = [] if model.head.tied else [Row("vocab_projector.weight", "head/kernel", "V D -> D V")]
    classifier = [*linear_rows("pre_classifier", "head/hidden"), *linear_rows("classifier", "head/decision")]
    by_head: Mapping[str, list[Row]] = {
        "masked_lm": [
            *linear_rows("vocab_transform", "head/transform"),
            *norm_rows("vocab_layer_norm", "head/transform_norm"),
            Row("vocab_projector.bias", "head/bias"),
            *untied,
        ],
        "sequence": classifier,
        "multiple_choice": classifier,
        "token": linear_rows("classifier", "head/decision"),
        "qa": linear_rows("qa_outputs", "head/decision"),
        "model": [],
    }
    return body + by_head[head]


FAMILY = Family(
    model_types=("distilbert",),
    heads={
        "masked_lm": "DistilBertForMaskedLM",
        "sequence": "DistilBertForSequenceClassification",
        "token": "DistilBertForTokenClassification",
        "qa": "DistilBertForQuestionAnswering",
        "multiple_choice": "DistilBertForMultipleChoice",
        "model": "DistilBertModel",
    },
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    prefix="distilbert.",
    droppable_tensors=(r"vocab_\w+\..*", r"pre_classifier\..*", r"classifier\..*", r"qa_outputs\..*"),
    ignored_tensors=(r"distilbert\.embeddings\.position_ids",),
    tied_tensors=("vocab_projector.weight", "distilbert.embeddings.word_embeddings.weight"),
    convention=CallConvention(prefix_tokens=("[CLS]",), separator_tokens=("[SEP]",), suffix_tokens=("[SEP]",)),
    resolve=resolve,
    constant_tensors=constant_tensors,
)
