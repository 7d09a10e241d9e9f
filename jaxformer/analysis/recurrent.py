"""Recurrent models: the alignment of a decoder with its source, and the outputs of each layer."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
from flax import linen as nn
from jaxtyping import Float, Float32

from jaxformer.analysis import layers
from jaxformer.nn.recurrent import AttendingLayer, Layer
from jaxformer.types import Array, Batch, PyTree, Slots


@functools.partial(jax.jit, static_argnames="module")
def alignment(module: nn.Module, variables: Mapping[str, PyTree], batch: Batch) -> Float32[Array, "B T S"]:
    """Probabilities alpha of the decoder over the source (Bahdanau et al. 2015; Luong et al. 2015)."""
    _, sown = module.apply(variables, batch, mutable=["intermediates"])
    return sown["intermediates"]["decoder"]["layers_0"]["attention"][0]


@functools.partial(jax.jit, static_argnames="module")
def layer_outputs(
    module: nn.Module, variables: Mapping[str, PyTree], batch: Batch
) -> tuple[Float[Array, "B T D"], ...]:
    """Embeddings of the decoder after its input layers, then the outputs of each of its layers."""

    def wanted(part: nn.Module, method: str) -> bool:
        return method == "__call__" and (isinstance(part, Layer | AttendingLayer) or part.name == "front")

    _, sown = module.apply(variables, batch, capture_intermediates=wanted)
    decoder = sown["intermediates"]["decoder"]
    names = sorted((name for name in decoder if name.startswith("layers_")), key=lambda name: int(name[7:]))
    return (decoder["front"]["__call__"][0], *(decoder[name]["__call__"][0][0] for name in names))


@functools.partial(jax.jit, static_argnames="module")
def read_out(
    module: nn.Module, variables: Mapping[str, PyTree], x: Float[Array, "B T D"], slots: Slots
) -> Float32[Array, "B T V"]:
    """The head's logits of a layer's outputs."""
    return layers.apply(variables=variables, module=module, function=lambda m: m.head(x, slots, m.output_embed()))
