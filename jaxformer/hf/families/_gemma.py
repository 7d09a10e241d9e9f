"""Shared by Gemma 2 (2024) and Gemma 3 (2025): norms on both sides of a sub-layer, windows in some layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxformer.config import EncodingConfig, ModelConfig, NormConfig
from jaxformer.errors import ConfigError
from jaxformer.hf.families import _llama
from jaxformer.hf.table import Family, Row, Settings, norm_rows, require_stack

KINDS = ("full_attention", "sliding_attention")
PICTURES = ("image_token_id", "mm_tokens_per_image", "text_config", "vision_config")


@dataclass(frozen=True)
class Generation:
    """Differences of the two generations.

    Attributes:
      model_type, class_prefix: the value in config.json, and the start of its class names.
      classes: head -> class name where it does not follow from `class_prefix`; None: there is no such head.
      full_every: each layer with this number from 1 sees all keys, if config.json has no `layer_types`.
      pattern_key: an older key for that number; "": there is none.
      has_query_key_norm: queries and keys are normalised.
      has_local_base: layers with a window have a RoPE base of their own.
      caps: default caps of scores and logits.
      positions: default of `max_position_embeddings`.
    """

    model_type: str
    class_prefix: str
    classes: Mapping[str, str | None]
    full_every: int
    pattern_key: str
    has_query_key_norm: bool
    has_local_base: bool
    caps: tuple[float | None, float | None]
    positions: int


def windowed_layers(settings: Settings, layers: int, generation: Generation) -> tuple[int, ...]:
    """Numbers from 0 of the layers with a window.

    Raises:
      ConfigError: `layer_types` has another kind, or not one kind a layer.
    """
    every = generation.full_every
    if generation.pattern_key:
        every = settings.size(generation.pattern_key, every)
    kinds = settings.layer_kinds(layers, KINDS)
    if kinds is None:
        kinds = [KINDS[(number + 1) % every != 0] for number in range(layers)]
    return tuple(number for number, kind in enumerate(kinds) if kind == "sliding_attention")


def _encodings(settings: Settings, positions: int) -> tuple[EncodingConfig, float]:
    """The rotary encoding of layers that see all keys, and the base of those with a window (Gemma 3)."""
    values = settings("rope_parameters", None) or {}
    if not isinstance(values, Mapping) or not all(isinstance(part or {}, Mapping) for part in values.values()):
        raise ConfigError(f"{settings.path}: got rope_parameters {values!r:.80}, expected two objects; fix the file")
    full, local = (dict(values.get(kind) or {}) for kind in KINDS)
    scaling = settings("rope_scaling", None)  # of files of transformers 4
    full = {"rope_theta": settings("rope_theta", 1000000.0), **(full if scaling is None else dict(scaling)), **full}
    windowed = Settings(local, settings.path)
    windowed.expect("rope_type", "default")
    base = windowed("rope_theta", settings("rope_local_base_freq", 10000.0))
    beside = {"rope_scaling": None, "original_max_position_embeddings": None}  # the library reads the one inside alone
    inner = settings.with_values({**settings.values, "rope_parameters": full, **beside})
    settings.unread_keys |= {f"rope_parameters.{kind}" for kind in values if kind not in KINDS}
    settings.unread_keys |= {f"rope_parameters.{KINDS[1]}.{name}" for name in local if name not in windowed.read_keys}
    return _llama.rope_encoding(inner, positions, 1000000.0), base


def family(generation: Generation) -> Family:
    """The family of one generation."""
    base = _llama.family(
        _llama.Variant(
            model_type=generation.model_type,
            prefix_tokens=("<bos>",),
            class_prefix=generation.class_prefix,
            answering_prefix="",
            has_query_key_norm=generation.has_query_key_norm,
            has_offset_norm=True,
            tied=True,
            kv_heads=4,
            head_width=256,
            positions=generation.positions,
            activation="gelu_pytorch_tanh",
        )
    )

    def read_config(settings: Settings, head: str) -> ModelConfig:
        own = ("layer_types", "rope_parameters", "rope_scaling", "hidden_act")
        own = own if generation.has_local_base else ("layer_types", "hidden_act")
        values = {name: value for name, value in settings.values.items() if name not in own}
        inner = settings.with_values({**values, "hidden_act": settings("hidden_activation", "gelu_pytorch_tanh")})
        model = base.read_config(inner, head)
        decoder = require_stack(model, "decoder")
        windowed = windowed_layers(settings, decoder.layers, generation)
        window = settings.raw("sliding_window", 4096)
        if window is None and windowed:
            raise ConfigError(
                f"{settings.path}: got sliding_window null with layers of sliding_attention, expected a width; set it, "
                "or write full_attention in layer_types"
            )
        if window is not None:
            window = settings.size("sliding_window", 4096)
            window = window // 2 + 1 if decoder.causal is False else window
        if decoder.causal is False and not generation.has_local_base:
            settings.expect("use_bidirectional_attention", None, False)
        window = window if windowed else None
        encoding = decoder.encoding
        if generation.has_local_base:
            encoding, local_base = _encodings(settings, encoding.max_length)
            encoding = dataclasses.replace(encoding, window_base=None if window is None else local_base)
        norm = decoder.norm
        scores, logits = generation.caps
        if not generation.has_local_base:
            scores = _positive(settings, "attn_logit_softcapping", scores)
        attention = dataclasses.replace(
            decoder.attention,
            window=window,
            window_layers=() if window is None or len(windowed) == decoder.layers else windowed,
            scale_width=_positive(settings, "query_pre_attn_scalar", 256.0),
            soft_cap=scores,
            norm=NormConfig("rms", epsilon=norm.epsilon, offset=1.0) if generation.has_query_key_norm else None,
        )
        decoder = dataclasses.replace(
            decoder, attention=attention, encoding=encoding, norm=dataclasses.replace(norm, order="sandwich")
        )
        cap = _positive(settings, "final_logit_softcapping", logits)
        top = dataclasses.replace(model.head, soft_cap=cap) if head == "causal_lm" else model.head
        return dataclasses.replace(model, decoder=decoder, head=top)

    def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
        decoder = require_stack(model, "decoder")
        attention, encoding = decoder.attention, decoder.encoding
        head_width = attention.head_width or decoder.width // attention.heads
        settings = base.write_config(model, head)
        settings["hidden_activation"] = settings.pop("hidden_act")
        windowed = decoder.windowed_layers
        settings |= {
            "layer_types": [KINDS[number in windowed] for number in range(decoder.layers)],
            "sliding_window": attention.window,
            "query_pre_attn_scalar": attention.scale_width or head_width,
            **({} if generation.has_local_base else {"attn_logit_softcapping": attention.soft_cap}),
            "final_logit_softcapping": model.head.soft_cap,
        }
        if decoder.causal is False and attention.window is not None:
            settings["sliding_window"] = 2 * (attention.window - 1)
        if generation.has_local_base:
            local = encoding.base if encoding.window_base is None else encoding.window_base
            settings["rope_parameters"] = {
                "full_attention": settings["rope_parameters"],
                "sliding_attention": {"rope_theta": local, "rope_type": "default"},
            }
        return settings

    def rows(model: ModelConfig, head: str) -> list[Row]:
        hf_layer, param_layer = "model.layers.{layer}", "decoder/blocks"
        moved = f"{hf_layer}.post_attention_layernorm.weight"  # LLaMA's name of the norm before the feed-forward layer
        names = {
            "post_attention_layernorm": "attention_post_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "ffn_post_norm",
        }
        norms = [norm_rows(f"{hf_layer}.{name}", f"{param_layer}/{path}", False)[0] for name, path in names.items()]
        return [row for row in base.rows(model, head) if row.hf_name != moved] + norms

    heads = {head: generation.classes.get(head, name) for head, name in base.heads.items()}
    return dataclasses.replace(
        base,
        heads={head: name for head, name in heads.items() if name is not None},
        read_config=read_config,
        write_config=write_config,
        rows=rows,
        ignored_keys={
            "max_window_layers": "of use_sliding_window, which is refused",
            **({"attn_logit_softcapping": "the library does not apply it"} if generation.has_local_base else {}),
            "_sliding_window_pattern": "the number that `layer_types` was made from",
            **dict.fromkeys(PICTURES, "of models that also read pictures"),
        },
    )


def _positive(settings: Settings, name: str, default: float | None) -> float | None:
    """A number above 0, or None where the file says null; an absent key means the default."""
    value = settings.raw(name, default)
    if value is None:
        return None
    value = settings(name, 1.0)
    if not value > 0:
        raise ConfigError(f"{settings.path}: got {name} {value!r}, expected a number above 0, or null; fix the file")
    return value
