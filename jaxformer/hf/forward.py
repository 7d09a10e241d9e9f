"""The forward pass under the other library's names: arguments to a batch, logits to named outputs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxformer import tasks
from jaxformer.config import ModelConfig
from jaxformer.errors import ConfigError
from jaxformer.hf import keys
from jaxformer.hf.arguments import (
    HIDDEN_SPAN_SCORE,
    add_config_flags,
    argument_names,
    check_arguments,
    check_first_slots,
    check_spans,
    flatten_choices,
    make_batch,
    split_question,
)
from jaxformer.hf.origin import HuggingFaceOrigin
from jaxformer.hf.outputs import Outputs, add_router_outputs, compute_loss, named_outputs, needs_intermediates
from jaxformer.hf.table import Settings
from jaxformer.model import Model
from jaxformer.models import build
from jaxformer.types import Array, Batch, PyTree


def call(
    model: Model, origin: HuggingFaceOrigin, params: PyTree, dropout_key: Array | None, inputs: Mapping[str, Any]
) -> Outputs:
    """The outputs of a call, in float32, under the other library's names.

    Usable under jit and grad. The family's own convention takes over where it has one (XLNet's).

    Args:
      params: parameters to use in place of `model.params`.
      dropout_key: makes it a forward pass with dropout; None: without.
      inputs: arguments by name; those that are None count as absent.

    Raises:
      ConfigError: an argument is not supported by this model, or its shape or values do not fit.
    """
    if origin.convention.call is not None:
        return origin.convention.call(model, origin, params, dropout_key, inputs)
    config, module, head = model.config.model, model.module, origin.head
    if model.config.task.name != "none" and tasks.get(model.config.task.name).has_prefix:
        raise ConfigError("call: got a prefix language model, expected another: no argument says where a prefix ends")
    renamed = origin.convention.renamed
    names = tuple(renamed.get(name, name) for name in argument_names(config, head, origin.convention))
    hides_question = head == "qa" and origin.convention.hides_question
    names += ("question_lengths",) if hides_question else ()
    given = check_arguments(inputs, names)
    given |= {name: given.pop(own) for name, own in renamed.items() if own in given}
    arguments = add_config_flags(given, origin.settings, names)
    arguments, choices = flatten_choices(arguments) if head == "multiple_choice" else (arguments, 0)
    if choices and origin.convention.choices_begin_first and config.head.pooling == "first":
        check_first_slots(arguments)
    by_last = origin.convention.reads_last_token and head == "sequence"
    classifies_last_token = origin.family is not None and (by_last or reads_last_token(config, head))
    classifies_end = reads_end_token(config, head) and not by_last and "input_ids" in arguments
    if classifies_last_token or classifies_end:
        module = build.build(with_slot_head(config))
    arguments, hidden = split_question(origin.settings, arguments) if hides_question else (arguments, None)
    if head == "qa" and origin.convention.spans_read_padding and config.decoder is not None:
        check_spans(arguments, config.decoder.attention.window)
    batch = make_batch(origin.convention, origin.settings, config, head, arguments)
    with_intermediates = needs_intermediates(head, config, arguments)
    logits, sown = apply(module, model.inference_variables(params), batch, with_intermediates, dropout_key)
    if classifies_last_token:
        logits = last_token_logits(origin.settings, logits, arguments, int(config.is_seq2seq))
    elif classifies_end:
        logits = end_logits(origin.settings, logits, arguments)
    logits = logits.reshape(-1, choices) if choices else logits
    logits = logits if hidden is None else logits - HIDDEN_SPAN_SCORE * hidden[..., None]
    if head == "pretraining" and config.head.kind == "slots":
        logits = logits[..., 0]
    loss = compute_loss(head, origin.settings, logits, arguments, origin.convention.labels_are_shares)
    outputs = named_outputs(head, config, logits, loss, sown, arguments)
    has_loss = origin.family is None or "router_aux_loss_coef" in keys.default_values(origin.family)
    outputs = add_router_outputs(outputs, origin.settings, config, sown, arguments, has_loss)
    return Outputs({renamed.get(name, name): value for name, value in outputs.items()})


@functools.partial(jax.jit, static_argnames=("module", "with_intermediates"))
def apply(
    module: nn.Module, variables: PyTree, batch: Batch, with_intermediates: bool, key: Array | None = None
) -> tuple[Any, PyTree]:
    """The module's output, and its intermediates, {} without `with_intermediates`."""
    rngs = {} if key is None else {"dropout": key}
    if not with_intermediates:
        return module.apply(variables, batch, rngs=rngs), {}
    output, sown = module.apply(variables, batch, rngs=rngs, mutable=["intermediates"])
    return output, sown["intermediates"]


def reads_last_token(model: ModelConfig, head: str) -> bool:
    """True if the model is a decoder that classifies the hidden state of a text's last token."""
    top = model.head
    return head == "sequence" and model.encoder is None and top.pooling == "last" and top.width is None


def reads_end_token(model: ModelConfig, head: str) -> bool:
    """True if the model is an encoder-decoder that classifies the slot of the source's last end token, as BART."""
    return head == "sequence" and model.is_seq2seq


def with_slot_head(model: ModelConfig) -> ModelConfig:
    """The model with the decision of its classifier at every slot, by the same parameters."""
    return dataclasses.replace(model, head=dataclasses.replace(model.head, kind="slots"))


def end_logits(settings: Settings, logits: Array, inputs: Mapping[str, Any]) -> Array:
    """The decision `[B, C]` of a decoder's slot where the source has its last end token; without one, of the last slot.

    Raises:
      ConfigError: the decoder's input is not as long as the source.
    """
    ends = jnp.asarray(inputs["input_ids"]) == settings("eos_token_id", 2)
    if ends.shape != logits.shape[:2]:
        got = f"a decoder's input {list(logits.shape[:2])} beside input_ids {list(ends.shape)}"
        raise ConfigError(f"call: got {got}, expected one shape: the slot of the last end token is classified")
    index = jnp.arange(ends.shape[1])
    last = jnp.max(jnp.where(ends, index, -1), axis=1)
    return jnp.take_along_axis(logits, jnp.where(last < 0, index[-1], last)[:, None, None], axis=1)[:, 0]


def last_token_logits(settings: Settings, logits: Array, inputs: Mapping[str, Any], shift: int = 0) -> Array:
    """The decision of the rightmost token that is not padding, by its id and not by the mask; else of the last slot.

    Args:
      shift: slots by which a decoder's input is behind `input_ids`.

    Raises:
      ConfigError: several rows, and config.json names no padding token.
    """
    pad, rows = settings("pad_token_id", None), logits.shape[0]
    if pad is None and rows != 1:
        raise ConfigError(
            f"call: got {rows} rows and no pad_token_id in {settings.path}, expected one row, or a padding token: it "
            "says where each text ends"
        )
    if pad is None or "input_ids" not in inputs:
        return logits[:, -1]
    ids = jnp.asarray(inputs["input_ids"])
    last = jnp.max(jnp.where(ids != pad, jnp.arange(ids.shape[1]), 0), axis=1)
    last = jnp.minimum(last + shift, logits.shape[1] - 1)
    return jnp.take_along_axis(logits, last[:, None, None], axis=1)[:, 0]
