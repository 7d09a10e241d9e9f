"""XLNet's calling convention: permutations, targets and memories beside what other encoders are called with."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxformer.config import ConfigError
from jaxformer.hf import calling
from jaxformer.hf.calling import Outputs
from jaxformer.models.xlnet import Streams, XLNet
from jaxformer.types import Array, PyTree, Slots, Stream

if TYPE_CHECKING:
    from jaxformer.hf.pretrained import Pretrained

NAMES = (
    "input_ids", "inputs_embeds", "attention_mask", "input_mask", "token_type_ids", "perm_mask", "target_mapping",
    "mems", "use_mems", "output_hidden_states", "return_dict",
)  # fmt: skip


def call(model: Pretrained, params: PyTree, dropout_key: Any, inputs: Mapping[str, Any]) -> Outputs:
    """What their model returns for these arguments; see `Pretrained.__call__`.

    Outputs hold `mems`, a `[S, B, D]` array a layer, unless `use_mems` (or what the config says of it) is False.

    Raises:
      ConfigError: an argument is unknown, or does not fit the others.
    """
    labels = {"qa": ("start_positions", "end_positions"), "model": ()}
    names = (*NAMES, *labels.get(model.head, ("labels",)))
    given = calling.with_defaults(calling.check(inputs, names), model.settings, names)
    source = _source(model, given)
    shape = source.tokens.shape[:2]
    hidden = _shaped(given, "perm_mask", (*shape, shape[1]))
    targets = _shaped(given, "target_mapping", (shape[0], None, shape[1]))
    memory = _memory(given["mems"], model) if "mems" in given else None
    variables = {**model._variables, "params": params}
    hidden = None if hidden is None else hidden > 0
    streams, logits = _run(model.module, variables, source, hidden, targets, memory, dropout_key)
    return _outputs(model, streams, logits, given, training=dropout_key is not None)


@functools.partial(jax.jit, static_argnames="module")
def _run(
    module: XLNet,
    variables: PyTree,
    source: Stream,
    hidden: Array | None,
    targets: Array | None,
    memory: Array | None,
    key: Any,
) -> tuple[Streams, Array]:
    """The streams and the head's word on them. To the head all slots are real, as to theirs: it may read padding."""
    slots = Slots(source.slots.position, jnp.ones_like(source.slots.segment))

    def whole(module: XLNet) -> tuple[Streams, Array]:
        streams = module.streams(source, hidden, targets, memory)
        return streams, module.logits(streams, slots)

    return module.apply(variables, method=whole, rngs={} if key is None else {"dropout": key})


def _source(model: Pretrained, given: Mapping[str, Any]) -> Stream:
    """The stream, at positions counted from 0 over padding and text alike."""
    if "attention_mask" in given and "input_mask" in given:
        raise ConfigError("call: got attention_mask and input_mask, expected one; the second is 1 at padding")
    inputs = {
        name: jnp.asarray(given[name]) for name in ("input_ids", "inputs_embeds", "token_type_ids") if name in given
    }
    if "attention_mask" in given:
        inputs["attention_mask"] = jnp.asarray(given["attention_mask"])
    if "input_mask" in given:
        inputs["attention_mask"] = jnp.asarray(given["input_mask"]) == 0
    return calling.batch_of(model.convention, model.settings, model.config.model, "", inputs).source


def _shaped(given: Mapping[str, Any], name: str, shape: tuple[int | None, ...]) -> Array | None:
    """An argument, if it is given, whose shape must be `shape`; None is any size."""
    if name not in given:
        return None
    value = jnp.asarray(given[name])
    if value.ndim != len(shape) or any(size not in (None, got) for got, size in zip(value.shape, shape, strict=True)):
        expected = [size or "targets" for size in shape]
        raise ConfigError(f"call: got {name} of shape {list(value.shape)}, expected {expected}")
    return value


def _memory(mems: Sequence[Array], model: Pretrained) -> Array:
    """`[L, B, S, D]` of a `[S, B, D]` array a layer."""
    if len(mems) != model.config.model.encoder.layers:
        raise ConfigError(f"call: got mems of {len(mems)} layers, expected {model.config.model.encoder.layers}")
    return jnp.swapaxes(jnp.stack([jnp.asarray(layer) for layer in mems]), 1, 2)


def _outputs(model: Pretrained, streams: Streams, logits: Array, given: Mapping[str, Any], training: bool) -> Outputs:
    found, head = Outputs(), model.head
    unshifted = "token" if head == "causal_lm" else head  # a token is not the next one's label, it is its own
    loss = calling.loss_of(unshifted, model.settings, logits, given)
    if loss is not None:
        found["loss"] = loss
    if head == "qa":
        found |= {"start_logits": logits[..., 0], "end_logits": logits[..., 1]}
    else:
        found["last_hidden_state" if head == "model" else "logits"] = logits
    mode = ("use_mems_train", False) if training else ("use_mems_eval", True)
    if given["use_mems"] if "use_mems" in given else model.settings(*mode):
        found["mems"] = tuple(jnp.swapaxes(streams.memory, 1, 2))
    if given.get("output_hidden_states", False):
        both = (streams.content,) if streams.query is None else (streams.content, streams.query)
        found["hidden_states"] = tuple(states for layer in zip(*both, strict=True) for states in layer)
    return found
