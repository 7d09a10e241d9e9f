"""The forward pass of a model as an ONNX file. `onnx_decoding` exports a step of decoding.

The package jax2onnx converts the operations (extra `[onnx]`). It is given what JAX has traced, since it changes
functions of jax while it traces a model itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import os
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
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
    target = new_path("export_onnx", path)
    check_model("export_onnx", config)
    inputs = program_inputs("export_onnx", config, length, rows)
    module = module.clone(config=with_dense_attention(config))
    names: list[str] = []

    def run(*arrays: Array) -> list[Array]:
        outputs: Any = module.apply(variables, batch_of(dict(zip(inputs, arrays, strict=True))))
        named = outputs._asdict() if isinstance(outputs, RelationLogits) else {"logits": outputs}
        names[:] = named
        return list(named.values())

    convert, save = converter("export_onnx")
    model = convert(run, inputs, names, target.stem)
    with folder_beside(target) as partial:
        save(model, partial / target.name)
        for file in sorted(partial.iterdir(), reverse=True):  # the parameters before the file that names them
            file.rename(target.parent / file.name)
    return target


@contextlib.contextmanager
def folder_beside(target: Path) -> Generator[Path]:
    """A folder beside `target` for files that are not whole yet. It and what is left in it are removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as partial:
        yield Path(partial)


def new_path(command: str, path: str | os.PathLike[str]) -> Path:
    """The path as a `Path`.

    Raises:
      ConfigError: it exists.
    """
    target = Path(path)
    if target.exists():
        raise ConfigError(f"{command}: got {target}, which exists, expected a new file; choose another name")
    return target


def check_model(command: str, config: ModelConfig) -> None:
    """Refuses models whose programs cannot be exported.

    Raises:
      ConfigError: the model is such a one.
    """
    if config.dtype != "float32":
        raise ConfigError(f"{command}: got a model that computes in {config.dtype}, expected float32")
    if config.permutation is not None or config.generator is not None:
        raise ConfigError(f"{command}: got a model of permutations or with a generator, which is not supported")


def with_dense_attention(config: ModelConfig) -> ModelConfig:
    """`config` with the attention kernel "dense" in place of "auto", which may take one that jax2onnx does not know."""
    sides = {}
    for side in ("encoder", "decoder"):
        stack = getattr(config, side)
        if stack is not None and stack.attention.kernel == "auto":
            sides[side] = dataclasses.replace(stack, attention=dataclasses.replace(stack.attention, kernel="dense"))
    return dataclasses.replace(config, **sides)


def check_sizes(command: str, **sizes: int | None) -> None:
    """Refuses sizes below 1.

    Raises:
      ConfigError: one is.
    """
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ConfigError(f"{command}: got {name} {size}, expected at least 1")


def batch_size(rows: int | None) -> Any:
    """The number of rows, a symbol if there may be any."""
    return jax.export.symbolic_shape("rows")[0] if rows is None else rows


def program_inputs(command: str, config: ModelConfig, length: int, rows: int | None) -> dict[str, Any]:
    """Shapes and dtypes of the inputs of a forward pass, by name."""
    check_sizes(command, length=length, rows=rows)
    sides = [side for side, reads in (("source", config.has_encoder), ("target", config.has_decoder)) if reads]
    size = batch_size(rows)
    return {name: spec for side in sides for name, spec in side_inputs(config, side, size, length).items()}


Convert = Callable[[Callable[..., Sequence[Array]], Mapping[str, Any], Sequence[str], str], Any]
"""A program as an ONNX model: `(program, inputs by name, names of outputs, title)`. The names may be set by tracing."""


def converter(command: str) -> tuple[Convert, Callable[[Any, Path], None]]:
    """The conversion of a program, and the function that writes its result: `(model, file)`.

    Raises:
      ConfigError: a package is missing. The conversion raises it where an operation has no ONNX form.
    """
    to_onnx, write = _packages(command)

    def convert(
        program: Callable[..., Sequence[Array]], inputs: Mapping[str, Any], outputs: Sequence[str], title: str
    ) -> Any:
        compute = jaxpr_as_fun(jax.make_jaxpr(program)(*inputs.values()))
        level = logging.root.manager.disable
        logging.disable(logging.WARNING)  # hundreds of notes on shapes of constants
        try:
            return to_onnx(
                lambda *arrays: tuple(compute(*arrays)),
                list(inputs.values()),
                model_name=title,
                input_names=list(inputs),
                output_names=list(outputs),
            )
        except (NotImplementedError, TypeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"{command}: got a model that jax2onnx cannot convert ({reason}), expected another"
            ) from None
        finally:
            logging.disable(level)

    def save(model: Any, file: Path) -> None:
        parameters = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
        write(model, file, save_as_external_data=parameters > LARGEST, location=f"{file.name}.data")

    return convert, save


def side_inputs(config: ModelConfig, side: str, rows: Any, length: int) -> dict[str, Any]:
    """The inputs of one side, by name."""
    part = config.encoder_part if side == "source" else config.decoder_part
    if side == "source" and config.series is not None:
        tokens = jax.ShapeDtypeStruct((rows, length, config.series.channels or 1), jnp.float32)
    else:
        tokens = ints(rows, length)
    inputs = {f"{side}_tokens": tokens, f"{side}_segment": ints(rows, length)}
    if part is not None and part.embed.kinds:
        inputs[f"{side}_token_type"] = ints(rows, length)
    return inputs


def batch_of(arrays: Mapping[str, Array]) -> Batch:
    """The batch of a program's inputs. Positions count the tokens of a row, so that padding may be on either side."""

    def stream(side: str) -> Stream | None:
        if f"{side}_tokens" not in arrays:
            return None
        segment = arrays[f"{side}_segment"]
        position = jnp.maximum(jnp.cumsum(segment, axis=1) - 1, 0)
        return Stream(arrays[f"{side}_tokens"], Slots(position, segment), arrays.get(f"{side}_token_type"))

    return Batch(stream("source"), stream("target"))


def ints(*shape: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an int32 input."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _packages(command: str) -> tuple[Callable[..., Any], Callable[..., None]]:
    """The converter, and the function that writes what it makes."""
    try:
        converter, onnx = importlib.import_module("jax2onnx"), importlib.import_module("onnx")
    except ImportError as error:
        raise ConfigError(
            f"{command}: got no package {error.name}, expected it; pip install 'jaxformer[onnx]'"
        ) from None
    return converter.to_onnx, onnx.save
