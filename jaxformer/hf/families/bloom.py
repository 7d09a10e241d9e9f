"""BLOOM (Le Scao et al. 2022): pre-norm decoder with ALiBi and a norm over the embeddings."""

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
    attention_sizes,
    linear_rows,
    norm_rows,
    require_ffn,
    require_stack,
    token_classifier_dropout,
)


def read_config(settings: Settings, head: str) -> ModelConfig:
    width = settings.size("n_embed", None) or settings.size("hidden_size", 64)  # an older key, which wins
    dropout = settings("hidden_dropout", 0.0)
    parts, are_summed = settings("pretraining_tp", 1), settings("slow_but_exact", False)
    if are_summed and parts > 1:
        raise ConfigError(
            f"{settings.path}: got slow_but_exact True with pretraining_tp {parts}, expected one of them off: the "
            "library then leaves out the biases of `dense` and `dense_4h_to_h`; this variant is not supported"
        )
    decoder = StackConfig(
        layers=settings.size("n_layer", 2),
        width=width,
        embed=EmbedConfig(vocab=settings.size("vocab_size", 250880), norm=True),
        encoding=EncodingConfig("alibi"),
        attention=AttentionConfig(heads=settings.size("n_head", 8), dropout=settings("attention_dropout", 0.0)),
        ffn=FeedForwardConfig(width=4 * width, activation="gelu_tanh"),
        norm=NormConfig(epsilon=settings("layer_norm_epsilon", 1e-5)),
        dropout=dropout,
        residual_after_norm=settings("apply_residual_connection_post_layernorm", False),
    )
    top = _decoder.head_config(settings, head, tied=True, dropout=token_classifier_dropout(settings))
    return ModelConfig(decoder=decoder, head=top)


def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
    decoder = require_stack(model, "decoder")
    if require_ffn(decoder).width not in (None, 4 * decoder.width):
        raise ConfigError("export: got another feed-forward width, expected 4 times the model width for this family")
    return {
        "hidden_size": decoder.width,
        "n_layer": decoder.layers,
        "n_head": decoder.attention.heads,
        "vocab_size": decoder.embed.vocab,
        "layer_norm_epsilon": decoder.norm.epsilon,
        "apply_residual_connection_post_layernorm": decoder.residual_after_norm,
        "hidden_dropout": decoder.dropout,
        "attention_dropout": decoder.attention.dropout,
        "tie_word_embeddings": _decoder.is_tied(model, head, True),
        **({"classifier_dropout": model.head.dropout} if head == "token" else {}),
    }


def rows(model: ModelConfig, head: str) -> list[Row]:
    decoder = require_stack(model, "decoder")
    sizes = attention_sizes(decoder.attention, decoder.width)
    hf_layer, param_layer = "transformer.h.{layer}", "decoder/blocks"
    hf_attention, attention = f"{hf_layer}.self_attention", f"{param_layer}/attention"
    axes = {"H": sizes["H"], "K": sizes["K"]}
    return [
        Row("transformer.word_embeddings.weight", "target_embed/table"),
        *norm_rows("transformer.word_embeddings_layernorm", "decoder/embed_norm"),
        *norm_rows(f"{hf_layer}.input_layernorm", f"{param_layer}/attention_norm"),
        *_decoder.fused_rows(f"{hf_attention}.query_key_value", attention, sizes),
        *linear_rows(f"{hf_attention}.dense", f"{attention}/out", "D (H K) -> H K D", sizes=axes),
        *norm_rows(f"{hf_layer}.post_attention_layernorm", f"{param_layer}/ffn_norm"),
        *linear_rows(f"{hf_layer}.mlp.dense_h_to_4h", f"{param_layer}/ffn/in"),
        *linear_rows(f"{hf_layer}.mlp.dense_4h_to_h", f"{param_layer}/ffn/out"),
        *norm_rows("transformer.ln_f", "decoder/final_norm"),
        *_decoder.head_rows(model, head),
    ]


FAMILY = Family(
    model_types=("bloom",),
    heads={
        "causal_lm": "BloomForCausalLM",
        "sequence": "BloomForSequenceClassification",
        "token": "BloomForTokenClassification",
        "qa": "BloomForQuestionAnswering",
        "model": "BloomModel",
    },
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    prefix="transformer.",
    droppable_tensors=_decoder.DROPPABLE_TENSORS,
    ignored_keys={
        "pretraining_tp": "number of parts of a matrix product, whose sum is the same without slow_but_exact",
        **dict.fromkeys(
            (
                "masked_softmax_fusion",
                "bias_dropout_fusion",
                "skip_bias_add",
                "skip_bias_add_qkv",
                "attention_softmax_in_fp32",
                "offset_alibi",
                "seq_length",
            ),
            "of the training program; the library does not read it",
        ),
    },
    tied_tensors=("lm_head.weight", "transformer.word_embeddings.weight"),
    convention=CallConvention(positions="mask", takes_position_ids=False, spans_read_padding=True),
)
