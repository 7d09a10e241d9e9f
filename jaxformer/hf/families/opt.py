"""OPT (Zhang et al. 2022): decoder with learned positions that begin at row 2; OPT-350M has norms after sub-layers.

OPT-350M also has an embedding narrower than the model, with a projection behind it and another before the head.
"""

from __future__ import annotations

from typing import Any

from jaxformer.config import (
    AttentionConfig,
    EmbedConfig,
    EncodingConfig,
    FeedForwardConfig,
    ModelConfig,
    NormConfig,
    StackConfig,
)
from jaxformer.hf.families import _decoder
from jaxformer.hf.table import (
    CallConvention,
    Family,
    Row,
    Settings,
    attention_rows,
    hf_activation,
    linear_rows,
    norm_rows,
    require_ffn,
    require_stack,
)

OFFSET = 2
"""Rows of the position table before position 0. Padding reads the second."""


def read_config(settings: Settings, head: str) -> ModelConfig:
    width, dropout = settings.size("hidden_size", 768), settings("dropout", 0.1)
    table_width = settings.size("word_embed_proj_dim", None) or width
    has_bias, has_affine = settings("enable_bias", True), settings("layer_norm_elementwise_affine", True)
    is_pre, is_removed = settings("do_layer_norm_before", True), settings("_remove_final_layer_norm", False)
    settings.expect("layerdrop", 0.0)
    decoder = StackConfig(
        layers=settings.size("num_hidden_layers", 12),
        width=width,
        embed=EmbedConfig(
            vocab=settings.size("vocab_size", 50272),
            width=None if table_width == width else table_width,
            pad=settings.raw("pad_token_id", 1),
        ),
        encoding=EncodingConfig(
            "learned", max_length=settings.size("max_position_embeddings", 2048) + OFFSET, offset=OFFSET
        ),
        attention=AttentionConfig(
            heads=settings.size("num_attention_heads", 12),
            bias=has_bias,
            dropout=settings("attention_dropout", 0.0),
        ),
        ffn=FeedForwardConfig(
            width=settings.size("ffn_dim", 3072),
            activation=settings.activation("activation_function", "relu"),
            bias=has_bias,
        ),
        norm=NormConfig(  # the library's layer norms have epsilon 1e-5
            order="pre" if is_pre else "post",
            scale=has_affine,
            bias=has_affine,
            final=is_pre and not is_removed,
        ),
        dropout=dropout,
        output_width=None if table_width == width else table_width,
    )
    return ModelConfig(decoder=decoder, head=_decoder.head_config(settings, head, tied=True))


def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
    decoder = require_stack(model, "decoder")
    ffn, is_pre = require_ffn(decoder), decoder.norm.order == "pre"
    return {
        "hidden_size": decoder.width,
        "num_hidden_layers": decoder.layers,
        "num_attention_heads": decoder.attention.heads,
        "ffn_dim": ffn.width or 4 * decoder.width,
        "max_position_embeddings": decoder.encoding.max_length - OFFSET,
        "vocab_size": decoder.embed.vocab,
        "word_embed_proj_dim": decoder.embed.width or decoder.width,
        "do_layer_norm_before": is_pre,
        "_remove_final_layer_norm": is_pre and decoder.norm.final is False,
        "enable_bias": decoder.attention.bias,
        "layer_norm_elementwise_affine": decoder.norm.scale,
        "activation_function": hf_activation(ffn.activation),
        "dropout": decoder.dropout,
        "attention_dropout": decoder.attention.dropout,
        "pad_token_id": decoder.embed.pad,
        "tie_word_embeddings": _decoder.is_tied(model, head, True),
    }


def rows(model: ModelConfig, head: str) -> list[Row]:
    decoder = require_stack(model, "decoder")
    hf_layer, param_layer = "model.decoder.layers.{layer}", "decoder/blocks"
    names, has_bias = ("q_proj", "k_proj", "v_proj", "out_proj"), require_ffn(decoder).bias
    norms = [
        *norm_rows(f"{hf_layer}.self_attn_layer_norm", f"{param_layer}/attention_norm"),
        *norm_rows(f"{hf_layer}.final_layer_norm", f"{param_layer}/ffn_norm"),
        *(norm_rows("model.decoder.final_layer_norm", "decoder/final_norm") if decoder.norm.final else []),
    ]
    projections = [
        Row("model.decoder.project_in.weight", "target_embed/up", "D E -> E D"),
        Row("model.decoder.project_out.weight", "decoder/output_projection/kernel", "E D -> D E"),
    ]
    return [
        Row("model.decoder.embed_tokens.weight", "target_embed/table"),
        Row("model.decoder.embed_positions.weight", "decoder/position/table"),
        *(projections if decoder.output_width is not None else []),
        *attention_rows(f"{hf_layer}.self_attn", f"{param_layer}/attention", decoder.attention, decoder.width, names),
        *linear_rows(f"{hf_layer}.fc1", f"{param_layer}/ffn/in", has_bias=has_bias),
        *linear_rows(f"{hf_layer}.fc2", f"{param_layer}/ffn/out", has_bias=has_bias),
        *(norms if decoder.norm.scale else []),
        *_decoder.head_rows(model, head),
    ]


FAMILY = Family(
    model_types=("opt",),
    heads={
        "causal_lm": "OPTForCausalLM",
        "sequence": "OPTForSequenceClassification",
        "qa": "OPTForQuestionAnswering",
        "model": "OPTModel",
    },
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    prefix="model.",
    droppable_tensors=_decoder.DROPPABLE_TENSORS,
    tied_tensors=("lm_head.weight", "model.decoder.embed_tokens.weight"),
    convention=CallConvention(positions="mask", prefix_tokens=("</s>",)),
)
