"""Pairs of an encoder and a decoder of two families, joined by cross-attention (Rothe et al. 2020, "Leveraging
Pre-trained Checkpoints for Sequence Generation Tasks"): the library's EncoderDecoderModel.

config.json holds the configs of both sides, and each side's tensors keep their names behind "encoder." or "decoder.".
So the table of a pair follows from those of the two families, `pair_family`; `FAMILY` is the one of no pair yet.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxformer.config import ModelConfig
from jaxformer.errors import ConfigError
from jaxformer.hf import keys
from jaxformer.hf.comparison import config_differences
from jaxformer.hf.generation_options import DEFAULTS
from jaxformer.hf.table import (
    NO_HEAD,
    CallConvention,
    Family,
    Row,
    Settings,
    families,
    linear_rows,
    require_stack,
)

ENCODERS = (
    "bert", "roberta", "xlm-roberta", "roberta-prelayernorm", "electra", "distilbert", "albert", "deberta",
    "deberta-v2", "roformer",
)  # fmt: skip
"""`model_type`s of encoders; an export of a model that was trained here takes the first that computes the same."""

DECODERS = ("gpt2", "bert", "roberta", "xlm-roberta", "roberta-prelayernorm", "electra")
"""`model_type`s of decoders whose layers have a cross-attention in the library."""

SIDES = {"encoder": ENCODERS, "decoder": DECODERS}

DEFAULT_SIDE = {"encoder": {"model_type": "bert"}, "decoder": {"model_type": "bert", "is_decoder": True}}
"""Config of a side that config.json lacks, as the library takes it."""

JOINED = {"is_decoder": True, "add_cross_attention": True}
"""Keys of a decoder's config that make it one that reads an encoder's output."""


def side_values(settings: Settings, side: str) -> Mapping[str, Any]:
    """The config of one side, with its `model_type`.

    Raises:
      ConfigError: it is no object, or of a family that this side does not have.
    """
    values = settings(side, None)
    if values is None:
        values = DEFAULT_SIDE[side] | (JOINED if side == "decoder" else {})
    if not isinstance(values, Mapping):
        raise ConfigError(f"{settings.path}: got {side} {values!r:.80}, expected the config of a model; fix the file")
    check_type(settings.path, side, values.get("model_type"))
    return values


def check_type(path: str, side: str, model_type: Any) -> None:
    """Refuses a family that a pair does not have on this side.

    Raises:
      ConfigError: it is none of `SIDES[side]`.
    """
    if model_type not in SIDES[side]:
        expected = ", ".join(SIDES[side])
        raise ConfigError(f"{path}: got {model_type!r} as the {side} of a pair, expected one of {expected}")


@functools.cache
def _family(model_type: str) -> Family:
    return next(family for _, family in families() if model_type in family.model_types)


def _encoder_head(family: Family) -> str:
    """The head of the body alone, of which the pair has no use for a pooler."""
    return "bare" if "bare" in family.heads else "model"


def _read_side(settings: Settings, side: str) -> ModelConfig:
    """The model of one side; all keys of its config are checked."""
    values = side_values(settings, side)
    family = _family(str(values["model_type"]))
    own = keys.with_defaults(family, Settings(values, f"{settings.path} ({side})"))
    for name in ("output_hidden_states", "output_attentions"):
        own.expect(name, False)
    if own("cross_attention_hidden_size", None) is not None:
        raise ConfigError(f"{own.path}: got cross_attention_hidden_size, expected null; this variant is not supported")
    own.expect("is_decoder", side == "decoder")
    own.expect("add_cross_attention", side == "decoder")
    if side == "encoder":
        model = family.read_config(own, _encoder_head(family))
    else:
        model = family.read_config(own.with_values({**own.values, "add_cross_attention": False}), "causal_lm")
    keys.check_keys(family, own)
    return model


def read_config(settings: Settings, head: str) -> ModelConfig:
    settings.expect("is_encoder_decoder", True)
    settings("tie_encoder_decoder", False)  # read by `specialise`
    settings("pad_token_id", None)
    encoder, decoder = _read_side(settings, "encoder"), _read_side(settings, "decoder")
    return ModelConfig(encoder=encoder.encoder, decoder=decoder.decoder, share_embeddings=False, head=decoder.head)


def _parts(model: ModelConfig) -> dict[str, ModelConfig]:
    """The two sides as models of their own."""
    return {
        "encoder": ModelConfig(encoder=require_stack(model, "encoder"), head=NO_HEAD, dtype=model.dtype),
        "decoder": ModelConfig(decoder=require_stack(model, "decoder"), head=model.head, dtype=model.dtype),
    }


def _write_side(part: ModelConfig, side: str, family: Family) -> dict[str, Any]:
    """The config of one side.

    Raises:
      ConfigError: the family computes something else.
    """
    head = _encoder_head(family) if side == "encoder" else "causal_lm"
    values = {
        "model_type": family.model_types[0],
        "architectures": [family.heads[head]],
        **family.write_config(part, head),
        **(JOINED if side == "decoder" else {}),
    }
    reread = keys.with_defaults(family, Settings({**values, "add_cross_attention": False}))
    again = family.read_config(reread, head)
    again = dataclasses.replace(again, head=NO_HEAD) if side == "encoder" else again
    differences = config_differences(part, again)
    if differences:
        raise ConfigError(f"{side} as {family.model_types[0]}: {'; '.join(differences)}")
    return values


def write_config(model: ModelConfig, head: str, types: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The config.json of a pair.

    Args:
      types: `model_type` of each side; None: the first that computes the same.
    """
    settings: dict[str, Any] = {"is_encoder_decoder": True, "tie_encoder_decoder": False}
    for side, part in _parts(model).items():
        problems = []
        for name in SIDES[side] if types is None else (types[side],):
            try:
                settings[side] = _write_side(part, side, _family(name))
                break
            except (ConfigError, AttributeError, KeyError) as error:
                problems.append(str(error))
        if side not in settings:
            raise ConfigError(min(problems, key=len))
    return settings


def generation_values(settings: Settings) -> dict[str, Any]:
    """Options of `generate` in config.json: those of the decoder's config where the pair's own names none."""
    values = side_values(settings, "decoder")
    own = {**keys.default_values(_family(str(values["model_type"]))), **values}
    chosen = {name: own[name] for name in DEFAULTS if name in own}
    return {**chosen, **{name: value for name, value in settings.values.items() if value is not None}}


def specialise(settings: Settings) -> Family:
    """The table of the pair that a config.json names."""
    types = [str(side_values(settings, side)["model_type"]) for side in SIDES]
    return pair_family(*types, is_tied=bool(settings("tie_encoder_decoder", False)))


@functools.cache
def pair_family(encoder_type: str, decoder_type: str, is_tied: bool = False) -> Family:
    """The table of a pair of two `model_type`s.

    Args:
      is_tied: the file holds the layers of both sides once (`tie_encoder_decoder` of version 4).
    """
    encoder, decoder = _family(encoder_type), _family(decoder_type)
    types = {"encoder": encoder_type, "decoder": decoder_type}

    def rows(model: ModelConfig, head: str) -> list[Row]:
        own = encoder.rows(_parts(model)["encoder"], _encoder_head(encoder))
        first = [row for row in own if not row.param_paths[0].startswith("head/")]
        first = [dataclasses.replace(row, hf_name=_encoder_name(encoder, row.hf_name)) for row in first]
        second = [
            dataclasses.replace(row, hf_name=f"decoder.{row.hf_name}") for row in decoder.rows(model, "causal_lm")
        ]
        between = linear_rows("enc_to_dec_proj", "memory_projection") if _has_projection(model) else []
        return [*first, *between, *second]

    def resolve(model: ModelConfig, tensors: dict[str, Any]) -> ModelConfig:
        own = {name: tensors.pop(name) for name in list(tensors) if name.startswith("encoder.")}
        inner = {encoder.prefix + name.removeprefix("encoder."): tensor for name, tensor in own.items()}
        part = encoder.resolve(_parts(model)["encoder"], inner)
        tensors |= {_encoder_name(encoder, name): tensor for name, tensor in inner.items()}
        model = dataclasses.replace(model, encoder=part.encoder)
        if is_tied:
            _fill_tied(rows(model, "seq2seq"), tensors, encoder.prefix, decoder.prefix)
        return model

    def constant_tensors(model: ModelConfig) -> dict[str, np.ndarray]:
        found = encoder.constant_tensors(_parts(model)["encoder"])
        return {_encoder_name(encoder, name): value for name, value in found.items()}

    behind = lambda names: tuple(f"decoder.{name}" for name in names)  # noqa: E731
    patterns = lambda first, second: (  # noqa: E731
        *(_encoder_pattern(encoder, pattern) for pattern in first),
        *(rf"decoder\.{pattern}" for pattern in second),
    )
    return dataclasses.replace(
        FAMILY,
        write_config=lambda model, head: write_config(model, head, types),
        rows=rows,
        droppable_tensors=(r"encoder\.pooler\..*", *patterns(encoder.droppable_tensors, decoder.droppable_tensors)),
        ignored_tensors=patterns(encoder.ignored_tensors, decoder.ignored_tensors),
        duplicate_tensors=tuple(behind(names) for names in decoder.duplicate_tensors),
        renamed_tensors=tuple(dict.fromkeys((*encoder.renamed_tensors, *decoder.renamed_tensors))),
        tied_tensors=None if decoder.tied_tensors is None else behind(decoder.tied_tensors),
        constant_tensors=constant_tensors,
        resolve=resolve,
        specialise=None,
        convention=dataclasses.replace(
            FAMILY.convention,
            positions=encoder.convention.positions,
            takes_position_ids=encoder.convention.takes_position_ids,
            decoder_positions=decoder.convention.positions,
            prefix_tokens=encoder.convention.prefix_tokens,
            separator_tokens=encoder.convention.separator_tokens,
            suffix_tokens=encoder.convention.suffix_tokens,
        ),
    )


def _has_projection(model: ModelConfig) -> bool:
    encoder, decoder = require_stack(model, "encoder"), require_stack(model, "decoder")
    return (encoder.output_width or encoder.width) != decoder.width


def _encoder_name(family: Family, name: str) -> str:
    """The name of an encoder's tensor in the pair, which holds the bare body."""
    return "encoder." + name.removeprefix(family.prefix)


def _encoder_pattern(family: Family, pattern: str) -> str:
    """The expression for an encoder's tensors in the pair, from the family's own."""
    return r"encoder\." + pattern.removeprefix(re.escape(family.prefix))


def _fill_tied(rows: list[Row], tensors: dict[str, Any], encoder_prefix: str, decoder_prefix: str) -> None:
    """Adds the tensors that only the other side's file holds, under the names of this side."""
    needed = [re.sub(r"\\\{\w+\\\}", r"\\d+", re.escape(row.hf_name)) for row in rows]
    for name, tensor in list(tensors.items()):
        twin = name
        if name.startswith("encoder."):
            twin = f"decoder.{decoder_prefix}{name.removeprefix('encoder.')}"
        elif name.startswith(f"decoder.{decoder_prefix}"):
            twin = "encoder." + name.removeprefix(f"decoder.{decoder_prefix}")
        if any(re.fullmatch(pattern, twin) for pattern in needed):
            tensors.setdefault(twin, tensor)


FAMILY = Family(
    model_types=("encoder-decoder",),
    heads={"seq2seq": "EncoderDecoderModel"},
    read_config=read_config,
    write_config=write_config,
    rows=lambda model, head: specialise(Settings(write_config(model, head))).rows(model, head),
    ignored_keys=dict.fromkeys(("vocab_size", "hidden_size"), "of one of the two sides, whose own config says it"),
    convention=CallConvention(is_pair=True, decoder_start_token=None),
    specialise=specialise,
    generation_values=generation_values,
)
