"""Shared by decoders with the usual heads: a language model, classifiers of texts and tokens, answers, a bare model."""

from __future__ import annotations

from typing import Any

from jaxformer.config import HeadConfig, ModelConfig
from jaxformer.hf.table import (
    NO_HEAD,
    SPAN_HEAD,
    Row,
    Settings,
    classifier_head,
    linear_rows,
    token_classifier_dropout,
)

DROPPABLE_TENSORS = (r"lm_head\..*", r"score\..*", r"classifier\..*", r"qa_outputs\..*")


def head_config(settings: Settings, head: str, tied: bool, bias: bool = False, dropout: float = 0.0) -> HeadConfig:
    """The head of a decoder.

    Args:
      tied: default of `tie_word_embeddings`.
      bias: the language-model head has a bias.
      dropout: dropout rate of the classifier of tokens.
    """
    heads = {
        "causal_lm": lambda: HeadConfig(tied=settings("tie_word_embeddings", tied), bias=bias),
        "sequence": lambda: classifier_head(settings, "classes", pooling="last", decision_bias=False),
        "token": lambda: classifier_head(settings, "slots", dropout=dropout),
        "qa": lambda: SPAN_HEAD,
        "model": lambda: NO_HEAD,
    }
    return heads[head]()


def head_rows(model: ModelConfig, head: str) -> list[Row]:
    """Rows of the head."""
    heads = {
        "causal_lm": [
            *([] if model.head.tied else [Row("lm_head.weight", "head/kernel", "V D -> D V")]),
            *([Row("lm_head.bias", "head/bias")] if model.head.bias else []),
        ],
        "sequence": [Row("score.weight", "head/decision/kernel", "C D -> D C")],
        "token": linear_rows("classifier", "head/decision"),
        "qa": linear_rows("qa_outputs", "head/decision"),
        "model": [],
    }
    return heads[head]


def scored_head_config(settings: Settings, head: str, tied: bool) -> HeadConfig:
    """The head of a decoder of LLaMA's kind, whose classifier of tokens may have no bias."""
    if head != "token":
        return head_config(settings, head, tied)
    bias, dropout = settings("token_classification_bias", True), token_classifier_dropout(settings)
    return classifier_head(settings, "slots", dropout=dropout, decision_bias=bias)


def scored_head_settings(model: ModelConfig, head: str) -> dict[str, Any]:
    """Keys of config.json that `scored_head_config` reads beside `tie_word_embeddings`."""
    if head != "token":
        return {}
    return {"classifier_dropout": model.head.dropout, "token_classification_bias": model.head.decision_bias}


def scored_head_rows(model: ModelConfig, head: str) -> list[Row]:
    """Rows of the head of a decoder of LLaMA's kind: both classifiers are called score."""
    if head != "token":
        return head_rows(model, head)
    return linear_rows("score", "head/decision", has_bias=model.head.decision_bias)


def is_tied(model: ModelConfig, head: str, default: bool) -> bool:
    """`tie_word_embeddings` to write: of heads other than a language model's the default, which nothing reads."""
    return model.head.tied if head == "causal_lm" else default


def fused_rows(hf_name: str, param_path: str, sizes: dict[str, int], has_bias: bool = True) -> list[Row]:
    """Rows of one Linear that holds query, key and value of the first head, then of the second, and so on."""
    axes = {"H": sizes["H"], "K": sizes["K"]}
    paths = lambda leaf: tuple(f"{param_path}/{part}/{leaf}" for part in ("query", "key", "value"))  # noqa: E731
    rows = [Row(f"{hf_name}.weight", paths("kernel"), "(H n K) D -> n D H K", axes)]
    return [*rows, Row(f"{hf_name}.bias", paths("bias"), "(H n K) -> n H K", axes)] if has_bias else rows
