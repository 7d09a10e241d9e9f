"""Functions of the logits of all tokens, computed for one chunk of tokens at a time.

Each device goes through its own tokens in chunks of `DeferredLogits.chunk`, against its own part of the vocabulary.
A table that is sharded by width is gathered once. Its gradient is summed in float32 over the chunks, and once over the
devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Float, Float32, Int32, Shaped

from jaxformer.nn.layers import soft_cap
from jaxformer.parallel import shards
from jaxformer.types import Array, DeferredLogits, PyTree


class VocabPart(NamedTuple):
    """The part of the vocabulary that logits `[..., V]` cover.

    Attributes:
      axes: mesh axes that shard the vocabulary; () if the logits are complete.
      offset: vocabulary id of the first logit.
    """

    axes: tuple[str, ...] = ()
    offset: Array | int = 0

    def ids(self, logits: Float[Array, "*batch V"]) -> Int32[Array, "*batch V"]:
        """Vocabulary id of each entry of `logits`."""
        return jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) + self.offset

    def sum(self, tree: PyTree) -> PyTree:
        """Sum over all parts of the vocabulary."""
        return jax.lax.psum(tree, self.axes) if self.axes else tree

    def max(self, x: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
        """Maximum over all parts of the vocabulary."""
        return jax.lax.pmax(x, self.axes) if self.axes else x

    def min(self, x: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
        """Minimum over all parts of the vocabulary."""
        return jax.lax.pmin(x, self.axes) if self.axes else x


FULL_VOCAB = VocabPart()


def is_vocab_sharded(logits: Float[Array, "*batch V"]) -> bool:
    """True if the partitioner shards the vocabulary axis of `logits`."""
    return bool(shards.dividing_axes("act_vocab", logits.shape[-1]))


class _Layout(NamedTuple):
    """Mesh axes that shard rows, slots, vocabulary, and the width of the table (those are also axes of rows)."""

    batch: tuple[str, ...] = ()
    length: tuple[str, ...] = ()
    vocab: tuple[str, ...] = ()
    width: tuple[str, ...] = ()

    @property
    def tokens(self) -> PartitionSpec:
        return PartitionSpec(self.batch, self.length)

    def specs(self, deferred: DeferredLogits) -> DeferredLogits:
        """Specs of the arrays of `deferred`."""
        bias = None if deferred.bias is None else PartitionSpec(self.vocab)
        return deferred.replace(hidden=self.tokens, table=PartitionSpec(self.vocab, self.width), bias=bias)

    def vocab_part(self, table: Float[Array, "V D"]) -> VocabPart:
        """Part of the vocabulary that a device's `table` covers."""
        return VocabPart(self.vocab, jax.lax.axis_index(self.vocab) * table.shape[0] if self.vocab else 0)


def map_chunks(function: Callable[..., PyTree], deferred: DeferredLogits, data: PyTree) -> PyTree:
    """`function(logits [N, V], data [N, ...], part)` for all tokens: an array `[B, T, ...]` or a tree of them.

    Args:
      data: tree of arrays `[B, T, ...]`.
    """
    layout = _layout(deferred)

    def local(deferred: DeferredLogits, data: PyTree) -> PyTree:
        table, part = _table(layout, deferred), layout.vocab_part(deferred.table)
        chunks = jax.tree.map(lambda x: _split(x, deferred.chunk), (deferred.hidden, data))
        apply = lambda chunk: function(_logits(chunk[0], table, deferred), chunk[1], part)  # noqa: E731
        return _join(jax.lax.map(apply, chunks), deferred.hidden)

    return _run(layout, local, (layout.specs(deferred), layout.tokens), layout.tokens)(deferred, data)


def chunked_gradient(function: Callable[..., Array], deferred: DeferredLogits, data: PyTree) -> DeferredLogits:
    """Gradients of hidden states, table and bias; `function(logits, data, part)` is the gradient of the logits."""
    layout = _layout(deferred)

    def local(deferred: DeferredLogits, data: PyTree) -> DeferredLogits:
        hidden, bias = deferred.hidden, deferred.bias
        table, part = _table(layout, deferred), layout.vocab_part(deferred.table)

        def accumulate(sums: tuple, chunk: tuple) -> tuple[tuple, Array]:
            x, chunk_data = chunk
            logits, cap = _logits(x, table, deferred), deferred.soft_cap
            gradient = function(logits, chunk_data, part)
            if cap is not None:  # the derivative of the cap: 1 - tanh(x / cap)^2
                gradient = gradient * (1.0 - (logits / cap) ** 2)
            low = gradient.astype(x.dtype)
            dx = jnp.einsum("nv,vd->nd", low, table, preferred_element_type=jnp.float32)
            dtable = sums[0] + jnp.einsum("nv,nd->vd", low, x, preferred_element_type=jnp.float32)
            dbias = None if bias is None else sums[1] + jnp.sum(gradient, axis=0)
            return (dtable, dbias), dx.astype(x.dtype)

        start = (jnp.zeros(table.shape), None if bias is None else jnp.zeros(bias.shape))
        chunks = jax.tree.map(lambda x: _split(x, deferred.chunk), (hidden, data))
        (dtable, dbias), dx = jax.lax.scan(accumulate, start, chunks)
        dx = part.sum(_join(dx, hidden))
        token_axes = (*layout.batch, *layout.length)
        summed_axes = tuple(axis for axis in token_axes if axis not in layout.width)
        dtable = jax.lax.psum(dtable, summed_axes) if summed_axes else dtable
        if layout.width:
            dtable = jax.lax.psum_scatter(dtable, layout.width, scatter_dimension=1, tiled=True)
        dbias = dbias if dbias is None or not token_axes else jax.lax.psum(dbias, token_axes)
        return deferred.replace(hidden=dx, table=dtable, bias=dbias)

    specs = layout.specs(deferred)
    return _run(layout, local, (specs, layout.tokens), specs)(deferred, data)


def _layout(deferred: DeferredLogits) -> _Layout:
    batch, length, _ = deferred.hidden.shape
    rows, width = deferred.table.shape
    if shards.is_unsharded():
        return _Layout()
    by_rows = shards.dividing_axes("batch", batch)
    width_axes = tuple(axis for axis in shards.dividing_axes("table", width) if axis in by_rows)
    return _Layout(by_rows, shards.dividing_axes("length", length), shards.dividing_axes("vocab", rows), width_axes)


def _run(layout: _Layout, local: Callable, in_specs: PyTree, out_specs: PyTree) -> Callable:
    return local if shards.is_unsharded() else shards.shard(local, in_specs, out_specs)


def _table(layout: _Layout, deferred: DeferredLogits) -> Float[Array, "V D"]:
    """A device's rows of the table at full width, in the dtype of the hidden states."""
    table = deferred.table.astype(deferred.hidden.dtype)
    return jax.lax.all_gather(table, layout.width, axis=1, tiled=True) if layout.width else table


def _logits(x: Float[Array, "N D"], table: Float[Array, "V D"], deferred: DeferredLogits) -> Float32[Array, "N V"]:
    logits = jnp.einsum("nd,vd->nv", x, table, preferred_element_type=jnp.float32)
    logits = logits if deferred.bias is None else logits + deferred.bias
    return soft_cap(logits, deferred.soft_cap)


def _split(x: Shaped[Array, "B T *rest"], chunk: int) -> Shaped[Array, "chunks N *rest"]:
    """`x` in chunks of N tokens; the last chunk is padded with zeros."""
    x = x.reshape(-1, *x.shape[2:])
    chunk = min(chunk, x.shape[0])
    x = jnp.pad(x, [(0, -x.shape[0] % chunk)] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(-1, chunk, *x.shape[1:])


def _join(tree: PyTree, like: Float[Array, "B T D"]) -> PyTree:
    """The inverse of `_split`, with the axes B and T of `like`."""
    batch, length = like.shape[:2]
    restore = lambda x: x.reshape(-1, *x.shape[2:])[: batch * length].reshape(batch, length, *x.shape[2:])  # noqa: E731
    return jax.tree.map(restore, tree)
