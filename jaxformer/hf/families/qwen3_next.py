"""Qwen3-Next (Qwen Team 2025): the gated delta rule in most layers, gated attention in the others, and many experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxformer.config import (
    AttentionConfig,
    DeltaConfig,
    EmbedConfig,
    FeedForwardConfig,
    ModelConfig,
    MoEConfig,
    NormConfig,
    StackConfig,
)
from jaxformer.config.layer_groups import LayerGroup, layer_groups
from jaxformer.errors import ConfigError
from jaxformer.hf.families import _decoder
from jaxformer.hf.families._llama import pad_token, rope_encoding, rope_parameters
from jaxformer.hf.table import (
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

KINDS = ("full_attention", "linear_attention")
INTERVAL = 4
"""Default of `full_attention_interval`: every n-th layer has attention."""
FRACTION = 0.25
"""Default of `partial_rotary_factor`."""
PARTS = {"gate_proj": "gate", "up_proj": "in", "down_proj": "out"}
"""Modules of a gated feed-forward layer, and the parameters here."""


def read_config(settings: Settings, head: str) -> ModelConfig:
    layers, vocab = settings.size("num_hidden_layers", 48), settings.size("vocab_size", 151936)
    epsilon = settings("rms_norm_eps", 1e-6)
    activation = settings.activation("hidden_act", "silu")
    norm = NormConfig("rms", epsilon=epsilon, offset=1.0)
    moe, dense_width = _read_moe(settings, layers), settings.size("intermediate_size", 5632)
    expert_width = settings.size("moe_intermediate_size", 512)
    attention_layers = _attention_layers(settings, layers)
    delta = DeltaConfig(
        key_heads=settings.size("linear_num_key_heads", 16),
        value_heads=settings.size("linear_num_value_heads", 32),
        key_width=settings.size("linear_key_head_dim", 128),
        value_width=settings.size("linear_value_head_dim", 128),
        conv_kernel=settings.size("linear_conv_kernel_dim", 4),
        activation=activation,
        epsilon=epsilon,
        attention_layers=attention_layers,
    )
    if delta.heads % delta.key_heads:
        raise ConfigError(
            f"{settings.path}: got linear_num_value_heads {delta.heads}, expected a multiple of linear_num_key_heads "
            f"({delta.key_heads}); fix the file"
        )
    decoder = StackConfig(
        layers=layers,
        width=settings.size("hidden_size", 2048),
        embed=EmbedConfig(vocab=vocab, pad=pad_token(settings, vocab)),
        encoding=rope_encoding(settings, settings.size("max_position_embeddings", 32768), 10000.0, FRACTION),
        attention=AttentionConfig(
            heads=settings.size("num_attention_heads", 16),
            kv_heads=settings.size("num_key_value_heads", 2),
            head_width=settings.size("head_dim", 256),
            bias=settings("attention_bias", False),
            norm=norm,
            gate=True,
            dropout=settings("attention_dropout", 0.0),
        ),
        delta=None if len(attention_layers) == layers else delta,
        ffn=FeedForwardConfig(
            width=dense_width if moe is None else expert_width, activation=activation, gated=True, bias=False
        ),
        moe=moe and dataclasses.replace(moe, dense_width=dense_width if moe.dense_at else None),
        norm=norm,
    )
    return ModelConfig(decoder=decoder, head=_decoder.scored_head_config(settings, head, tied=False))


def _attention_layers(settings: Settings, layers: int) -> tuple[int, ...]:
    """Numbers of the layers with attention.

    Raises:
      ConfigError: `layer_types` are not one of two kinds for each layer.
    """
    interval = settings.size("full_attention_interval", INTERVAL)
    default = [KINDS[(number + 1) % interval > 0] for number in range(layers)]
    kinds = settings.layer_kinds(layers, KINDS) or default
    return tuple(number for number, kind in enumerate(kinds) if kind == KINDS[0])


def _read_moe(settings: Settings, layers: int) -> MoEConfig | None:
    """The mixture of experts; None if all layers are dense.

    Raises:
      ConfigError: `mlp_only_layers` or the number of experts are no numbers.
    """
    settings("output_router_logits", False)  # read at a call: `outputs.add_router_outputs`
    step, dense = settings.size("decoder_sparse_step", 1), settings("mlp_only_layers", None) or []
    experts = settings("num_experts", 512)
    if not isinstance(dense, list) or not all(isinstance(number, int) for number in dense):
        raise ConfigError(f"{settings.path}: got mlp_only_layers {dense!r:.80}, expected numbers of layers")
    if experts < 0:
        raise ConfigError(f"{settings.path}: got num_experts {experts}, expected at least 0; fix the file")
    numbers = tuple(number for number in range(layers) if number in dense or (number + 1) % step)
    moe = MoEConfig(
        experts=max(experts, 1),
        top_k=settings.size("num_experts_per_tok", 10),
        normalise=settings("norm_topk_prob", True),
        shared=1,
        shared_width=settings.size("shared_expert_intermediate_size", 512),
        shared_gate=True,
        dense_at=numbers,
        balance_loss=settings("router_aux_loss_coef", 0.001),
        z_loss=0.0,
    )
    return None if experts == 0 or len(numbers) == layers else moe


def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
    decoder = require_stack(model, "decoder")
    attention, ffn, delta = decoder.attention, require_ffn(decoder), decoder.delta
    written = {
        "hidden_size": decoder.width,
        "num_hidden_layers": decoder.layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads or attention.heads,
        "head_dim": attention.head_width or decoder.width // attention.heads,
        "hidden_act": hf_activation(ffn.activation),
        "layer_types": [KINDS[number in decoder.delta_layers] for number in range(decoder.layers)],
        "max_position_embeddings": decoder.encoding.max_length,
        "vocab_size": decoder.embed.vocab,
        "rms_norm_eps": decoder.norm.epsilon,
        "rope_parameters": rope_parameters(decoder.encoding) | {"partial_rotary_factor": decoder.encoding.fraction},
        "attention_bias": attention.bias,
        "attention_dropout": attention.dropout,
        "tie_word_embeddings": _decoder.is_tied(model, head, False),
        **_moe_settings(decoder),
        **_decoder.scored_head_settings(model, head),
    }
    if delta is not None:
        written |= {
            "linear_num_key_heads": delta.key_heads,
            "linear_num_value_heads": delta.heads,
            "linear_key_head_dim": delta.key_width,
            "linear_value_head_dim": delta.value_width,
            "linear_conv_kernel_dim": delta.conv_kernel,
        }
    return written if decoder.embed.pad is None else written | {"pad_token_id": decoder.embed.pad}


def _moe_settings(decoder: StackConfig) -> dict[str, Any]:
    """The keys of feed-forward layers and experts."""
    moe, width = decoder.moe, require_ffn(decoder).width or 4 * decoder.width
    if moe is None:
        return {"num_experts": 0, "intermediate_size": width, "decoder_sparse_step": 1, "mlp_only_layers": []}
    found = {
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": moe.normalise,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": moe.shared_width or moe.shared * width,
        "router_aux_loss_coef": moe.balance_loss,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(decoder.dense_numbers),
    }
    return found | ({"intermediate_size": moe.dense_width or width} if decoder.dense_numbers else {})


def rows(model: ModelConfig, head: str) -> list[Row]:
    decoder = require_stack(model, "decoder")
    body = [Row("model.embed_tokens.weight", "target_embed/table")]
    for group in layer_groups(decoder):
        path = f"decoder/{group.name}"
        body += [dataclasses.replace(row, first_layer=group.first) for row in _layer_rows(group, path)]
    body += norm_rows("model.norm", "decoder/final_norm", has_bias=False)
    return body + _decoder.scored_head_rows(model, head)


def _layer_rows(group: LayerGroup, path: str) -> list[Row]:
    """Rows of layers of one form."""
    stack, layer = group.stack, "model.layers.{layer}"
    found = [
        *norm_rows(f"{layer}.input_layernorm", f"{path}/attention_norm", has_bias=False),
        *norm_rows(f"{layer}.post_attention_layernorm", f"{path}/ffn_norm", has_bias=False),
    ]
    if stack.delta is None:
        found += _attention_rows(stack, f"{layer}.self_attn", f"{path}/attention")
    else:
        found += _delta_rows(stack.delta, f"{layer}.linear_attn", f"{path}/gated_delta")
    mlp, ffn = f"{layer}.mlp", f"{path}/ffn"
    if stack.moe is None:
        return found + _feed_forward_rows(mlp, ffn)
    return [
        *found,
        Row(f"{mlp}.gate.weight", f"{ffn}/router", "E D -> D E"),
        *_feed_forward_rows(f"{mlp}.experts.{{expert}}", ffn),
        *_feed_forward_rows(f"{mlp}.shared_expert", f"{ffn}/shared"),
        *linear_rows(f"{mlp}.shared_expert_gate", f"{ffn}/shared_gate", has_bias=False),
    ]


def _attention_rows(stack: StackConfig, hf_name: str, path: str) -> list[Row]:
    """Rows of gated attention: `q_proj` holds the query and the gate of the first head, then of the second, ..."""
    own = stack.attention
    width = own.head_width or stack.width // own.heads
    names, both = ("q_proj", "k_proj", "v_proj", "o_proj"), (f"{path}/query", f"{path}/gate")
    found = [row for row in attention_rows(hf_name, path, own, stack.width, names) if "q_proj" not in row.hf_name]
    fused: dict[str, Any] = {"sizes": {"H": own.heads, "K": width}, "splits": (width, width), "groups": own.heads}
    weights, biases = (tuple(f"{each}/{leaf}" for each in both) for leaf in ("kernel", "bias"))
    found.append(Row(f"{hf_name}.q_proj.weight", weights, "(H K) D -> D H K", **fused))
    if own.bias:
        found.append(Row(f"{hf_name}.q_proj.bias", biases, "(H K) -> H K", **fused))
    for part in ("query", "key"):
        found += norm_rows(f"{hf_name}.{part[0]}_norm", f"{path}/{part}_norm", has_bias=False)
    return found


def _delta_rows(delta: DeltaConfig, hf_name: str, path: str) -> list[Row]:
    """Rows of the gated delta rule, whose projections hold all of the first key head, then of the second, ..."""
    heads = delta.heads // delta.key_heads
    keys, values = delta.key_width, heads * delta.value_width

    def fused(name: str, parts: Sequence[str], splits: tuple[int, ...]) -> Row:
        paths = tuple(f"{path}/{part}/kernel" for part in parts)
        return Row(f"{hf_name}.{name}.weight", paths, "O I -> I O", splits=splits, groups=delta.key_heads)

    convolved = tuple(f"{path}/{part}_conv" for part in ("query", "key", "value"))
    widths = tuple(delta.key_heads * width for width in (keys, keys, values))
    return [
        fused("in_proj_qkvz", ("query", "key", "value", "gate"), (keys, keys, values, values)),
        fused("in_proj_ba", ("beta", "decay"), (heads, heads)),
        Row(f"{hf_name}.conv1d.weight", convolved, "C 1 W -> W C", splits=widths),
        Row(f"{hf_name}.A_log", f"{path}/log_scale"),
        Row(f"{hf_name}.dt_bias", f"{path}/step_bias"),
        *norm_rows(f"{hf_name}.norm", f"{path}/norm", has_bias=False),
        *linear_rows(f"{hf_name}.out_proj", f"{path}/out", has_bias=False),
    ]


def _feed_forward_rows(hf_name: str, path: str) -> list[Row]:
    return [
        row
        for name, part in PARTS.items()
        for row in linear_rows(f"{hf_name}.{name}", f"{path}/{part}", has_bias=False)
    ]


FAMILY = Family(
    model_types=("qwen3_next",),
    heads={
        "causal_lm": "Qwen3NextForCausalLM",
        "sequence": "Qwen3NextForSequenceClassification",
        "token": "Qwen3NextForTokenClassification",
        "qa": "Qwen3NextForQuestionAnswering",
        "model": "Qwen3NextModel",
    },
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    prefix="model.",
    head_prefixes={"qa": "transformer."},
    droppable_tensors=(
        r"lm_head\..*",
        r"score\..*",
        r"qa_outputs\..*",
        r"mtp\..*",
    ),  # the library's model has no multi-token prediction
    ignored_tensors=(r"model\.rotary_emb\.inv_freq",),
    tied_tensors=("lm_head.weight", "model.embed_tokens.weight"),
)
