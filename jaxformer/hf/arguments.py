"""Arguments under the other library's names, validated and turned into a `Batch`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxformer.config import ModelConfig, StackConfig
from jaxformer.errors import ConfigError
from jaxformer.hf.positions import check_order, positions_of_mask, tokens_before
from jaxformer.hf.table import CallConvention, Settings
from jaxformer.registry import nearest
from jaxformer.types import Array, Batch, Slots, Stream

MAX_INT32 = 2**31 - 1

IGNORED_LABEL = -100
"""The label that is left out of losses."""

OUTPUT_FLAGS = ("output_attentions", "output_hidden_states", "return_dict")
ROUTER_FLAG = "output_router_logits"
ENCODER_ARGUMENTS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids")
DECODER_ARGUMENTS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")
SEQ2SEQ_ARGUMENTS = (
    "input_ids", "inputs_embeds", "attention_mask",
    "decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask",
)  # fmt: skip
INTEGER_ARGUMENTS = (
    "input_ids", "decoder_input_ids", "token_type_ids", "position_ids", "decoder_token_type_ids",
    "decoder_position_ids", "start_positions", "end_positions",
    "next_sentence_label", "sentence_order_label", "question_lengths",
)  # fmt: skip
"""Arguments that hold integers; `labels` may be scores."""


def argument_names(model: ModelConfig, head: str, convention: CallConvention) -> tuple[str, ...]:
    """Names of the arguments that a call of this model accepts."""
    stack = model.encoder or model.decoder
    names = ENCODER_ARGUMENTS if stack is not None and stack.embed.kinds else DECODER_ARGUMENTS
    names = SEQ2SEQ_ARGUMENTS if model.is_seq2seq else names
    if convention.is_pair and model.encoder is not None and model.decoder is not None:
        names += ("position_ids", "decoder_position_ids")
        names += ("token_type_ids",) if model.encoder.embed.kinds else ()
        names += ("decoder_token_type_ids",) if model.decoder.embed.kinds else ()
    if not convention.takes_position_ids:
        names = tuple(name for name in names if name != "position_ids")
    labels = {"qa": ("start_positions", "end_positions"), "model": (), "bare": (), "encoder": ()}
    if model.head.relation:
        labels["pretraining"] = ("labels", "next_sentence_label")
    router = (ROUTER_FLAG,) if returns_router_logits(model, head) else ()
    return (*names, *labels.get(head, ("labels",)), *OUTPUT_FLAGS, *router)


def returns_router_logits(model: ModelConfig, head: str) -> bool:
    """True if a call can return the logits of the experts' routers."""
    return head in ("causal_lm", "model") and model.decoder is not None and model.decoder.moe is not None


def check_arguments(inputs: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The arguments that are not None.

    Raises:
      ConfigError: one is unknown, or of a wrong type.
    """
    given = {name: value for name, value in inputs.items() if value is not None}
    for name in given:
        if name not in names:
            raise ConfigError(f"call: got {name}, expected some of {', '.join(names)}{nearest(name, names)}")
    if given.get("return_dict", True) is not True:
        raise ConfigError("call: got return_dict False, expected True; `tuple(outputs.values())` is what it returns")
    for name in (*INTEGER_ARGUMENTS, "labels"):
        if name in given:
            _check_numbers(name, given[name])
    return given


def _check_numbers(name: str, value: Any) -> None:
    """Raises a ConfigError for what is no array of numbers, and for integers beyond 32 bits, which jax would wrap."""
    array = value if isinstance(value, (np.ndarray, jax.Array)) else np.asarray(value)
    kinds = (jnp.integer,) if name in INTEGER_ARGUMENTS else (jnp.integer, jnp.floating)
    if not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
        expected = "whole numbers" if name in INTEGER_ARGUMENTS else "numbers"
        raise ConfigError(f"call: got {name} of type {array.dtype}, expected {expected}")
    if array.dtype in (np.int64, np.uint64, np.uint32) and has_concrete_values(array) and array.size:
        largest = max(int(array.max()), -int(array.min()))
        if largest > MAX_INT32:
            raise ConfigError(f"call: got {name} {largest}, expected numbers of 32 bits; check the tokenizer")


def add_config_flags(given: dict[str, Any], settings: Settings, names: tuple[str, ...]) -> dict[str, Any]:
    """The arguments, and the output flags that config.json sets and the call does not."""
    wished = (name for name in (*OUTPUT_FLAGS[:2], ROUTER_FLAG) if name in names and settings(name, False))
    return {**dict.fromkeys(wished, True), **given}


def flatten_choices(given: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """The arguments of a multiple choice with each choice as a row, `[B, C, T]` -> `[B * C, T]`, and C.

    Raises:
      ConfigError: an input has no axis of choices.
    """
    flat, counts = dict(given), set()
    for name in ENCODER_ARGUMENTS:
        if name not in given:
            continue
        x = jnp.asarray(given[name])
        if x.ndim != (4 if name == "inputs_embeds" else 3):
            raise ConfigError(
                f"call: got {name} of shape {list(x.shape)}, expected [batch, choices, length]; add an axis"
            )
        flat[name] = x.reshape(-1, *x.shape[2:])
        counts.add(x.shape[1])
    if len(counts) != 1:
        raise ConfigError(f"call: got {sorted(counts) or 'no'} choices, expected one number in all inputs")
    return flat, counts.pop()


def check_first_slots(given: Mapping[str, Any]) -> None:
    """Refuses texts with padding in their first slot, if the mask can be read.

    Raises:
      ConfigError: there is some.
    """
    mask = given.get("attention_mask")
    if mask is not None and has_concrete_values(mask) and not np.asarray(mask)[:, 0].all():
        raise ConfigError(
            "call: got choices with padding before their first token, expected it after; pad on the right"
        )


def split_question(settings: Settings, given: Mapping[str, Any]) -> tuple[dict[str, Any], Array | None]:
    """The arguments of a call for spans with token types, and which slots no span may use, bool `[B, T]`.

    These are the tokens of the question but the first, which stands for "no answer". The question ends with the first
    separator of config.json, or has `question_lengths` `[B]` or `[B, 1]` tokens. With neither, all slots count.
    """
    inputs = dict(given)
    lengths, ids = inputs.pop("question_lengths", None), inputs.get("input_ids")
    if lengths is None and ids is None:
        return inputs, None
    shape = jnp.shape(ids if ids is not None else inputs["inputs_embeds"])[:2]
    if lengths is None:
        lengths = jnp.argmax(jnp.asarray(ids) == settings("sep_token_id", 66), axis=1) + 1
    index = jnp.arange(shape[1])[None]
    question = index < jnp.asarray(lengths).reshape(-1, 1)
    if question.shape != shape:
        raise ConfigError(f"call: got question_lengths of {len(question)} rows, expected {shape[0]}")
    inputs.setdefault("token_type_ids", (~question).astype(jnp.int32))
    return inputs, question & (index > 0)


def check_spans(given: Mapping[str, Any], window: int | None) -> None:
    """Refuses a loss of spans beside padding that sees no token in a causal stack, if the mask can be read.

    Args:
      window: slots that a slot sees, its own included, in some layers; None: all before it.

    Raises:
      ConfigError: there is such padding.
    """
    mask = given.get("attention_mask")
    if mask is None or "start_positions" not in given or not has_concrete_values(mask):
        return
    shown = np.asarray(mask) != 0
    index = np.arange(shown.shape[-1])
    last = np.maximum.accumulate(np.where(shown, index, -1), axis=-1)
    blind = (last < 0) | (index - last >= (window or len(index)))
    if blind.any():
        row, slot = np.argwhere(blind)[0]
        least = "" if window is None else f", with at most {window - 1} slots of padding in a row"
        raise ConfigError(
            f"call: got start_positions and padding in slot {slot} of row {row} that sees no token, expected padding "
            f"behind the text alone{least}: spans compete with it, and its scores are other ones in the other library"
        )


HIDDEN_SPAN_SCORE = 1e6
"""Subtracted from the scores of a hidden slot."""


def has_concrete_values(x: Any) -> bool:
    """True if the values of an array can be read: not under jit, nor if other processes hold a part."""
    return not isinstance(x, Tracer) and getattr(x, "is_fully_addressable", True)


def check_ids(name: str, ids: Any, count: int | None, ignored: int | None = None) -> None:
    """Refuses ids outside of 0 to count - 1, if their values can be read. Under jit such ids give NaN.

    Raises:
      ConfigError: one is outside, and is not `ignored`.
    """
    if count is None or not has_concrete_values(ids):
        return
    ids = np.asarray(ids)
    outside = (ids < 0) | (ids >= count)
    if ignored is not None:
        outside &= ids != ignored
    if outside.any():
        raise ConfigError(f"call: got {name} {ids[outside][0]}, expected 0 to {count - 1}; check the tokenizer")


def make_batch(
    convention: CallConvention,
    settings: Settings,
    model: ModelConfig,
    head: str,
    inputs: Mapping[str, Any],
) -> Batch:
    """The batch of a call.

    Padded slots have the outputs of the other library: labels may stand there, a span's scores compete with theirs, and
    a pooler reads the first slot whatever it holds. Their segments are negative (`nn/masks.py`).
    """
    sources = {name: jnp.asarray(value) for name, value in inputs.items() if name not in OUTPUT_FLAGS}
    encoder, decoder = model.encoder, model.decoder
    if decoder is None:
        if encoder is None:
            raise ConfigError("call: got a model without transformer parts, expected an encoder or a decoder")
        return Batch(make_stream(convention, encoder, hide_padding(convention, model, sources)), None)
    if encoder is None:
        return Batch(None, make_stream(convention, decoder, sources, causal=decoder.causal is not False))
    source = make_stream(convention, encoder, hide_padding(convention, model, sources))
    classifies = head in ("sequence", "token")
    if not {"decoder_input_ids", "decoder_inputs_embeds"} & set(sources):
        if "labels" in sources and sources["labels"].ndim == 2 and not classifies:
            sources["decoder_input_ids"] = shift_right(convention, settings, sources["labels"])
            if convention.is_pair:
                real = sources["decoder_input_ids"] != settings("pad_token_id", 0)
                sources.setdefault("decoder_attention_mask", real.astype(jnp.int32))
        elif "input_ids" in sources and (
            convention.decodes_source(head) or (convention.reads_last_token and classifies)
        ):
            sources["decoder_input_ids"] = shift_right(convention, settings, sources["input_ids"])
        else:
            raise ConfigError("call: got no decoder_input_ids, expected them or labels")
    targets = {name.removeprefix("decoder_"): x for name, x in sources.items() if name.startswith("decoder_")}
    if convention.reads_last_token and classifies and "input_ids" in targets:
        targets.setdefault("attention_mask", (targets["input_ids"] != _padding(decoder)).astype(jnp.int32))
    target = make_stream(convention.of_decoder, decoder, targets, causal=True)
    return Batch(source, target)


def hide_padding(convention: CallConvention, model: ModelConfig, sources: Mapping[str, Array]) -> Mapping[str, Array]:
    """The arguments of an encoder with a mask for padding, where the family has one by default.

    Raises:
      ConfigError: the family hides padding from the encoder and not from the decoder, and there is some.
    """
    if convention.hides_padding is None or "attention_mask" in sources or "input_ids" not in sources:
        return sources
    real = sources["input_ids"] != _padding(model.encoder)
    if not convention.hides_padding(model) and has_concrete_values(real) and not bool(real.all()):
        raise ConfigError(
            f"call: got padding ({_padding(model.encoder)}) without an attention_mask, expected one: the other library "
            "then hides it from the encoder and shows it to the decoder"
        )
    return {**sources, "attention_mask": real.astype(jnp.int32)}


def _padding(stack: StackConfig | None) -> int:
    """The padding token of a stack; -1 where there is none."""
    return -1 if stack is None or stack.embed.pad is None else stack.embed.pad


def make_stream(
    convention: CallConvention, stack: StackConfig, inputs: Mapping[str, Array], causal: bool = False
) -> Stream:
    """One stream with its positions and slots; raises a ConfigError for arguments of a wrong shape or range."""
    pad, encoding = _padding(stack), stack.encoding
    if ("input_ids" in inputs) == ("inputs_embeds" in inputs):
        raise ConfigError("call: got both or none of input_ids and inputs_embeds, expected one of them")
    tokens = inputs["input_ids"] if "input_ids" in inputs else inputs["inputs_embeds"]
    if tokens.ndim != (2 if "input_ids" in inputs else 3):
        raise ConfigError(f"call: got inputs of shape {list(tokens.shape)}, expected [batch, length] ids; add an axis")
    if "inputs_embeds" in inputs and stack.embed.scale and not convention.scales_embeddings:
        tokens = tokens / math.sqrt(stack.width)  # which the model multiplies by
    shape = tokens.shape[:2]
    if 0 in shape:
        raise ConfigError(f"call: got inputs of shape {list(tokens.shape)}, expected at least one token")
    real = inputs["attention_mask"] if "attention_mask" in inputs else jnp.ones(shape, jnp.int32)
    if real.shape != shape:
        raise ConfigError(f"call: got an attention_mask of shape {list(real.shape)}, expected {list(shape)}")
    real = jnp.not_equal(real, 0).astype(jnp.int32)
    count, prefix = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape), None
    if convention.positions == "ids" and "input_ids" in inputs:
        text = (tokens != pad).astype(jnp.int32)
        if causal and has_concrete_values(text * real) and bool(((text == 0) & (real == 1)).any()):
            raise ConfigError(
                f"call: got padding ({pad}) that the attention_mask does not hide, expected it hidden: padding has no "
                "position, by which a causal model orders tokens"
            )
        count = jnp.cumsum(text, axis=1) * text - 1  # padding: the row before the first position's
        prefix = tokens_before(count, text) if causal else None
    if convention.positions == "mask" and "attention_mask" in inputs:
        count, prefix = positions_of_mask(real, encoding.kind == "learned")
    if "position_ids" in inputs:
        first = pad + 1 if convention.positions == "ids" else 0
        count = jnp.broadcast_to(inputs["position_ids"], shape).astype(jnp.int32) - first
        prefix = tokens_before(count, real) if causal and stack.attention.window is None else None
        tokens = check_order(stack, tokens, count, real, causal, first=first)
    if "input_ids" in inputs:
        check_ids("input_ids", tokens, stack.embed.vocab)
    if "token_type_ids" in inputs and stack.embed.kinds:
        check_ids("token_type_ids", inputs["token_type_ids"], stack.embed.kinds)
    if encoding.kind == "learned" or encoding.absolute:
        check_ids("a position (row of the table)", count + encoding.offset, encoding.max_length)
    elif "position_ids" in inputs:
        check_ids("position_ids", count, MAX_INT32)
    segment = 2 * real - 1
    if causal and "position_ids" in inputs:  # padding before a text sees no token, whatever its own position is
        segment = jnp.where(jnp.cumsum(real, axis=1) == 0, -2, segment)
    return Stream(tokens, Slots(count, segment, prefix), inputs.get("token_type_ids"))


def shift_right(convention: CallConvention, settings: Settings, labels: Array) -> Array:
    """A decoder's input: its start token, then all labels but the last, with padding in place of ignored labels."""
    pad = settings("pad_token_id", None if convention.is_pair else 0)
    start = settings("decoder_start_token_id", convention.decoder_start_token)
    if convention.start_and_padding is not None:
        start, pad = convention.start_and_padding(settings)
    if convention.starts_with_last_token:
        labels = jnp.where(labels == IGNORED_LABEL, pad, labels)
        last = jnp.sum(labels != pad, axis=1, keepdims=True) - 1
        first = jnp.take_along_axis(labels, last, axis=1)
    else:
        if start is None or pad is None:
            raise ConfigError(
                f"call: got no {'pad_token_id' if start is not None else 'decoder_start_token_id'} in {settings.path}, "
                "expected it: a decoder's input is made of labels; give decoder_input_ids, or mend the file"
            )
        first = jnp.full((labels.shape[0], 1), start, labels.dtype)
    moved = jnp.concatenate([first, labels[:, :-1]], axis=1)
    return jnp.where(moved == IGNORED_LABEL, pad, moved)
