"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al. 2024): LLaMA's layers with fused projections, LongRoPE, and a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxformer.config import (
    AttentionConfig,
    EmbedConfig,
    FeedForwardConfig,
    ModelConfig,
    NormConfig,
    StackConfig,
)
from jaxformer.errors import ConfigError
from jaxformer.hf.families import _decoder
from jaxformer.hf.families._llama import pad_token, rope_encoding, rope_parameters
from jaxformer.hf.table import (
    Family,
    Row,
    Settings,
    attention_sizes,
    hf_activation,
    linear_rows,
    norm_rows,
    require_ffn,
    require_stack,
)

ORIGINAL = "original_max_position_embeddings"


def read_config(settings: Settings, head: str) -> ModelConfig:
    width, heads = settings.size("hidden_size", 3072), settings.size("num_attention_heads", 32)
    vocab, positions = settings.size("vocab_size", 32064), settings.size("max_position_embeddings", 4096)
    settings.expect("embd_pdrop", 0.0)  # the library reads it, and applies no dropout to embeddings
    decoder = StackConfig(
        layers=settings.size("num_hidden_layers", 32),
        width=width,
        embed=EmbedConfig(vocab=vocab, pad=pad_token(settings, vocab)),
        encoding=rope_encoding(_with_original(settings), positions, 10000.0, fraction=1.0),
        attention=AttentionConfig(
            heads=heads,
            kv_heads=settings.size("num_key_value_heads", heads),
            head_width=settings.size("head_dim", max(width // heads, 1)),
            bias=False,
            window=settings.size("sliding_window", None),
            dropout=settings("attention_dropout", 0.0),
        ),
        ffn=FeedForwardConfig(
            width=settings.size("intermediate_size", 8192),
            activation=settings.activation("hidden_act", "silu"),
            gated=True,
            bias=False,
        ),
        norm=NormConfig("rms", epsilon=settings("rms_norm_eps", 1e-5)),
        dropout=settings("resid_pdrop", 0.0),
    )
    return ModelConfig(decoder=decoder, head=_decoder.scored_head_config(settings, head, tied=False))


def _with_original(settings: Settings) -> Settings:
    """The settings with the original length in `rope_parameters`. The library takes the one beside them, or 4096.

    Raises:
      ConfigError: the two differ, or the scaling is one that the library refuses for this family.
    """
    original = settings.size(ORIGINAL, 4096)
    values = settings("rope_scaling", None) or settings("rope_parameters", None) or {}
    if not isinstance(values, Mapping):
        return settings  # `rope_encoding` refuses it
    kind = values.get("rope_type", values.get("type", "default"))
    kind = "longrope" if kind in ("su", "yarn") else kind  # names in older files of this family
    if kind not in ("default", "longrope"):
        raise ConfigError(
            f"{settings.path}: got rope_type {kind!r}, expected default or longrope, the library's for this family"
        )
    if kind == "default":
        unread = {name: value for name, value in values.items() if name != ORIGINAL}
        return settings.with_values({**settings.values, "rope_scaling": None, "rope_parameters": unread})
    if values.get(ORIGINAL, original) != original:
        raise ConfigError(
            f"{settings.path}: got {ORIGINAL} {values[ORIGINAL]!r} in rope_parameters and {original} beside them, "
            "expected the same; the library reads the one beside them, 4096 where it is absent"
        )
    named = {name: value for name, value in values.items() if name != "type"}
    rope = {**named, "rope_type": kind, ORIGINAL: original}
    return settings.with_values({**settings.values, "rope_scaling": None, "rope_parameters": rope})


def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
    decoder = require_stack(model, "decoder")
    attention, ffn, scaling = decoder.attention, require_ffn(decoder), decoder.encoding.scaling
    usual, positions = decoder.width // attention.heads, decoder.encoding.max_length
    written = {
        "hidden_size": decoder.width,
        "num_hidden_layers": decoder.layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads or attention.heads,
        "intermediate_size": ffn.width or 4 * decoder.width,
        "max_position_embeddings": positions,
        ORIGINAL: 4096 if scaling is None else scaling.original,
        "vocab_size": decoder.embed.vocab,
        "hidden_act": hf_activation(ffn.activation),
        "rms_norm_eps": decoder.norm.epsilon,
        "rope_parameters": {"partial_rotary_factor": 1.0} | rope_parameters(decoder.encoding),
        "sliding_window": attention.window,
        "embd_pdrop": decoder.embed.dropout,
        "attention_dropout": attention.dropout,
        "resid_pdrop": decoder.dropout,
        "pad_token_id": decoder.embed.pad,
        "tie_word_embeddings": _decoder.is_tied(model, head, False),
        **_decoder.scored_head_settings(model, head),
    }
    if (attention.head_width or usual) != usual:
        written["head_dim"] = attention.head_width
    return written


def rows(model: ModelConfig, head: str) -> list[Row]:
    decoder = require_stack(model, "decoder")
    hf_layer, param_layer = "model.layers.{layer}", "decoder/blocks"
    hf_attention, attention = f"{hf_layer}.self_attn", f"{param_layer}/attention"
    sizes = attention_sizes(decoder.attention, decoder.width)
    heads, groups, width = (sizes[axis] for axis in "HGK")
    parts = tuple(f"{attention}/{part}/kernel" for part in ("query", "key", "value"))
    splits = (heads * width, groups * width, groups * width)
    gated = tuple(f"{param_layer}/ffn/{part}/kernel" for part in ("gate", "in"))
    return [
        Row("model.embed_tokens.weight", "target_embed/table"),
        *norm_rows(f"{hf_layer}.input_layernorm", f"{param_layer}/attention_norm", has_bias=False),
        Row(f"{hf_attention}.qkv_proj.weight", parts, "(H K) D -> D H K", {"K": width}, splits),
        Row(f"{hf_attention}.o_proj.weight", f"{attention}/out/kernel", "D (H K) -> H K D", {"H": heads, "K": width}),
        *norm_rows(f"{hf_layer}.post_attention_layernorm", f"{param_layer}/ffn_norm", has_bias=False),
        Row(f"{hf_layer}.mlp.gate_up_proj.weight", gated, "(n F) D -> n D F"),
        *linear_rows(f"{hf_layer}.mlp.down_proj", f"{param_layer}/ffn/out", has_bias=False),
        *norm_rows("model.norm", "decoder/final_norm", has_bias=False),
        *_decoder.scored_head_rows(model, head),
    ]


FAMILY = Family(
    model_types=("phi3",),
    heads={
        "causal_lm": "Phi3ForCausalLM",
        "sequence": "Phi3ForSequenceClassification",
        "token": "Phi3ForTokenClassification",
        "model": "Phi3Model",
    },
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    prefix="model.",
    droppable_tensors=(r"lm_head\..*", r"score\..*"),
    ignored_tensors=(r"model\.rotary_emb\.inv_freq",),
    tied_tensors=("lm_head.weight", "model.embed_tokens.weight"),
)
