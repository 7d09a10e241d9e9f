"""T5Gemma (Zhang et al. 2025, "Encoder-Decoder Gemma"): an encoder and a decoder of Gemma 2's layers.

config.json holds the config of each side, which is one of Gemma 2. The encoder sees both ways, within `sliding_window`
slots to either side in layers with a window. The decoder has cross-attention between its self-attention and its
feed-forward layer; it reads the encoder's output at its own width. The two sides have a table of embeddings each.
The library's dropout after the last norms is not applied here, as in T5.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxformer.config import HeadConfig, ModelConfig, StackConfig
from jaxformer.errors import ConfigError
from jaxformer.hf import keys
from jaxformer.hf.families import _gemma
from jaxformer.hf.generation_options import DEFAULTS
from jaxformer.hf.table import (
    NO_HEAD,
    CallConvention,
    Family,
    Row,
    Settings,
    attention_rows,
    classifier_head,
    linear_rows,
    norm_rows,
    require_ffn,
    require_stack,
)

SIDE = dataclasses.replace(
    _gemma.family(
        _gemma.Generation(
            model_type="t5_gemma_module",
            class_prefix="T5GemmaModule",
            classes={},
            full_every=2,
            pattern_key="",
            has_query_key_norm=False,
            has_local_base=False,
            caps=(50.0, 30.0),
            positions=8192,
        )
    ),
    heads={"causal_lm": "T5GemmaModule"},
    ignored_keys={
        "is_decoder": "the side says it",
        **dict.fromkeys(("encoder", "decoder"), "of the file that holds both sides"),
        "cross_attention_hidden_size": "width of the encoder, whose own config says it",
        "dropout_rate": "of both sides, beside them",
        "classifier_dropout_rate": "of both sides, beside them",
    },
)
"""One side, as a decoder of Gemma 2."""

NORMS = {
    "input_layernorm": "pre_self_attn_layernorm",
    "post_attention_layernorm": "post_self_attn_layernorm",
}
"""Gemma 2's names of a layer's norms -> T5Gemma's, where they differ."""

SIDE_KEYS = (
    "attention_bias", "attn_logit_softcapping", "head_dim", "hidden_activation", "hidden_size", "intermediate_size",
    "layer_types", "max_position_embeddings", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "query_pre_attn_scalar", "rms_norm_eps", "rope_parameters", "sliding_window",
)  # fmt: skip
"""Keys that the library's code reads of a side's config, and that mean nothing beside the two."""

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def side_settings(settings: Settings, side: str) -> Settings:
    """The config of one side, with the library's defaults.

    Raises:
      ConfigError: it is no object, or of another family.
    """
    values = settings(side, None) or {}
    if not isinstance(values, Mapping) or values.get("model_type", "t5_gemma_module") != "t5_gemma_module":
        raise ConfigError(f"{settings.path}: got {side} {values!r:.80}, expected the config of a t5_gemma_module")
    return keys.with_defaults(SIDE, Settings(values, f"{settings.path} ({side})"))


def _read_side(settings: Settings, side: str) -> ModelConfig:
    """One side as a decoder with its head; all keys of its config are checked."""
    own, dropout = side_settings(settings, side), settings("dropout_rate", 0.0)
    above = {
        "attention_dropout": settings("attention_dropout", 0.0),
        "tie_word_embeddings": settings("tie_word_embeddings", True),
    }
    model = SIDE.read_config(own.with_values({**own.values, **above}), "causal_lm")
    keys.check_keys(SIDE, own)
    stack = require_stack(model, "decoder")
    attention = stack.attention
    if side == "encoder" and attention.window is not None:  # as many slots ahead as back, besides its own
        attention = dataclasses.replace(attention, window=attention.window + 1)
    stack = dataclasses.replace(
        stack,
        attention=attention,
        embed=dataclasses.replace(stack.embed, dropout=dropout),
        ffn=dataclasses.replace(require_ffn(stack), dropout=dropout),
        dropout=dropout,
    )
    return ModelConfig(decoder=stack, head=model.head)


def read_config(settings: Settings, head: str) -> ModelConfig:
    both = settings("is_encoder_decoder", True) and head != "encoder"
    if head in ("seq2seq", "model"):
        settings.expect("is_encoder_decoder", True)
    encoder = require_stack(_read_side(settings, "encoder"), "decoder")
    dropout = settings("classifier_dropout_rate", 0.0)
    classifiers = {
        "sequence": lambda: classifier_head(settings, "classes", pooling="last", dropout=dropout),
        "token": lambda: classifier_head(settings, "slots", dropout=dropout),
    }
    top: HeadConfig = classifiers[head]() if head in classifiers else NO_HEAD
    if not both:
        settings("decoder", None)  # of the same class with a decoder
        return ModelConfig(encoder=encoder, head=top)
    side = _read_side(settings, "decoder")
    decoder = require_stack(side, "decoder")
    decoder = dataclasses.replace(decoder, memory_width=encoder.width if encoder.width != decoder.width else None)
    return ModelConfig(
        encoder=encoder, decoder=decoder, share_embeddings=False, head=side.head if head == "seq2seq" else top
    )


def write_config(model: ModelConfig, head: str) -> dict[str, Any]:
    encoder = require_stack(model, "encoder")
    settings: dict[str, Any] = {
        "is_encoder_decoder": model.decoder is not None,
        "dropout_rate": encoder.dropout,
        "attention_dropout": encoder.attention.dropout,
        "classifier_dropout_rate": model.head.dropout if head in ("sequence", "token") else 0.0,
        "tie_word_embeddings": model.head.tied if head == "seq2seq" else True,
        "pad_token_id": (model.decoder or encoder).embed.pad,
        "encoder": _write_side(encoder, "encoder", NO_HEAD),
    }
    if model.decoder is not None:
        settings["decoder"] = _write_side(model.decoder, "decoder", model.head if head == "seq2seq" else HeadConfig())
    return settings


def _write_side(stack: StackConfig, side: str, head: HeadConfig) -> dict[str, Any]:
    """The config of one side."""
    attention = stack.attention
    if side == "encoder" and attention.window is not None:
        attention = dataclasses.replace(attention, window=attention.window - 1)
    stack = dataclasses.replace(stack, attention=attention)
    values = SIDE.write_config(ModelConfig(decoder=stack, head=head), "causal_lm")
    shared = ("attention_dropout", "tie_word_embeddings")
    values = {name: value for name, value in values.items() if name not in shared}
    return {"model_type": "t5_gemma_module", "is_decoder": side == "decoder", **values}


def rows(model: ModelConfig, head: str) -> list[Row]:
    found = _side_rows(require_stack(model, "encoder"), "encoder", "source_embed/table")
    if model.decoder is not None:
        stack = model.decoder
        found += _side_rows(stack, "decoder", "target_embed/table")
        layer, path = "model.decoder.layers.{layer}", "decoder/blocks"
        found += attention_rows(f"{layer}.cross_attn", f"{path}/cross", stack.attention, stack.width, PROJECTIONS)
        found += norm_rows(f"{layer}.pre_cross_attn_layernorm", f"{path}/cross_norm", has_bias=False)
        found += norm_rows(f"{layer}.post_cross_attn_layernorm", f"{path}/cross_post_norm", has_bias=False)
    if head == "seq2seq" and not model.head.tied:
        found.append(Row("lm_head.out_proj.weight", "head/kernel", "V D -> D V"))
    return found + (linear_rows("score.out_proj", "head/decision") if head in ("sequence", "token") else [])


def _side_rows(stack: StackConfig, side: str, table: str) -> list[Row]:
    """Rows of one side, from those of Gemma 2."""

    def of_side(row: Row) -> Row:
        *module, last, leaf = row.hf_name.split(".")
        name = ".".join([*module, NORMS.get(last, last), leaf])
        path = str(row.param_path).replace("decoder/", f"{side}/").replace("target_embed/table", table)
        return dataclasses.replace(row, hf_name=name.replace("model.", f"model.{side}.", 1), param_path=path)

    return [of_side(row) for row in SIDE.rows(ModelConfig(decoder=stack, head=NO_HEAD), "model")]


def start_and_padding(settings: Settings) -> tuple[Any, Any]:
    """First token and padding of a decoder's input that is made of labels: those of the decoder's own config."""
    own = side_settings(settings, "decoder")
    return own("bos_token_id", None), own("pad_token_id", None)


def generation_values(settings: Settings) -> dict[str, Any]:
    """Options of `generate` in config.json: special tokens are the decoder's where the file's top names none."""
    own = side_settings(settings, "decoder")
    chosen = {name: own(name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {**chosen, **{name: value for name, value in settings.values.items() if name in DEFAULTS}}


FAMILY = Family(
    model_types=("t5gemma",),
    heads={
        "seq2seq": "T5GemmaForConditionalGeneration",
        "sequence": "T5GemmaForSequenceClassification",
        "token": "T5GemmaForTokenClassification",
        "model": "T5GemmaModel",
        "encoder": "T5GemmaEncoderModel",
    },
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    prefix="model.",
    droppable_tensors=(r"lm_head\..*", r"score\..*", r"model\.decoder\..*"),
    ignored_keys=dict.fromkeys(
        (*SIDE_KEYS, "vocab_size", "is_decoder", "cross_attention_hidden_size"),
        "of the two sides, whose own configs say it",
    ),
    tied_tensors=("lm_head.out_proj.weight", "model.decoder.embed_tokens.weight"),
    convention=CallConvention(
        scales_embeddings=True,
        prefix_tokens=("<bos>",),
        reads_last_token=True,
        start_and_padding=start_and_padding,
        hides_padding=lambda model: model.decoder is None,
    ),
    generation_values=generation_values,
)
