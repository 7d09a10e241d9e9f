"""DeepSeek-V2 and V3: latent attention, dense first layers, then mixtures of many small experts and shared ones."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxformer.config import (
    AttentionConfig,
    EmbedConfig,
    EncodingConfig,
    FeedForwardConfig,
    LatentConfig,
    ModelConfig,
    MoEConfig,
    NormConfig,
    StackConfig,
)
from jaxformer.errors import ConfigError
from jaxformer.hf.families import _decoder
from jaxformer.hf.families._llama import pad_token, rope_encoding, rope_parameters
from jaxformer.hf.table import (
    Family,
    Row,
    Settings,
    hf_activation,
    linear_rows,
    norm_rows,
    require_ffn,
    require_stack,
)

LATENT_EPSILON = 1e-6
"""Epsilon of the norms of latent vectors, which the library does not take from `rms_norm_eps`."""

PUBLISHED_TOP_K = 6
"""Experts per token of DeepSeek-V2 and V2-Lite. The library's class has no number, and its model needs one."""

PARTS = {"gate_proj": "gate", "up_proj": "in", "down_proj": "out"}
"""Modules of a gated feed-forward layer, and the parameters here."""

IGNORED_KEYS = {
    "pretraining_tp": "number of parts of a matrix product, whose sum is the same",
    "head_dim": "the library sets it to qk_rope_head_dim",
    "qk_head_dim": "the library sets it to qk_nope_head_dim + qk_rope_head_dim",
    "ep_size": "how experts are divided over devices, not what they compute",
    "aux_loss_alpha": "a loss of training that the library does not have",
    "seq_aux": "of aux_loss_alpha",
}


@dataclass(frozen=True)
class Variant:
    """A version of DeepSeek.

    Attributes:
      model_type: the value in config.json.
      class_prefix: start of its class names.
      sigmoid: experts are scored one by one, with a correction bias, and groups by their two best (V3); else by a
        softmax over all of them, and groups by their best if `topk_method` says so (V2).
      has_token_head: the library has a class for classification of tokens.
    """

    model_type: str
    class_prefix: str
    sigmoid: bool
    has_token_head: bool = False


def family(variant: Variant) -> Family:
    """The family of a version of DeepSeek."""
    heads = {"causal_lm": "ForCausalLM", "sequence": "ForSequenceClassification", "model": "Model"}
    if variant.has_token_head:
        heads["token"] = "ForTokenClassification"

    def read_config(settings: Settings, head: str) -> ModelConfig:
        width, count = settings.size("hidden_size", 4096), settings.size("num_attention_heads", 32)
        layers, vocab = settings.size("num_hidden_layers", 32), settings.size("vocab_size", 102400)
        if settings.size("num_key_value_heads", count) != count:
            got = settings.size("num_key_value_heads", count)
            raise ConfigError(
                f"{settings.path}: got num_key_value_heads {got}, expected num_attention_heads ({count}): latent "
                "attention has no other key heads; fix the file"
            )
        encoding = _encoding(settings)
        if not variant.sigmoid:
            settings.expect("mlp_bias", False)
        settings.expect("moe_layer_freq", 1)
        epsilon = settings("rms_norm_eps", 1e-6)
        moe = _read_moe(settings, variant, layers)
        dense_width = settings.size("intermediate_size", 11008)
        decoder = StackConfig(
            layers=layers,
            width=width,
            embed=EmbedConfig(vocab=vocab, pad=pad_token(settings, vocab)),
            encoding=replace(encoding, interleaved=not variant.sigmoid or _flag(settings, "rope_interleave")),
            attention=AttentionConfig(
                heads=count,
                bias=settings("attention_bias", False),
                latent=LatentConfig(
                    rank=settings.size("kv_lora_rank", 512),
                    query_rank=_or_none(settings, "q_lora_rank"),
                    content_width=settings.size("qk_nope_head_dim", 128),
                    rope_width=settings.size("qk_rope_head_dim", 64),
                    value_width=settings.size("v_head_dim", 128),
                    epsilon=LATENT_EPSILON,
                ),
                dropout=settings("attention_dropout", 0.0),
            ),
            ffn=FeedForwardConfig(
                width=dense_width if moe is None else settings.size("moe_intermediate_size", 1407),
                activation=settings.activation("hidden_act", "silu"),
                gated=True,
                bias=False,
            ),
            moe=moe and replace(moe, dense_width=dense_width if moe.dense_layers else None),
            norm=NormConfig("rms", epsilon=epsilon),
        )
        return ModelConfig(decoder=decoder, head=_decoder.scored_head_config(settings, head, tied=False))

    def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
        decoder = require_stack(model, "decoder")
        own, ffn, moe = decoder.attention, require_ffn(decoder), decoder.moe
        latent = own.latent
        if latent is None:
            raise ConfigError("export: got attention without latents, expected attention.latent for this family")
        scaling = decoder.encoding.scaling
        rope = rope_parameters(decoder.encoding)
        if scaling is not None and scaling.score_scale:
            rope["mscale_all_dim"] = scaling.score_scale
        settings = {
            "hidden_size": decoder.width,
            "num_hidden_layers": decoder.layers,
            "num_attention_heads": own.heads,
            "num_key_value_heads": own.heads,
            "max_position_embeddings": decoder.encoding.max_length,
            "vocab_size": decoder.embed.vocab,
            "rms_norm_eps": decoder.norm.epsilon,
            "rope_parameters": rope,
            "attention_bias": own.bias,
            "attention_dropout": own.dropout,
            "tie_word_embeddings": model.head.tied and head == "causal_lm",
            "hidden_act": hf_activation(ffn.activation),
            "kv_lora_rank": latent.rank,
            "q_lora_rank": latent.query_rank,
            "qk_nope_head_dim": latent.content_width,
            "qk_rope_head_dim": latent.rope_width,
            "v_head_dim": latent.values_width,
            **_moe_settings(decoder, ffn, variant),
        }
        if variant.sigmoid:
            settings["rope_interleave"] = decoder.encoding.interleaved
        if decoder.embed.pad is not None:
            settings["pad_token_id"] = decoder.embed.pad
        settings |= _decoder.scored_head_settings(model, head)
        if moe is None or moe.dense_layers:
            settings["intermediate_size"] = (moe.dense_width if moe else None) or ffn.width or 4 * decoder.width
        return settings

    def rows(model: ModelConfig, head: str) -> list[Row]:
        decoder = require_stack(model, "decoder")
        dense = decoder.dense_layers
        body = [
            Row("model.embed_tokens.weight", "target_embed/table"),
            *norm_rows("model.norm", "decoder/final_norm", has_bias=False),
            *(_layer_rows(decoder, "decoder/dense_blocks", 0, None, variant) if dense else []),
            *_layer_rows(decoder, "decoder/blocks", dense, decoder.moe, variant),
        ]
        return body + _decoder.scored_head_rows(model, head)

    def resolve(model: ModelConfig, tensors: dict[str, Any]) -> ModelConfig:
        """The same model; tensors of modules after the last layer (multi-token prediction) are left out."""
        layers = require_stack(model, "decoder").layers
        for name in list(tensors):
            found = re.match(r"model\.layers\.(\d+)\.", name)
            if variant.sigmoid and found and int(found[1]) >= layers:
                del tensors[name]
        return model

    keys = {"num_nextn_predict_layers", "num_mtp_layers"} if variant.sigmoid else set()
    reason = "modules that predict further tokens, which the library's model does not have"
    return Family(
        model_types=(variant.model_type,),
        heads={name: variant.class_prefix + suffix for name, suffix in heads.items()},
        read_config=read_config,
        write_config=write_config,
        rows=rows,
        prefix="model.",
        droppable_tensors=(r"lm_head\..*", r"score\..*"),
        ignored_keys=IGNORED_KEYS | dict.fromkeys(sorted(keys), reason),
        ignored_tensors=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq"),
        tied_tensors=("lm_head.weight", "model.embed_tokens.weight"),
        resolve=resolve,
    )


def _encoding(settings: Settings) -> EncodingConfig:
    """The rotary encoding, with the factor on scores that `mscale_all_dim` makes."""
    encoding = rope_encoding(settings, settings.size("max_position_embeddings", 2048), 10000.0)
    values = settings("rope_scaling", None) or settings("rope_parameters", None) or {}
    scale = values.get("mscale_all_dim") if isinstance(values, Mapping) else None
    settings.unread_keys.discard("rope_parameters.mscale_all_dim")
    if not scale or encoding.scaling is None:
        return encoding
    if encoding.scaling.kind != "yarn" or isinstance(scale, bool) or not isinstance(scale, int | float) or scale < 0:
        kind = encoding.scaling.kind
        raise ConfigError(
            f"{settings.path}: got mscale_all_dim {scale!r} with rope_type {kind}, expected a positive number with "
            "yarn; this variant is not supported"
        )
    return replace(encoding, scaling=replace(encoding.scaling, score_scale=float(scale)))


def _flag(settings: Settings, name: str) -> bool:
    """A key that is true where it is absent, and false where the file says null, as in the library."""
    return False if settings.raw(name, True) is None else settings(name, True)


def _or_none(settings: Settings, name: str) -> int | None:
    """A size whose null in the file is None, while an absent key has the library's default."""
    return None if settings.raw(name) is None else settings.size(name)


def _read_moe(settings: Settings, variant: Variant, layers: int) -> MoEConfig | None:
    """The mixture of experts; None if all layers are dense."""
    groups, top_groups = (_or_none(settings, name) for name in ("n_group", "topk_group"))
    settings("output_router_logits", False)  # read at a call: `outputs.add_router_outputs`
    dense = settings("first_k_dense_replace", 0)
    if isinstance(dense, bool) or not isinstance(dense, int) or dense < 0:
        raise ConfigError(
            f"{settings.path}: got first_k_dense_replace {dense!r}, expected a whole number; fix the file"
        )
    moe = MoEConfig(
        experts=settings.size("n_routed_experts", 64),
        top_k=settings.size("num_experts_per_tok", PUBLISHED_TOP_K),
        shared=settings.size("n_shared_experts", 2),
        scale=settings("routed_scaling_factor", 1.0),
        dense_layers=min(dense, layers),
        balance_loss=0.0,
        z_loss=0.0,
    )
    if variant.sigmoid:
        settings.expect("scoring_func", "sigmoid")
        settings.expect("topk_method", "noaux_tc")
        moe = replace(
            moe,
            gate="sigmoid",
            correction=True,
            normalise=_flag(settings, "norm_topk_prob"),
            groups=groups or 1,
            top_groups=top_groups,
            group_score="top2",
        )
    else:
        settings.expect("scoring_func", "softmax")
        settings.expect("norm_topk_prob", False)  # the library does not apply it
        settings.expect("topk_method", "greedy", "group_limited_greedy")
        moe = replace(moe, normalise=False)
        if settings("topk_method", "greedy") == "group_limited_greedy":
            moe = replace(moe, groups=groups or 1, top_groups=top_groups)
    return None if moe.dense_layers == layers else moe


def _moe_settings(decoder: StackConfig, ffn: FeedForwardConfig, variant: Variant) -> dict[str, Any]:
    """The keys of the mixture of experts.

    Raises:
      ConfigError: the family has no such mixture.
    """
    moe = decoder.moe
    if moe is None:
        return {"first_k_dense_replace": decoder.layers}
    needed = {
        "gate": (moe.gate, "sigmoid" if variant.sigmoid else "softmax"),
        "correction": (moe.correction, variant.sigmoid),
        "bias": (ffn.bias, False),
    }
    grouped = (moe.top_groups or moe.groups) < moe.groups
    if grouped:
        needed["group_score"] = (moe.group_score, "top2" if variant.sigmoid else "max")
    if not variant.sigmoid:
        needed["normalise"] = (moe.normalise, False)
    if not moe.shared:
        needed["shared"] = (0, "at least 1")
    for name, (got, expected) in needed.items():
        if got != expected:
            raise ConfigError(f"export: got a mixture with {name} {got}, expected {expected} for this family")
    settings = {
        "first_k_dense_replace": moe.dense_layers,
        "n_routed_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "n_shared_experts": moe.shared,
        "routed_scaling_factor": moe.scale,
        "moe_intermediate_size": ffn.width or 4 * decoder.width,
        "n_group": moe.groups,
        "topk_group": moe.top_groups or moe.groups,
    }
    if variant.sigmoid:
        return settings | {"norm_topk_prob": moe.normalise}
    return settings | {"topk_method": "group_limited_greedy" if grouped else "greedy"}


def _layer_rows(decoder: StackConfig, path: str, first: int, moe: MoEConfig | None, variant: Variant) -> list[Row]:
    """Rows of the layers below `path`, whose first has the number `first` in the file."""
    own, layer = decoder.attention, "model.layers.{layer}"
    latent = own.latent
    if latent is None:
        raise ConfigError("export: got attention without latents, expected attention.latent for this family")
    attention, hf = f"{path}/attention", f"{layer}.self_attn"
    heads = {"H": own.heads, "K": latent.query_width}
    rows = [
        *norm_rows(f"{layer}.input_layernorm", f"{path}/attention_norm", has_bias=False),
        *norm_rows(f"{layer}.post_attention_layernorm", f"{path}/ffn_norm", has_bias=False),
    ]
    query = "q_proj"
    if latent.query_rank is not None:
        query = "q_b_proj"
        rows += linear_rows(f"{hf}.q_a_proj", f"{attention}/query_down", has_bias=own.bias)
        rows += norm_rows(f"{hf}.q_a_layernorm", f"{attention}/query_norm", has_bias=False)
    up = {"H": own.heads, "K": latent.content_width + latent.values_width}
    rows += [
        Row(f"{hf}.{query}.weight", f"{attention}/query/kernel", "(H K) D -> D H K", heads),
        *linear_rows(f"{hf}.kv_a_proj_with_mqa", f"{attention}/down", has_bias=own.bias),
        *norm_rows(f"{hf}.kv_a_layernorm", f"{attention}/latent_norm", has_bias=False),
        Row(f"{hf}.kv_b_proj.weight", f"{attention}/up/kernel", "(H K) R -> R H K", up),
        Row(f"{hf}.o_proj.weight", f"{attention}/out/kernel", "D (H K) -> H K D", {"H": own.heads}),
    ]
    if own.bias if own.output_bias is None else own.output_bias:
        rows.append(Row(f"{hf}.o_proj.bias", f"{attention}/out/bias"))
    mlp = f"{layer}.mlp"
    if moe is None:
        rows += [row for hf_part, part in PARTS.items() for row in _plain(f"{mlp}.{hf_part}", f"{path}/ffn/{part}")]
    else:
        rows.append(Row(f"{mlp}.gate.weight", f"{path}/ffn/router", "E D -> D E"))
        if moe.correction:
            rows.append(Row(f"{mlp}.gate.e_score_correction_bias", f"{path}/ffn/correction_bias"))
        for hf_part, part in PARTS.items():
            rows += _plain(f"{mlp}.experts.{{expert}}.{hf_part}", f"{path}/ffn/{part}")
            rows += _plain(f"{mlp}.shared_experts.{hf_part}", f"{path}/ffn/shared/{part}")
    return [dataclasses.replace(row, first_layer=first) for row in rows]


def _plain(hf_name: str, param_path: str) -> list[Row]:
    return linear_rows(hf_name, param_path, has_bias=False)
