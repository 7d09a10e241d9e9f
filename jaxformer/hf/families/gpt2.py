"""GPT-2 (Radford et al. 2019): pre-norm decoder, learned positions, fused query-key-value projection."""

from __future__ import annotations

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
from jaxformer.hf.table import (
    NO_HEAD,
    SPAN_HEAD,
    Family,
    Row,
    Settings,
    attention_sizes,
    classifier_head,
    hf_activation,
    linear_rows,
    norm_rows,
    require_stack,
    token_classifier_dropout,
)


def read_config(settings: Settings, head: str) -> ModelConfig:
    settings.expect("add_cross_attention", False)
    width = settings.size("n_embd", 768)
    decoder = StackConfig(
        layers=settings.size("n_layer", 12),
        width=width,
        embed=EmbedConfig(vocab=settings.size("vocab_size", 50257), dropout=settings("embd_pdrop", 0.1)),
        encoding=EncodingConfig("learned", max_length=settings.size("n_positions", 1024)),
        attention=AttentionConfig(
            heads=settings.size("n_head", 12),
            scale=settings("scale_attn_weights", True),
            scale_by_layer=settings("scale_attn_by_inverse_layer_idx", False),
            dropout=settings("attn_pdrop", 0.1),
        ),
        ffn=FeedForwardConfig(
            width=settings.size("n_inner", None) or 4 * width,
            activation=settings.activation("activation_function", "gelu_new"),
        ),
        norm=NormConfig(epsilon=settings("layer_norm_epsilon", 1e-5)),
        dropout=settings("resid_pdrop", 0.1),
    )
    heads = {
        "causal_lm": lambda: HeadConfig(tied=settings("tie_word_embeddings", True)),
        "sequence": lambda: classifier_head(settings, "classes", pooling="last", decision_bias=False),
        "token": lambda: classifier_head(settings, "slots", dropout=token_classifier_dropout(settings)),
        "qa": lambda: SPAN_HEAD,
        "model": lambda: NO_HEAD,
    }
    return ModelConfig(decoder=decoder, head=heads[head]())


def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
    decoder = require_stack(model, "decoder")
    return {
        "n_embd": decoder.width,
        "n_layer": decoder.layers,
        "n_head": decoder.attention.heads,
        "n_inner": None if decoder.ffn is None else decoder.ffn.width,
        "n_positions": decoder.encoding.max_length,
        "vocab_size": decoder.embed.vocab,
        "activation_function": "gelu" if decoder.ffn is None else hf_activation(decoder.ffn.activation),
        "layer_norm_epsilon": decoder.norm.epsilon,
        "scale_attn_weights": decoder.attention.scale,
        "scale_attn_by_inverse_layer_idx": decoder.attention.scale_by_layer,
        "embd_pdrop": decoder.embed.dropout,
        "attn_pdrop": decoder.attention.dropout,
        "resid_pdrop": decoder.dropout,
        "tie_word_embeddings": model.head.tied or head != "causal_lm",
        **({"classifier_dropout": model.head.dropout} if head == "token" else {}),
    }


def rows(model: ModelConfig, head: str) -> list[Row]:
    decoder = require_stack(model, "decoder")
    sizes, hf_layer, param_layer = (
        attention_sizes(decoder.attention, decoder.width),
        "transformer.h.{layer}",
        "decoder/blocks",
    )
    axes = {"H": sizes["H"], "K": sizes["K"]}
    fused = lambda leaf: tuple(f"{param_layer}/attention/{part}/{leaf}" for part in ("query", "key", "value"))  # noqa: E731
    body = [
        Row("transformer.wte.weight", "target_embed/table"),
        Row("transformer.wpe.weight", "decoder/position/table"),
        *norm_rows(f"{hf_layer}.ln_1", f"{param_layer}/attention_norm"),
        Row(f"{hf_layer}.attn.c_attn.weight", fused("kernel"), "D (n H K) -> n D H K", axes),
        Row(f"{hf_layer}.attn.c_attn.bias", fused("bias"), "(n H K) -> n H K", axes),
        *linear_rows(f"{hf_layer}.attn.c_proj", f"{param_layer}/attention/out", "(H K) D -> H K D", sizes=axes),
        *norm_rows(f"{hf_layer}.ln_2", f"{param_layer}/ffn_norm"),
        *linear_rows(f"{hf_layer}.mlp.c_fc", f"{param_layer}/ffn/in", ""),
        *linear_rows(f"{hf_layer}.mlp.c_proj", f"{param_layer}/ffn/out", ""),
        *norm_rows("transformer.ln_f", "decoder/final_norm"),
        *(_cross_rows(hf_layer, f"{param_layer}/cross", axes) if model.is_seq2seq else []),
    ]
    by_head = {
        "causal_lm": [] if model.head.tied else [Row("lm_head.weight", "head/kernel", "V D -> D V")],
        "sequence": [Row("score.weight", "head/decision/kernel", "C D -> D C")],
        "token": linear_rows("classifier", "head/decision"),
        "qa": linear_rows("qa_outputs", "head/decision"),
        "model": [],
    }
    return body + by_head[head]


def _cross_rows(hf_layer: str, param_path: str, axes: dict[str, int]) -> list[Row]:
    """Rows of cross-attention, in a decoder that has an encoder beside it: keys and values are one projection."""
    module = f"{hf_layer}.crossattention"
    fused = lambda leaf: tuple(f"{param_path}/{part}/{leaf}" for part in ("key", "value"))  # noqa: E731
    return [
        *norm_rows(f"{hf_layer}.ln_cross_attn", f"{param_path}_norm"),
        *linear_rows(f"{module}.q_attn", f"{param_path}/query", "D (H K) -> D H K", "(H K) -> H K", axes),
        Row(f"{module}.c_attn.weight", fused("kernel"), "I (n H K) -> n I H K", axes),
        Row(f"{module}.c_attn.bias", fused("bias"), "(n H K) -> n H K", axes),
        *linear_rows(f"{module}.c_proj", f"{param_path}/out", "(H K) O -> H K O", sizes=axes),
    ]


FAMILY = Family(
    model_types=("gpt2",),
    heads={
        "causal_lm": "GPT2LMHeadModel",
        "sequence": "GPT2ForSequenceClassification",
        "token": "GPT2ForTokenClassification",
        "qa": "GPT2ForQuestionAnswering",
        "model": "GPT2Model",
    },
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    prefix="transformer.",
    droppable_tensors=(r"lm_head\..*", r"score\..*", r"classifier\..*", r"qa_outputs\..*"),
    ignored_keys={
        "reorder_and_upcast_attn": "scores are in float32 here in any precision",
        **dict.fromkeys(
            (
                "summary_type",
                "summary_use_proj",
                "summary_activation",
                "summary_proj_to_labels",
                "summary_first_dropout",
                "summary_last_dropout",
            ),
            "of a head that is not read (GPT2DoubleHeadsModel)",
        ),
    },
    ignored_tensors=(r"transformer\.h\.\d+\.(cross)?att(entio)?n\.(masked_)?bias",),
    tied_tensors=("lm_head.weight", "transformer.wte.weight"),
)
