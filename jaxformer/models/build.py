"""From a config to a module, and from a module to parameters that are created sharded over a mesh."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Key

from jaxformer.config import ModelConfig, StackConfig
from jaxformer.models import adapters
from jaxformer.models.electra import Electra
from jaxformer.models.linear import LinearForecast
from jaxformer.models.rnn import Recurrent
from jaxformer.models.transformer import Transformer
from jaxformer.models.xlnet import XLNet
from jaxformer.nn import cpu, encodings, kernels
from jaxformer.nn.attention import head_shape
from jaxformer.nn.layers import shapes_alone
from jaxformer.parallel import mesh as meshes
from jaxformer.parallel import rules
from jaxformer.runtime import programs
from jaxformer.types import Array, Batch, PyTree, Slots, Stream


def build(config: ModelConfig) -> nn.Module:
    """The module that `config` describes. Vocabulary sizes must be resolved (see `resolve`)."""
    recurrent = config.recurrent_encoder is not None or config.recurrent_decoder is not None
    if recurrent:
        return Recurrent(config)
    if config.linear is not None:
        return LinearForecast(config)
    if config.generator is not None:
        return Electra(config)
    return Transformer(config) if config.permutation is None else XLNet(config)


class SeriesSizes(NamedTuple):
    """Sizes of a series that the data decides: its channels, and the time steps of look-back and horizon."""

    channels: int | None = None
    look_back: int | None = None
    horizon: int | None = None


def resolve(
    config: ModelConfig,
    source: int | None,
    target: int | None,
    classes: int | None = None,
    sizes: SeriesSizes | None = None,
) -> ModelConfig:
    """`config` with the sizes that depend on the data: vocabulary of source and target, number of classes, channels.

    Sizes that the config already sets are kept. An encoder of a series has no vocabulary.
    """
    parts: dict[str, Any] = {}
    sizes = sizes or SeriesSizes()
    if config.series is not None:
        source = None
        channels = config.series.channels or sizes.channels
        parts["series"] = dataclasses.replace(config.series, channels=channels)
    sides = {"encoder": source, "recurrent_encoder": source, "decoder": target, "recurrent_decoder": target}
    for name, vocab in sides.items():
        part = getattr(config, name)
        if part is not None and part.embed.vocab is None:
            parts[name] = dataclasses.replace(part, embed=dataclasses.replace(part.embed, vocab=vocab))
    if config.generator is not None and config.generator.encoder.embed.vocab is None:
        stack = config.generator.encoder
        stack = dataclasses.replace(stack, embed=dataclasses.replace(stack.embed, vocab=source))
        parts["generator"] = dataclasses.replace(config.generator, encoder=stack)
    if config.head.kind in ("classes", "slots") and config.head.classes is None:
        parts["head"] = dataclasses.replace(config.head, classes=classes)
    if config.head.kind == "forecast":
        look_back, horizon = config.head.look_back or sizes.look_back, config.head.horizon or sizes.horizon
        parts["head"] = dataclasses.replace(config.head, look_back=look_back, horizon=horizon)
    return dataclasses.replace(config, **parts)


def chosen_kernels(config: ModelConfig, length: int, prefix: bool = False) -> dict[str, tuple[str, str]]:
    """Kernel of each stack's self-attention for rows of `length` on the current mesh, and the reason for the choice.

    Args:
      prefix: the targets begin with a prefix (see `types.Slots`).

    Raises:
      ConfigError: the kernel of the config does not support the mesh or the length.
    """
    return {
        side: _attention(config, side, stack, config.slots(side, length), prefix)
        for side, stack in config.stacks.items()
        if stack.layers
    }


def _attention(config: ModelConfig, side: str, stack: StackConfig, length: int, prefix: bool) -> tuple[str, str]:
    heads, kv_heads, head_width = head_shape(stack.attention, stack.width)
    devices = kernels.shard_counts()
    site = kernels.CallSite(
        platform=meshes.platform(),
        dtype=config.dtype,
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        queries=length,
        keys=length,
        causal=is_causal(stack, side),
        hidden_pairs=config.permutation is not None,
        prefix=prefix and is_causal(stack, side),
        bias=encodings.get(stack.encoding.kind).bias is not None,
        dropout=stack.attention.dropout > 0,
        context=devices["context"],
        tensor=devices["tensor"],
    )
    return kernels.choose_kernel(stack.attention, site)


def is_causal(stack: StackConfig, side: str) -> bool:
    """True if slots see only their past: by default in a decoder, in an encoder if the config says so."""
    return stack.causal is not False if side == "decoder" else bool(stack.causal)


def uses_causal_ring(config: ModelConfig, length: int) -> bool:
    """True if the current mesh shards sequences and a causal stack uses the ring kernel."""
    if kernels.shard_counts()["context"] == 1:
        return False
    chosen = chosen_kernels(config, length)
    present = {side: stack for side, stack in config.stacks.items() if stack.layers}
    return any(chosen[side][0] == "ring" and is_causal(stack, side) for side, stack in present.items())


def example_batch(config: ModelConfig, rows: int = 1, length: int = 2) -> Batch:
    """A batch for shapes and initialisation, with the streams that the model reads: no padding, all tokens 0.

    The series of a forecast has the length of the look-back.
    """

    def stream(length: int) -> Stream:
        ids: Any = np.zeros((rows, length), np.int32)  # numpy, so that nothing is placed on a device
        position: Any = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
        return Stream(ids, Slots(position, ids + 1))

    source = stream(config.head.look_back or length) if config.has_encoder else None
    if source is not None and config.series is not None:
        values: Any = np.zeros((*source.tokens.shape, config.series.channels or 1), np.float32)
        source = source._replace(tokens=values)
    return Batch(source, stream(length) if config.has_decoder else None)


def init_variables(module: nn.Module, key: Key[Array, ""]) -> dict[str, PyTree]:
    """Boxed variables: parameters with the logical names of their axes, and batch-norm statistics (if any)."""
    layers: adapters.Layers = {}
    with contextlib.nullcontext() if module.config.adapter is None else adapters.recording(layers):
        variables = dict(module.init({"params": key}, example_batch(module.config)))
    if module.config.adapter is not None:
        variables["params"] = adapters.add(module.config.adapter, variables["params"], layers, key)
    return variables


def shapes(module: nn.Module) -> PyTree:
    """Boxed shapes of the variables, without computing them."""
    shapes = _shapes(module)  # ty: ignore[invalid-argument-type]  # modules are hashable, as frozen dataclasses
    return jax.tree.map(lambda x: x, shapes)  # a copy: callers may change the dicts


@functools.lru_cache(maxsize=8)
def _shapes(module: nn.Module) -> PyTree:
    """Cached: a run asks several times as it starts, and tracing a large model takes seconds."""

    def trace() -> PyTree:
        with shapes_alone():
            return jax.eval_shape(functools.partial(init_variables, module), _abstract_key())

    return programs.keep(trace, "shapes", (module, jax.sharding.get_abstract_mesh()))


def _abstract_key() -> jax.ShapeDtypeStruct:
    """Shape and sharding of the key that `create` passes, so that jax does not trace again.

    Not a real key: the devices of the mesh may belong to another machine.
    """
    mesh = jax.sharding.get_abstract_mesh()
    sharding = None if mesh.empty else NamedSharding(mesh, PartitionSpec())
    return jax.ShapeDtypeStruct((), jax.eval_shape(lambda: jax.random.key(0)).dtype, sharding=sharding)


@functools.lru_cache(maxsize=8)
def _initialiser(module: nn.Module) -> Callable[[Key[Array, ""]], dict[str, PyTree]]:
    """`init_variables` of this module, the same object for all callers, so that jax traces it once."""
    return functools.partial(init_variables, module)


def linear_maps(module: nn.Module) -> adapters.Layers:
    """Every `Dense` of the module by its path, without computing anything."""
    layers: adapters.Layers = {}
    with adapters.recording(layers), shapes_alone():
        jax.eval_shape(lambda: init_variables(module, jax.random.key(0)))
    return layers


def create(module: nn.Module, key: Key[Array, ""], mesh: Mesh) -> dict[str, PyTree]:
    """Initial variables, sharded over `mesh`; each device computes its own shards.

    The values are equal on every mesh, since JAX's counter-based generator is partitionable.
    """
    initialise = _initialiser(module)  # ty: ignore[invalid-argument-type]
    make = programs.jit(
        initialise,
        depends_on=(module, mesh),
        # Of the same trace as the program: `shapes` would trace the model once more.
        out_shardings=lambda: rules.shardings(jax.eval_shape(initialise, _abstract_key()), mesh),
        compiler_options=cpu.one_off_compiler_options(),
    )
    return nn.meta.unbox(make(key))


def logical_names(module: nn.Module) -> PyTree:
    """Tuple of the logical names of its axes, for each parameter."""
    is_box = lambda x: isinstance(x, nn.meta.AxisMetadata)  # noqa: E731
    return jax.tree.map(lambda x: tuple(x.names) if is_box(x) else (), shapes(module)["params"], is_leaf=is_box)


def model_width(config: ModelConfig) -> int:
    """Model width D, as in the Noam schedule: of the decoder, else of the encoder; the look-back of a linear forecast.

    Raises:
      ValueError: there is neither.
    """
    part = config.decoder_part or config.encoder_part
    if part is None and config.linear is not None and config.head.look_back is not None:
        return config.head.look_back
    if part is None:
        raise ValueError("model: got neither encoder nor decoder, expected at least one; add one")
    return part.width


def count_params(params: PyTree) -> int:
    """Total number of parameters."""
    return sum(int(np.prod(jnp.shape(x))) for x in jax.tree.leaves(params))
