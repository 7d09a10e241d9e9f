"""DeBERTa v2 and v3 (He et al. 2021, 2023): buckets of distances, shared projections, a convolution."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxformer.config import ConfigError, ConvConfig, ModelConfig, NormConfig
from jaxformer.hf.families import _deberta
from jaxformer.hf.table import (
    Convention,
    Family,
    Row,
    Settings,
    attention_sizes,
    linear,
    norm,
    projections,
    side,
    their_activation,
)

MAX_KERNEL = 255  # the neighbours of every slot are copied side by side

PROJECTIONS = (
    "attention.self.query_proj",
    "attention.self.key_proj",
    "attention.self.value_proj",
    "attention.output.dense",
)


def read(settings: Settings, head: str) -> ModelConfig:
    words = [word.strip() for word in settings("norm_rel_ebd", "none").lower().split("|")]
    epsilon, buckets = settings("layer_norm_eps", 1e-7), settings("position_buckets", -1)
    stack = _deberta.encoder(
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
            f"{settings.where}: got conv_kernel_size {kernel}, expected at most {MAX_KERNEL}; fix the file"
        )
    if kernel > 0:
        conv = ConvConfig(kernel=kernel, groups=groups, activation=activation)
        stack = dataclasses.replace(stack, conv=conv)
    return _deberta.model(settings, head, stack)


def write(model: ModelConfig, head: str) -> dict[str, Any]:
    stack = side(model, "encoder")
    settings, encoding = _deberta.write(model, ("p2c", "c2p")), stack.encoding
    if encoding.kind == "deberta":
        settings["position_buckets"] = -1 if encoding.buckets is None else encoding.buckets
        settings["share_att_key"] = encoding.share_projections
        settings["norm_rel_ebd"] = "none" if encoding.norm is None else "layer_norm"
    if stack.conv is not None:
        settings["conv_kernel_size"] = stack.conv.kernel
        settings["conv_groups"] = stack.conv.groups
        settings["conv_act"] = their_activation(stack.conv.activation)
    return settings


def rows(model: ModelConfig, head: str) -> list[Row]:
    stack = side(model, "encoder")
    theirs, ours, encoding = "deberta.encoder.layer.{layer}", "encoder/blocks/attention", stack.encoding
    sizes = attention_sizes(stack.attention, stack.width)
    taken = {"H": sizes["H"], "K": sizes["K"]}
    found = projections(theirs, ours, stack.attention, stack.width, PROJECTIONS)
    if encoding.kind == "deberta" and not encoding.share_projections:
        parts = {"key": encoding.content_to_position, "query": encoding.position_to_content}
        for part in (name for name, there in parts.items() if there):
            name = f"{theirs}.attention.self.pos_{part}_proj"
            found += linear(name, f"{ours}/position/{part}", "(H K) D -> D H K", "(H K) -> H K", **taken)
    if encoding.kind == "deberta" and encoding.norm is not None:
        found += norm("deberta.encoder.LayerNorm", "encoder/shared/norm")
    if stack.conv is not None:
        found += linear("deberta.encoder.conv.conv", "encoder/conv", "O I S -> S I O")
        found += norm("deberta.encoder.conv.LayerNorm", "encoder/conv/norm")
    return _deberta.body(model) + found + _deberta.top(model, head)


FAMILY = Family(
    types=("deberta-v2",),
    heads=_deberta.heads("DebertaV2"),
    read=read,
    write=write,
    rows=rows,
    prefix="deberta.",
    spare=_deberta.SPARE,
    ignored=_deberta.IGNORED,
    twins=_deberta.TWINS,
    renamed=_deberta.RENAMED,
    output=("cls.predictions.decoder.weight", "deberta.embeddings.word_embeddings.weight"),
    convention=Convention(before=("[CLS]",), between=("[SEP]",), after=("[SEP]",)),
)
