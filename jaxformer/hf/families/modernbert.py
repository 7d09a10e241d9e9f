"""ModernBERT (Warner et al. 2024): a pre-norm encoder with gated feed-forward layers and windows in most layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
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
from jaxformer.errors import ConfigError
from jaxformer.hf.table import (
    NO_HEAD,
    SPAN_HEAD,
    CallConvention,
    Family,
    Row,
    Settings,
    attention_sizes,
    choice_head,
    classifier_head,
    hf_activation,
    linear_rows,
    norm_rows,
    require_ffn,
    require_stack,
)

KINDS = ("full_attention", "sliding_attention")


def windowed_layers(settings: Settings, layers: int) -> tuple[int, ...]:
    """Numbers from 0 of the layers with a window.

    Raises:
      ConfigError: `layer_types` has another kind, or not one kind a layer.
    """
    every = settings.size("global_attn_every_n_layers", 3)  # of files of transformers 4
    kinds = settings.layer_kinds(layers, KINDS)
    if kinds is None:
        kinds = [KINDS[number % every != 0] for number in range(layers)]
    return tuple(number for number, kind in enumerate(kinds) if kind == "sliding_attention")


def rope_bases(settings: Settings) -> tuple[float, float]:
    """RoPE bases of the layers that see all keys, and of those with a window.

    Raises:
      ConfigError: `rope_parameters` does not hold an object for each kind of layer, or asks for scaling.
    """
    settings.expect("rope_scaling", None)
    values = settings("rope_parameters", None) or {}
    if not isinstance(values, Mapping) or not all(isinstance(part or {}, Mapping) for part in values.values()):
        raise ConfigError(f"{settings.path}: got rope_parameters {values!r:.80}, expected two objects; fix the file")
    settings.unread_keys |= {f"rope_parameters.{kind}" for kind in values if kind not in KINDS}
    old = (settings("global_rope_theta", 160000.0), settings("local_rope_theta", 10000.0))  # of transformers 4
    bases = []
    for kind, default in zip(KINDS, old, strict=True):
        part = Settings(dict(values.get(kind) or {}), settings.path)
        part.expect("rope_type", "default")
        bases.append(part("rope_theta", default))
        settings.unread_keys |= {f"rope_parameters.{kind}.{name}" for name in part.values if name not in part.read_keys}
    return bases[0], bases[1]


def read_config(settings: Settings, head: str) -> ModelConfig:
    settings.expect("attention_dropout", 0.0)  # also the rate of the attention's output, without the other sub-layer's
    settings.expect("sparse_prediction", False)
    layers, epsilon = settings.size("num_hidden_layers", 22), settings("norm_eps", 1e-5)
    windowed, (full_base, local_base) = windowed_layers(settings, layers), rope_bases(settings)
    window = settings.size("local_attention", 128) // 2 + 1
    norm_bias, pooling = settings("norm_bias", False), settings("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise ConfigError(f"{settings.path}: got classifier_pooling {pooling!r:.80}, expected cls or mean")
    stack = StackConfig(
        layers=layers,
        width=settings.size("hidden_size", 768),
        embed=EmbedConfig(
            vocab=settings.size("vocab_size", 50368),
            norm=True,
            dropout=settings("embedding_dropout", 0.0),
            pad=settings.raw("pad_token_id", 50283),
        ),
        encoding=EncodingConfig(
            "rope",
            max_length=settings.size("max_position_embeddings", 8192),
            base=full_base,
            window_base=local_base if windowed else None,
        ),
        attention=AttentionConfig(
            heads=settings.size("num_attention_heads", 12),
            bias=settings("attention_bias", False),
            window=window if windowed else None,
            window_layers=() if len(windowed) == layers else windowed,
        ),
        ffn=FeedForwardConfig(
            width=settings.size("intermediate_size", 1152),
            activation=settings.activation("hidden_activation", "gelu"),
            gated=True,
            bias=settings("mlp_bias", False),
            dropout=settings("mlp_dropout", 0.0),
        ),
        norm=NormConfig(epsilon=epsilon, bias=norm_bias),
        first_norm=False,
    )
    transform: dict[str, Any] = {
        "transform": True,
        "transform_bias": settings("classifier_bias", False),
        "transform_norm_bias": norm_bias,
        "activation": settings.activation("classifier_activation", "gelu"),
        "epsilon": epsilon,
    }
    dropout, tied = settings("classifier_dropout", 0.0), settings("tie_word_embeddings", True)
    pooled = "first" if pooling == "cls" else "mean"
    heads = {
        "masked_lm": lambda: HeadConfig(tied=tied, bias=settings("decoder_bias", True), **transform),
        "sequence": lambda: classifier_head(settings, "classes", pooling=pooled, dropout=dropout, **transform),
        "multiple_choice": lambda: choice_head(pooling=pooled, dropout=dropout, **transform),
        "token": lambda: classifier_head(settings, "slots", dropout=dropout, **transform),
        "qa": lambda: dataclasses.replace(SPAN_HEAD, dropout=dropout, **transform),
        "model": lambda: NO_HEAD,
    }
    return ModelConfig(encoder=stack, head=heads[head]())


def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
    stack, top = require_stack(model, "encoder"), model.head
    ffn, own, encoding = require_ffn(stack), stack.attention, stack.encoding
    local = encoding.base if encoding.window_base is None else encoding.window_base
    settings = {
        "hidden_size": stack.width,
        "num_hidden_layers": stack.layers,
        "num_attention_heads": own.heads,
        "intermediate_size": ffn.width or 4 * stack.width,
        "hidden_activation": hf_activation(ffn.activation),
        "max_position_embeddings": encoding.max_length,
        "norm_eps": stack.norm.epsilon,
        "norm_bias": stack.norm.bias,
        "attention_bias": own.bias,
        "mlp_bias": ffn.bias,
        "mlp_dropout": ffn.dropout,
        "embedding_dropout": stack.embed.dropout,
        "vocab_size": stack.embed.vocab,
        "pad_token_id": stack.embed.pad,
        "layer_types": [KINDS[number in stack.windowed_layers] for number in range(stack.layers)],
        "rope_parameters": {
            kind: {"rope_theta": base, "rope_type": "default"}
            for kind, base in zip(KINDS, (encoding.base, local), strict=True)
        },
        "tie_word_embeddings": top.tied or head != "masked_lm",
    }
    if own.window is not None:
        settings["local_attention"] = 2 * (own.window - 1) or 1
    if head != "model":
        settings |= {
            "classifier_bias": top.transform_bias,
            "classifier_activation": hf_activation(top.activation),
            "classifier_dropout": top.dropout,
        }
    if head in ("sequence", "multiple_choice"):
        settings["classifier_pooling"] = "mean" if top.pooling == "mean" else "cls"
    if head == "masked_lm":
        settings["decoder_bias"] = top.bias
    return settings


def rows(model: ModelConfig, head: str) -> list[Row]:
    stack, top = require_stack(model, "encoder"), model.head
    has_bias = stack.norm.bias
    body = [
        Row("model.embeddings.tok_embeddings.weight", "source_embed/table"),
        *norm_rows("model.embeddings.norm", "encoder/embed_norm", has_bias),
        *norm_rows("model.final_norm", "encoder/final_norm", has_bias),
    ]
    if stack.layers > 1:
        body += [*_layer_rows(stack, "encoder/dense_blocks", 0), *_layer_rows(stack, "encoder/blocks", 1)]
    else:
        body += _layer_rows(stack, "encoder/blocks", 0)
    if head == "model":
        return body
    body += linear_rows("head.dense", "head/transform", has_bias=top.transform_bias)
    body += norm_rows("head.norm", "head/transform_norm", top.transform_norm_bias)
    if head != "masked_lm":
        return body + linear_rows("classifier", "head/decision")
    untied = [] if top.tied else [Row("decoder.weight", "head/kernel", "V D -> D V")]
    return body + untied + ([Row("decoder.bias", "head/bias")] if top.bias else [])


def _layer_rows(stack: StackConfig, path: str, first: int) -> list[Row]:
    """Rows of the first layer, whose attention has no norm, or of the others. Wi holds the gate before its factor."""
    ffn, own, layer = require_ffn(stack), stack.attention, "model.layers.{layer}"
    axes = attention_sizes(own, stack.width)
    heads = {"n": 3, "H": axes["H"], "K": axes["K"]}
    inputs = [f"{path}/attention/{name}" for name in ("query", "key", "value")]
    halves = [f"{path}/ffn/{name}" for name in ("gate", "in")]
    found = [
        Row(f"{layer}.attn.Wqkv.weight", tuple(f"{name}/kernel" for name in inputs), "(n H K) D -> n D H K", heads),
        Row(f"{layer}.attn.Wo.weight", f"{path}/attention/out/kernel", "D (H K) -> H K D", {"H": axes["H"]}),
        Row(f"{layer}.mlp.Wi.weight", tuple(f"{name}/kernel" for name in halves), "(n F) D -> n D F", {"n": 2}),
        *linear_rows(f"{layer}.mlp.Wo", f"{path}/ffn/out", has_bias=ffn.bias),
        *norm_rows(f"{layer}.mlp_norm", f"{path}/ffn_norm", stack.norm.bias),
        *(norm_rows(f"{layer}.attn_norm", f"{path}/attention_norm", stack.norm.bias) if first else []),
    ]
    if own.bias:
        found.append(
            Row(f"{layer}.attn.Wqkv.bias", tuple(f"{name}/bias" for name in inputs), "(n H K) -> n H K", heads)
        )
        found.append(Row(f"{layer}.attn.Wo.bias", f"{path}/attention/out/bias"))
    if ffn.bias:
        found.append(Row(f"{layer}.mlp.Wi.bias", tuple(f"{name}/bias" for name in halves), "(n F) -> n F", {"n": 2}))
    return [dataclasses.replace(row, first_layer=first) for row in found]


FAMILY = Family(
    model_types=("modernbert",),
    heads={
        "masked_lm": "ModernBertForMaskedLM",
        "sequence": "ModernBertForSequenceClassification",
        "token": "ModernBertForTokenClassification",
        "qa": "ModernBertForQuestionAnswering",
        "multiple_choice": "ModernBertForMultipleChoice",
        "model": "ModernBertModel",
    },
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    prefix="model.",
    droppable_tensors=(r"head\..*", r"decoder\..*", r"classifier\..*"),
    ignored_keys={
        "initializer_cutoff_factor": "of the library's initialisation",
        "deterministic_flash_attn": "of a kernel that is not used here",
        "sparse_pred_ignore_index": "of sparse_prediction, which is refused",
        "reference_compile": "of the library's compilation",
    },
    tied_tensors=("decoder.weight", "model.embeddings.tok_embeddings.weight"),
    convention=CallConvention(
        prefix_tokens=("[CLS]",), separator_tokens=("[SEP]",), suffix_tokens=("[SEP]",), choices_begin_first=True
    ),
)
