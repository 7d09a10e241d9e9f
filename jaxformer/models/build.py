"""From a config to a module, and from a module to parameters that are laid out over a mesh from the start."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Key

from jaxformer.config import ModelConfig, StackConfig
from jaxformer.models.rnn import Recurrent
from jaxformer.models.transformer import Transformer
from jaxformer.models.xlnet import XLNet
from jaxformer.nn import cpu, encodings, kernels
from jaxformer.nn.attention import shape
from jaxformer.parallel import mesh as meshes
from jaxformer.parallel import rules
from jaxformer.types import Array, Batch, PyTree, Slots, Stream


def build(config: ModelConfig) -> nn.Module:
    """The module that `config` describes; its vocabulary sizes must be resolved."""
    recurrent = config.recurrent_encoder is not None or config.recurrent_decoder is not None
    if recurrent:
        return Recurrent(config)
    return Transformer(config) if config.permutation is None else XLNet(config)


def resolve(config: ModelConfig, source: int, target: int, classes: int | None = None) -> ModelConfig:
    """`config` with what only the data knows filled in: vocabulary rows of each side, and the number of classes.

    A size that the config already names is kept.
    """
    parts: dict[str, Any] = {}
    sides = {"encoder": source, "recurrent_encoder": source, "decoder": target, "recurrent_decoder": target}
    for name, vocab in sides.items():
        part = getattr(config, name)
        if part is not None and part.embed.vocab is None:
            parts[name] = dataclasses.replace(part, embed=dataclasses.replace(part.embed, vocab=vocab))
    if config.head.kind in ("classes", "slots") and config.head.classes is None:
        parts["head"] = dataclasses.replace(config.head, classes=classes)
    return dataclasses.replace(config, **parts)


def attentions(config: ModelConfig, length: int) -> dict[str, tuple[str, str]]:
    """The kernel of each stack's self-attention on the current mesh, over `length` slots, and why it is that one.

    Raises:
      ConfigError: a kernel that the config names cannot work there.
    """
    stacks = {"encoder": config.encoder, "decoder": config.decoder}
    return {side: _attention(config, side, stack, length) for side, stack in stacks.items() if stack is not None}


def _attention(config: ModelConfig, side: str, stack: StackConfig, length: int) -> tuple[str, str]:
    heads, kv_heads, head_width = shape(stack.attention, stack.width)
    site = kernels.Site(
        platform=meshes.platform(),
        dtype=config.dtype,
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        queries=length,
        keys=length,
        causal=causal(stack, side),
        table=config.permutation is not None,
        score=encodings.get(stack.encoding.kind).score is not None,
        dropout=stack.attention.dropout > 0,
        **kernels.devices(),
    )
    return kernels.choose(stack.attention, site)


def causal(stack: StackConfig, side: str) -> bool:
    """Whether slots see their past only: in a decoder by default, in an encoder if the config says so."""
    return stack.causal is not False if side == "decoder" else bool(stack.causal)


def ring(config: ModelConfig, length: int) -> bool:
    """Whether the current mesh divides sequences and a causal stack passes them round in a ring."""
    if kernels.devices()["context"] == 1:
        return False
    stacks = {"encoder": config.encoder, "decoder": config.decoder}
    chosen = attentions(config, length)
    return any(kernel == "ring" and causal(stacks[side], side) for side, (kernel, _) in chosen.items())


def example(config: ModelConfig, rows: int = 1, length: int = 2) -> Batch:
    """A batch of the right structure for shapes and initialisation: every slot real, all tokens 0."""
    ids = np.zeros((rows, length), np.int32)
    stream = Stream(ids, Slots(np.tile(np.arange(length, dtype=np.int32), (rows, 1)), ids + 1))
    encodes = config.encoder is not None or config.recurrent_encoder is not None
    decodes = config.decoder is not None or config.recurrent_decoder is not None
    return Batch(stream if encodes else None, stream if decodes else None)


def initialise(module: nn.Module, key: Key[Array, ""]) -> dict[str, PyTree]:
    """Boxed variables: parameters with their axes' logical names, and batch-norm statistics if there are any."""
    return dict(module.init({"params": key}, example(module.config)))


def shapes(module: nn.Module) -> PyTree:
    """Boxed shapes of the variables, without computing them."""
    return jax.tree.map(lambda x: x, _shapes(module))  # containers of the caller's own


@functools.lru_cache(maxsize=8)
def _shapes(module: nn.Module) -> PyTree:
    """A start asks half a dozen times, and tracing a large model takes seconds."""
    mesh = jax.sharding.get_abstract_mesh()
    where = None if mesh.empty else NamedSharding(mesh, PartitionSpec())
    # What `create` is given, or jax would trace again; but not a real key: the mesh's devices may not be here.
    key = jax.ShapeDtypeStruct((), jax.eval_shape(lambda: jax.random.key(0)).dtype, sharding=where)
    return jax.eval_shape(_initialiser(module), key)


@functools.lru_cache(maxsize=8)
def _initialiser(module: nn.Module) -> Callable[[Key[Array, ""]], dict[str, PyTree]]:
    """`initialise` of this module, one object for all who ask: jax does not trace it twice."""
    return functools.partial(initialise, module)


def create(module: nn.Module, key: Key[Array, ""], mesh: Mesh) -> dict[str, PyTree]:
    """Variables made on the mesh, each device computing its own shards.

    The values are the same on every mesh: JAX's counter-based generator is partitionable.
    """
    layout = rules.shardings(shapes(module), mesh)
    make = jax.jit(_initialiser(module), out_shardings=layout, compiler_options=cpu.once())
    return nn.meta.unbox(make(key))


def logical_names(module: nn.Module) -> PyTree:
    """For every parameter, the tuple of its axes' logical names."""
    is_box = lambda x: isinstance(x, nn.meta.AxisMetadata)  # noqa: E731
    return jax.tree.map(lambda x: tuple(x.names) if is_box(x) else (), shapes(module)["params"], is_leaf=is_box)


def width(config: ModelConfig) -> int:
    """The model width that Noam's rule speaks of: the decoder's, else the encoder's."""
    return (config.decoder or config.recurrent_decoder or config.encoder or config.recurrent_encoder).width


def count(params: PyTree) -> int:
    """Number of parameters."""
    return sum(int(np.prod(jnp.shape(x))) for x in jax.tree.leaves(params))
