"""Weight-only int8 quantization for decoding: each token reads a quarter of the bytes of float32 weights.

A kernel W becomes round(W / s). The scale s is the largest |W| of an output channel divided by 127; for an embedding
table, of a token's row. A product x W becomes (x round(W / s)) s. Hidden states and products stay in the compute
precision, so no calibration data is needed (Krishnamoorthi 2018: symmetric, one scale per channel, weights only).

All kernels of `Dense` and `ChunkDense`, `Embed` tables and the kernels of untied heads are quantized. Biases, norms,
recurrent kernels and experts are not.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Float, Float32, Int8

from jaxformer.models import build
from jaxformer.nn.heads import Head
from jaxformer.nn.layers import ChunkDense, Dense, Embed
from jaxformer.types import Array, PyTree


class Weight(NamedTuple):
    """A parameter to quantize: its name in the layer, and how many of its last axes are inputs and outputs."""

    name: str
    input_axes: int
    output_axes: int


def quantize(module: nn.Module, variables: PyTree) -> PyTree:
    """Variables with int8 kernels and tables, and a float32 `kernel_scale` or `table_scale` beside each."""

    def quantize_layer(params: PyTree, path: tuple[str, ...], weight: Weight) -> PyTree:
        if path:
            return {**params, path[0]: quantize_layer(params[path[0]], path[1:], weight)}
        values, scale = round_to_int8(params[weight.name], weight.input_axes, weight.output_axes)
        return {**params, weight.name: values, f"{weight.name}_scale": scale}

    params = variables["params"]
    for path, weight in quantized_weights(module).items():
        params = quantize_layer(params, path, weight)
    return {**variables, "params": params}


def round_to_int8(
    kernel: Float[Array, "..."], input_axes: int, output_axes: int
) -> tuple[Int8[Array, "..."], Float32[Array, "..."]]:
    """Rounded kernels, and their scales without the input axes, one per output channel.

    Args:
      kernel: kernels whose last axes are `input_axes` input and then `output_axes` output axes.
    """
    axes = tuple(range(kernel.ndim - output_axes - input_axes, kernel.ndim - output_axes))
    kernel = kernel.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(kernel), axis=axes, keepdims=True), jnp.finfo(jnp.float32).tiny) / 127.0
    return jnp.round(kernel / scale).astype(jnp.int8), jnp.squeeze(scale, axes)


def quantized_weights(module: nn.Module) -> dict[tuple[str, ...], Weight]:
    """The parameters to quantize, by the path of their layer in the parameter tree."""
    weights: dict[tuple[str, ...], Weight] = {}

    def record(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        layer = context.module
        if isinstance(layer, Dense):
            weights[layer.path] = Weight("kernel", layer.inputs, len(layer.shape) - layer.inputs)
        elif isinstance(layer, ChunkDense):
            weights[layer.path] = Weight("kernel", 1, 1)
        elif isinstance(layer, Embed):
            weights[layer.path] = Weight("table", 1, 0)
        elif isinstance(layer, Head) and layer.has_matrix:
            weights[layer.path] = Weight("kernel", 1, 1)
        return call(*args, **kwargs)

    with nn.intercept_methods(record):
        jax.eval_shape(lambda: build.init_variables(module, jax.random.key(0)))
    return weights
