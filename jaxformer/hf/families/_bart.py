"""Shared by BART, Marian and Pegasus: encoder and decoder with learned or sinusoidal positions and biases."""

from __future__ import annotations

from typing import Any, Literal

from jaxformer.config import (
    AttentionConfig,
    EmbedConfig,
    EncodingConfig,
    FeedForwardConfig,
    ModelConfig,
    NormConfig,
    StackConfig,
)
from jaxformer.hf.table import (
    Row,
    Settings,
    attention_rows,
    hf_activation,
    linear_rows,
    norm_rows,
    require_ffn,
    require_stack,
)

EMBEDDING_TABLES = ("model.shared.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


def stack_config(
    settings: Settings,
    name: str,
    encoding: EncodingConfig,
    vocab: int,
    embed_norm: bool = False,
    order: Literal["pre", "post"] = "post",
) -> StackConfig:
    """The encoder or the decoder of a config.json; `name` is "encoder" or "decoder"."""
    dropout = settings("dropout", 0.1)
    settings.expect(f"{name}_layerdrop", 0.0)
    return StackConfig(
        layers=settings.size(f"{name}_layers", 12),
        width=settings.size("d_model", 1024),
        embed=EmbedConfig(
            vocab=vocab,
            scale=settings("scale_embedding", False),
            norm=embed_norm,
            dropout=dropout,
            pad=settings("pad_token_id", None),
        ),
        encoding=encoding,
        attention=AttentionConfig(
            heads=settings.size(f"{name}_attention_heads", 16), dropout=settings("attention_dropout", 0.0)
        ),
        ffn=FeedForwardConfig(
            width=settings.size(f"{name}_ffn_dim", 4096),
            activation=settings.activation("activation_function", "gelu"),
            dropout=settings("activation_dropout", 0.0),
        ),
        norm=NormConfig(order=order),  # the library's layer norms have epsilon 1e-5, whatever the config says
        dropout=dropout,
    )


def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
    encoder, decoder = require_stack(model, "encoder"), require_stack(model, "decoder")
    settings: dict[str, Any] = {
        "d_model": encoder.width,
        "vocab_size": encoder.embed.vocab,
        "dropout": encoder.dropout,
        "attention_dropout": encoder.attention.dropout,
        "scale_embedding": encoder.embed.scale,
        "pad_token_id": encoder.embed.pad,
        "is_encoder_decoder": True,
    }
    for name, part in (("encoder", encoder), ("decoder", decoder)):
        ffn = require_ffn(part)
        settings |= {
            f"{name}_layers": part.layers,
            f"{name}_attention_heads": part.attention.heads,
            f"{name}_ffn_dim": ffn.width or 4 * part.width,
            "activation_function": hf_activation(ffn.activation),
            "activation_dropout": ffn.dropout,
        }
    return settings


def stack_rows(model: ModelConfig, name: str) -> list[Row]:
    """Rows of the encoder or the decoder, without token embeddings."""
    part = require_stack(model, name)
    hf_layer, param_layer = f"model.{name}.layers.{{layer}}", f"{name}/blocks"
    rows = [
        *attention_rows(f"{hf_layer}.self_attn", f"{param_layer}/attention", part.attention, part.width, PROJECTIONS),
        *norm_rows(f"{hf_layer}.self_attn_layer_norm", f"{param_layer}/attention_norm"),
        *linear_rows(f"{hf_layer}.fc1", f"{param_layer}/ffn/in"),
        *linear_rows(f"{hf_layer}.fc2", f"{param_layer}/ffn/out"),
        *norm_rows(f"{hf_layer}.final_layer_norm", f"{param_layer}/ffn_norm"),
    ]
    if part.norm.order == "pre":
        rows += norm_rows(f"model.{name}.layer_norm", f"{name}/final_norm")
    if part.embed.norm:
        rows += norm_rows(f"model.{name}.layernorm_embedding", f"{name}/embed_norm")
    if part.encoding.kind == "learned":
        rows.append(Row(f"model.{name}.embed_positions.weight", f"{name}/position/table"))
    if name == "decoder":
        rows += attention_rows(
            f"{hf_layer}.encoder_attn", f"{param_layer}/cross", part.attention, part.width, PROJECTIONS
        )
        rows += norm_rows(f"{hf_layer}.encoder_attn_layer_norm", f"{param_layer}/cross_norm")
    return rows


def body_rows(model: ModelConfig) -> list[Row]:
    """Rows of embeddings, encoder and decoder."""
    return [*embedding_rows(model), *stack_rows(model, "encoder"), *stack_rows(model, "decoder")]


def embedding_rows(model: ModelConfig) -> list[Row]:
    """Rows of the shared embedding, or of the encoder's and the decoder's."""
    if model.share_embeddings:
        return [Row(EMBEDDING_TABLES[0], "source_embed/table")]
    return [
        Row(EMBEDDING_TABLES[1], "source_embed/table"),
        Row(EMBEDDING_TABLES[2], "target_embed/table"),
    ]


def output_rows(model: ModelConfig) -> list[Row]:
    """Rows of the output bias, a buffer that some files lack, and of the output projection if it is not tied."""
    bias = Row("final_logits_bias", "head/bias", "1 V -> V", optional=True)
    return [bias] if model.head.tied else [bias, Row("lm_head.weight", "head/kernel", "V D -> D V")]
