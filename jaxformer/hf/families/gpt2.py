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
    HIDDEN,
    SPANS,
    Family,
    Row,
    Settings,
    attention_sizes,
    classifier,
    linear,
    norm,
    side,
    their_activation,
    token_dropout,
)


def read(settings: Settings, head: str) -> ModelConfig:
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
        "sequence": lambda: classifier(settings, "classes", pooling="last", decision_bias=False),
        "token": lambda: classifier(settings, "slots", dropout=token_dropout(settings)),
        "qa": lambda: SPANS,
        "model": lambda: HIDDEN,
    }
    return ModelConfig(decoder=decoder, head=heads[head]())


def write(model: ModelConfig, head: str) -> dict[str, Any]:
    decoder = side(model, "decoder")
    return {
        "n_embd": decoder.width,
        "n_layer": decoder.layers,
        "n_head": decoder.attention.heads,
        "n_inner": None if decoder.ffn is None else decoder.ffn.width,
        "n_positions": decoder.encoding.max_length,
        "vocab_size": decoder.embed.vocab,
        "activation_function": "gelu" if decoder.ffn is None else their_activation(decoder.ffn.activation),
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
    decoder = side(model, "decoder")
    sizes, theirs, ours = attention_sizes(decoder.attention, decoder.width), "transformer.h.{layer}", "decoder/blocks"
    heads = {"H": sizes["H"], "K": sizes["K"]}
    three = lambda leaf: tuple(f"{ours}/attention/{part}/{leaf}" for part in ("query", "key", "value"))  # noqa: E731
    body = [
        Row("transformer.wte.weight", "target_embed/table"),
        Row("transformer.wpe.weight", "decoder/position/table"),
        *norm(f"{theirs}.ln_1", f"{ours}/attention_norm"),
        Row(f"{theirs}.attn.c_attn.weight", three("kernel"), "D (n H K) -> n D H K", heads),
        Row(f"{theirs}.attn.c_attn.bias", three("bias"), "(n H K) -> n H K", heads),
        *linear(f"{theirs}.attn.c_proj", f"{ours}/attention/out", "(H K) D -> H K D", **heads),
        *norm(f"{theirs}.ln_2", f"{ours}/ffn_norm"),
        *linear(f"{theirs}.mlp.c_fc", f"{ours}/ffn/in", ""),
        *linear(f"{theirs}.mlp.c_proj", f"{ours}/ffn/out", ""),
        *norm("transformer.ln_f", "decoder/final_norm"),
    ]
    tops = {
        "causal_lm": [] if model.head.tied else [Row("lm_head.weight", "head/kernel", "V D -> D V")],
        "sequence": [Row("score.weight", "head/decision/kernel", "C D -> D C")],
        "token": linear("classifier", "head/decision"),
        "qa": linear("qa_outputs", "head/decision"),
        "model": [],
    }
    return body + tops[head]


FAMILY = Family(
    types=("gpt2",),
    heads={
        "causal_lm": "GPT2LMHeadModel",
        "sequence": "GPT2ForSequenceClassification",
        "token": "GPT2ForTokenClassification",
        "qa": "GPT2ForQuestionAnswering",
        "model": "GPT2Model",
    },
    read=read,
    write=write,
    rows=rows,
    prefix="transformer.",
    spare=(r"lm_head\..*", r"score\..*", r"classifier\..*", r"qa_outputs\..*"),
    free={
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
    ignored=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
    output=("lm_head.weight", "transformer.wte.weight"),
)
