"""GPT-Neo (Black et al. 2021): GPT-2 with local attention in some layers and unscaled scores."""

from __future__ import annotations

from typing import Any

from jaxformer.config import (
    AttentionConfig,
    EmbedConfig,
    EncodingConfig,
    FeedForwardConfig,
    ModelConfig,
    NormConfig,
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

ALTERNATING: list[Any] = [[["global", "local"], 12]]
"""`attention_types` of files without the key: every second layer is local, 24 layers in all."""


def read_config(settings: Settings, head: str) -> ModelConfig:
    width, layers = settings.size("hidden_size", 2048), settings.size("num_layers", 24)
    decoder = StackConfig(
        layers=layers,
        width=width,
        embed=EmbedConfig(vocab=settings.size("vocab_size", 50257), dropout=settings("embed_dropout", 0.0)),
        encoding=EncodingConfig("learned", max_length=settings.size("max_position_embeddings", 2048)),
        attention=AttentionConfig(
            heads=settings.size("num_heads", 16),
            scale=False,
            bias=False,
            output_bias=True,
            dropout=settings("attention_dropout", 0.0),
            **_windows(settings, layers),
        ),
        ffn=FeedForwardConfig(
            width=settings.size("intermediate_size", None) or 4 * width,
            activation=settings.activation("activation_function", "gelu_new"),
        ),
        norm=NormConfig(epsilon=settings("layer_norm_epsilon", 1e-5)),
        dropout=settings("resid_dropout", 0.0),
    )
    top = _decoder.head_config(settings, head, tied=True, dropout=settings("classifier_dropout", 0.1))
    return ModelConfig(decoder=decoder, head=top)


def _windows(settings: Settings, layers: int) -> dict[str, Any]:
    """The fields of an `AttentionConfig` that say which layers have a window.

    Raises:
      ConfigError: `attention_types` is no list of [kinds, times], has another kind, or has not one kind a layer;
        `attention_layers`, which is derived from it and written beside it, says something else.
    """
    given, window = settings("attention_types", None) or ALTERNATING, settings.size("window_size", 256)
    try:
        kinds = [kind for names, times in given for kind in list(names) * times]
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != layers or not set(kinds) <= {"global", "local"}:
        raise ConfigError(
            f"{settings.path}: got attention_types {given!r:.80}, expected global or local for each of the {layers} "
            'layers, as [[["global", "local"], times]]; fix the file'
        )
    if (settings("attention_layers", None) or kinds) != kinds:
        raise ConfigError(
            f"{settings.path}: got attention_layers that differ from attention_types, expected the same; fix the file"
        )
    local = tuple(i for i, kind in enumerate(kinds) if kind == "local")
    if not local:
        return {"window": None}
    for every in (1, 2):  # so that regular patterns are as those that are trained here
        if local == tuple(range(every - 1, layers, every)):
            return {"window": window, "window_every": every}
    return {"window": window, "window_layers": local}


def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
    decoder = require_stack(model, "decoder")
    ffn, local = require_ffn(decoder), decoder.windowed_layers
    return {
        "hidden_size": decoder.width,
        "num_layers": decoder.layers,
        "num_heads": decoder.attention.heads,
        "intermediate_size": ffn.width,
        "max_position_embeddings": decoder.encoding.max_length,
        "vocab_size": decoder.embed.vocab,
        "attention_types": [[["local" if i in local else "global" for i in range(decoder.layers)], 1]],
        "window_size": decoder.attention.window or 256,
        "activation_function": hf_activation(ffn.activation),
        "layer_norm_epsilon": decoder.norm.epsilon,
        "embed_dropout": decoder.embed.dropout,
        "attention_dropout": decoder.attention.dropout,
        "resid_dropout": decoder.dropout,
        "tie_word_embeddings": _decoder.is_tied(model, head, True),
        **({"classifier_dropout": model.head.dropout} if head == "token" else {}),
    }


def rows(model: ModelConfig, head: str) -> list[Row]:
    decoder = require_stack(model, "decoder")
    hf_layer, param_layer = "transformer.h.{layer}", "decoder/blocks"
    names, attention = ("q_proj", "k_proj", "v_proj", "out_proj"), f"{param_layer}/attention"
    return [
        Row("transformer.wte.weight", "target_embed/table"),
        Row("transformer.wpe.weight", "decoder/position/table"),
        *norm_rows(f"{hf_layer}.ln_1", f"{param_layer}/attention_norm"),
        *attention_rows(f"{hf_layer}.attn.attention", attention, decoder.attention, decoder.width, names),
        *norm_rows(f"{hf_layer}.ln_2", f"{param_layer}/ffn_norm"),
        *linear_rows(f"{hf_layer}.mlp.c_fc", f"{param_layer}/ffn/in"),
        *linear_rows(f"{hf_layer}.mlp.c_proj", f"{param_layer}/ffn/out"),
        *norm_rows("transformer.ln_f", "decoder/final_norm"),
        *_decoder.head_rows(model, head),
    ]


FAMILY = Family(
    model_types=("gpt_neo",),
    heads={
        "causal_lm": "GPTNeoForCausalLM",
        "sequence": "GPTNeoForSequenceClassification",
        "token": "GPTNeoForTokenClassification",
        "qa": "GPTNeoForQuestionAnswering",
        "model": "GPTNeoModel",
    },
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    prefix="transformer.",
    droppable_tensors=_decoder.DROPPABLE_TENSORS,
    ignored_tensors=(r"transformer\.h\.\d+\.attn\.attention\.(masked_)?bias",),
    tied_tensors=("lm_head.weight", "transformer.wte.weight"),
    convention=CallConvention(spans_read_padding=True),
)
