"""What BART and Marian share: post-norm encoder and decoder with separate biased projections."""

from __future__ import annotations

from typing import Any

from jaxformer.config import (
    AttentionConfig,
    ConfigError,
    EmbedConfig,
    EncodingConfig,
    FeedForwardConfig,
    ModelConfig,
    NormConfig,
    StackConfig,
)
from jaxformer.hf.table import Row, Settings, linear, norm, projections, side, their_activation

TABLES = ("model.shared.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


def stack(
    settings: Settings,
    name: str,
    encoding: EncodingConfig,
    vocab: int,
    embed_norm: bool = False,
    order: str = "post",
) -> StackConfig:
    """The encoder or decoder of a config.json."""
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
        norm=NormConfig(order=order),  # their layer norms have epsilon 1e-5, whatever the config says
        dropout=dropout,
    )


def write(model: ModelConfig, head: str) -> dict[str, Any]:
    encoder, decoder = side(model, "encoder"), side(model, "decoder")
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
        if part.ffn is None:
            raise ConfigError(f"export: got a {name} without feed-forward layers, expected them for this family")
        settings |= {
            f"{name}_layers": part.layers,
            f"{name}_attention_heads": part.attention.heads,
            f"{name}_ffn_dim": part.ffn.width or 4 * part.width,
            "activation_function": their_activation(part.ffn.activation),
            "activation_dropout": part.ffn.dropout,
        }
    return settings


def rows(model: ModelConfig, name: str) -> list[Row]:
    """Rows of one stack, without embeddings."""
    part = side(model, name)
    theirs, ours = f"model.{name}.layers.{{layer}}", f"{name}/blocks"
    found = [
        *projections(f"{theirs}.self_attn", f"{ours}/attention", part.attention, part.width, PROJECTIONS),
        *norm(f"{theirs}.self_attn_layer_norm", f"{ours}/attention_norm"),
        *linear(f"{theirs}.fc1", f"{ours}/ffn/in"),
        *linear(f"{theirs}.fc2", f"{ours}/ffn/out"),
        *norm(f"{theirs}.final_layer_norm", f"{ours}/ffn_norm"),
    ]
    if part.norm.order == "pre":
        found += norm(f"model.{name}.layer_norm", f"{name}/final_norm")
    if part.embed.norm:
        found += norm(f"model.{name}.layernorm_embedding", f"{name}/embed_norm")
    if part.encoding.kind == "learned":
        found.append(Row(f"model.{name}.embed_positions.weight", f"{name}/position/table"))
    if name == "decoder":
        found += projections(f"{theirs}.encoder_attn", f"{ours}/cross", part.attention, part.width, PROJECTIONS)
        found += norm(f"{theirs}.encoder_attn_layer_norm", f"{ours}/cross_norm")
    return found


def embeddings(model: ModelConfig) -> list[Row]:
    """One table for both sides, or one each."""
    if model.share_embeddings:
        return [Row(TABLES[0], "source_embed/table")]
    return [
        Row(TABLES[1], "source_embed/table"),
        Row(TABLES[2], "target_embed/table"),
    ]


def output(model: ModelConfig) -> list[Row]:
    """The head's bias, which is a buffer of theirs (absent from some files), and its own table if it has one."""
    bias = Row("final_logits_bias", "head/bias", "1 V -> V", optional=True)
    return [bias] if model.head.tied else [bias, Row("lm_head.weight", "head/kernel", "V D -> D V")]
