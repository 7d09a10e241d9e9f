"""Logits that are never whole: a function of every token's logits, computed for some tokens at a time.

Each device goes through its own tokens, `Projection.chunk` of them at a time, against its own part of the vocabulary.
The table is gathered once where it lies divided by width; a gradient with respect to it is summed in float32 over the
chunks, and once over the devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Float, Float32, Int32, Shaped

from jaxformer.parallel import shards
from jaxformer.types import Array, Projection, PyTree


class Rows(NamedTuple):
    """The part of the vocabulary that some logits `[..., V]` are of.

    Attributes:
      axes: the mesh axes that divide the vocabulary; (): the logits are all there are.
      first: the number of their first row.
    """

    axes: tuple[str, ...] = ()
    first: Array | int = 0

    def numbers(self, logits: Float[Array, "*batch V"]) -> Int32[Array, "*batch V"]:
        """Of the rows of `logits`."""
        return jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) + self.first

    def sum(self, tree: PyTree) -> PyTree:
        """Sums of parts made whole."""
        return jax.lax.psum(tree, self.axes) if self.axes else tree

    def max(self, x: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
        """The largest of all parts'."""
        return jax.lax.pmax(x, self.axes) if self.axes else x

    def min(self, x: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
        """The smallest of all parts'."""
        return jax.lax.pmin(x, self.axes) if self.axes else x


ALL = Rows()


def divided(logits: Float[Array, "*batch V"]) -> bool:
    """Whether the partitioner divides the vocabulary of whole logits."""
    return bool(shards.fitting("act_vocab", logits.shape[-1]))


class _Layout(NamedTuple):
    """Mesh axes that divide rows, slots, the vocabulary, and the table's width (these divide rows too)."""

    batch: tuple[str, ...] = ()
    length: tuple[str, ...] = ()
    vocab: tuple[str, ...] = ()
    width: tuple[str, ...] = ()

    @property
    def tokens(self) -> PartitionSpec:
        return PartitionSpec(self.batch, self.length)

    def projection(self, of: Projection) -> Projection:
        """The specs of its arrays."""
        bias = None if of.bias is None else PartitionSpec(self.vocab)
        return of.replace(hidden=self.tokens, table=PartitionSpec(self.vocab, self.width), bias=bias)

    def rows(self, table: Float[Array, "V D"]) -> Rows:
        """Those of a device's part of the table."""
        return Rows(self.vocab, jax.lax.axis_index(self.vocab) * table.shape[0] if self.vocab else 0)


def each(function: Callable[..., PyTree], projection: Projection, data: PyTree) -> PyTree:
    """`function(logits [N, V], data [N, ...], rows)` of all tokens, an array `[B, T]` or a tree of them.

    Args:
      data: arrays `[B, T]`.
    """
    where = _layout(projection)

    def local(projection: Projection, data: PyTree) -> PyTree:
        table, rows = _table(where, projection), where.rows(projection.table)
        chunks = jax.tree.map(lambda x: _cut(x, projection.chunk), (projection.hidden, data))
        one = lambda given: function(_logits(given[0], table, projection.bias), given[1], rows)  # noqa: E731
        return _join(jax.lax.map(one, chunks), projection.hidden)

    return _run(where, local, (where.projection(projection), where.tokens), where.tokens)(projection, data)


def pull(function: Callable[..., Array], projection: Projection, data: PyTree) -> Projection:
    """The gradients of hidden states, table and bias, where `function(logits, data, rows)` has that of the logits."""
    where = _layout(projection)

    def local(projection: Projection, data: PyTree) -> Projection:
        hidden, bias = projection.hidden, projection.bias
        table, rows = _table(where, projection), where.rows(projection.table)

        def one(sums: tuple, given: tuple) -> tuple[tuple, Array]:
            x, of_x = given
            gradient = function(_logits(x, table, bias), of_x, rows)
            low = gradient.astype(x.dtype)
            dx = jnp.einsum("nv,vd->nd", low, table, preferred_element_type=jnp.float32)
            dtable = sums[0] + jnp.einsum("nv,nd->vd", low, x, preferred_element_type=jnp.float32)
            dbias = None if bias is None else sums[1] + jnp.sum(gradient, axis=0)
            return (dtable, dbias), dx.astype(x.dtype)

        start = (jnp.zeros(table.shape), None if bias is None else jnp.zeros(bias.shape))
        chunks = jax.tree.map(lambda x: _cut(x, projection.chunk), (hidden, data))
        (dtable, dbias), dx = jax.lax.scan(one, start, chunks)
        dx = rows.sum(_join(dx, hidden))
        over = (*where.batch, *where.length)
        others = tuple(axis for axis in over if axis not in where.width)
        dtable = jax.lax.psum(dtable, others) if others else dtable
        if where.width:
            dtable = jax.lax.psum_scatter(dtable, where.width, scatter_dimension=1, tiled=True)
        dbias = dbias if dbias is None or not over else jax.lax.psum(dbias, over)
        return projection.replace(hidden=dx, table=dtable, bias=dbias)

    specs = where.projection(projection)
    return _run(where, local, (specs, where.tokens), specs)(projection, data)


def _layout(projection: Projection) -> _Layout:
    batch, length, _ = projection.hidden.shape
    rows, width = projection.table.shape
    if shards.alone():
        return _Layout()
    by_rows = shards.fitting("batch", batch)
    apart = tuple(axis for axis in shards.fitting("table", width) if axis in by_rows)
    return _Layout(by_rows, shards.fitting("length", length), shards.fitting("vocab", rows), apart)


def _run(where: _Layout, local: Callable, in_specs: PyTree, out_specs: PyTree) -> Callable:
    return local if shards.alone() else shards.shard(local, in_specs, out_specs)


def _table(where: _Layout, projection: Projection) -> Float[Array, "V D"]:
    """A device's rows of the table at their whole width, in the precision of the hidden states."""
    table = projection.table.astype(projection.hidden.dtype)
    return jax.lax.all_gather(table, where.width, axis=1, tiled=True) if where.width else table


def _logits(
    x: Float[Array, "N D"], table: Float[Array, "V D"], bias: Float[Array, " V"] | None
) -> Float32[Array, "N V"]:
    logits = jnp.einsum("nd,vd->nv", x, table, preferred_element_type=jnp.float32)
    return logits if bias is None else logits + bias


def _cut(x: Shaped[Array, "B T *rest"], chunk: int) -> Shaped[Array, "chunks N *rest"]:
    """In chunks of N tokens, the last chunk filled up with zeros."""
    x = x.reshape(-1, *x.shape[2:])
    chunk = min(chunk, x.shape[0])
    x = jnp.pad(x, [(0, -x.shape[0] % chunk)] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(-1, chunk, *x.shape[1:])


def _join(tree: PyTree, like: Float[Array, "B T D"]) -> PyTree:
    """The inverse of `_cut`, for tokens `[B, T]` as many as those of `like`."""
    batch, length = like.shape[:2]
    whole = lambda x: x.reshape(-1, *x.shape[2:])[: batch * length].reshape(batch, length, *x.shape[2:])  # noqa: E731
    return jax.tree.map(whole, tree)
