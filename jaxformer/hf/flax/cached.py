"""Calls with a key-value cache: `init_cache`, `past_key_values`, and the decoder of an encoder-decoder alone.

A cache is a pytree `Cache`. Users pass it on and never look inside, so its arrays are those of jaxformer's own decoding
(`jaxformer/nn/cache.py`) with the positions of the cached slots beside them.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxformer.hf import positions
from jaxformer.hf.flax.spec import Spec
from jaxformer.models.transformer import Transformer
from jaxformer.nn.cache import KeyValues, StackKeyValues
from jaxformer.types import Array, PyTree, Slots, Stream


class Cache(flax.struct.PyTreeNode):
    """The content of `past_key_values`.

    Attributes:
      keys_values: keys and values of all layers.
      position: int32 `[B, S]`, positions of the slots that were written.
      index: int32 scalar, number of slots that were written.
    """

    keys_values: StackKeyValues
    position: Array
    index: Array


class Memory(flax.struct.PyTreeNode):
    """The encoder's side of a decoder's call.

    Attributes:
      states: the encoder's output `[B, S, D]`, or its keys and values for all layers.
      slots: which of its slots are real.
    """

    states: Any
    slots: Slots


def empty(spec: Spec, rows: int, length: int) -> Cache:
    """A cache with room for `length` slots."""
    stack = spec.module.bind({}).decoder
    keys_values = stack.empty_cache(rows, length, jnp.dtype(spec.config.dtype))
    return Cache(keys_values, jnp.zeros((rows, length), jnp.int32), jnp.zeros((), jnp.int32))


def check_order(spec: Spec, cache: Cache, tokens: Array, mask: Array, position: Array) -> Array:
    """New tokens `[B, N]`, if their positions rise and follow those in the cache; see `positions.check_order`."""
    real = jnp.broadcast_to(jnp.not_equal(mask, 0), cache.position.shape)
    written = real & (jnp.arange(real.shape[1]) < cache.index)
    after = jnp.max(jnp.where(written, cache.position, jnp.iinfo(jnp.int32).min), axis=1, keepdims=True)
    real = jax.lax.dynamic_slice_in_dim(real, cache.index, tokens.shape[1], axis=1)
    return positions.check_order(spec.stack, tokens, position, real, causal=True, after=after)


def query_slots(
    spec: Spec, cache: Cache, count: int, mask: Array, position: Array | None
) -> tuple[Slots, Slots, Array]:
    """Slots of the new tokens and of the cache with them in it, and the cache's positions.

    Args:
      count: number of new tokens.
      mask: `[B, S]`, of all slots of the cache, those that are still to be written included.
      position: `[B, count]`, positions of the new tokens; None: as the family counts.
    """
    rows, length = cache.position.shape
    real = jnp.broadcast_to(jnp.not_equal(mask, 0).astype(jnp.int32), (rows, length))
    column = jnp.arange(length, dtype=jnp.int32)
    counted = jnp.cumsum(real, axis=1) - 1
    window = lambda x: jax.lax.dynamic_slice_in_dim(x, cache.index, count, axis=1)  # noqa: E731
    if spec.convention.positions == "mask" and position is None:
        position = window(counted)
    elif position is None:
        position = jnp.broadcast_to(cache.index + jnp.arange(count, dtype=jnp.int32), (rows, count))
    position = jnp.broadcast_to(position, (rows, count)).astype(jnp.int32)
    written = jax.lax.dynamic_update_slice_in_dim(cache.position, position, cache.index, axis=1)
    segment = real * (column < cache.index + count)
    return Slots(position, 2 * window(real) - 1), Slots(written, segment), written


@functools.partial(jax.jit, static_argnames=("spec", "flags"))
def advance(
    spec: Spec,
    params: PyTree,
    target: Stream,
    cache: Cache | None,
    cache_slots: Slots | None,
    memory: Memory | None,
    key: Array | None,
    flags: tuple[bool, bool],
) -> tuple[Array, Array, StackKeyValues | None, PyTree]:
    """Hidden states, head's output, keys and values, and intermediates of new tokens.

    Args:
      params: our parameters, or those of `Transformer.unstack`.
      flags: whether attentions and hidden states are asked for.
    """
    keys_values = None if cache is None else cache.keys_values
    separate = isinstance(keys_values, tuple)
    if any(flags) and separate:  # intermediates come from the scan, which reads one array
        keys_values = jax.tree.map(lambda *layers: jnp.stack(layers), *keys_values)

    def run(module: Transformer) -> Any:
        x, written = module.decoder(
            module.input_embed()(target),
            target.slots,
            None if memory is None else memory_of(module, memory.states),
            None if memory is None else memory.slots,
            cache=keys_values,
            cache_slots=cache_slots,
            index=None if cache is None else cache.index,
            token_type=target.token_type,
        )
        return x, module.head(x, target.slots, module.output_embed()), written

    rngs = {} if key is None else {"dropout": key}
    apply: Any = functools.partial(spec.module.apply, {"params": params}, method=run, rngs=rngs)
    sown: PyTree = {}
    if any(flags):
        (x, logits, written), variables = apply(mutable=["intermediates"])
        sown = variables["intermediates"]["decoder"]
    else:
        x, logits, written = apply()
    if any(flags) and separate and isinstance(written, KeyValues):
        layers = spec.stack.layers
        written = tuple(jax.tree.map(lambda part: part[i], written) for i in range(layers))  # noqa: B023
    return x, logits, written, sown


@functools.partial(jax.jit, static_argnames=("spec",))
def encode(spec: Spec, tree: PyTree, source: Stream, key: Array | None) -> tuple[Array, PyTree]:
    """The encoder's output and its intermediates."""
    rngs = {} if key is None else {"dropout": key}
    variables = {"params": spec.params(tree)}
    states, sown = spec.module.apply(variables, source, method="encode", rngs=rngs, mutable=["intermediates"])
    return states, sown["intermediates"]["encoder"]


def project_memory(spec: Spec, params: PyTree, states: Array) -> StackKeyValues:
    """Keys and values of the encoder's output, computed once for a loop of steps."""
    module: Any = spec.module
    return module.apply({"params": params}, method=lambda m: m.decoder.project_memory(m.memory(states)))


def memory_of(module: Transformer, states: Any) -> Any:
    """Memory of the decoder's layers: the encoder's output in their width, or its keys and values as they are."""
    return states if isinstance(states, (KeyValues, tuple)) else module.memory(states)
