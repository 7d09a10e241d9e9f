"""OLMo 2 (OLMo et al. 2024): LLaMA with norms behind the sub-layers, and over the queries and keys of all heads."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxformer.config import ModelConfig, NormConfig
from jaxformer.errors import ConfigError
from jaxformer.hf.families import _llama
from jaxformer.hf.table import Row, Settings, norm_rows, require_stack

BASE = _llama.family(_llama.Variant("olmo2", "Olmo2", has_query_key_norm=True, epsilon=1e-5))

NORMS = {"post_attention_layernorm": "attention_norm", "post_feedforward_layernorm": "ffn_norm"}
"""Module of a layer -> the norm behind a sub-layer."""


def read_config(settings: Settings, head: str) -> ModelConfig:
    model = BASE.read_config(settings, head)
    decoder = require_stack(model, "decoder")
    norm = dataclasses.replace(decoder.norm, order="branch")
    attention = dataclasses.replace(decoder.attention, norm_over="heads")
    return dataclasses.replace(model, decoder=dataclasses.replace(decoder, norm=norm, attention=attention))


def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
    return BASE.write_config(model, head)


def rows(model: ModelConfig, head: str) -> list[Row]:
    layer = "model.layers.{layer}"
    moved = [f"{layer}.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")]
    kept = [row for row in BASE.rows(model, head) if row.hf_name not in moved]
    return kept + [row for name, path in NORMS.items() for row in norm_rows(f"{layer}.{name}", f"decoder/blocks/{path}", False)]


FAMILY = dataclasses.replace(
    BASE,
    heads={head: name for head, name in BASE.heads.items() if head != "token"},
    read_config=read_config,
    write_config=write_config,
    rows=rows,
)
