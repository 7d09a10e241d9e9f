"""LongT5 (Guo et al. 2022): T5 v1.1 with an encoder of local attention, and of transient global attention.

`local` attention is a window of `local_radius` slots on both sides. In `transient-global` attention all queries also
see a summary of each block of `global_block_size` slots.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.errors import ConfigError
from jaxformer.hf.families import t5
from jaxformer.hf.table import Row, Settings, norm_rows, require_stack

ATTENTION_TYPES = ("local", "transient-global")


def read_config(settings: Settings, head: str) -> ModelConfig:
    settings.expect("encoder_attention_type", *ATTENTION_TYPES)
    model = t5.read_config(settings, head)
    encoder = require_stack(model, "encoder")
    radius, block = settings.size("local_radius", 127), settings.size("global_block_size", 16)
    has_summaries = settings("encoder_attention_type", "local") == "transient-global"
    own = dataclasses.replace(encoder.attention, window=radius + 1, summary=block if has_summaries else None)
    return dataclasses.replace(model, encoder=dataclasses.replace(encoder, attention=own))


def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
    own = require_stack(model, "encoder").attention
    if own.window is None:
        raise ConfigError("export: got an encoder without attention.window, expected one for LongT5; export it as t5")
    return {
        **t5.write_config(model, head),
        "encoder_attention_type": ATTENTION_TYPES[own.summary is not None],
        "local_radius": own.window - 1,
        **({} if own.summary is None else {"global_block_size": own.summary}),
    }


def rows(model: ModelConfig, head: str) -> list[Row]:
    has_summaries = require_stack(model, "encoder").attention.summary is not None
    module = "TransientGlobalSelfAttention" if has_summaries else "LocalSelfAttention"
    found = []
    for row in t5.rows(model, head):
        is_encoder = row.hf_name.startswith("encoder.")
        name = row.hf_name.replace(".SelfAttention.", f".{module}.") if is_encoder else row.hf_name
        found.append(dataclasses.replace(row, hf_name=name))
    if has_summaries:
        table = f"encoder.block.0.layer.0.{module}.global_relative_attention_bias.weight"
        norm = f"encoder.block.{{layer}}.layer.0.{module}.global_input_layer_norm"
        found.append(Row(table, "encoder/shared/summary_table"))
        found += norm_rows(norm, "encoder/blocks/attention/summary_norm", has_bias=False)
    return found


FAMILY = dataclasses.replace(
    t5.FAMILY,
    model_types=("longt5",),
    heads={"seq2seq": "LongT5ForConditionalGeneration", "model": "LongT5Model", "encoder": "LongT5EncoderModel"},
    read_config=read_config,
    write_config=write_config,
    rows=rows,
)
