"""Rewrites a model trained here as one that a Hugging Face family can express: other parameters, the same function.

- Interleaved sinusoids (sine, cosine, ...) become concatenated ones (sines, then cosines). The channels of
  the residual stream are reordered alike on every axis, which changes no output.
- An output projection without bias gets a bias of zero.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxformer.config import ModelConfig
from jaxformer.models import build
from jaxformer.types import Array, PyTree

STREAM = ("embed", "table")
"""Logical names of the parameter axes that the residual stream passes through."""


def rewrite_for_export(model: ModelConfig, params: PyTree) -> tuple[ModelConfig, PyTree]:
    """An equal model with concatenated sinusoids and an output bias, and its parameters."""
    is_reordered = False
    for name in ("encoder", "decoder"):
        stack = getattr(model, name)
        if stack is None or stack.embed.width is not None:  # other widths: the two do not have the same channels
            continue
        if stack.encoding.kind == "sinusoidal" and not stack.encoding.concatenated:
            is_reordered = True
            encoding = dataclasses.replace(stack.encoding, concatenated=True)
            model = dataclasses.replace(model, **{name: dataclasses.replace(stack, encoding=encoding)})
    if is_reordered:
        params = _reordered(model, params)
    if model.head.kind == "tokens" and not model.head.bias and model.encoder and model.decoder:
        vocab = model.decoder.embed.vocab
        params = {**params, "head": {**params.get("head", {}), "bias": jnp.zeros(vocab)}}
        model = dataclasses.replace(model, head=dataclasses.replace(model.head, bias=True))
    return model, params


def _reordered(model: ModelConfig, params: PyTree) -> PyTree:
    """The parameters after channel 2i of the residual stream has moved to i, and 2i + 1 to D / 2 + i."""
    names = jax.tree.map(
        lambda box: box.names if isinstance(box, nn.Partitioned) else None,
        build.shapes(build.build(model))["params"],
        is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned),
    )
    stack = model.decoder or model.encoder
    if stack is None:
        return params
    width = stack.width
    order = np.concatenate([np.arange(0, width, 2), np.arange(1, width, 2)])

    def move(path: tuple, x: Array) -> Array:
        keys = [str(key.key) for key in path]
        axes = _names_of(names, keys)
        stream = [axis for axis, name in enumerate(axes) if name in STREAM]
        if keys[-1] in ("scale", "bias") and keys[-2].endswith("norm") and keys[-2] not in ("query_norm", "key_norm"):
            stream = [x.ndim - 1]
        for axis in stream:
            x = jnp.take(x, order, axis=axis)
        return x

    return jax.tree_util.tree_map_with_path(move, params)


def _names_of(names: PyTree, keys: list[str]) -> tuple[str | None, ...]:
    """The logical names of one parameter's axes."""
    for key in keys:
        names = names.get(key, ())
    return names or ()
