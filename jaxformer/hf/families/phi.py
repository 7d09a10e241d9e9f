"""Phi-1, Phi-1.5 and Phi-2 (Li et al. 2023): parallel sub-layers behind one norm, RoPE on a part of each head."""

from __future__ import annotations

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
    attention_rows,
    hf_activation,
    linear_rows,
    norm_rows,
    require_ffn,
    require_stack,
)


def read_config(settings: Settings, head: str) -> ModelConfig:
    width, heads = settings.size("hidden_size", 2048), settings.size("num_attention_heads", 32)
    vocab, epsilon = settings.size("vocab_size", 51200), settings("layer_norm_eps", 1e-5)
    positions = settings.size("max_position_embeddings", 2048)
    normalised, head_width = settings("qk_layernorm", False), settings.size("head_dim", max(width // heads, 1))
    if normalised and head_width != width // heads:
        raise ConfigError(
            f"{settings.path}: got head_dim {head_width} with qk_layernorm, expected {width // heads}, the width of "
            "the library's norm (hidden_size / num_attention_heads); this variant is not supported"
        )
    decoder = StackConfig(
        layers=settings.size("num_hidden_layers", 24),
        width=width,
        embed=EmbedConfig(vocab=vocab, dropout=settings("embd_pdrop", 0.0), pad=pad_token(settings, vocab)),
        encoding=rope_encoding(settings, positions, 10000.0, fraction=0.5),
        attention=AttentionConfig(
            heads=heads,
            kv_heads=settings.size("num_key_value_heads", heads),
            head_width=head_width,
            norm=NormConfig(epsilon=epsilon) if normalised else None,
            dropout=settings("attention_dropout", 0.0),
        ),
        ffn=FeedForwardConfig(
            width=settings.size("intermediate_size", 8192), activation=settings.activation("hidden_act", "gelu_new")
        ),
        norm=NormConfig(epsilon=epsilon),
        dropout=settings("resid_pdrop", 0.0),
        sublayers="parallel_one_norm",
    )
    if head == "causal_lm":
        top = _decoder.head_config(settings, head, tied=False, bias=True)
    else:
        top = _decoder.scored_head_config(settings, head, tied=False)
    return ModelConfig(decoder=decoder, head=top)


def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
    decoder = require_stack(model, "decoder")
    attention, ffn, rope = decoder.attention, require_ffn(decoder), rope_parameters(decoder.encoding)
    usual = decoder.width // attention.heads
    written = {
        "hidden_size": decoder.width,
        "num_hidden_layers": decoder.layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads or attention.heads,
        "intermediate_size": ffn.width or 4 * decoder.width,
        "max_position_embeddings": decoder.encoding.max_length,
        "vocab_size": decoder.embed.vocab,
        "hidden_act": hf_activation(ffn.activation),
        "layer_norm_eps": decoder.norm.epsilon,
        "qk_layernorm": attention.norm is not None,
        "rope_parameters": rope | {"partial_rotary_factor": decoder.encoding.fraction},
        "embd_pdrop": decoder.embed.dropout,
        "attention_dropout": attention.dropout,
        "resid_pdrop": decoder.dropout,
        "tie_word_embeddings": _decoder.is_tied(model, head, False),
        **_decoder.scored_head_settings(model, head),
    }
    if (attention.head_width or usual) != usual:
        written["head_dim"] = attention.head_width
    return written if decoder.embed.pad is None else written | {"pad_token_id": decoder.embed.pad}


def rows(model: ModelConfig, head: str) -> list[Row]:
    decoder = require_stack(model, "decoder")
    hf_layer, param_layer = "model.layers.{layer}", "decoder/blocks"
    hf_attention, attention = f"{hf_layer}.self_attn", f"{param_layer}/attention"
    norms = []
    if decoder.attention.norm is not None:
        norms += norm_rows(f"{hf_attention}.q_layernorm", f"{attention}/query_norm")
        norms += norm_rows(f"{hf_attention}.k_layernorm", f"{attention}/key_norm")
    names = ("q_proj", "k_proj", "v_proj", "dense")
    return [
        Row("model.embed_tokens.weight", "target_embed/table"),
        *norm_rows(f"{hf_layer}.input_layernorm", f"{param_layer}/attention_norm"),
        *attention_rows(hf_attention, attention, decoder.attention, decoder.width, names),
        *norms,
        *linear_rows(f"{hf_layer}.mlp.fc1", f"{param_layer}/ffn/in"),
        *linear_rows(f"{hf_layer}.mlp.fc2", f"{param_layer}/ffn/out"),
        *norm_rows("model.final_layernorm", "decoder/final_norm"),
        *_decoder.scored_head_rows(model, head),
    ]


FAMILY = Family(
    model_types=("phi",),
    heads={
        "causal_lm": "PhiForCausalLM",
        "sequence": "PhiForSequenceClassification",
        "token": "PhiForTokenClassification",
        "model": "PhiModel",
    },
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    prefix="model.",
    droppable_tensors=(r"lm_head\..*", r"score\..*"),
    ignored_tensors=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq"),
    tied_tensors=("lm_head.weight", "model.embed_tokens.weight"),
)
