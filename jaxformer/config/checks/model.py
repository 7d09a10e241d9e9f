"""Checks that the fields of a model section agree."""

from __future__ import annotations

import math
from typing import Any

from jaxformer.config.checks.fields import invalid
from jaxformer.config.checks.stack import GENERATOR
from jaxformer.config.layer_groups import has_unlike_layers, unlike_option
from jaxformer.config.schema import (
    AdapterConfig,
    EmbedConfig,
    GeneratorConfig,
    ModelConfig,
    RecurrentConfig,
    StackConfig,
)


def _check_memory_width(model: ModelConfig) -> None:
    """Raises ConfigError for a width of the memory that no encoder's output has."""
    for name, stack in model.stacks.items():
        if stack.memory_width is None:
            continue
        width = None if name != "decoder" or model.encoder is None else model.encoder.width
        if stack.memory_width != width:
            expected = "None without an encoder" if width is None else f"the encoder's width ({width}), or None"
            raise invalid(f"config.model.{name}.memory_width", stack.memory_width, expected)


def _check_output_width(model: ModelConfig) -> None:
    """Raises ConfigError for a last projection whose result nothing can read."""
    for name, stack in model.stacks.items():
        if stack.output_width is None:
            continue
        path, decodes = f"config.model.{name}", model.decoder is not None
        if (name == "encoder" and decodes) or model.permutation is not None or model.generator is not None:
            raise invalid(f"{path}.output_width", stack.output_width, "None, unless the head alone reads this stack")
        tokens = model.head.kind == "tokens"
        if tokens and not model.head.projection:
            raise invalid(f"{path}.output_width", stack.output_width, "None, since head.projection is False")
        if tokens and model.head.tied and stack.output_width != (stack.embed.width or stack.width):
            expected = f"the width of the table of the tied head ({stack.embed.width or stack.width})"
            raise invalid(f"{path}.output_width", stack.output_width, expected, "change it, or untie the head")


def _check_first_layers(model: ModelConfig) -> None:
    """Raises ConfigError for layers of two forms, or latent attention, where a part of a model has no such layers."""
    for name, stack in model.stacks.items():
        path = f"config.model.{name}"
        if model.permutation is not None and stack.attention.latent is not None:
            raise invalid(f"{path}.attention.latent", "a section", "None with model.permutation")
        if not has_unlike_layers(stack):
            continue
        refused = {
            "in a decoder with an encoder, whose output every layer projects": name == "decoder" and model.is_seq2seq,
            "with model.permutation": model.permutation is not None,
        }
        for reason, is_wrong in refused.items():
            if is_wrong:
                option, got, expected = unlike_option(stack)
                raise invalid(f"{path}.{option}", got, f"{expected} {reason}")


def _check_projected_sums(model: ModelConfig) -> None:
    """Raises ConfigError for embeddings whose sum is projected where another part expects the model width."""
    for name in model.parts:
        part: StackConfig | RecurrentConfig = getattr(model, name)
        if part.embed.projection == "table":
            continue
        path = f"config.model.{name}.embed.projection"
        if part.embed.width is None:
            raise invalid(path, "sum", "table where embed.width is None, or a width to project from")
        if isinstance(part, RecurrentConfig) or model.permutation is not None or part.layers == 0:
            raise invalid(path, "sum", "table for recurrent parts, permutations and stacks without layers")
        head, is_last = model.head, name == ("encoder" if model.decoder is None else "decoder")
        reads_table = head.kind == "tokens" and head.tied and head.projection and is_last
        if reads_table and not head.transform and (part.output_width or part.width) != part.embed.width:
            raise invalid(path, "sum", "table, or head.transform to give the tied head the width of the table")
        if head.kind == "tokens" and is_last and not head.projection and head.transform:
            raise invalid(path, "sum", "table, since head.projection is False")
    sides = [part.embed for part in (model.encoder, model.decoder) if part is not None]
    if model.share_embeddings and len({(embed.projection, embed.kinds) for embed in sides}) > 1:
        raise invalid("config.model.share_embeddings", True, "the same embed.projection and embed.kinds on both sides")


def _check_copying(model: ModelConfig) -> None:
    """Raises ConfigError for a head that copies where there is no source of tokens, or no distribution to mix with."""
    head, encoder, decoder = model.head, model.encoder, model.decoder
    if encoder is None or decoder is None or model.series is not None or head.kind != "tokens":
        expected = "False, except for a head of tokens of a transformer encoder and decoder that read texts"
        raise invalid("config.model.head.copy", True, expected)
    if not head.projection:
        raise invalid("config.model.head.copy", True, "False where head.projection is False")
    if head.chunk is not None:
        raise invalid("config.model.head.chunk", head.chunk, "None with head.copy, whose mixture needs all logits")
    if encoder.embed.vocab != decoder.embed.vocab:
        got = f"vocabularies of {encoder.embed.vocab} and {decoder.embed.vocab} tokens"
        raise invalid("config.model.head.copy", f"True with {got}", "equal vocabularies, so that ids can be copied")


def _check_matches(model: ModelConfig) -> None:
    """Raises ConfigError for tokens to compare where no whole pair of texts is read at once."""
    parts: dict[str, StackConfig | RecurrentConfig] = {name: getattr(model, name) for name in model.parts}
    if model.generator is not None:
        parts["generator.encoder"] = model.generator.encoder
    others = [name for name in ("decoder_part", "permutation", "generator") if getattr(model, name) is not None]
    for name, part in parts.items():
        if part.embed.matches and (others or (isinstance(part, StackConfig) and part.causal)):
            expected = "False, except for an encoder alone that sees both texts of a pair"
            raise invalid(f"config.model.{name}.embed.matches", True, expected)


def check_model(model: ModelConfig) -> None:
    """Checks that the sections of a model fit together.

    Raises:
      ConfigError: there are none, or of two families; attention without an encoder; embeddings that cannot be shared; a
        pooling that the encoder does not allow; adapters that are not described as they should be.
    """
    recurrent = [part for part in model.parts if part.startswith("recurrent_")]
    transformer = [part for part in model.parts if part not in recurrent]
    if model.series is not None or model.linear is not None or model.head.kind == "forecast":
        _check_series(model)
    if model.is_empty:
        raise invalid(
            "config.model", "no encoder and no decoder", "at least one", "add one in the recipe with section()"
        )
    if transformer and recurrent:
        raise invalid(
            "config.model", " and ".join(transformer + recurrent), "parts of one family",
            "set the transformer parts or the recurrent ones to None",
        )  # fmt: skip
    encoder, decoder = model.encoder_part, model.decoder_part
    reads_pairs = model.encoder is not None and decoder is None and model.permutation is None
    if model.head.residual_width is not None and (model.head.kind != "slots" or model.head.width is not None):
        expected = "None, unless head.kind is slots and head.width None"
        raise invalid("config.model.head.residual_width", model.head.residual_width, expected)
    if model.head.relation and not (model.head.kind == "tokens" and reads_pairs):
        expected = "False, unless a transformer encoder alone has a head of kind tokens"
        raise invalid("config.model.head.relation", True, expected)
    if model.recurrent_decoder is not None:
        if model.recurrent_decoder.bidirectional:
            raise invalid("config.model.recurrent_decoder.bidirectional", "True", "False: a decoder reads forwards")
        if model.recurrent_decoder.attention != "none" and encoder is None:
            raise invalid(
                "config.model.recurrent_decoder.attention", model.recurrent_decoder.attention,
                "none where there is no encoder",
            )  # fmt: skip
    if model.recurrent_encoder is not None and model.recurrent_encoder.attention != "none":
        attention = model.recurrent_encoder.attention
        raise invalid("config.model.recurrent_encoder.attention", attention, "none: it is the decoder that attends")
    if model.decoder is not None and model.decoder.causal is False and encoder is not None:
        raise invalid("config.model.decoder.causal", "False", "True or None: a decoder cannot see what it predicts")
    if model.decoder is not None and model.decoder.layers == 0 and encoder is not None:
        raise invalid("config.model.decoder.layers", 0, "at least 1 beside an encoder, which nothing would read")
    head = model.head
    if head.kind == "tokens" and not head.projection:
        for name in ("bias", "scale", "transform", "chunk"):
            if getattr(head, name):
                expected = "no such part, since head.projection is False"
                raise invalid(f"config.model.head.{name}", getattr(head, name), expected)
    if head.transform and head.kind not in ("tokens", "slots", "classes"):
        raise invalid("config.model.head.transform", True, f"False with head.kind {head.kind}")
    if head.transform and head.kind != "tokens" and (head.width is not None or head.residual_width is not None):
        raise invalid("config.model.head.transform", True, "False with another layer before the decision")
    for name in ("transform_bias", "transform_norm_bias"):
        if not getattr(head, name) and not head.transform:
            raise invalid(f"config.model.head.{name}", False, "True where head.transform is False: there is none")
    if model.head.soft_cap is not None and (model.head.kind != "tokens" or not model.head.projection):
        expected = "None: only logits of tokens, from an output matrix, are capped"
        raise invalid("config.model.head.soft_cap", model.head.soft_cap, expected)
    _check_memory_width(model)
    _check_output_width(model)
    _check_projected_sums(model)
    _check_matches(model)
    if model.head.copy:
        _check_copying(model)
    _check_first_layers(model)
    if model.decoder is not None and encoder is not None and model.decoder.sublayers != "sequential":
        expected = "sequential beside an encoder: cross-attention stands between the two sub-layers"
        raise invalid("config.model.decoder.sublayers", model.decoder.sublayers, expected)
    if model.share_embeddings:
        _check_shared_embeddings(encoder, decoder)
    if model.multi_token is not None:
        _check_multi_token(model)
    if model.permutation is not None:
        _check_permutation(model)
    if model.generator is not None:
        _check_generator(model, model.generator)
    if model.adapter is not None:
        check_adapter(model.adapter)
        if model.adapter.layers and any(stack.share_layers for stack in model.stacks.values()):
            raise invalid("config.model.adapter.layers", model.adapter.layers, "() where layers share their parameters")
        if model.generator is not None:
            raise invalid("config.model.adapter", "a section", "None beside config.model.generator", "take one away")
    if model.head.pooling == "end" and (model.head.kind != "classes" or model.encoder is None or model.decoder):
        expected = "first, mean or last, unless a transformer encoder alone has a head of kind classes"
        raise invalid("config.model.head.pooling", "end", expected)
    pools_last = model.head.pooling == "last" and model.head.kind in ("classes", "pair")
    bidirectional = model.recurrent_encoder is not None and model.recurrent_encoder.bidirectional
    if pools_last and bidirectional and model.head.kind == "pair":  # the backward direction has read one token there
        raise invalid("config.model.head.pooling", "last", "first or mean for pairs that are read in both directions")
    if (
        pools_last and model.encoder is not None and model.encoder.encoding.kind != "transformer_xl"
    ):  # XLNet's is the last
        raise invalid("config.model.head.pooling", "last", "first or mean for a transformer encoder")


def _check_multi_token(model: ModelConfig) -> None:
    """Raises ConfigError for modules that predict further tokens where they cannot be the decoder's kin."""
    stack, head = model.decoder, model.head
    if stack is None or model.has_encoder:
        raise invalid("config.model.multi_token", "a section", "None unless the model is a transformer decoder alone")
    refused = {
        f"with head.kind {head.kind}": head.kind != "tokens",
        "with decoder.causal False": stack.causal is False,
        "where decoder.layers is 0": stack.layers == 0,
        "with decoder.output_width": stack.output_width is not None,
        "with decoder.embed.projection sum": stack.embed.sum_width is not None,
        "with decoder.embed.kinds": stack.embed.kinds > 0,
        "with decoder.encoding.kind deberta": stack.encoding.kind == "deberta",
        "with decoder.norm.kind batch": stack.norm.kind == "batch",
        "with decoder.attention.scale_by_layer": stack.attention.scale_by_layer,
        "with decoder.delta": stack.delta is not None,
        "with model.adapter": model.adapter is not None,
    }
    for reason, is_wrong in refused.items():
        if is_wrong:
            raise invalid("config.model.multi_token", "a section", f"None {reason}")


def _check_series(model: ModelConfig) -> None:
    """Raises ConfigError if a part that reads a series is missing, or cannot do what the config says."""
    path, series, linear, head = "config.model.series", model.series, model.linear, model.head
    if series is None:
        got = "a section" if linear is not None else "forecast"
        where = "config.model.linear" if linear is not None else "config.model.head.kind"
        raise invalid(where, got, "a series to forecast", "add config.model.series with section()")
    if (model.encoder is None) == (linear is None):
        got = "a section, with encoder and linear" if linear is not None else "a section, without encoder and linear"
        raise invalid(path, got, "one of encoder and linear, which read it", "set the other to None")
    others = {
        "permutation": model.permutation is not None,
        "generator": model.generator is not None,
        "share_embeddings": model.share_embeddings,
    }
    for other in (name for name, is_set in others.items() if is_set):
        raise invalid(f"config.model.{other}", "True or a section", "none of it for an encoder of a series")
    if series.affine and series.normalise != "instance":
        raise invalid(f"{path}.affine", True, "False, or series.normalise=instance, whose scale it learns")
    if linear is not None:
        if head.kind != "forecast" or model.decoder is not None:
            raise invalid("config.model.linear", "a section", "head.kind forecast and no decoder")
        if linear.trend is not None and linear.trend % 2 == 0:
            raise invalid("config.model.linear.trend", linear.trend, "an odd number, with a step in the middle")
        if series.patch != 1 or series.stride is not None or series.independent:
            expected = "1, and no stride or independent: a linear forecast reads no patches, and channels one by one"
            raise invalid(f"{path}.patch", series.patch, expected)
    if series.independent and head.kind != "forecast":
        raise invalid(f"{path}.independent", True, f"False for head.kind {head.kind}, which sees all channels")
    if head.kind == "forecast" and model.decoder is not None:
        raise invalid("config.model.head.kind", "forecast", "a head of tokens for a decoder")
    if head.kind == "slots" or (head.kind == "tokens" and model.decoder is None):
        raise invalid("config.model.head.kind", head.kind, "forecast, classes, pooled or none for a series")
    if model.encoder is not None:
        embed, default = model.encoder.embed, EmbedConfig()
        for name in ("vocab", "width", "projection", "projection_bias", "kinds", "deviation", "pad", "matches"):
            if getattr(embed, name) != getattr(default, name):
                value, expected = getattr(embed, name), f"{getattr(default, name)} for a series, which has no table"
                raise invalid(f"config.model.encoder.embed.{name}", value, expected)


def _check_generator(model: ModelConfig, generator: GeneratorConfig) -> None:
    encoder, head = model.encoder, generator.head
    if encoder is None or model.decoder is not None or model.permutation is not None:
        raise invalid("config.model.generator", "a section", "None unless the model is a transformer encoder alone")
    if head.kind != "tokens":
        raise invalid("config.model.generator.head.kind", head.kind, "tokens: a masked language model")
    if head.copy:
        raise invalid("config.model.generator.head.copy", True, "False: a generator has no source to copy from")
    if head.chunk is not None:
        raise invalid("config.model.generator.head.chunk", head.chunk, "None: tokens are sampled from whole logits")
    if "batch" in (encoder.norm.kind, generator.encoder.norm.kind):
        raise invalid("config.model.generator", "a section", "None, or norms of other kinds than batch")
    if generator.encoder.embed.vocab != encoder.embed.vocab:
        expected = f"{encoder.embed.vocab}, as config.model.encoder.embed.vocab"
        raise invalid(f"{GENERATOR}.embed.vocab", generator.encoder.embed.vocab, expected)
    own, table = (stack.embed.width or stack.width for stack in (generator.encoder, encoder))
    if generator.sharing != "none" and own != table:
        expected = f"{table}, the width of the model's table, for sharing {generator.sharing}"
        raise invalid(f"{GENERATOR}.embed.width", own, expected, "set it, or generator.sharing to none")


def check_adapter(adapter: AdapterConfig) -> None:
    """Checks the entries of an adapter section. Its patterns are compared with the model's paths when that is built.

    Raises:
      ConfigError: there are no targets, an entry is not PATTERN=NUMBER, or a layer is named twice.
    """
    path = "config.model.adapter"
    if not adapter.targets:
        raise invalid(f"{path}.targets", adapter.targets, "at least one pattern", "set adapter to None for no adapters")
    for field, kind in (("ranks", "a whole number of at least 1"), ("alphas", "a number above 0")):
        for entry in getattr(adapter, field):
            pattern, _, number = entry.rpartition("=")
            is_valid = number.isdecimal() and int(number) > 0 if field == "ranks" else _is_positive(number)
            if not pattern or not is_valid:
                raise invalid(f"{path}.{field}", entry, f"PATTERN=NUMBER with {kind}, as ffn/in=4")
    if len(set(adapter.layers)) < len(adapter.layers) or min(adapter.layers, default=0) < 0:
        raise invalid(f"{path}.layers", adapter.layers, "different numbers of at least 0")


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def _check_permutation(model: ModelConfig) -> None:
    path, encoder = "config.model.permutation", model.encoder
    if encoder is None or model.decoder is not None:
        raise invalid(path, "a section", "None unless the model is a transformer encoder alone")
    if encoder.share_layers:
        raise invalid("config.model.encoder.share_layers", True, "False for a permutation model")
    if encoder.encoding.kind != "transformer_xl":
        raise invalid(path, "a section", f"encoding.kind transformer_xl (it is {encoder.encoding.kind})")
    if encoder.norm.order != "post" or encoder.ffn is None or encoder.moe is not None:
        raise invalid(path, "a section", "layers with a dense feed-forward part, and norm.order post")


def _check_shared_embeddings(encoder: Any, decoder: Any) -> None:
    path = "config.model.share_embeddings"
    if encoder is None or decoder is None:
        raise invalid(path, "True", "False where there is only one side")
    widths = [side.embed.width or side.width for side in (encoder, decoder)]
    if widths[0] != widths[1] or encoder.width != decoder.width:
        raise invalid(path, "True", f"equal widths of both sides (they are {widths[0]} and {widths[1]})")
    if encoder.embed.vocab != decoder.embed.vocab:
        raise invalid(path, "True", f"equal vocabularies (they are {encoder.embed.vocab} and {decoder.embed.vocab})")
