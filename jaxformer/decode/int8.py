"""Weights as integers of 8 bits, for decoding: a quarter of the bytes that every token reads.

A kernel W becomes round(W / s), where s is the largest |W| of an output channel divided by 127 (of a token's row, for
an embedding table), and x W becomes (x round(W / s)) s: hidden states stay in the compute precision and products in
its, so no data is needed to find scales (Krishnamoorthi 2018: symmetric, a scale a channel, weights only). All `Dense`
kernels, `Embed` tables and the kernels of untied heads are replaced; biases, norms, recurrent kernels and experts are
not.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Float, Float32, Int8

from jaxformer.models import build
from jaxformer.nn.heads import Head
from jaxformer.nn.layers import Dense, Embed
from jaxformer.types import Array, PyTree


def quantized(module: nn.Module, variables: PyTree) -> PyTree:
    """The variables of `module` with int8 kernels and tables, and a `kernel_scale` or `table_scale` beside each."""

    def changed(part: PyTree, path: tuple[str, ...], name: str, inputs: int, outputs: int) -> PyTree:
        if path:
            return {**part, path[0]: changed(part[path[0]], path[1:], name, inputs, outputs)}
        values, scale = rounded(part[name], inputs, outputs)
        return {**part, name: values, f"{name}_scale": scale}

    params = variables["params"]
    for path, what in places(module).items():
        params = changed(params, path, *what)
    return {**variables, "params": params}


def rounded(kernel: Float[Array, "..."], inputs: int, outputs: int) -> tuple[Int8[Array, "..."], Float32[Array, "..."]]:
    """The integers and the scales, one an output, of kernels that end in so many input and output axes."""
    summed = tuple(range(kernel.ndim - outputs - inputs, kernel.ndim - outputs))
    kernel = kernel.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(kernel), axis=summed, keepdims=True), jnp.finfo(jnp.float32).tiny) / 127.0
    return jnp.round(kernel / scale).astype(jnp.int8), jnp.squeeze(scale, summed)


def places(module: nn.Module) -> dict[tuple[str, ...], tuple[str, int, int]]:
    """Where in the parameters what is replaced lies: path -> (name, input axes, output axes)."""
    found: dict[tuple[str, ...], tuple[str, int, int]] = {}

    def note(call, args, kwargs, context):
        layer = context.module
        if isinstance(layer, Dense):
            found[layer.path] = ("kernel", layer.inputs, len(layer.shape) - layer.inputs)
        elif isinstance(layer, Embed):
            found[layer.path] = ("table", 1, 0)
        elif isinstance(layer, Head) and layer.config.kind == "tokens" and not layer.config.tied:
            found[layer.path] = ("kernel", 1, 1)
        return call(*args, **kwargs)

    with nn.intercept_methods(note):
        jax.eval_shape(lambda: build.initialise(module, jax.random.key(0)))
    return found
