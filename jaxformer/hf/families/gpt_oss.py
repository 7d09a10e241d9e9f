"""gpt-oss (OpenAI 2025): experts with clamped gates, windows in every other layer, and a sink in every softmax."""

from __future__ import annotations

from typing import Any

from jaxformer.config import (
    AttentionConfig,
    EmbedConfig,
    FeedForwardConfig,
    ModelConfig,
    MoEConfig,
    NormConfig,
    StackConfig,
)
from jaxformer.errors import ConfigError
from jaxformer.hf.families import _decoder
from jaxformer.hf.families._llama import key_heads, pad_token, rope_encoding, rope_parameters
from jaxformer.hf.table import (
    Family,
    Row,
    Settings,
    attention_rows,
    norm_rows,
    require_ffn,
    require_stack,
)

KINDS = ("full_attention", "sliding_attention")

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""`rope_parameters` of a file without them."""


def read_config(settings: Settings, head: str) -> ModelConfig:
    width, heads = settings.size("hidden_size", 2880), settings.size("num_attention_heads", 64)
    layers, vocab = settings.size("num_hidden_layers", 36), settings.size("vocab_size", 201088)
    epsilon = settings("rms_norm_eps", 1e-5)
    scaled = settings("rope_scaling", None) or settings("rope_parameters", None)
    rope = settings if scaled else settings.with_values({**settings.values, "rope_parameters": YARN})
    windowed = _windowed_layers(settings, layers)
    window = settings.raw("sliding_window", 128)
    if window is not None:
        window = settings.size("sliding_window", 128)
    elif windowed:
        raise ConfigError(
            f"{settings.path}: got sliding_window null with layers of sliding_attention, expected a width; set it, or "
            "write full_attention in layer_types"
        )
    settings("output_router_logits", False)  # read at a call: `forward.add_router_outputs`
    decoder = StackConfig(
        layers=layers,
        width=width,
        embed=EmbedConfig(vocab=vocab, pad=pad_token(settings, vocab)),
        encoding=rope_encoding(rope, settings.size("max_position_embeddings", 131072), 150000.0),
        attention=AttentionConfig(
            heads=heads,
            kv_heads=key_heads(settings, 8, heads),
            head_width=max(width // heads, 1)
            if settings.raw("head_dim", 64) is None
            else settings.size("head_dim", 64),
            bias=settings("attention_bias", True),
            sink=True,
            window=window if windowed else None,
            window_layers=() if len(windowed) == layers else windowed,
            dropout=settings("attention_dropout", 0.0),
        ),
        ffn=FeedForwardConfig(
            width=settings.size("intermediate_size", 2880),
            activation="silu",
            gated=True,
            slope=settings("swiglu_alpha", 1.702),
            limit=settings("swiglu_limit", 7.0),
            offset=1.0,
        ),
        moe=MoEConfig(
            experts=settings.size("num_local_experts", 128),
            top_k=settings.size("num_experts_per_tok", 4),
            router_bias=True,
            balance_loss=settings("router_aux_loss_coef", 0.001),
            z_loss=0.0,
        ),
        norm=NormConfig("rms", epsilon=epsilon),
    )
    return ModelConfig(decoder=decoder, head=_decoder.scored_head_config(settings, head, tied=False))


def _windowed_layers(settings: Settings, layers: int) -> tuple[int, ...]:
    """Numbers of the layers with a window.

    Raises:
      ConfigError: `layer_types` are not one of two kinds for each layer.
    """
    default = [KINDS[(number + 1) % 2] for number in range(layers)]
    kinds = settings.layer_kinds(layers, KINDS) or default
    return tuple(number for number, kind in enumerate(kinds) if kind == KINDS[1])


def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
    decoder = require_stack(model, "decoder")
    attention, ffn, moe = decoder.attention, require_ffn(decoder), decoder.moe
    if moe is None:
        raise ConfigError("export: got a decoder without experts, expected them for this family")
    written = {
        "hidden_size": decoder.width,
        "num_hidden_layers": decoder.layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads or attention.heads,
        "head_dim": attention.head_width or decoder.width // attention.heads,
        "intermediate_size": ffn.width or 4 * decoder.width,
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": moe.balance_loss,
        "swiglu_alpha": ffn.slope,
        "swiglu_limit": ffn.limit,
        "sliding_window": attention.window or 128,  # the library wants a number also where no layer has a window
        "layer_types": [KINDS[number in decoder.windowed_layers] for number in range(decoder.layers)],
        "max_position_embeddings": decoder.encoding.max_length,
        "vocab_size": decoder.embed.vocab,
        "rms_norm_eps": decoder.norm.epsilon,
        "rope_parameters": rope_parameters(decoder.encoding),
        "attention_bias": attention.bias,
        "attention_dropout": attention.dropout,
        "tie_word_embeddings": _decoder.is_tied(model, head, False),
        **_decoder.scored_head_settings(model, head),
    }
    return written if decoder.embed.pad is None else written | {"pad_token_id": decoder.embed.pad}


def rows(model: ModelConfig, head: str) -> list[Row]:
    decoder = require_stack(model, "decoder")
    hf_layer, param_layer = "model.layers.{layer}", "decoder/blocks"
    hf_attention, attention, experts = f"{hf_layer}.self_attn", f"{param_layer}/attention", f"{hf_layer}.mlp.experts"
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    pair = lambda leaf: tuple(f"{param_layer}/ffn/{part}/{leaf}" for part in ("gate", "in"))  # noqa: E731
    return [
        Row("model.embed_tokens.weight", "target_embed/table"),
        *norm_rows(f"{hf_layer}.input_layernorm", f"{param_layer}/attention_norm", has_bias=False),
        *attention_rows(hf_attention, attention, decoder.attention, decoder.width, names),
        Row(f"{hf_attention}.sinks", f"{attention}/sink"),
        *norm_rows(f"{hf_layer}.post_attention_layernorm", f"{param_layer}/ffn_norm", has_bias=False),
        Row(f"{hf_layer}.mlp.router.weight", f"{param_layer}/ffn/router", "E D -> D E"),
        Row(f"{hf_layer}.mlp.router.bias", f"{param_layer}/ffn/router_bias"),
        Row(f"{experts}.gate_up_proj", pair("kernel"), "E D (F n) -> n E D F"),
        Row(f"{experts}.gate_up_proj_bias", pair("bias"), "E (F n) -> n E F"),
        Row(f"{experts}.down_proj", f"{param_layer}/ffn/out/kernel"),
        Row(f"{experts}.down_proj_bias", f"{param_layer}/ffn/out/bias"),
        *norm_rows("model.norm", "decoder/final_norm", has_bias=False),
        *_decoder.scored_head_rows(model, head),
    ]


FAMILY = Family(
    model_types=("gpt_oss",),
    heads={
        "causal_lm": "GptOssForCausalLM",
        "sequence": "GptOssForSequenceClassification",
        "token": "GptOssForTokenClassification",
        "model": "GptOssModel",
    },
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    prefix="model.",
    droppable_tensors=(r"lm_head\..*", r"score\..*"),
    ignored_keys={"hidden_act": "the library's experts have one activation, that of swiglu_alpha and swiglu_limit"},
    ignored_tensors=(r"model\.rotary_emb\.inv_freq",),
    tied_tensors=("lm_head.weight", "model.embed_tokens.weight"),
)
