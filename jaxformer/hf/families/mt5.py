"""mT5 (Xue et al. 2021): T5 v1.1 under other names, with a head of its own or a tied one.

A tied head reads scaled hidden states in files of transformers 4, as in T5, and unscaled ones since.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.hf.families import t5
from jaxformer.hf.table import Settings


def read_config(settings: Settings, head: str) -> ModelConfig:
    model = t5.read_config(settings, head)
    is_scaled = model.head.tied and settings("transformers_version", "5").startswith("4.")
    return dataclasses.replace(model, head=dataclasses.replace(model.head, scale=is_scaled))


def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
    settings = t5.write_config(model, head)
    del settings["scale_decoder_outputs"]  # which is T5's
    return settings


FAMILY = dataclasses.replace(
    t5.FAMILY,
    model_types=("mt5",),
    heads=t5.head_classes("MT5"),
    read_config=read_config,
    write_config=write_config,
)
