"""DeBERTa v2 and v3 (He et al. 2021, 2023): buckets of distances, shared projections, a convolution."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxformer.config import ConvConfig, ModelConfig, NormConfig
from jaxformer.errors import ConfigError
from jaxformer.hf.families import _deberta
from jaxformer.hf.table import (
    CallConvention,
    Family,
    Row,
    Settings,
    attention_rows,
    attention_sizes,
    hf_activation,
    linear_rows,
    norm_rows,
    require_stack,
)

MAX_KERNEL = 255  # every slot's neighbours are copied side by side

PROJECTIONS = (
    "attention.self.query_proj",
    "attention.self.key_proj",
    "attention.self.value_proj",
    "attention.output.dense",
)


def read_config(settings: Settings, head: str) -> ModelConfig:
    words = [word.strip() for word in settings("norm_rel_ebd", "none").lower().split("|")]
    epsilon, buckets = settings("layer_norm_eps", 1e-7), settings("position_buckets", -1)
    stack = _deberta.encoder_config(
        settings,
        (1536, 24, 24, 6144),
        128100,
        key_bias=True,
        buckets=buckets if buckets > 0 else None,
        share_projections=settings("share_att_key", False),
        norm=NormConfig(order="post", epsilon=epsilon) if "layer_norm" in words else None,
    )
    kernel, groups = settings("conv_kernel_size", 0), settings.size("conv_groups", 1)
    activation = settings.activation("conv_act", "tanh")
    if kernel > MAX_KERNEL:
        raise ConfigError(
            f"{settings.path}: got conv_kernel_size {kernel}, expected at most {MAX_KERNEL}; fix the file"
        )
    if kernel > 0:
        conv = ConvConfig(kernel=kernel, groups=groups, activation=activation)
        stack = dataclasses.replace(stack, conv=conv)
    return _deberta.model_config(settings, head, stack)


def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
    stack = require_stack(model, "encoder")
    settings, encoding = _deberta.write_config(model, ("p2c", "c2p")), stack.encoding
    if encoding.kind == "deberta":
        settings["position_buckets"] = -1 if encoding.buckets is None else encoding.buckets
        settings["share_att_key"] = encoding.share_projections
        settings["norm_rel_ebd"] = "none" if encoding.norm is None else "layer_norm"
    if stack.conv is not None:
        settings["conv_kernel_size"] = stack.conv.kernel
        settings["conv_groups"] = stack.conv.groups
        settings["conv_act"] = hf_activation(stack.conv.activation)
    return settings


def rows(model: ModelConfig, head: str) -> list[Row]:
    stack = require_stack(model, "encoder")
    hf_layer, param_attention, encoding = "deberta.encoder.layer.{layer}", "encoder/blocks/attention", stack.encoding
    axes = attention_sizes(stack.attention, stack.width)
    sizes = {"H": axes["H"], "K": axes["K"]}
    attention = attention_rows(hf_layer, param_attention, stack.attention, stack.width, PROJECTIONS)
    if encoding.kind == "deberta" and not encoding.share_projections:
        parts = {"key": encoding.content_to_position, "query": encoding.position_to_content}
        for part in (name for name, is_used in parts.items() if is_used):
            name = f"{hf_layer}.attention.self.pos_{part}_proj"
            attention += linear_rows(
                name, f"{param_attention}/position/{part}", "(H K) D -> D H K", "(H K) -> H K", sizes=sizes
            )
    if encoding.kind == "deberta" and encoding.norm is not None:
        attention += norm_rows("deberta.encoder.LayerNorm", "encoder/shared/norm")
    if stack.conv is not None:
        attention += linear_rows("deberta.encoder.conv.conv", "encoder/conv", "O I S -> S I O")
        attention += norm_rows("deberta.encoder.conv.LayerNorm", "encoder/conv/norm")
    return _deberta.body_rows(model) + attention + _deberta.head_rows(model, head)


FAMILY = Family(
    model_types=("deberta-v2",),
    heads=_deberta.head_classes("DebertaV2") | {"multiple_choice": "DebertaV2ForMultipleChoice"},
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    prefix="deberta.",
    droppable_tensors=_deberta.DROPPABLE_TENSORS,
    ignored_tensors=_deberta.IGNORED_TENSORS,
    duplicate_tensors=_deberta.DUPLICATE_TENSORS,
    renamed_tensors=_deberta.RENAMED_TENSORS,
    tied_tensors=("cls.predictions.decoder.weight", "deberta.embeddings.word_embeddings.weight"),
    convention=CallConvention(
        labels_are_shares=True,
        prefix_tokens=("[CLS]",),
        separator_tokens=("[SEP]",),
        suffix_tokens=("[SEP]",),
    ),
)
