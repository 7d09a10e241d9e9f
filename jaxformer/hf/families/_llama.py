"""What LLaMA and its relatives share: pre-norm decoder, RMS norm, rotations, gated feed-forward, grouped queries."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxformer.config import (
    AttentionConfig,
    ConfigError,
    EmbedConfig,
    EncodingConfig,
    FeedForwardConfig,
    HeadConfig,
    ModelConfig,
    MoEConfig,
    NormConfig,
    RopeScalingConfig,
    StackConfig,
)
from jaxformer.hf.table import (
    HIDDEN,
    Convention,
    Family,
    Row,
    Settings,
    classifier,
    linear,
    norm,
    projections,
    side,
    their_activation,
    token_dropout,
)


@dataclass(frozen=True)
class Mixture:
    """Where a relative with experts keeps them.

    Attributes:
      block: what holds router and experts, in names of tensors.
      parts: gate, up and down projection of an expert, in names of tensors.
      count, width: settings of the number of experts and of their inner width.
      experts, top_k, normalise: defaults; `normalise` None: always, and there is no setting.
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
    """Where a relative differs from LLaMA, or what its config.json is silent about.

    Attributes:
      type, name: `model_type`, and what class names begin with.
      bias: "setting": `attention_bias` decides for all four projections; "inputs": query, key and value have biases;
        "none": nothing has.
      mlp_bias: there is a setting of that name.
      has_window: there is a setting `sliding_window`, whose default is `window`.
      head_norm: queries and keys are normalised.
      offset: RMS scales are stored as differences from 1, and embeddings multiplied by sqrt(width).
      mixture: the feed-forward layers are mixtures of experts.
      tied, kv_heads, head_width, theta, positions, activation, epsilon: defaults; `kv_heads` None: as many as heads.
      before: special tokens before a text, where no tokenizer.json says it.
    """

    type: str
    name: str
    bias: str = "setting"
    mlp_bias: bool = False
    window: int | None = None
    has_window: bool = False
    head_norm: bool = False
    offset: bool = False
    mixture: Mixture | None = None
    tied: bool = False
    kv_heads: int | None = None
    head_width: int | None = None
    theta: float = 10000.0
    positions: int = 2048
    activation: str = "silu"
    epsilon: float = 1e-6
    before: tuple[str, ...] = ()


def free(variant: Variant) -> dict[str, str]:
    """Keys that change nothing, with the reason."""
    found = {"pretraining_tp": "into how many parts products were split, which their sums do not show"}
    if not variant.has_window:
        names = ("sliding_window", "max_window_layers")
        found |= dict.fromkeys(names, "of use_sliding_window, which is refused")
    if variant.mixture and variant.mixture.width != "intermediate_size":
        found["intermediate_size"] = "of layers without experts, which are refused"
    return found


def rotation(settings: Settings, positions: int, theta: float) -> EncodingConfig:
    """The rotary encoding of `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    found = settings("rope_scaling", None) or settings("rope_parameters", None) or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"{settings.where}: got rope_parameters {found!r}, expected an object; fix the file")
    rope = Settings(found, settings.where)
    kind = rope("rope_type", "default", "type")
    for holder in (settings, rope):
        holder.expect("partial_rotary_factor", 1.0)  # of other families; the library reads and does not apply it here
    base = rope("rope_theta", settings("rope_theta", theta))
    encoding = EncodingConfig("rope", max_length=positions, base=base, scaling=_scaling(rope, kind, positions))
    settings.unread |= {f"rope_parameters.{name}" for name in found if name not in rope.asked}
    return encoding


def _scaling(rope: Settings, kind: str, positions: int) -> RopeScalingConfig | None:
    """How the frequencies of a `rope_type` are stretched."""
    if kind == "default":
        return None
    if kind not in ("linear", "dynamic", "llama3", "yarn"):
        expected = "default, linear, dynamic, llama3 or yarn"
        raise ConfigError(f"{rope.where}: got rope_type {kind!r}, expected {expected}; this variant is not supported")
    if kind == "linear":
        return RopeScalingConfig("linear", factor=rope("factor", 1.0))
    original = positions if kind == "dynamic" else rope.size("original_max_position_embeddings", positions)
    scaling = RopeScalingConfig(kind, factor=rope("factor", positions / original), original=original)
    if kind == "llama3":
        scaling = replace(scaling, low=rope("low_freq_factor", 1.0), high=rope("high_freq_factor", 4.0))
    if kind == "yarn":
        scaling = replace(
            scaling,
            slow=rope("beta_slow", 1.0) or 1.0,
            fast=rope("beta_fast", 32.0) or 32.0,
            whole=rope("truncate", True),
            magnitude=_magnitude(rope),
        )
    return scaling


def _magnitude(rope: Settings) -> float | None:
    """YaRN's factor on cosines and sines, where it is given, or its two-part form (DeepSeek's mscale)."""
    if rope("attention_factor", None) is not None:
        return rope("attention_factor", 1.0)
    parts = rope("mscale", None), rope("mscale_all_dim", None)
    if None in parts or not all(parts):
        return None
    scale = lambda m: 0.1 * m * math.log(max(rope("factor", 1.0), 1.0)) + 1.0  # noqa: E731
    return scale(parts[0]) / scale(parts[1])


def their_rotation(encoding: EncodingConfig) -> dict[str, Any]:
    """`rope_parameters` of an encoding."""
    rope: dict[str, Any] = {"rope_theta": encoding.base, "rope_type": "default"}
    if encoding.fraction != 1.0:
        rope["partial_rotary_factor"] = encoding.fraction  # which reading it again refuses
    scaling = encoding.scaling
    if scaling is None:
        return rope
    rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = scaling.original
    if scaling.kind == "llama3":
        rope |= {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
    if scaling.kind == "yarn":
        rope |= {"beta_slow": scaling.slow, "beta_fast": scaling.fast, "truncate": scaling.whole}
        if scaling.magnitude is not None:
            rope["attention_factor"] = scaling.magnitude
    return rope


def _pad(settings: Settings, vocab: int) -> int | None:
    """The row that gets no gradient; -1 is the last one, as in the other library."""
    pad = settings("pad_token_id", None)
    if pad is None:
        return None
    if isinstance(pad, bool) or not isinstance(pad, int) or not -vocab <= pad < vocab:
        raise ConfigError(f"{settings.where}: got pad_token_id {pad!r}, expected a token of {vocab}; fix the file")
    return pad % vocab


def _mixture(settings: Settings, mixture: Mixture) -> MoEConfig:
    """The experts that a config.json says. Its load-balance loss keeps its weight, in the form of `nn/moe.py`."""
    settings.expect("router_jitter_noise", 0.0)
    settings.expect("decoder_sparse_step", 1)
    settings.expect("mlp_only_layers", [])
    settings("output_router_logits", False)  # read at a call: `calling.router_outputs`
    return MoEConfig(
        experts=settings.size(mixture.count, mixture.experts, "num_local_experts"),
        top_k=settings.size("num_experts_per_tok", mixture.top_k),
        normalise=True if mixture.normalise is None else settings("norm_topk_prob", mixture.normalise),
        balance_loss=settings("router_aux_loss_coef", 0.001),
        z_loss=0.0,
    )


def _their_mixture(moe: MoEConfig, mixture: Mixture) -> dict[str, Any]:
    settings = {
        mixture.count: moe.experts,
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": moe.balance_loss,
    }
    return settings if mixture.normalise is None else settings | {"norm_topk_prob": moe.normalise}


def family(variant: Variant) -> Family:
    """The family of a relative."""

    def read(settings: Settings, head: str) -> ModelConfig:
        heads, width = settings.size("num_attention_heads", 32), settings.size("hidden_size", 4096)
        positions = settings.size("max_position_embeddings", variant.positions)
        epsilon = settings("rms_norm_eps", variant.epsilon)
        vocab = settings.size("vocab_size", 32000)
        bias = settings("attention_bias", False) if variant.bias == "setting" else variant.bias == "inputs"
        settings.expect("use_sliding_window", False)
        window = variant.window
        if variant.has_window and settings.given("sliding_window", window) is None:
            window = None  # null: none, which is not the default
        elif variant.has_window:
            window = settings.size("sliding_window", window)
        if any(kind != "full_attention" for kind in settings("layer_types", None) or ()):
            raise ConfigError(
                f"{settings.where}: got layer_types other than full_attention, expected no other; this variant is not "
                "supported"
            )
        both_ways = settings("use_bidirectional_attention", None)
        decoder = StackConfig(
            layers=settings.size("num_hidden_layers", 32),
            width=width,
            embed=EmbedConfig(vocab=vocab, scale=variant.offset, pad=_pad(settings, vocab)),
            encoding=rotation(settings, positions, variant.theta),
            attention=AttentionConfig(
                heads=heads,
                kv_heads=settings.size("num_key_value_heads", variant.kv_heads or heads),
                head_width=settings.size("head_dim", variant.head_width or max(width // heads, 1)),
                bias=bias,
                output_bias=False if variant.bias == "inputs" else None,
                norm=NormConfig("rms", epsilon=epsilon) if variant.head_norm else None,
                window=window,
                dropout=settings("attention_dropout", 0.0),
            ),
            ffn=FeedForwardConfig(
                width=settings.size(variant.mixture.width if variant.mixture else "intermediate_size", 11008),
                activation=settings.activation("hidden_act", variant.activation),
                gated=True,
                bias=variant.mlp_bias and settings("mlp_bias", False),
            ),
            moe=variant.mixture and _mixture(settings, variant.mixture),
            norm=NormConfig("rms", epsilon=epsilon, offset=1.0 if variant.offset else 0.0),
            causal=False if both_ways else None,
        )
        tops = {
            "causal_lm": lambda: HeadConfig(tied=settings("tie_word_embeddings", variant.tied)),
            "sequence": lambda: classifier(settings, "classes", pooling="last", decision_bias=False),
            "token": lambda: classifier(
                settings,
                "slots",
                dropout=token_dropout(settings),
                decision_bias=settings("token_classification_bias", True),
            ),
            "model": lambda: HIDDEN,
        }
        return ModelConfig(decoder=decoder, head=tops[head]())

    def write(model: ModelConfig, head: str) -> dict[str, Any]:
        decoder = side(model, "decoder")
        attention, ffn = decoder.attention, decoder.ffn
        if ffn is None:
            raise ConfigError("export: got a decoder without feed-forward layers, expected them for this family")
        if variant.mixture and decoder.moe is None:
            raise ConfigError("export: got a decoder without experts, expected them for this family")
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
            "rope_parameters": their_rotation(decoder.encoding),
            "attention_dropout": attention.dropout,
            "tie_word_embeddings": (model.head.tied and head == "causal_lm") or (variant.tied and head != "causal_lm"),
            "hidden_act": their_activation(ffn.activation),
        }
        if decoder.causal is False:
            settings["use_bidirectional_attention"] = True
        if decoder.embed.pad is not None:
            settings["pad_token_id"] = decoder.embed.pad
        if head == "token":
            settings |= {
                "classifier_dropout": model.head.dropout,
                "token_classification_bias": model.head.decision_bias,
            }
        if variant.bias == "setting":
            settings["attention_bias"] = attention.bias
        if variant.mlp_bias:
            settings["mlp_bias"] = ffn.bias
        if variant.has_window:
            settings["sliding_window"] = attention.window
        if variant.mixture:
            settings |= _their_mixture(decoder.moe, variant.mixture)
        return settings

    def rows(model: ModelConfig, head: str) -> list[Row]:
        decoder = side(model, "decoder")
        theirs, ours = "model.layers.{layer}", "decoder/blocks"
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        body = [
            Row("model.embed_tokens.weight", "target_embed/table"),
            *norm(f"{theirs}.input_layernorm", f"{ours}/attention_norm", bias=False),
            *projections(f"{theirs}.self_attn", f"{ours}/attention", decoder.attention, decoder.width, names),
            *norm(f"{theirs}.post_attention_layernorm", f"{ours}/ffn_norm", bias=False),
            *norm("model.norm", "decoder/final_norm", bias=False),
        ]
        mixture, where, parts = variant.mixture, f"{theirs}.mlp", ("gate_proj", "up_proj", "down_proj")
        if mixture:
            body.append(Row(f"{theirs}.{mixture.block}.gate.weight", f"{ours}/ffn/router", "E D -> D E"))
            where, parts = f"{theirs}.{mixture.block}.experts.{{expert}}", mixture.parts
        for name, part in zip(parts, ("gate", "in", "out"), strict=True):
            body += linear(f"{where}.{name}", f"{ours}/ffn/{part}")[: 2 if decoder.ffn.bias else 1]
        if variant.head_norm:
            body += norm(f"{theirs}.self_attn.q_norm", f"{ours}/attention/query_norm", bias=False)
            body += norm(f"{theirs}.self_attn.k_norm", f"{ours}/attention/key_norm", bias=False)
        tops = {
            "causal_lm": [] if model.head.tied else [Row("lm_head.weight", "head/kernel", "V D -> D V")],
            "sequence": [Row("score.weight", "head/decision/kernel", "C D -> D C")],
            "token": linear("score", "head/decision")[: 2 if model.head.decision_bias else 1],
            "model": [],
        }
        return body + tops[head]

    return Family(
        types=(variant.type,),
        heads={
            "causal_lm": f"{variant.name}ForCausalLM",
            "sequence": f"{variant.name}ForSequenceClassification",
            "token": f"{variant.name}ForTokenClassification",
            "model": f"{variant.name}Model",
        },
        read=read,
        write=write,
        rows=rows,
        prefix="model.",
        spare=(r"lm_head\..*", r"score\..*"),
        free=free(variant),
        ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq"),
        output=("lm_head.weight", "model.embed_tokens.weight"),
        convention=Convention(before=variant.before),
    )
