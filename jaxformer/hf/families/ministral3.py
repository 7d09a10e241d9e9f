"""Ministral 3 (Mistral AI 2025): Mistral with YaRN, and scores that grow with the position of their query."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxformer.config import AttentionConfig, ModelConfig, TemperatureConfig
from jaxformer.errors import ConfigError
from jaxformer.hf.families._llama import Variant, family
from jaxformer.hf.table import Settings, require_stack

RATE, LENGTH = "llama_4_scaling_beta", "original_max_position_embeddings"
"""Keys of `rope_parameters` for the temperature."""

ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    LENGTH: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    RATE: 0.1,
}
"""`rope_parameters` of a file without them."""

_MISTRAL = family(
    Variant(
        model_type="ministral3",
        class_prefix="Ministral3",
        answering_prefix="model.",
        bias="none",
        has_window=True,
        kv_heads=8,
        head_width=128,
        positions=262144,
        epsilon=1e-5,
        prefix_tokens=("<s>",),
    )
)


def read_config(settings: Settings, head: str) -> ModelConfig:
    stored = settings("rope_scaling", None) or settings("rope_parameters", None) or ROPE
    if not isinstance(stored, Mapping):
        raise ConfigError(f"{settings.path}: got rope_parameters {stored!r:.80}, expected an object; fix the file")
    rope = Settings(stored, settings.path)
    rate, length = rope(RATE, None), rope.size(LENGTH, None)
    if isinstance(rate, bool) or not isinstance(rate, int | float) or rate < 0 or length is None:
        raise ConfigError(
            f"{settings.path}: got rope_parameters with {RATE} {rate!r} and {LENGTH} {length!r}, expected a number "
            "that is not negative, and a length; fix the file"
        )
    plain = {name: value for name, value in stored.items() if name not in (RATE, "max_position_embeddings")}
    values = {**settings.values, "rope_parameters": plain, "rope_scaling": None}
    model = _MISTRAL.read_config(settings.with_values(values), head)
    settings.unread_keys.discard(f"rope_parameters.{LENGTH}")  # read here where the scaling does not read it
    return _with_temperature(model, TemperatureConfig(float(rate), length) if rate else None)


def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
    decoder = require_stack(model, "decoder")
    temperature, scaling = decoder.attention.temperature, decoder.encoding.scaling
    written = _MISTRAL.write_config(_with_temperature(model, None), head)
    rope = written["rope_parameters"]
    length = rope.get(LENGTH, decoder.encoding.max_length)
    if temperature is not None:
        length = temperature.length
    if scaling is not None and rope.get(LENGTH, length) != length:
        raise ConfigError(
            f"export: got attention.temperature.length {length} and encoding.scaling.original {rope[LENGTH]}, expected "
            "the same for this family"
        )
    rate = 0.0 if temperature is None else temperature.rate
    return written | {"rope_parameters": {**rope, RATE: rate, LENGTH: length}}


def _with_temperature(model: ModelConfig, temperature: TemperatureConfig | None) -> ModelConfig:
    decoder = require_stack(model, "decoder")
    attention: AttentionConfig = dataclasses.replace(decoder.attention, temperature=temperature)
    return dataclasses.replace(model, decoder=dataclasses.replace(decoder, attention=attention))


FAMILY = dataclasses.replace(_MISTRAL, read_config=read_config, write_config=write_config)
