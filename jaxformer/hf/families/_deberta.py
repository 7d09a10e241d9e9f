"""Shared by DeBERTa and DeBERTa v2: post-norm encoder, attention scores of content and distance, heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
from jaxformer.hf.families import _bert
from jaxformer.hf.table import (
    NO_HEAD,
    SPAN_HEAD,
    Row,
    Settings,
    choice_head,
    classifier_head,
    hf_activation,
    linear_rows,
    norm_rows,
    require_ffn,
    require_stack,
)

MAX_DISTANCE = 2**20
"""Longest relative distance: a table of all distances up to it is computed."""

TERMS = {"c2p": "content_to_position", "p2c": "position_to_content"}
"""Entry of `pos_att_type` -> field of `EncodingConfig`."""

DROPPABLE_TENSORS = (
    r"cls\..*",
    r"mask_predictions\..*",
    r"pooler\..*",
    r"classifier\..*",
    r"qa_outputs\..*",
    r"deberta\.embeddings\.position_embeddings\..*",
)
IGNORED_TENSORS = (r"deberta\.embeddings\.position_ids",)
DUPLICATE_TENSORS = (("cls.predictions.decoder.bias", "cls.predictions.bias"),)
RENAMED_TENSORS = (  # the masked language model of `legacy: false`: the same function, other names
    (r"^lm_predictions\.lm_head\.(dense|LayerNorm)\.", r"cls.predictions.transform.\1."),
    (r"^lm_predictions\.lm_head\.bias$", "cls.predictions.bias"),
)


def model_config(settings: Settings, head: str, stack: StackConfig) -> ModelConfig:
    """The model config of an encoder with a head."""
    dropout = settings("hidden_dropout_prob", 0.1)
    tied = settings("tie_word_embeddings", True) or not settings("legacy", True)

    def pooled() -> dict[str, Any]:
        return {
            "width": _pooler_width(settings, stack.width),
            "hidden": settings.activation("pooler_hidden_act", "gelu"),
            "dropout": settings("cls_dropout", dropout),
            "input_dropout": settings("pooler_dropout", 0.0),
        }

    heads = {
        "masked_lm": lambda: HeadConfig(
            tied=tied,
            bias=True,
            transform=True,
            activation=settings.activation("hidden_act", "gelu"),
            epsilon=stack.norm.epsilon,
        ),
        "sequence": lambda: classifier_head(settings, "classes", **pooled()),
        "multiple_choice": lambda: choice_head(**pooled()),
        "token": lambda: classifier_head(settings, "slots", dropout=dropout),
        "qa": lambda: SPAN_HEAD,
        "model": lambda: NO_HEAD,
    }
    if head == "masked_lm" and stack.embed.width is not None:
        raise ConfigError(
            f"{settings.path}: got embedding_size {stack.embed.width} with a masked language model, expected that of "
            "the hidden states; this variant is not supported"
        )
    return ModelConfig(encoder=stack, head=heads[head]())


def _pooler_width(settings: Settings, width: int) -> int:
    settings.expect("pooler_hidden_size", width)
    return width


def encoder_config(
    settings: Settings, sizes: tuple[int, int, int, int], vocab: int, key_bias: bool, **relative: Any
) -> StackConfig:
    """The encoder of a config.json.

    Args:
      sizes: the library's defaults of width, layers, heads and feed-forward width.
      vocab: its default vocabulary size.
      relative: further fields of the encoding if positions are relative.
    """
    width, dropout = settings.size("hidden_size", sizes[0]), settings("hidden_dropout_prob", 0.1)
    inner, kinds = settings.size("embedding_size", width), settings("type_vocab_size", 0)
    biased = settings("position_biased_input", True)
    if inner != width and (kinds or biased):
        raise ConfigError(
            f"{settings.path}: got embedding_size {inner} with position_biased_input {biased} and type_vocab_size "
            f"{kinds}, expected {width}, or neither of the two; this variant is not supported"
        )
    settings.expect("attention_head_size", width // settings.size("num_attention_heads", sizes[2]))
    return StackConfig(
        layers=settings.size("num_hidden_layers", sizes[1]),
        width=width,
        embed=EmbedConfig(
            vocab=settings.size("vocab_size", vocab),
            width=None if inner == width else inner,
            kinds=kinds,
            norm=True,
            dropout=dropout,
            pad=settings("pad_token_id", 0),
        ),
        encoding=_encoding(settings, biased, dropout, relative),
        attention=AttentionConfig(
            heads=settings.size("num_attention_heads", sizes[2]),
            key_bias=None if key_bias else False,
            average_padding=True,
            dropout=settings("attention_probs_dropout_prob", 0.1),
        ),
        ffn=FeedForwardConfig(
            width=settings.size("intermediate_size", sizes[3]), activation=settings.activation("hidden_act", "gelu")
        ),
        norm=NormConfig(order="post", epsilon=settings("layer_norm_eps", 1e-7)),
        dropout=dropout,
    )


def _encoding(settings: Settings, biased: bool, dropout: float, relative: dict[str, Any]) -> EncodingConfig:
    length, named = settings.size("max_position_embeddings", 512), settings("pos_att_type", None) or []
    longest = settings("max_relative_positions", -1)
    if longest > MAX_DISTANCE:
        raise ConfigError(
            f"{settings.path}: got max_relative_positions {longest}, expected at most {MAX_DISTANCE}; fix the file"
        )
    named = [word.strip() for word in named.lower().split("|")] if isinstance(named, str) else named
    if not set(named) <= set(TERMS) or bool(named) != settings("relative_attention", False):
        raise ConfigError(
            f"{settings.path}: got pos_att_type {named!r} with relative_attention "
            f"{settings('relative_attention', False)}, expected some of c2p and p2c exactly if it is true; "
            "this variant is not supported"
        )
    if not named:
        return EncodingConfig("learned" if biased else "none", max_length=length)
    fields: dict[str, Any] = {"buckets": None, **relative}
    return EncodingConfig(
        "deberta",
        max_length=length,
        max_distance=length if longest < 1 else longest,
        absolute=biased,
        dropout=dropout,
        content_to_position="c2p" in named,
        position_to_content="p2c" in named,
        **fields,
    )


def write_config(model: ModelConfig, terms: Sequence[str]) -> dict[str, Any]:
    """The config.json of a model. `terms` are the entries of `pos_att_type`, in the order in which they are listed."""
    stack = require_stack(model, "encoder")
    encoding, ffn = stack.encoding, require_ffn(stack)
    relative = encoding.kind == "deberta"
    listed = [word for word in terms if relative and getattr(encoding, TERMS[word])]
    settings = {
        "hidden_size": stack.width,
        "num_hidden_layers": stack.layers,
        "num_attention_heads": stack.attention.heads,
        "intermediate_size": ffn.width or 4 * stack.width,
        "hidden_act": hf_activation(ffn.activation),
        "hidden_dropout_prob": stack.dropout,
        "attention_probs_dropout_prob": stack.attention.dropout,
        "layer_norm_eps": stack.norm.epsilon,
        "vocab_size": stack.embed.vocab,
        "type_vocab_size": stack.embed.kinds,
        "pad_token_id": stack.embed.pad,
        "max_position_embeddings": encoding.max_length,
        "relative_attention": relative,
        "pos_att_type": listed or None,
        "position_biased_input": encoding.absolute if relative else encoding.kind == "learned",
        "legacy": True,
        "tie_word_embeddings": model.head.tied or model.head.kind != "tokens",
    }
    if relative:
        is_default = encoding.max_distance == encoding.max_length
        settings["max_relative_positions"] = -1 if is_default else encoding.max_distance
    if stack.embed.width is not None:
        settings["embedding_size"] = stack.embed.width
    if model.head.kind == "classes":
        settings["pooler_hidden_size"] = model.head.width
        settings["pooler_hidden_act"] = hf_activation(model.head.hidden)
        settings["pooler_dropout"] = model.head.input_dropout
        settings["cls_dropout"] = model.head.dropout
    return settings


def body_rows(model: ModelConfig) -> list[Row]:
    """Rows of embeddings, distance embeddings and layers, without query, key and value projections."""
    stack = require_stack(model, "encoder")
    hf_layer, param_layer = "deberta.encoder.layer.{layer}", "encoder/blocks"
    rows = [
        Row("deberta.embeddings.word_embeddings.weight", "source_embed/table"),
        *norm_rows("deberta.embeddings.LayerNorm", "encoder/embed_norm"),
        *norm_rows(f"{hf_layer}.attention.output.LayerNorm", f"{param_layer}/attention_norm"),
        *linear_rows(f"{hf_layer}.intermediate.dense", f"{param_layer}/ffn/in"),
        *linear_rows(f"{hf_layer}.output.dense", f"{param_layer}/ffn/out"),
        *norm_rows(f"{hf_layer}.output.LayerNorm", f"{param_layer}/ffn_norm"),
    ]
    if stack.embed.width is not None:
        rows.append(Row("deberta.embeddings.embed_proj.weight", "source_embed/up", "D E -> E D"))
    if stack.embed.kinds:
        rows.append(Row("deberta.embeddings.token_type_embeddings.weight", "source_embed/kinds"))
    if stack.encoding.kind == "learned":
        rows.append(Row("deberta.embeddings.position_embeddings.weight", "encoder/position/table"))
    if stack.encoding.kind == "deberta":
        rows.append(Row("deberta.encoder.rel_embeddings.weight", "encoder/shared/table"))
        if stack.encoding.absolute:
            rows.append(Row("deberta.embeddings.position_embeddings.weight", "encoder/position/learned/table"))
    return rows


def head_rows(model: ModelConfig, head: str) -> list[Row]:
    """Rows of the head."""
    by_head = {
        "masked_lm": _bert.prediction_rows(model),
        "sequence": [*linear_rows("pooler.dense", "head/hidden"), *linear_rows("classifier", "head/decision")],
        "multiple_choice": [*linear_rows("pooler.dense", "head/hidden"), *linear_rows("classifier", "head/decision")],
        "token": linear_rows("classifier", "head/decision"),
        "qa": linear_rows("qa_outputs", "head/decision"),
        "model": [],
    }
    return by_head[head]


def head_classes(name: str) -> dict[str, str]:
    """Head -> class name. The bare model has no pooler, so there is no head "bare"."""
    absent = ("bare", "causal_lm", "multiple_choice")
    return {head: class_name for head, class_name in _bert.head_classes(name).items() if head not in absent}
