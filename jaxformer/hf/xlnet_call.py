"""XLNet's forward pass under the other library's names: permutations, targets and memories of earlier texts."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxformer.errors import ConfigError
from jaxformer.hf.arguments import add_config_flags, check_arguments, make_batch
from jaxformer.hf.origin import HuggingFaceOrigin
from jaxformer.hf.outputs import Outputs, compute_loss
from jaxformer.model import Model
from jaxformer.models.xlnet import Streams, XLNet
from jaxformer.tasks._tokens import read_stream
from jaxformer.types import Array, PyTree, Slots, Stream

NAMES = (
    "input_ids", "inputs_embeds", "attention_mask", "input_mask", "token_type_ids", "perm_mask", "target_mapping",
    "mems", "use_mems", "output_hidden_states", "return_dict",
)  # fmt: skip


def call(
    model: Model, origin: HuggingFaceOrigin, params: PyTree, dropout_key: Array | None, inputs: Mapping[str, Any]
) -> Outputs:
    """The outputs of a call; see `forward.call`.

    Outputs hold `mems`, a `[S, B, D]` array per layer, unless `use_mems` (or what the config says of it) is False.

    Raises:
      ConfigError: an argument is unknown, or does not fit the others.
    """
    labels = {"qa": ("start_positions", "end_positions"), "model": ()}
    names = (*NAMES, *labels.get(origin.head, ("labels",)))
    arguments = add_config_flags(check_arguments(inputs, names), origin.settings, names)
    source = _source(model, origin, arguments)
    batch_size, length = source.tokens.shape[:2]
    hidden = _argument(arguments, "perm_mask", (batch_size, length, length))
    targets = _argument(arguments, "target_mapping", (batch_size, None, length))
    memory = _stack_memory(arguments["mems"], model) if "mems" in arguments else None
    hidden = None if hidden is None else hidden > 0
    variables = model.inference_variables(params)
    streams, logits = _run(model.module, variables, source, hidden, targets, memory, dropout_key)
    return _named_outputs(origin, streams, logits, arguments, training=dropout_key is not None)


@functools.partial(jax.jit, static_argnames="module")
def _run(
    module: nn.Module,
    variables: PyTree,
    source: Stream,
    hidden: Array | None,
    targets: Array | None,
    memory: Array | None,
    key: Array | None,
) -> tuple[Streams, Array]:
    """The streams and the logits. The head reads padding like text, as the other library's does."""
    slots = Slots(source.slots.position, jnp.ones_like(source.slots.segment))

    def streams_and_logits(module: XLNet) -> tuple[Streams, Array]:
        streams = module.streams(source, hidden, targets, memory)
        return streams, module.logits(streams, slots)

    outputs: Any = module.apply(variables, method=streams_and_logits, rngs={} if key is None else {"dropout": key})
    return outputs


def _source(model: Model, origin: HuggingFaceOrigin, given: Mapping[str, Any]) -> Stream:
    """The input stream; positions count padding and text alike."""
    if "attention_mask" in given and "input_mask" in given:
        raise ConfigError("call: got attention_mask and input_mask, expected one; the second is 1 at padding")
    inputs = {
        name: jnp.asarray(given[name]) for name in ("input_ids", "inputs_embeds", "token_type_ids") if name in given
    }
    if "attention_mask" in given:
        inputs["attention_mask"] = jnp.asarray(given["attention_mask"])
    if "input_mask" in given:
        inputs["attention_mask"] = jnp.asarray(given["input_mask"]) == 0
    return read_stream(make_batch(origin.convention, origin.settings, model.config.model, "", inputs), "source")


def _argument(given: Mapping[str, Any], name: str, shape: tuple[int | None, ...]) -> Array | None:
    """The argument of this name as an array of `shape`, where None is any size; None if it is absent.

    Raises:
      ConfigError: it has another shape.
    """
    if name not in given:
        return None
    value = jnp.asarray(given[name])
    if value.ndim != len(shape) or any(size not in (None, got) for got, size in zip(value.shape, shape, strict=True)):
        expected = [size or "targets" for size in shape]
        raise ConfigError(f"call: got {name} of shape {list(value.shape)}, expected {expected}")
    return value


def _stack_memory(mems: Sequence[Array], model: Model) -> Array:
    """`[L, B, S, D]` from one array `[S, B, D]` per layer."""
    encoder = model.config.model.encoder
    layers = 0 if encoder is None else encoder.layers
    if len(mems) != layers:
        raise ConfigError(f"call: got mems of {len(mems)} layers, expected {layers}")
    return jnp.swapaxes(jnp.stack([jnp.asarray(layer) for layer in mems]), 1, 2)


def _named_outputs(
    origin: HuggingFaceOrigin, streams: Streams, logits: Array, given: Mapping[str, Any], training: bool
) -> Outputs:
    """The outputs under the other library's names."""
    outputs, head = Outputs(), origin.head
    unshifted = "token" if head == "causal_lm" else head  # a token is its own label, not the next one's
    loss = compute_loss(unshifted, origin.settings, logits, given)
    if loss is not None:
        outputs["loss"] = loss
    if head == "qa":
        outputs |= {"start_logits": logits[..., 0], "end_logits": logits[..., 1]}
    else:
        outputs["last_hidden_state" if head == "model" else "logits"] = logits
    mode = ("use_mems_train", False) if training else ("use_mems_eval", True)
    if given["use_mems"] if "use_mems" in given else origin.settings(*mode):
        outputs["mems"] = tuple(jnp.swapaxes(streams.memory, 1, 2))
    if given.get("output_hidden_states", False):
        both = (streams.content,) if streams.query is None else (streams.content, streams.query)
        outputs["hidden_states"] = tuple(states for layer in zip(*both, strict=True) for states in layer)
    return outputs
