"""The forward pass of a model as an ONNX file. A step of decoding is not exported.

The package jax2onnx converts the operations (extra `[onnx]`). It is given what JAX has traced, since it changes
functions of jax while it traces a model itself.
"""

from __future__ import annotations

import importlib
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.extend.core import jaxpr_as_fun

from jaxformer.config import ModelConfig
from jaxformer.errors import ConfigError
from jaxformer.types import Array, Batch, PyTree, RelationLogits, Slots, Stream

LARGEST = 2**31 - 2**20
"""Most bytes of parameters in the file itself, which may have 2 GiB; more are in a file beside it."""


def export(
    module: nn.Module,
    variables: Mapping[str, PyTree],
    config: ModelConfig,
    path: str | os.PathLike[str],
    length: int,
    rows: int | None = None,
) -> Path:
    """Writes an ONNX file that computes what the module does for a batch.

    Inputs are int32 `[rows, length]`: `source_tokens` and `source_segment` (1 for a token, 0 for padding, on either
    side) of a model with an encoder, `target_tokens` and `target_segment` of one with a decoder, `source_token_type`
    where the model has types; the tokens of a series are float32 `[rows, length, channels]`. The output is `logits`,
    float32; a head with a second loss has its outputs under their names.

    Args:
      length: slots of each side, shorter inputs are padded; a series has as many time steps.
      rows: texts of a call; None: any number.

    Raises:
      ConfigError: jax2onnx is not installed, the model computes in bfloat16 or is of a kind that is not supported, a
        number is below 1, or the file exists.
    """
    target = Path(path)
    if target.exists():
        raise ConfigError(f"export_onnx: got {target}, which exists, expected a new file; choose another name")
    for name, number in (("length", length), ("rows", rows)):
        if number is not None and number < 1:
            raise ConfigError(f"export_onnx: got {name} {number}, expected at least 1")
    if config.dtype != "float32":
        raise ConfigError(f"export_onnx: got a model that computes in {config.dtype}, expected float32")
    if config.permutation is not None or config.generator is not None:
        raise ConfigError("export_onnx: got a model of permutations or with a generator, which is not supported")
    convert, save = _packages()
    size: Any = jax.export.symbolic_shape("rows")[0] if rows is None else rows
    sides = [side for side, reads in (("source", config.has_encoder), ("target", config.has_decoder)) if reads]
    inputs = {name: spec for side in sides for name, spec in _side(config, side, size, length).items()}
    names: list[str] = []

    def run(*arrays: Array) -> list[Array]:
        outputs: Any = module.apply(variables, _batch(dict(zip(inputs, arrays, strict=True))))
        named = outputs._asdict() if isinstance(outputs, RelationLogits) else {"logits": outputs}
        names[:] = named
        return list(named.values())

    compute = jaxpr_as_fun(jax.make_jaxpr(run)(*inputs.values()))
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # hundreds of notes on shapes of constants
    try:
        model = convert(
            lambda *arrays: tuple(compute(*arrays)),
            list(inputs.values()),
            model_name=target.stem,
            input_names=list(inputs),
            output_names=names,
        )
    finally:
        logging.disable(level)
    target.parent.mkdir(parents=True, exist_ok=True)
    parameters = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as partial:
        written = Path(partial) / target.name
        save(model, written, save_as_external_data=parameters > LARGEST, location=f"{target.name}.data")
        for file in sorted(written.parent.iterdir(), reverse=True):  # the parameters before the file that names them
            file.rename(target.parent / file.name)
    return target


def _side(config: ModelConfig, side: str, rows: Any, length: int) -> dict[str, Any]:
    """The inputs of one side, by name."""
    part = config.encoder_part if side == "source" else config.decoder_part
    if side == "source" and config.series is not None:
        tokens = jax.ShapeDtypeStruct((rows, length, config.series.channels or 1), jnp.float32)
    else:
        tokens = _ints(rows, length)
    inputs = {f"{side}_tokens": tokens, f"{side}_segment": _ints(rows, length)}
    if part is not None and part.embed.kinds:
        inputs[f"{side}_token_type"] = _ints(rows, length)
    return inputs


def _batch(arrays: Mapping[str, Array]) -> Batch:
    """The batch of a program's inputs. Positions count the tokens of a row, so that padding may be on either side."""

    def stream(side: str) -> Stream | None:
        if f"{side}_tokens" not in arrays:
            return None
        segment = arrays[f"{side}_segment"]
        position = jnp.maximum(jnp.cumsum(segment, axis=1) - 1, 0)
        return Stream(arrays[f"{side}_tokens"], Slots(position, segment), arrays.get(f"{side}_token_type"))

    return Batch(stream("source"), stream("target"))


def _ints(*shape: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _packages() -> tuple[Callable[..., Any], Callable[..., None]]:
    """The converter, and the function that writes what it makes."""
    try:
        converter, onnx = importlib.import_module("jax2onnx"), importlib.import_module("onnx")
    except ImportError as error:
        raise ConfigError(
            f"export_onnx: got no package {error.name}, expected it; pip install 'jaxformer[onnx]'"
        ) from None
    return converter.to_onnx, onnx.save
