"""XGLM (Lin et al. 2022): pre-norm decoder with sinusoidal positions that begin at 2, and scaled embeddings."""

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
from jaxformer.errors import ConfigError
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
"""Number of position 0."""


def read_config(settings: Settings, head: str) -> ModelConfig:
    width, pad = settings.size("d_model", 1024), settings.raw("pad_token_id", 1)
    if width % 2 or width < 4:
        raise ConfigError(f"{settings.path}: got d_model {width}, expected an even number of at least 4; fix the file")
    if pad is not None and pad >= OFFSET:
        raise ConfigError(
            f"{settings.path}: got pad_token_id {pad!r}, expected 0, 1 or null: the library's position {pad - OFFSET} "
            "would be zeros; this variant is not supported"
        )
    settings.expect("layerdrop", 0.0)
    settings.expect("add_cross_attention", False)
    dropout, half = settings("dropout", 0.1), width // 2
    decoder = StackConfig(
        layers=settings.size("num_layers", 24),
        width=width,
        embed=EmbedConfig(
            vocab=settings.size("vocab_size", 256008),
            scale=settings("scale_embedding", True),
            dropout=dropout,
            pad=pad,
        ),
        encoding=EncodingConfig(
            "sinusoidal",
            max_length=settings.size("max_position_embeddings", 2048),
            offset=OFFSET,
            base=10000.0 ** (half / (half - 1)),  # the wavelengths end at 10000, as in tensor2tensor
            concatenated=True,
        ),
        attention=AttentionConfig(
            heads=settings.size("attention_heads", 16), dropout=settings("attention_dropout", 0.1)
        ),
        ffn=FeedForwardConfig(
            width=settings.size("ffn_dim", 4096),
            activation=settings.activation("activation_function", "gelu"),
            dropout=settings("activation_dropout", 0.0),
        ),
        norm=NormConfig(),  # the library's layer norms have epsilon 1e-5
        dropout=dropout,
    )
    return ModelConfig(decoder=decoder, head=_decoder.head_config(settings, head, tied=True))


def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
    decoder = require_stack(model, "decoder")
    ffn = require_ffn(decoder)
    return {
        "d_model": decoder.width,
        "num_layers": decoder.layers,
        "attention_heads": decoder.attention.heads,
        "ffn_dim": ffn.width or 4 * decoder.width,
        "max_position_embeddings": decoder.encoding.max_length,
        "vocab_size": decoder.embed.vocab,
        "scale_embedding": decoder.embed.scale,
        "activation_function": hf_activation(ffn.activation),
        "dropout": decoder.dropout,
        "attention_dropout": decoder.attention.dropout,
        "activation_dropout": ffn.dropout,
        "pad_token_id": decoder.embed.pad,
        "tie_word_embeddings": _decoder.is_tied(model, head, True),
    }


def rows(model: ModelConfig, head: str) -> list[Row]:
    decoder = require_stack(model, "decoder")
    hf_layer, param_layer = "model.layers.{layer}", "decoder/blocks"
    names = ("q_proj", "k_proj", "v_proj", "out_proj")
    return [
        Row("model.embed_tokens.weight", "target_embed/table"),
        *norm_rows(f"{hf_layer}.self_attn_layer_norm", f"{param_layer}/attention_norm"),
        *attention_rows(f"{hf_layer}.self_attn", f"{param_layer}/attention", decoder.attention, decoder.width, names),
        *norm_rows(f"{hf_layer}.final_layer_norm", f"{param_layer}/ffn_norm"),
        *linear_rows(f"{hf_layer}.fc1", f"{param_layer}/ffn/in"),
        *linear_rows(f"{hf_layer}.fc2", f"{param_layer}/ffn/out"),
        *norm_rows("model.layer_norm", "decoder/final_norm"),
        *_decoder.head_rows(model, head),
    ]


FAMILY = Family(
    model_types=("xglm",),
    heads={"causal_lm": "XGLMForCausalLM", "model": "XGLMModel"},
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    prefix="model.",
    droppable_tensors=_decoder.DROPPABLE_TENSORS,
    ignored_tensors=(r"model\.embed_positions\.weights",),
    tied_tensors=("lm_head.weight", "model.embed_tokens.weight"),
    convention=CallConvention(prefix_tokens=("</s>",)),
)
