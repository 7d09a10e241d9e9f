"""Compares two model configs by what they compute, so that an export is written only as a family that is equal."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxformer.config import DeltaConfig, EmbedConfig, EncodingConfig, ModelConfig, MoEConfig, StackConfig

ENCODING_FIELDS = {
    "none": (),
    "learned": ("max_length", "offset"),
    "sinusoidal": ("base", "concatenated", "offset"),
    "rope": ("base", "window_base", "fraction", "interleaved", "rotate_values", "scaling"),
    "t5": ("buckets", "max_distance", "bidirectional"),
    "alibi": (),
}
"""`encoding.kind` -> the fields that it reads; a kind that is not listed reads all."""

IGNORED_FIELDS = frozenset({
    "dropout", "dropout_first", "kernel", "block", "unroll", "remat", "remat_names", "microbatches", "deviation",
    "init_scale", "dtype", "momentum", "average_padding", "input_dropout", "pad", "capacity", "balance_loss", "z_loss",
    "correction_rate", "chunk",
})  # fmt: skip
"""Fields that do not change what a model computes when it is applied."""


def config_differences(model: ModelConfig, other: ModelConfig) -> list[str]:
    """One line for each field in which the configs differ in what they compute: its path and both values."""
    return list(_differences(normalised(model), normalised(other), "model"))


def normalised(model: ModelConfig) -> ModelConfig:
    """The config with defaults spelled out and unread fields reset: models that compute the same compare equal."""
    stacks = {}
    for name in ("encoder", "decoder"):
        stack = getattr(model, name)
        if stack is not None:
            stacks[name] = _normalised_stack(stack, causal=name == "decoder")
    return dataclasses.replace(model, **stacks)


def _normalised_stack(stack: StackConfig, causal: bool) -> StackConfig:
    attention, encoding, norm, width = stack.attention, stack.encoding, stack.norm, stack.width
    causal = causal if stack.causal is None else stack.causal
    if encoding.bidirectional is None:
        encoding = dataclasses.replace(encoding, bidirectional=not causal)
    if encoding.kind in ENCODING_FIELDS:
        fields = {name: getattr(encoding, name) for name in ENCODING_FIELDS[encoding.kind]}
        encoding = dataclasses.replace(EncodingConfig(encoding.kind), **fields)
    if norm.kind == "rms":
        norm = dataclasses.replace(norm, bias=True)
    windowed = stack.windowed_layers
    if len(windowed) in (0, stack.layers):
        attention = dataclasses.replace(attention, window=attention.window if windowed else None)
    differ = 0 < len(windowed) < stack.layers
    attention = dataclasses.replace(
        attention,
        window_every=1,
        window_layers=windowed if differ else (),
        kv_heads=attention.kv_heads or attention.heads,
        head_width=attention.head_width or width // attention.heads,
        scale_width=attention.scale_width or attention.head_width or width // attention.heads,
        key_bias=attention.bias if attention.key_bias is None else attention.key_bias,
        output_bias=attention.bias if attention.output_bias is None else attention.output_bias,
        latent=attention.latent and dataclasses.replace(attention.latent, value_width=attention.latent.values_width),
    )
    return dataclasses.replace(
        stack,
        causal=causal,
        encoding=encoding,
        attention=attention,
        moe=_normalised_moe(stack),
        delta=_normalised_delta(stack),
        embed=_normalised_embed(stack.embed, width),
        ffn=stack.ffn and dataclasses.replace(stack.ffn, width=stack.ffn.width or 4 * width),
        norm=dataclasses.replace(norm, final=norm.order != "post" if norm.final is None else norm.final),
    )


def _normalised_moe(stack: StackConfig) -> MoEConfig | None:
    """The mixture with the width of its dense layers, and groups only where they exclude experts."""
    moe = stack.moe
    if moe is None or stack.ffn is None:
        return moe
    if (moe.top_groups or moe.groups) >= moe.groups:
        moe = dataclasses.replace(moe, groups=1, top_groups=None, group_score="max")
    width, inner = moe.dense_width or stack.ffn.width or 4 * stack.width, stack.ffn.width or 4 * stack.width
    dense = stack.dense_numbers
    return dataclasses.replace(
        moe,
        dense_layers=0,
        dense_at=dense,
        dense_width=width if dense else None,
        shared=min(moe.shared, 1),
        shared_width=moe.shared_width or moe.shared * inner or None,
    )


def _normalised_delta(stack: StackConfig) -> DeltaConfig | None:
    """The gated delta rule with the numbers of the layers that have attention."""
    delta = stack.delta
    if delta is None:
        return None
    attention = tuple(number for number in range(stack.layers) if number not in stack.delta_layers)
    return dataclasses.replace(delta, value_heads=delta.heads, attention_every=4, attention_layers=attention)


def _normalised_embed(embed: EmbedConfig, width: int) -> EmbedConfig:
    """The embedding with its width, and the projection of the sum only where there is one."""
    projection = "table" if embed.sum_width is None else embed.projection
    return dataclasses.replace(embed, width=embed.width or width, projection=projection)


def _differences(a: Any, b: Any, path: str) -> Iterator[str]:
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        for f in dataclasses.fields(a):
            if f.name not in IGNORED_FIELDS:
                yield from _differences(getattr(a, f.name), getattr(b, f.name), f"{path}.{f.name}")
    elif a != b:
        yield f"{path} {a!r} (expected {b!r})"
