"""GPT-NeoX and Pythia (Black et al. 2022; Biderman et al. 2023): parallel sub-layers, RoPE on a part of each head."""

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
from jaxformer.hf.families import _decoder
from jaxformer.hf.families._llama import rope_encoding, rope_parameters
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


def read_config(settings: Settings, head: str) -> ModelConfig:
    width, dropout = settings.size("hidden_size", 6144), settings("hidden_dropout", 0.0)
    positions = settings.size("max_position_embeddings", 2048)
    settings.expect("head_dim", None)
    decoder = StackConfig(
        layers=settings.size("num_hidden_layers", 44),
        width=width,
        embed=EmbedConfig(vocab=settings.size("vocab_size", 50432), dropout=dropout),
        encoding=rope_encoding(
            settings, positions, settings("rotary_emb_base", 10000.0), fraction=settings("rotary_pct", 0.25)
        ),
        attention=AttentionConfig(
            heads=settings.size("num_attention_heads", 64),
            bias=settings("attention_bias", True),
            dropout=settings("attention_dropout", 0.0),
        ),
        ffn=FeedForwardConfig(
            width=settings.size("intermediate_size", 24576), activation=settings.activation("hidden_act", "gelu")
        ),
        norm=NormConfig(epsilon=settings("layer_norm_eps", 1e-5)),
        dropout=dropout,
        sublayers="parallel" if settings("use_parallel_residual", True) else "sequential",
    )
    top = _decoder.head_config(settings, head, tied=False, dropout=settings("classifier_dropout", 0.1))
    return ModelConfig(decoder=decoder, head=top)


def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
    decoder = require_stack(model, "decoder")
    ffn, rope = require_ffn(decoder), rope_parameters(decoder.encoding)
    return {
        "hidden_size": decoder.width,
        "num_hidden_layers": decoder.layers,
        "num_attention_heads": decoder.attention.heads,
        "intermediate_size": ffn.width or 4 * decoder.width,
        "max_position_embeddings": decoder.encoding.max_length,
        "vocab_size": decoder.embed.vocab,
        "hidden_act": hf_activation(ffn.activation),
        "layer_norm_eps": decoder.norm.epsilon,
        "use_parallel_residual": decoder.sublayers == "parallel",
        "rope_parameters": rope | {"partial_rotary_factor": decoder.encoding.fraction},
        "attention_bias": decoder.attention.bias,
        "hidden_dropout": decoder.dropout,
        "attention_dropout": decoder.attention.dropout,
        "tie_word_embeddings": _decoder.is_tied(model, head, False),
        **({"classifier_dropout": model.head.dropout} if head == "token" else {}),
    }


def rows(model: ModelConfig, head: str) -> list[Row]:
    decoder = require_stack(model, "decoder")
    sizes, has_bias = attention_sizes(decoder.attention, decoder.width), decoder.attention.bias
    hf_layer, param_layer = "gpt_neox.layers.{layer}", "decoder/blocks"
    hf_attention, attention = f"{hf_layer}.attention", f"{param_layer}/attention"
    axes = {"H": sizes["H"], "K": sizes["K"]}
    return [
        Row("gpt_neox.embed_in.weight", "target_embed/table"),
        *norm_rows(f"{hf_layer}.input_layernorm", f"{param_layer}/attention_norm"),
        *_decoder.fused_rows(f"{hf_attention}.query_key_value", attention, sizes, has_bias),
        *linear_rows(f"{hf_attention}.dense", f"{attention}/out", "D (H K) -> H K D", sizes=axes, has_bias=has_bias),
        *norm_rows(f"{hf_layer}.post_attention_layernorm", f"{param_layer}/ffn_norm"),
        *linear_rows(f"{hf_layer}.mlp.dense_h_to_4h", f"{param_layer}/ffn/in"),
        *linear_rows(f"{hf_layer}.mlp.dense_4h_to_h", f"{param_layer}/ffn/out"),
        *norm_rows("gpt_neox.final_layer_norm", "decoder/final_norm"),
        *_decoder.head_rows(model, head),
    ]


FAMILY = Family(
    model_types=("gpt_neox",),
    heads={
        "causal_lm": "GPTNeoXForCausalLM",
        "sequence": "GPTNeoXForSequenceClassification",
        "token": "GPTNeoXForTokenClassification",
        "qa": "GPTNeoXForQuestionAnswering",
        "model": "GPTNeoXModel",
    },
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    prefix="gpt_neox.",
    droppable_tensors=_decoder.DROPPABLE_TENSORS,
    ignored_keys={"is_decoder": "the library's model is a decoder whatever it says"},
    ignored_tensors=(r"gpt_neox\.layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)",),
    renamed_tensors=((r"^(gpt_neox\.)?embed_out\.", "lm_head."),),
    tied_tensors=("lm_head.weight", "gpt_neox.embed_in.weight"),
)
