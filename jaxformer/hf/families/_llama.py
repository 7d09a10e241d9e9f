"""LLaMA and its variants: pre-norm decoder with RMS norm, RoPE, gated feed-forward and grouped queries."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxformer.config import (
    AttentionConfig,
    EmbedConfig,
    EncodingConfig,
    FeedForwardConfig,
    ModelConfig,
    MoEConfig,
    NormConfig,
    RopeScalingConfig,
    StackConfig,
)
from jaxformer.errors import ConfigError
from jaxformer.hf.families import _decoder
from jaxformer.hf.table import (
    CallConvention,
    Family,
    Row,
    Settings,
    attention_rows,
    hf_activation,
    linear_rows,
    norm_rows,
    require_ffn,
    require_stack,
)


@dataclass(frozen=True)
class ExpertLayout:
    """Names and defaults of a mixture of experts.

    Attributes:
      block: module that holds router and experts.
      parts: modules of an expert's gate, up and down projection.
      count, width: config.json keys of the number of experts and of their inner width.
      experts, top_k: default values.
      normalise: default of `norm_topk_prob`; None: there is no such key, and weights are always normalised.
    """

    block: str
    parts: tuple[str, str, str]
    count: str
    width: str
    experts: int
    top_k: int
    normalise: bool | None = None


@dataclass(frozen=True)
class Variant:
    """Differences of a variant from LLaMA, and its default values.

    Attributes:
      model_type: the value in config.json.
      class_prefix: start of its class names.
      bias: biases of attention. "setting": `attention_bias` decides for all four projections; "inputs": query, key and
        value have them; "none": no projection has.
      has_mlp_bias: config.json has the key `mlp_bias`.
      has_window: config.json has the key `sliding_window`, whose default is `window`, for all layers.
      layer_windows: rule for the layers with a window. None: they all have it, or none; "types": those that
        `layer_types` names, by default all; "late": the same, by default those from `max_window_layers` on, and none
        without `use_sliding_window`.
      norm_order: `NormConfig.order`.
      norms: modules of a layer that hold the norms of attention and feed-forward layer.
      has_query_key_norm: queries and keys are normalised.
      norm_over: `AttentionConfig.norm_over` of these norms.
      has_token_head: it has a class for token classification.
      answering_prefix: start of the body's tensor names in its class for answers; "": it has no such class.
      has_offset_norm: RMS scales are stored as differences from 1, and embeddings multiplied by sqrt(width) (Gemma).
      mixture: the mixture of experts in place of feed-forward layers.
      tied, kv_heads, head_width, theta, positions, activation, epsilon: default values. `kv_heads` None: as many as
        query heads.
      prefix_tokens: special tokens before a text if no tokenizer.json says it.
    """

    model_type: str
    class_prefix: str
    bias: str = "setting"
    has_mlp_bias: bool = False
    window: int | None = None
    has_window: bool = False
    layer_windows: Literal["types", "late"] | None = None
    norm_order: Literal["pre", "res_post"] = "pre"
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    has_query_key_norm: bool = False
    norm_over: Literal["head", "heads"] = "head"
    has_token_head: bool = True
    answering_prefix: str = "transformer."
    has_offset_norm: bool = False
    mixture: ExpertLayout | None = None
    tied: bool = False
    kv_heads: int | None = None
    head_width: int | None = None
    theta: float = 10000.0
    positions: int = 2048
    activation: str = "silu"
    epsilon: float = 1e-6
    prefix_tokens: tuple[str, ...] = ()


def ignored_keys(variant: Variant) -> dict[str, str]:
    """config.json keys that change nothing, with the reason."""
    keys = {"pretraining_tp": "number of parts of a matrix product, whose sum is the same"}
    if not variant.has_window and variant.layer_windows is None:
        names = ("sliding_window", "max_window_layers")
        keys |= dict.fromkeys(names, "of use_sliding_window, which is refused")
    if variant.mixture and variant.mixture.width != "intermediate_size":
        keys["intermediate_size"] = "of layers without experts, which are refused"
    return keys


def rope_encoding(settings: Settings, positions: int, theta: float, fraction: float | None = None) -> EncodingConfig:
    """The rotary encoding of `rope_parameters`, or of `rope_theta` and `rope_scaling` in files of transformers 4.

    Args:
      fraction: default of `partial_rotary_factor`; None: the family rotates whole heads, and other values are refused.
    """
    values = settings("rope_scaling", None) or settings("rope_parameters", None) or {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"{settings.path}: got rope_parameters {values!r}, expected an object; fix the file")
    rope = Settings(values, settings.path)
    kind = rope("rope_type", "default", "type")
    original = settings("original_max_position_embeddings", None)
    if original is not None and kind in ("llama3", "yarn", "longrope"):  # the library takes it before the one inside
        rope = Settings({**values, "original_max_position_embeddings": original}, settings.path)
    if fraction is None:
        for holder in (settings, rope):
            holder.expect("partial_rotary_factor", 1.0)  # the library reads it, but does not apply it in these families
    else:
        fraction = rope("partial_rotary_factor", settings("partial_rotary_factor", fraction))
    base = rope("rope_theta", settings("rope_theta", theta))
    encoding = EncodingConfig("rope", max_length=positions, base=base, scaling=_scaling(rope, kind, positions))
    encoding = replace(encoding, fraction=1.0 if fraction is None else fraction)
    settings.unread_keys |= {f"rope_parameters.{name}" for name in values if name not in rope.read_keys}
    return encoding


def _scaling(rope: Settings, kind: str, positions: int) -> RopeScalingConfig | None:
    """The frequency scaling of a `rope_type`; None: no scaling."""
    if kind == "default":
        return None
    if kind not in ("linear", "dynamic", "llama3", "yarn", "longrope"):
        expected = "default, linear, dynamic, llama3, yarn or longrope"
        raise ConfigError(f"{rope.path}: got rope_type {kind!r}, expected {expected}; this variant is not supported")
    if kind == "linear":
        return RopeScalingConfig("linear", factor=rope("factor", 1.0))
    original = positions if kind == "dynamic" else rope.size("original_max_position_embeddings", positions)
    scaling = RopeScalingConfig(kind, factor=rope("factor", positions / original), original=original)
    if kind == "longrope":
        short, long = (_divisors(rope, name) for name in ("short_factor", "long_factor"))
        magnitude = None if rope("attention_factor", None) is None else rope("attention_factor", 1.0)
        ratio = max(scaling.factor, 1.0)  # the library's magnitude is 1 below it
        scaling = replace(scaling, factor=ratio, short=short, long=long, magnitude=magnitude)
    if kind == "llama3":
        scaling = replace(scaling, low=rope("low_freq_factor", 1.0), high=rope("high_freq_factor", 4.0))
    if kind == "yarn":
        scaling = replace(
            scaling,
            slow=rope("beta_slow", 1.0) or 1.0,
            fast=rope("beta_fast", 32.0) or 32.0,
            whole=rope("truncate", True),
            magnitude=_attention_factor(rope),
        )
    return scaling


def _divisors(rope: Settings, name: str) -> tuple[float, ...]:
    """LongRoPE's list of divisors.

    Raises:
      ConfigError: it is no list of numbers above 0.
    """
    values = rope(name)
    if not isinstance(values, list) or not all(
        isinstance(x, int | float) and not isinstance(x, bool) and x > 0 for x in values
    ):
        raise ConfigError(f"{rope.path}: got {name} {values!r:.80}, expected a list of numbers above 0; fix the file")
    return tuple(map(float, values))


def _attention_factor(rope: Settings) -> float | None:
    """YaRN's factor on cosines and sines, also from its two-part form (DeepSeek's mscale); None: computed."""
    if rope("attention_factor", None) is not None:
        return rope("attention_factor", 1.0)
    parts = rope("mscale", None), rope("mscale_all_dim", None)
    if None in parts or not all(parts):
        return None
    scale = lambda m: 0.1 * m * math.log(max(rope("factor", 1.0), 1.0)) + 1.0  # noqa: E731
    return scale(parts[0]) / scale(parts[1])


def rope_parameters(encoding: EncodingConfig) -> dict[str, Any]:
    """`rope_parameters` of an encoding."""
    rope: dict[str, Any] = {"rope_theta": encoding.base, "rope_type": "default"}
    if encoding.fraction != 1.0:
        rope["partial_rotary_factor"] = encoding.fraction  # which `rope_encoding` refuses
    scaling = encoding.scaling
    if scaling is None:
        return rope
    rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("llama3", "yarn", "longrope"):
        rope["original_max_position_embeddings"] = scaling.original
    if scaling.kind == "llama3":
        rope |= {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
    if scaling.kind == "yarn":
        rope |= {"beta_slow": scaling.slow, "beta_fast": scaling.fast, "truncate": scaling.whole}
    if scaling.kind == "longrope":
        rope |= {"short_factor": list(scaling.short), "long_factor": list(scaling.long)}
    if scaling.kind in ("yarn", "longrope") and scaling.magnitude is not None:
        rope["attention_factor"] = scaling.magnitude
    return rope


def pad_token(settings: Settings, vocab: int) -> int | None:
    """The padding token, whose embedding gets no gradient. Negative ids count from the end, as in the library."""
    pad = settings("pad_token_id", None)
    if pad is None:
        return None
    if isinstance(pad, bool) or not isinstance(pad, int) or not -vocab <= pad < vocab:
        raise ConfigError(f"{settings.path}: got pad_token_id {pad!r}, expected a token of {vocab}; fix the file")
    return pad % vocab


KINDS = ("full_attention", "sliding_attention")
"""Layers without and with a window in `layer_types`."""


def _windows(settings: Settings, variant: Variant) -> tuple[int | None, tuple[int, ...]]:
    """Width of the window (None: no layer has one), and the numbers of the layers that have it; (): all.

    Raises:
      ConfigError: `layer_types` are not one of two kinds for each layer, or windows have no width.
    """
    layers, default = settings.size("num_hidden_layers", 32), 4096 if variant.window is None else variant.window
    kinds, first = settings.layer_kinds(layers, KINDS if variant.layer_windows else KINDS[:1]), 0
    has_key = can_have = variant.has_window or variant.layer_windows is not None
    if variant.layer_windows == "late":
        can_have, first = bool(settings("use_sliding_window", False)), max(settings("max_window_layers", 28), 0)
    else:
        settings.expect("use_sliding_window", False)
    # null means no window, an absent key the default
    has_width = has_key and settings.raw("sliding_window", default) is not None
    window = settings.size("sliding_window", default) if has_width and can_have else None
    if variant.layer_windows is None:
        return window, ()
    windowed = tuple(range(first, layers) if kinds is None else (n for n in range(layers) if kinds[n] == KINDS[1]))
    if windowed and kinds is not None and window is None:
        raise ConfigError(
            f"{settings.path}: got layers of sliding_attention without a sliding_window, expected a width"
            f"{' and use_sliding_window' * (variant.layer_windows == 'late')}; set it, or write full_attention"
        )
    if window is None or not windowed:
        return None, ()
    return window, () if len(windowed) == layers else windowed


def _window_settings(decoder: StackConfig, variant: Variant) -> dict[str, Any]:
    """The keys that `_windows` reads."""
    window = decoder.attention.window
    if variant.layer_windows is None:
        return {"sliding_window": window} if variant.has_window else {}
    kinds = [KINDS[number in decoder.windowed_layers] for number in range(decoder.layers)]
    late = {"use_sliding_window": window is not None} if variant.layer_windows == "late" else {}
    return {"sliding_window": window, "layer_types": kinds, **late}


def key_heads(settings: Settings, default: int | None, heads: int) -> int:
    """The number of key heads: where the file says null, and without a default, that of the query heads."""
    given = settings.raw("num_key_value_heads", default)
    return heads if given is None else settings.size("num_key_value_heads", given)


def _moe_config(settings: Settings, mixture: ExpertLayout) -> MoEConfig:
    """The mixture of experts of a config.json. The load-balance loss of `nn/moe.py` takes its weight."""
    settings.expect("router_jitter_noise", 0.0)
    settings.expect("decoder_sparse_step", 1)
    settings.expect("mlp_only_layers", [])
    settings("output_router_logits", False)  # read at a call: `forward.add_router_outputs`
    return MoEConfig(
        experts=settings.size(mixture.count, mixture.experts, "num_local_experts"),
        top_k=settings.size("num_experts_per_tok", mixture.top_k),
        normalise=True if mixture.normalise is None else settings("norm_topk_prob", mixture.normalise),
        balance_loss=settings("router_aux_loss_coef", 0.001),
        z_loss=0.0,
    )


def _moe_settings(moe: MoEConfig, mixture: ExpertLayout) -> dict[str, Any]:
    settings = {
        mixture.count: moe.experts,
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": moe.balance_loss,
    }
    return settings if mixture.normalise is None else settings | {"norm_topk_prob": moe.normalise}


def family(variant: Variant) -> Family:
    """The family of a variant of LLaMA."""

    def read_config(settings: Settings, head: str) -> ModelConfig:
        heads, width = settings.size("num_attention_heads", 32), settings.size("hidden_size", 4096)
        positions = settings.size("max_position_embeddings", variant.positions)
        epsilon = settings("rms_norm_eps", variant.epsilon)
        vocab = settings.size("vocab_size", 32000)
        bias = settings("attention_bias", False) if variant.bias == "setting" else variant.bias == "inputs"
        window, windowed = _windows(settings, variant)
        bidirectional = settings("use_bidirectional_attention", None)
        decoder = StackConfig(
            layers=settings.size("num_hidden_layers", 32),
            width=width,
            embed=EmbedConfig(vocab=vocab, scale=variant.has_offset_norm, pad=pad_token(settings, vocab)),
            encoding=rope_encoding(settings, positions, variant.theta),
            attention=AttentionConfig(
                heads=heads,
                kv_heads=key_heads(settings, variant.kv_heads, heads),
                head_width=settings.size("head_dim", variant.head_width or max(width // heads, 1)),
                bias=bias,
                output_bias=False if variant.bias == "inputs" else None,
                norm=NormConfig("rms", epsilon=epsilon) if variant.has_query_key_norm else None,
                norm_over=variant.norm_over,
                window=window,
                window_layers=windowed,
                dropout=settings("attention_dropout", 0.0),
            ),
            ffn=FeedForwardConfig(
                width=settings.size(variant.mixture.width if variant.mixture else "intermediate_size", 11008),
                activation=settings.activation("hidden_act", variant.activation),
                gated=True,
                bias=variant.has_mlp_bias and settings("mlp_bias", False),
            ),
            moe=None if variant.mixture is None else _moe_config(settings, variant.mixture),
            norm=NormConfig("rms", variant.norm_order, epsilon=epsilon, offset=1.0 if variant.has_offset_norm else 0.0),
            causal=False if bidirectional else None,
        )
        return ModelConfig(decoder=decoder, head=_decoder.scored_head_config(settings, head, variant.tied))

    def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
        decoder = require_stack(model, "decoder")
        attention, ffn = decoder.attention, require_ffn(decoder)
        head_width = attention.head_width or decoder.width // attention.heads
        settings = {
            "hidden_size": decoder.width,
            "num_hidden_layers": decoder.layers,
            "num_attention_heads": attention.heads,
            "num_key_value_heads": attention.kv_heads or attention.heads,
            "head_dim": head_width,
            variant.mixture.width if variant.mixture else "intermediate_size": ffn.width or 4 * decoder.width,
            "max_position_embeddings": decoder.encoding.max_length,
            "vocab_size": decoder.embed.vocab,
            "rms_norm_eps": decoder.norm.epsilon,
            "rope_parameters": rope_parameters(decoder.encoding),
            "attention_dropout": attention.dropout,
            "tie_word_embeddings": (model.head.tied and head == "causal_lm") or (variant.tied and head != "causal_lm"),
            "hidden_act": hf_activation(ffn.activation),
        }
        if decoder.causal is False:
            settings["use_bidirectional_attention"] = True
        if decoder.embed.pad is not None:
            settings["pad_token_id"] = decoder.embed.pad
        settings |= _decoder.scored_head_settings(model, head)
        if variant.bias == "setting":
            settings["attention_bias"] = attention.bias
        if variant.has_mlp_bias:
            settings["mlp_bias"] = ffn.bias
        settings |= _window_settings(decoder, variant)
        if variant.mixture:
            if decoder.moe is None:
                raise ConfigError("export: got a decoder without experts, expected them for this family")
            settings |= _moe_settings(decoder.moe, variant.mixture)
        return settings

    def rows(model: ModelConfig, head: str) -> list[Row]:
        decoder = require_stack(model, "decoder")
        ffn = require_ffn(decoder)
        hf_layer, param_layer = "model.layers.{layer}", "decoder/blocks"
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        body = [
            Row("model.embed_tokens.weight", "target_embed/table"),
            *norm_rows(f"{hf_layer}.{variant.norms[0]}", f"{param_layer}/attention_norm", has_bias=False),
            *attention_rows(
                f"{hf_layer}.self_attn", f"{param_layer}/attention", decoder.attention, decoder.width, names
            ),
            *norm_rows(f"{hf_layer}.{variant.norms[1]}", f"{param_layer}/ffn_norm", has_bias=False),
            *norm_rows("model.norm", "decoder/final_norm", has_bias=False),
        ]
        mixture, where, parts = variant.mixture, f"{hf_layer}.mlp", ("gate_proj", "up_proj", "down_proj")
        if mixture:
            body.append(Row(f"{hf_layer}.{mixture.block}.gate.weight", f"{param_layer}/ffn/router", "E D -> D E"))
            where, parts = f"{hf_layer}.{mixture.block}.experts.{{expert}}", mixture.parts
        for name, part in zip(parts, ("gate", "in", "out"), strict=True):
            body += linear_rows(f"{where}.{name}", f"{param_layer}/ffn/{part}", has_bias=ffn.bias)
        if variant.has_query_key_norm:
            body += norm_rows(f"{hf_layer}.self_attn.q_norm", f"{param_layer}/attention/query_norm", has_bias=False)
            body += norm_rows(f"{hf_layer}.self_attn.k_norm", f"{param_layer}/attention/key_norm", has_bias=False)
        return body + _decoder.scored_head_rows(model, head)

    return Family(
        model_types=(variant.model_type,),
        heads={
            "causal_lm": f"{variant.class_prefix}ForCausalLM",
            "sequence": f"{variant.class_prefix}ForSequenceClassification",
            **({"token": f"{variant.class_prefix}ForTokenClassification"} if variant.has_token_head else {}),
            **({"qa": f"{variant.class_prefix}ForQuestionAnswering"} if variant.answering_prefix else {}),
            "model": f"{variant.class_prefix}Model",
        },
        read_config=read_config,
        write_config=write_config,
        rows=rows,
        prefix="model.",
        head_prefixes={"qa": variant.answering_prefix} if variant.answering_prefix not in ("", "model.") else {},
        droppable_tensors=(r"lm_head\..*", r"score\..*", r"qa_outputs\..*"),
        ignored_keys=ignored_keys(variant),
        ignored_tensors=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq"),
        tied_tensors=("lm_head.weight", "model.embed_tokens.weight"),
        convention=CallConvention(prefix_tokens=variant.prefix_tokens),
    )
