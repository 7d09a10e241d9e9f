"""Gemma (2024): LLaMA with scaled embeddings, RMS scales stored as differences from 1, and a tanh GELU gate."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.hf.families._llama import Variant, family
from jaxformer.hf.table import Settings

LLAMA = family(
    Variant(
        model_type="gemma",
        prefix_tokens=("<bos>",),
        class_prefix="Gemma",
        answering_prefix="",
        has_offset_norm=True,
        tied=True,
        kv_heads=16,
        head_width=256,
        positions=8192,
        activation="gelu_pytorch_tanh",
    )
)


def read_config(settings: Settings, head: str) -> ModelConfig:
    if settings("hidden_act", "gelu_pytorch_tanh") == "gelu":  # published files mean the tanh form, and so the library
        settings = settings.with_values({**settings.values, "hidden_act": "gelu_pytorch_tanh"})
    return LLAMA.read_config(settings, head)


def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
    written = LLAMA.write_config(model, head)
    return written if written["hidden_act"] != "gelu" else written | {"hidden_act": "gelu_python"}


FAMILY = dataclasses.replace(LLAMA, read_config=read_config, write_config=write_config)
