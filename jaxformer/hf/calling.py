"""Their calling convention: argument names to a `Batch`, logits to a loss, and outputs under their names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxformer.config import ConfigError, ModelConfig, StackConfig
from jaxformer.hf.table import Convention, Settings
from jaxformer.registry import nearest
from jaxformer.types import Array, Batch, PyTree, Slots, Stream

MAX_POSITION = 2**31 - 1

IGNORED = -100
"""The label that counts nowhere."""

BOTH = ("output_attentions", "output_hidden_states", "return_dict")
ROUTER = "output_router_logits"
ENCODER = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids")
DECODER = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")
WHOLE = (
    "input_ids", "decoder_input_ids", "token_type_ids", "position_ids", "start_positions", "end_positions",
)  # fmt: skip
"""Arguments of whole numbers; `labels` may be scores."""
SEQ2SEQ = (
    "input_ids", "inputs_embeds", "attention_mask",
    "decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask",
)  # fmt: skip


@jax.tree_util.register_pytree_with_keys_class
class Outputs(dict[str, Any]):
    """Named outputs, by key or attribute, in their order; a pytree, so it passes through jit and grad."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"outputs: got {name!r}, expected one of {', '.join(self)}") from None

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        return [(jax.tree_util.DictKey(name), value) for name, value in self.items()], tuple(self)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: Any) -> Outputs:
        return cls(zip(names, values, strict=True))


def accepted(model: ModelConfig, head: str) -> tuple[str, ...]:
    """The arguments that a call of this model understands."""
    names = SEQ2SEQ if model.encoder is not None and model.decoder is not None else DECODER
    if model.decoder is None:
        kinds = model.encoder is not None and model.encoder.embed.kinds
        names = ENCODER if kinds else DECODER
    labels = {"qa": ("start_positions", "end_positions"), "model": (), "bare": (), "encoder": ()}
    router = (ROUTER,) if has_router(model, head) else ()
    return (*names, *labels.get(head, ("labels",)), *BOTH, *router)


def has_router(model: ModelConfig, head: str) -> bool:
    """Whether a call can return what the routers of a mixture of experts said."""
    return head in ("causal_lm", "model") and model.decoder is not None and model.decoder.moe is not None


def check(inputs: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The arguments that are given, if all are understood."""
    given = {name: value for name, value in inputs.items() if value is not None}
    for name in given:
        if name not in names:
            raise ConfigError(f"call: got {name}, expected some of {', '.join(names)}{nearest(name, names)}")
    if given.get("return_dict", True) is not True:
        raise ConfigError("call: got return_dict False, expected True; `tuple(outputs.values())` is what it returns")
    for name in (*WHOLE, "labels"):
        if name in given:
            _check_numbers(name, given[name])
    return given


def _check_numbers(name: str, value: Any) -> None:
    """Refuses what is no array of numbers, and whole numbers beyond 32 bits, which jax would wrap around."""
    array = value if isinstance(value, (np.ndarray, jax.Array)) else np.asarray(value)
    kinds = (jnp.integer,) if name in WHOLE else (jnp.integer, jnp.floating)
    if not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
        expected = "whole numbers" if name in WHOLE else "numbers"
        raise ConfigError(f"call: got {name} of type {array.dtype}, expected {expected}")
    if array.dtype in (np.int64, np.uint64, np.uint32) and is_known(array) and array.size:
        largest = max(int(array.max()), -int(array.min()))
        if largest > MAX_POSITION:
            raise ConfigError(f"call: got {name} {largest}, expected numbers of 32 bits; check the tokenizer")


def with_defaults(given: dict[str, Any], settings: Settings, names: tuple[str, ...]) -> dict[str, Any]:
    """The arguments, and what config.json says of the outputs where they do not."""
    wished = (name for name in (*BOTH[:2], ROUTER) if name in names and settings(name, False))
    return {**dict.fromkeys(wished, True), **given}


def is_known(x: Any) -> bool:
    """Whether the values of an array can be looked at: not under jit, nor where other processes hold a part."""
    return not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True)


def check_range(name: str, ids: Any, count: int, ignored: int | None = None) -> None:
    """Refuses ids outside of 0 to count - 1, where their values are known. Under jit they become NaN.

    Raises:
      ConfigError: one is outside, and is not `ignored`.
    """
    if not is_known(ids):
        return
    ids = np.asarray(ids)
    outside = (ids < 0) | (ids >= count)
    if ignored is not None:
        outside &= ids != ignored
    if outside.any():
        raise ConfigError(f"call: got {name} {ids[outside][0]}, expected 0 to {count - 1}; check the tokenizer")


def batch_of(
    convention: Convention,
    settings: Settings,
    model: ModelConfig,
    head: str,
    inputs: Mapping[str, Any],
) -> Batch:
    """The streams of a call.

    Padded slots have the outputs of the other library: labels may stand there, a span's scores compete with theirs, and
    a pooler reads the first slot whatever it holds. Their segments are negative (`nn/masks.py`).
    """
    sources = {name: jnp.asarray(value) for name, value in inputs.items() if name not in BOTH}
    if model.decoder is None or model.encoder is None:
        stream = _stream(convention, model.encoder or model.decoder, sources)
        return Batch(stream, None) if model.decoder is None else Batch(None, stream)
    source = _stream(convention, model.encoder, sources)
    if not {"decoder_input_ids", "decoder_inputs_embeds"} & set(sources):
        if "labels" in sources and sources["labels"].ndim == 2:
            sources["decoder_input_ids"] = shift_right(convention, settings, sources["labels"])
        elif "input_ids" in sources and convention.repeats:
            sources["decoder_input_ids"] = shift_right(convention, settings, sources["input_ids"])
        else:
            raise ConfigError("call: got no decoder_input_ids, expected them or labels")
    decoder = {name.removeprefix("decoder_"): x for name, x in sources.items() if name.startswith("decoder_")}
    target = _stream(convention, model.decoder, decoder)
    if head == "sequence" and "input_ids" in sources:
        target = _up_to_the_end(target, sources["input_ids"] == settings("eos_token_id", 2))
    return Batch(source, target)


def _up_to_the_end(target: Stream, ends: Array) -> Stream:
    """The stream without what follows the last end token, whose hidden state decides: a decoder's classifier."""
    index = jnp.arange(ends.shape[1])
    last = jnp.max(jnp.where(ends, index, -1), axis=1, keepdims=True)
    inside = (index <= last) | (last < 0)
    return target._replace(slots=target.slots._replace(segment=jnp.where(inside, target.slots.segment, 0)))


def decides_everywhere(model: ModelConfig, head: str) -> bool:
    """Whether the model is a decoder that classifies the hidden state of a text's last token."""
    top = model.head
    return head == "sequence" and model.encoder is None and top.pooling == "last" and top.width is None


def at_every_slot(model: ModelConfig) -> ModelConfig:
    """The model with the decision of its classifier at every slot, by the same parameters."""
    return dataclasses.replace(model, head=dataclasses.replace(model.head, kind="slots"))


def of_last_token(settings: Settings, logits: Array, inputs: Mapping[str, Any]) -> Array:
    """The decision of the rightmost token that is not padding, by its id and not by the mask; else of the last slot.

    Raises:
      ConfigError: several rows, and config.json names no padding token.
    """
    pad, rows = settings("pad_token_id", None), logits.shape[0]
    if pad is None and rows != 1:
        raise ConfigError(
            f"call: got {rows} rows and no pad_token_id in {settings.where}, expected one row, or a padding token: it "
            "says where each text ends"
        )
    if pad is None or "input_ids" not in inputs:
        return logits[:, -1]
    ids = jnp.asarray(inputs["input_ids"])
    last = jnp.max(jnp.where(ids != pad, jnp.arange(ids.shape[1]), 0), axis=1)
    return jnp.take_along_axis(logits, last[:, None, None], axis=1)[:, 0]


def _stream(convention: Convention, stack: StackConfig, inputs: Mapping[str, Array]) -> Stream:
    pad, encoding = stack.embed.pad, stack.encoding
    if ("input_ids" in inputs) == ("inputs_embeds" in inputs):
        raise ConfigError("call: got both or none of input_ids and inputs_embeds, expected one of them")
    tokens = inputs["input_ids"] if "input_ids" in inputs else inputs["inputs_embeds"]
    if tokens.ndim != (2 if "input_ids" in inputs else 3):
        raise ConfigError(f"call: got inputs of shape {list(tokens.shape)}, expected [batch, length] ids; add an axis")
    shape = tokens.shape[:2]
    if 0 in shape:
        raise ConfigError(f"call: got inputs of shape {list(tokens.shape)}, expected at least one token")
    real = inputs["attention_mask"] if "attention_mask" in inputs else jnp.ones(shape, jnp.int32)
    if real.shape != shape:
        raise ConfigError(f"call: got an attention_mask of shape {list(real.shape)}, expected {list(shape)}")
    real = (real != 0).astype(jnp.int32)
    count = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
    if convention.positions == "ids" and "input_ids" in inputs:
        text = (tokens != pad).astype(jnp.int32)
        count = jnp.cumsum(text, axis=1) * text - 1  # padding: the row before the first position's
    if "position_ids" in inputs:
        first = pad + 1 if convention.positions == "ids" else 0
        count = jnp.broadcast_to(inputs["position_ids"], shape).astype(jnp.int32) - first
    if "input_ids" in inputs:
        check_range("input_ids", tokens, stack.embed.vocab)
    if "token_type_ids" in inputs and stack.embed.kinds:
        check_range("token_type_ids", inputs["token_type_ids"], stack.embed.kinds)
    if encoding.kind == "learned" or encoding.absolute:
        check_range("a position (row of the table)", count + encoding.offset, encoding.max_length)
    elif "position_ids" in inputs:
        check_range("position_ids", count, MAX_POSITION)
    return Stream(tokens, Slots(count, 2 * real - 1), inputs.get("token_type_ids"))


def shift_right(convention: Convention, settings: Settings, labels: Array) -> Array:
    """A decoder's input: its start token, then all labels but the last, with padding for ignored ones."""
    start = settings("decoder_start_token_id", convention.start)
    first = jnp.full((labels.shape[0], 1), start, labels.dtype)
    moved = jnp.concatenate([first, labels[:, :-1]], axis=1)
    return jnp.where(moved == IGNORED, settings("pad_token_id", 0), moved)


def mean_cross_entropy(logits: Array, labels: Array) -> Array:
    """The mean over labels that count; NaN where none does, as theirs."""
    check_range("labels", labels, logits.shape[-1], IGNORED)
    counts = labels != IGNORED
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(counts, labels, 0))
    return jnp.sum(jnp.where(counts, losses, 0.0)) / jnp.sum(counts)


def loss_of(head: str, settings: Settings, logits: Array, inputs: Mapping[str, Any]) -> Array | None:
    """The loss that their model of this head computes, or None without labels."""
    if head == "qa":
        if not {"start_positions", "end_positions"} <= set(inputs):
            return None
        length = logits.shape[1]
        ends = []
        for column, name in enumerate(("start_positions", "end_positions")):
            labels = jnp.clip(jnp.asarray(inputs[name]).reshape(-1), 0, length)
            ends.append(mean_cross_entropy(logits[..., column], jnp.where(labels == length, IGNORED, labels)))
        return sum(ends) / 2
    if "labels" not in inputs:
        return None
    labels = jnp.asarray(inputs["labels"])
    if head == "causal_lm":
        return mean_cross_entropy(logits[:, :-1], labels[:, 1:])
    return sequence_loss(settings, logits, labels) if head == "sequence" else mean_cross_entropy(logits, labels)


def sequence_loss(settings: Settings, logits: Array, labels: Array) -> Array:
    """Cross-entropy, squared error or binary cross-entropy, as `problem_type` or the labels' kind say."""
    kind, classes = settings("problem_type", None), logits.shape[-1]
    if kind is None:
        whole = jnp.issubdtype(labels.dtype, jnp.integer)
        kind = (
            "regression" if classes == 1 else "single_label_classification" if whole else "multi_label_classification"
        )
    if kind == "regression":
        return jnp.mean(jnp.square(logits.reshape(labels.shape) - labels))
    if kind == "multi_label_classification":
        return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, labels.astype(jnp.float32)))
    return mean_cross_entropy(logits, labels.reshape(-1))


def outputs_of(
    head: str, model: ModelConfig, logits: Array, loss: Array | None, sown: PyTree, inputs: Mapping[str, Any]
) -> Outputs:
    """What their model of this head returns."""
    found = Outputs()
    if loss is not None:
        found["loss"] = loss
    side = "encoder" if model.decoder is None else "decoder"
    if head == "qa":
        found |= {"start_logits": logits[..., 0], "end_logits": logits[..., 1]}
    elif head in ("model", "bare", "encoder"):
        found["last_hidden_state"] = sown[side]["output"][0].astype(jnp.float32)
        if model.head.kind == "pooled":
            found["pooler_output"] = logits
    else:
        found["logits"] = logits
    seq2seq = model.encoder is not None and model.decoder is not None
    states, weights = inputs.get("output_hidden_states", False), inputs.get("output_attentions", False)
    for name in ("decoder", "encoder") if seq2seq else (side,):
        prefix = f"{name}_" if seq2seq else ""
        if states:
            found[f"{prefix}hidden_states"] = _hidden_states(sown[name])
        if weights:
            found[f"{prefix}attentions"] = tuple(sown[name]["blocks"]["attention"]["probabilities"][0])
    if seq2seq:
        if weights:
            found["cross_attentions"] = tuple(sown["decoder"]["blocks"]["cross"]["probabilities"][0])
        found["encoder_last_hidden_state"] = sown["encoder"]["output"][0]
    return found


def _hidden_states(sown: PyTree) -> tuple[Array, ...]:
    """Embeddings, then every layer's output, the last one after the final norm: L + 1 arrays `[B, T, D]`."""
    return (sown["input"][0], *sown["blocks"]["output"][0][:-1], sown["output"][0])


def needs_intermediates(head: str, model: ModelConfig, inputs: Mapping[str, Any]) -> bool:
    """Whether a call's outputs hold more than logits."""
    seq2seq = model.encoder is not None and model.decoder is not None
    wished = any(inputs.get(name, False) for name in (*BOTH[:2], ROUTER))
    return seq2seq or head in ("model", "bare", "encoder") or wished


def add_router(
    outputs: Outputs, settings: Settings, model: ModelConfig, sown: PyTree, inputs: Mapping[str, Any]
) -> Outputs:
    """The outputs with `router_logits` and, of a language model, `aux_loss`, which its loss gets with its weight."""
    if not inputs.get(ROUTER, False):
        return outputs
    logits = sown["decoder"]["blocks"]["ffn"]["router_logits"][0]
    found = Outputs(outputs)
    if "logits" in found:
        real = jnp.asarray(inputs.get("attention_mask", jnp.ones(logits.shape[1:3])))
        auxiliary = balance_loss(logits, real, model.decoder.moe.top_k)
        if "loss" in found:
            found["loss"] = found["loss"] + settings("router_aux_loss_coef", 0.001) * auxiliary
            loss = {"loss": found.pop("loss")}
        else:
            loss = {}
        found = Outputs({**loss, "aux_loss": auxiliary, **found})
    found["router_logits"] = tuple(logits.reshape(len(logits), -1, logits.shape[-1]))
    return found


def balance_loss(logits: Array, real: Array, top_k: int) -> Array:
    """E sum_e f_e P_e: f_e assignments to expert e and P_e its probability, a token and layer of all (Switch).

    Args:
      logits: of the routers, `[L, B, T, E]`.
      real: `[B, T]`, 0 at padding.
      top_k: experts that serve a token.
    """
    experts, weight = logits.shape[-1], jnp.broadcast_to(real.astype(jnp.float32), logits.shape[:3])
    probabilities = jax.nn.softmax(logits)
    chosen = jax.nn.one_hot(jax.lax.top_k(probabilities, top_k)[1], experts).sum(axis=-2)
    total = jnp.sum(weight)
    share, mean = (jnp.einsum("lbte,lbt->e", x, weight) / total for x in (chosen, probabilities))
    return experts * jnp.sum(share * mean)
