"""One step of decoding as an ONNX file: a token and the key-value cache in, logits and the cache out.

Layers are exported one after the other, each with its own parameters and cache, whatever `unroll` says: the converter
takes minutes for a scan that carries a cache.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Int

from jaxformer.bridges import onnx
from jaxformer.config import ModelConfig, StackConfig
from jaxformer.decode.runner import max_positions
from jaxformer.errors import ConfigError
from jaxformer.models import build
from jaxformer.nn.cache import KeyValues, TransformerState
from jaxformer.types import Array, PyTree, Slots

COMMAND = "export_onnx_step"


class Program(NamedTuple):
    """A function of arrays, with the shapes of its inputs by name in their order, and the names of its outputs."""

    function: Callable[..., list[Array]]
    inputs: dict[str, Any]
    outputs: list[str]


def export(
    variables: Mapping[str, PyTree],
    config: ModelConfig,
    directory: str | os.PathLike[str],
    length: int,
    source_length: int | None = None,
    rows: int | None = None,
    vocab: int | None = None,
) -> Path:
    """Writes a directory with `step.onnx`, and for an encoder-decoder `source.onnx`; shapes are in `docs/bridges.md`.

    The step writes a token of every row to the slot `index` and gives the logits of the next one. Positions count the
    slots of a row with segment 1, so prompts of a batch may be padded on either side.

    Args:
      length: slots of the cache: prompt, padding and new tokens.
      source_length: slots of the source, for a model with an encoder; shorter sources are padded.
      rows: texts of a call; None: any number.
      vocab: number of tokens; further logits, which pad the table for even shards, are left out. None: all.

    Raises:
      ConfigError: a package is missing, the model has no step that can be exported, a number is below 1 or beyond the
        model's positions, or the directory exists.
    """
    target = onnx.new_path(COMMAND, directory)
    found = programs(variables, config, length, source_length, rows, vocab)
    convert, save = onnx.converter(COMMAND)
    models = {f"{name}.onnx": convert(*program, name) for name, program in found.items()}
    with onnx.folder_beside(target) as partial:
        (partial / target.name).mkdir()
        for name, model in models.items():
            save(model, partial / target.name / name)
        (partial / target.name).rename(target)
    return target


def programs(
    variables: Mapping[str, PyTree],
    config: ModelConfig,
    length: int,
    source_length: int | None = None,
    rows: int | None = None,
    vocab: int | None = None,
) -> dict[str, Program]:
    """The programs that `export` writes, by the names of their files. Arguments and errors are those of `export`."""
    onnx.check_model(COMMAND, config)
    decoder = _decoder(config, length, source_length)
    onnx.check_sizes(COMMAND, length=length, source_length=source_length, rows=rows)
    config = dataclasses.replace(config, decoder=dataclasses.replace(decoder, unroll=decoder.layers))
    module: Any = build.build(onnx.with_dense_attention(config))
    variables, count = module.unstack(variables), onnx.batch_size(rows)
    inputs, found = _inputs(module, variables, count, length), {}
    if source_length is not None:
        source = onnx.side_inputs(config, "source", count, source_length)
        reader, names = _reader(module, variables, list(source)), _names("memory", decoder.layers)
        found["source"] = Program(reader, source, names)
        memory = dict(zip(names, jax.eval_shape(reader, *source.values()), strict=True))
        inputs |= memory | {"source_segment": source["source_segment"]}
    outputs = ["logits", *_names("present", decoder.layers)]
    return {**found, "step": Program(_step(module, variables, decoder.layers, vocab, list(inputs)), inputs, outputs)}


def _decoder(config: ModelConfig, length: int, source_length: int | None) -> StackConfig:
    """The decoder of a model whose step can be exported.

    Raises:
      ConfigError: the model has none, or what it reads beside its cache is not part of a step.
    """
    decoder = config.decoder
    if decoder is None or decoder.causal is False or config.head.kind != "tokens":
        raise ConfigError(f"{COMMAND}: got a model without a causal decoder of tokens, expected one; use export_onnx")
    if decoder.delta is not None:
        raise ConfigError(f"{COMMAND}: got layers of the gated delta rule, whose state is not exported")
    if config.head.copy:
        raise ConfigError(f"{COMMAND}: got a head that copies from the source, which is not supported")
    if config.encoder is None and source_length is not None:
        raise ConfigError(f"{COMMAND}: got source_length for a model without an encoder, expected None; leave it out")
    if config.encoder is not None and source_length is None:
        raise ConfigError(f"{COMMAND}: got no source_length, expected the slots of the encoder; set it")
    for name, stack, slots in (("length", decoder, length), ("source_length", config.encoder, source_length)):
        positions = max_positions(stack)
        if positions is not None and slots is not None and slots > positions:
            raise ConfigError(f"{COMMAND}: got {name} {slots}, expected at most the model's {positions} positions")
    return decoder


def _reader(module: Any, variables: Mapping[str, PyTree], names: list[str]) -> Any:
    """The program of a source: keys and values of cross-attention for each layer."""

    def cross_attention(module: Any, batch: Any) -> Any:
        source = module.read(batch)[0].side("source")
        return module.decoder.project_memory(module.memory(module.encode_slots(source)))

    def read(*arrays: Array) -> list[Array]:
        batch = onnx.batch_of(dict(zip(names, arrays, strict=True)))
        return jax.tree.leaves(nn.apply(cross_attention, module)(variables, batch))

    return read


def _step(module: Any, variables: Mapping[str, PyTree], layers: int, vocab: int | None, names: list[str]) -> Any:
    """The program of a step."""

    def step(*arrays: Array) -> list[Array]:
        values = dict(zip(names, arrays, strict=True))
        segment, index = values["segment"], values["index"]
        slots = _slots(segment)
        state = TransformerState(
            keys_values=_key_values(values, "past", layers),
            slots=slots,
            index=index,
            position=jax.lax.dynamic_index_in_dim(slots.position, index, axis=1, keepdims=False),
        )
        if "source_segment" in values:
            memory_slots = _slots(values["source_segment"])
            state = state.replace(memory=_key_values(values, "memory", layers), memory_slots=memory_slots)
        logits, state = module.apply(variables, values["tokens"], state, method=_apply_step)
        return [logits[:, :vocab], *jax.tree.leaves(state.keys_values)]

    return step


def _apply_step(module: Any, tokens: Int[Array, "B 1"], state: TransformerState) -> Any:
    """Logits `[B, V]` and the new state. The segment of the token is that of its slot: 0 where a row has padding."""
    segment = jax.lax.dynamic_slice_in_dim(state.slots.segment, state.index, 1, axis=1)
    slots = Slots(state.position[:, None], segment)
    x, state = module.advance(onnx.Stream(tokens, slots), state)
    return module.decoded_logits(x, slots, segment, state)[:, 0], state


def _slots(segment: Int[Array, "B S"]) -> Slots:
    """Slots whose positions count the tokens of a row."""
    return Slots(jnp.maximum(jnp.cumsum(segment, axis=1) - 1, 0), segment)


def _inputs(module: Any, variables: Mapping[str, PyTree], rows: Any, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The inputs of a step by name, without those of a source."""
    empty = lambda module: module.decoder.empty_cache(rows, length, jnp.dtype(jnp.float32))  # noqa: E731
    cache = jax.eval_shape(lambda: nn.apply(empty, module)(variables))
    inputs = {"tokens": onnx.ints(rows, 1), "index": onnx.ints(), "segment": onnx.ints(rows, length)}
    return inputs | dict(zip(_names("past", len(cache)), jax.tree.leaves(cache), strict=True))


def _names(prefix: str, layers: int) -> list[str]:
    return [f"{prefix}.{layer}.{part}" for layer in range(layers) for part in ("key", "value")]


def _key_values(values: Mapping[str, Array], prefix: str, layers: int) -> tuple[KeyValues, ...]:
    return tuple(KeyValues(values[f"{prefix}.{i}.key"], values[f"{prefix}.{i}.value"]) for i in range(layers))
