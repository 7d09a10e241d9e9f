"""Blockwise attention: exact, in memory linear in length, with an online softmax over tiles.

FlashAttention-2 (Dao 2023, algorithms 1 and 2) in plain JAX. For query tiles i and key tiles j = 1, 2, ...

    S_ij = q_i k_j^T + bias_ij
    m' = max(m, rowmax S_ij),  l' = e^(m - m') l + rowsum e^(S_ij - m'),  o' = e^(m - m') o + e^(S_ij - m') v_j

and finally o / l. Only o and the log-sums L = m + log l of the rows are stored for the backward pass, which computes

    P_ij = e^(S_ij - L_i),   dP_ij = do_i v_j^T,   dS_ij = P_ij (dP_ij - rowsum(do_i o_i)),   dv_j = sum_i P_ij^T do_i

and propagates dS_ij to q, k and the arguments of the bias. Dropout multiplies P_ij in o, and dP_ij in the backward
pass, by the same random factor, drawn from the key folded with the index of the tile.

A sink with score s starts the online softmax at m = s, l = 1; its gradient is -sum_i e^(s - L_i) rowsum(do_i o_i).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Float32, Int, Shaped

from jaxformer.config import AttentionConfig
from jaxformer.nn.kernels import AttentionBias, AttentionDropout, Kernel, Keys, Queries, _sharding
from jaxformer.nn.layers import soft_cap
from jaxformer.nn.masks import Blocks, Mask, last_visible, sees_ahead, visible
from jaxformer.types import Array, PyTree, Slots

MASKED_SCORE = -1e30

QueryTiles = Float[Array, "I B T H K"]
KeyTiles = Float[Array, "J B S G K"]


class StaticArgs(NamedTuple):
    """Static properties of a traced call: mask rules, bias function, dropout rate and cap of the scores."""

    causal: bool
    bias: Callable[..., Array] | None
    rate: float
    cap: float | None
    blocks: Blocks | None = None
    summaries: bool = False


class TileIds(NamedTuple):
    """Data of the tiles without a gradient.

    Attributes:
      query, key: slots `[tiles, B, slots]`.
      window: the mask's window, or None.
      active: bool `[query tiles, key tiles]`, False where nothing is visible.
      int_args: the bias arguments without a gradient; None in place of the others.
      dropout: the dropout key, or None.
    """

    query: Slots
    key: Slots
    window: Array | None
    active: Array
    int_args: PyTree
    dropout: Array | None


class OnlineSoftmax(NamedTuple):
    """State of the online softmax after some of the keys.

    Attributes:
      max: the row maxima m, `[tiles, B, H, slots]`.
      total: the sums l of exponentials, `[tiles, B, H, slots]`.
      o: the unnormalised outputs, `[tiles, B, H, slots, K]`.
    """

    max: Array
    total: Array
    o: Array


class OutputGradient(NamedTuple):
    """Inputs of the backward pass for each query tile: do, the log-sums L, and delta = rowsum(do o)."""

    do: Array
    log_sum: Array
    delta: Array


class Gradients(NamedTuple):
    """Float32 sums of the gradients of q, k and v (in tiles), and of the bias arguments."""

    q: Array
    k: Array
    v: Array
    float_args: PyTree


def attend(
    q: Queries,
    k: Keys,
    v: Keys,
    mask: Mask,
    bias: AttentionBias | None,
    dropout: AttentionDropout | None,
    config: AttentionConfig,
    sink: Float[Array, " H"] | None = None,
) -> Queries:
    """Attention output `[B, T, H, K]`, equal to the dense kernel's.

    Tiles are `config.block` by `config.block` slots; lengths are padded to full tiles. Tiles with no visible pair
    (above the diagonal of a causal mask, beyond a window, between different documents) are skipped at run time.

    Raises:
      ConfigError: the mask hides single pairs.
    """
    _sharding.refuse_hidden_pairs("blockwise", mask)
    rows, columns = min(config.block, q.shape[1]), min(config.block, k.shape[1])
    query = jax.tree.map(lambda ids: tile(ids, rows), mask.query)
    key = jax.tree.map(lambda ids: tile(ids, columns), mask.key)
    static, float_args, int_args = split_args(mask, bias, dropout, config)
    window = None if mask.window is None else jnp.asarray(mask.window, jnp.int32)
    ids = TileIds(
        query,
        key,
        window,
        active_tiles(query, key, mask.causal, window, mask.blocks, mask.summaries),
        int_args,
        None if dropout is None else dropout.key,
    )
    o = _attention(static, tile(q, rows), tile(k, columns), tile(v, columns), float_args, sink, ids)
    return untile(o, q.shape[1])


def split_args(
    mask: Mask, bias: AttentionBias | None, dropout: AttentionDropout | None, config: AttentionConfig
) -> tuple[StaticArgs, PyTree, PyTree]:
    """Static properties, the bias arguments with a gradient, and those without; None in place of the others."""
    function, rate = None if bias is None else bias.function, 0.0 if dropout is None else float(dropout.rate)
    static = StaticArgs(mask.causal, function, rate, config.soft_cap, mask.blocks, mask.summaries)
    args = None if bias is None else bias.args
    float_args = jax.tree.map(lambda leaf: leaf if _has_gradient(leaf) else None, args)
    return static, float_args, jax.tree.map(lambda leaf: None if _has_gradient(leaf) else leaf, args)


def _has_gradient(leaf: Shaped[Array, "..."]) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def tile(x: Shaped[Array, "B T *rest"], size: int) -> Shaped[Array, "I B _ *rest"]:
    """`x` as I tiles of `size` slots, padded with zeros; for ids that is segment 0, padding."""
    batch, length = x.shape[:2]
    count = -(-length // size)
    x = jnp.pad(x, [(0, 0), (0, count * size - length)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(batch, count, size, *x.shape[2:]), 1, 0)


def untile(x: Shaped[Array, "I B _ *rest"], length: int) -> Shaped[Array, "B T *rest"]:
    """The inverse of `tile`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def active_tiles(
    query: Slots,
    key: Slots,
    causal: bool,
    window: Int[Array, ""] | int | None,
    blocks: Blocks | None = None,
    summaries: bool = False,
) -> Bool[Array, "I J"]:
    """False for pairs of query tile and key tile without a visible pair of slots in any row of the batch: `[I, J]`.

    Compares ranges of segments and positions in the tiles, which is cheap. If ids or positions are not monotonic, an
    empty pair of tiles may be called active, which costs time but changes no result.
    """

    def ranges(slots: Slots, *arrays: Array) -> tuple[Array, ...]:
        real = slots.segment != 0
        return tuple(
            edge
            for ids in (jnp.abs(slots.segment), slots.position, *arrays)
            for edge in (
                jnp.min(jnp.where(real, ids, jnp.iinfo(jnp.int32).max), axis=-1),
                jnp.max(jnp.where(real, ids, -1), axis=-1),
            )
        )

    # The range of segments of an empty tile is empty (from the largest integer to -1) and overlaps with no other.
    query_edges = (edge[:, None] for edge in ranges(query, last_visible(query)))
    segment_from, segment_to, position_from, position_to, _, last_to = query_edges
    key_segment_from, key_segment_to, key_from, key_to = (edge[None] for edge in ranges(key))
    see = (segment_from <= key_segment_to) & (key_segment_from <= segment_to)
    if causal:
        see &= key_from <= last_to
    if window is not None:
        near = (position_from - window) < key_to
        if sees_ahead(query, causal):
            near &= (key_from - window) < position_to
        see &= near | (key_from < 0) if summaries else near
    if blocks is not None:
        size, end = blocks.size, blocks.last * blocks.size
        near = (position_from // size <= key_to // size + 1) & (key_from // size <= position_to // size + 1)
        see &= near | (position_from < size) | (key_from < size) | (position_to >= end) | (key_to >= end)
    return jnp.any(see, axis=-1)


def _logits(
    static: StaticArgs, q: Queries, k: Keys, float_args: PyTree, int_args: PyTree, query: Slots, key: Slots
) -> Float32[Array, "B H T S"]:
    """Scores `[B, H, T, S]` of one tile before the mask. The backward pass differentiates this function."""
    batch, rows, heads, _ = q.shape
    scores = jnp.einsum("bgrk,bsgk->bgrs", _fold_queries(q, k.shape[2]), k, preferred_element_type=jnp.float32)
    scores = soft_cap(scores.reshape(batch, heads, rows, -1), static.cap)
    if static.bias is not None:
        args = jax.tree.map(lambda a, b: b if a is None else a, float_args, int_args, is_leaf=lambda leaf: leaf is None)
        scores = scores + static.bias(args, q, k, query.position, key.position)
    return scores


def _fold_queries(x: Queries, groups: int) -> Float[Array, "B G _ K"]:
    """`x` as `[B, G, H/G * T, K]`: the query heads of one key head are rows of one product."""
    return jnp.moveaxis(x, 1, 2).reshape(x.shape[0], groups, -1, x.shape[-1])


def _fold_scores(x: Float[Array, "B H T S"], groups: int) -> Float[Array, "B G _ S"]:
    """`x` as `[B, G, H/G * T, S]`, in the order of `_fold_queries`."""
    return x.reshape(x.shape[0], groups, -1, x.shape[-1])


def _visible(static: StaticArgs, ids: TileIds, query: Slots, key: Slots) -> Bool[Array, "B 1 T S"]:
    return visible(query, key, static.causal, ids.window, static.blocks, static.summaries)[:, None]


def _drop_tile(
    static: StaticArgs, ids: TileIds, i: Int[Array, ""], j: Int[Array, ""], x: Float32[Array, "B H T S"]
) -> Float32[Array, "B H T S"]:
    """Dropout of tile (i, j), equal in the forward and the backward pass."""
    if ids.dropout is None:
        return x
    return AttentionDropout(static.rate, jax.random.fold_in(ids.dropout, i * ids.active.shape[1] + j)).drop(x)


def _enumerate(tiles: PyTree) -> PyTree:
    """`(index, tile)` pairs to scan over."""
    return jnp.arange(jax.tree.leaves(tiles)[0].shape[0]), tiles


def init(q: QueryTiles, width: int, sink: Float[Array, " H"] | None = None) -> OnlineSoftmax:
    """Initial state of the online softmax, for values of width `width`; with a sink, that of a score with value 0."""
    count, batch, rows, heads, _ = q.shape
    shape = (count, batch, heads, rows)
    if sink is not None:
        start = jnp.broadcast_to(_float(sink)[:, None], shape)
        return OnlineSoftmax(start, jnp.ones(shape), jnp.zeros((*shape, width)))
    return OnlineSoftmax(jnp.full(shape, MASKED_SCORE), jnp.zeros(shape), jnp.zeros((*shape, width)))


def accumulate(
    static: StaticArgs,
    q: QueryTiles,
    k: KeyTiles,
    v: KeyTiles,
    float_args: PyTree,
    ids: TileIds,
    running: OnlineSoftmax,
) -> OnlineSoftmax:
    """`running` after all query tiles have attended to all key tiles."""
    groups = k.shape[3]

    def row(args):
        i, (q_i, query, before) = args

        def column(carry, xs):
            j, (k_j, v_j, key) = xs

            def add(old_max, total, o):
                see = _visible(static, ids, query, key)
                scores = jnp.where(see, _logits(static, q_i, k_j, float_args, ids.int_args, query, key), MASKED_SCORE)
                new_max = jnp.maximum(old_max, jnp.max(scores, axis=-1))
                # Mask again: in a row that has seen nothing so far, masked scores equal the maximum.
                probs = jnp.where(see, jnp.exp(scores - new_max[..., None]), 0.0)
                shrink = jnp.exp(old_max - new_max)
                dropped = _drop_tile(static, ids, i, j, probs).astype(v_j.dtype)
                dropped = _fold_scores(dropped, groups)
                new = jnp.einsum("bgrs,bsgk->bgrk", dropped, v_j, preferred_element_type=jnp.float32)
                o = o * shrink[..., None] + new.reshape(o.shape)
                return OnlineSoftmax(new_max, total * shrink + jnp.sum(probs, axis=-1), o)

            return jax.lax.cond(ids.active[i, j], add, OnlineSoftmax, *carry), None

        return jax.lax.scan(column, before, _enumerate((k, v, ids.key)))[0]

    return jax.lax.map(row, _enumerate((q, ids.query, running)))


def finalize(running: OnlineSoftmax, dtype: jnp.dtype) -> tuple[QueryTiles, Float32[Array, "I B H T"]]:
    """Output tiles, and the log-sums L `[I, B, H, T]`."""
    total = jnp.where(running.total == 0.0, 1.0, running.total)  # in a row that sees nothing o is 0 already
    o = jnp.moveaxis(running.o / total[..., None], 3, 2)
    return o.astype(dtype), running.max + jnp.log(total)


def output_gradient(do: QueryTiles, o: QueryTiles, log_sum: Float32[Array, "I B H T"]) -> OutputGradient:
    """Inputs of the backward pass, from tiles of the cotangent, of the output and of the log-sums."""
    return OutputGradient(do, log_sum, jnp.moveaxis(jnp.sum(_float(do) * _float(o), axis=-1), 3, 2))


def zero_gradients(q: QueryTiles, k: KeyTiles, v: KeyTiles, float_args: PyTree) -> Gradients:
    """Gradients of zero."""
    return jax.tree.map(lambda leaf: jnp.zeros(jnp.shape(leaf)), Gradients(q, k, v, float_args))


def backward(
    static: StaticArgs,
    q: QueryTiles,
    k: KeyTiles,
    v: KeyTiles,
    float_args: PyTree,
    ids: TileIds,
    known: OutputGradient,
    sums: Gradients,
) -> Gradients:
    """`sums` plus the gradients for these query and key tiles.

    The outer loop is over key tiles j, the inner one over query tiles i; dq is carried, since it sums over all j.
    """
    groups = k.shape[3]

    def column(carry, xs):
        dq, dargs = carry
        j, (k_j, v_j, key, dk_j, dv_j) = xs

        def row(carry, xs):
            i, (q_i, known_i, query, dq_i) = xs

            def add(dk_j, dv_j, dargs, dq_i):
                logits = lambda q, k, args: _logits(static, q, k, args, ids.int_args, query, key)  # noqa: E731
                scores, scores_vjp = jax.vjp(logits, q_i, k_j, float_args)
                see = _visible(static, ids, query, key)
                probs = jnp.where(see, jnp.exp(scores - known_i.log_sum[..., None]), 0.0)
                rows = _fold_queries(known_i.do, groups)
                dropped = _fold_scores(_drop_tile(static, ids, i, j, probs).astype(known_i.do.dtype), groups)
                dv = jnp.einsum("bgrs,bgrk->bsgk", dropped, rows, preferred_element_type=jnp.float32)
                dprobs = jnp.einsum("bgrk,bsgk->bgrs", rows, v_j, preferred_element_type=jnp.float32)
                dprobs = _drop_tile(static, ids, i, j, dprobs.reshape(probs.shape))
                dscores = probs * (dprobs - known_i.delta[..., None])
                added = (dv, *scores_vjp(dscores))
                before = (dv_j, dq_i, dk_j, dargs)
                dv_j, dq_i, dk_j, dargs = jax.tree.map(lambda a, b: a + _float(b), before, added)
                return dk_j, dv_j, dargs, dq_i

            carry = jax.lax.cond(ids.active[i, j], add, lambda *carry: carry, *carry, dq_i)
            return carry[:-1], carry[-1]

        (dk_j, dv_j, dargs), dq = jax.lax.scan(row, (dk_j, dv_j, dargs), _enumerate((q, known, ids.query, dq)))
        return (dq, dargs), (dk_j, dv_j)

    key_tiles = _enumerate((k, v, ids.key, sums.k, sums.v))
    (dq, dargs), (dk, dv) = jax.lax.scan(column, (sums.q, sums.float_args), key_tiles)
    return Gradients(dq, dk, dv, dargs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    static: StaticArgs,
    q: QueryTiles,
    k: KeyTiles,
    v: KeyTiles,
    float_args: PyTree,
    sink: Float[Array, " H"] | None,
    ids: TileIds,
) -> QueryTiles:
    return _attention_forward(static, q, k, v, float_args, sink, ids)[0]


def _attention_forward(
    static: StaticArgs,
    q: QueryTiles,
    k: KeyTiles,
    v: KeyTiles,
    float_args: PyTree,
    sink: Float[Array, " H"] | None,
    ids: TileIds,
):
    o, log_sum = finalize(accumulate(static, q, k, v, float_args, ids, init(q, v.shape[-1], sink)), q.dtype)
    return o, (q, k, v, float_args, sink, ids, o, log_sum)


def _attention_backward(static: StaticArgs, saved, do: QueryTiles):
    q, k, v, float_args, sink, ids, o, log_sum = saved
    known, zeros = output_gradient(do, o, log_sum), zero_gradients(q, k, v, float_args)
    sums = backward(static, q, k, v, float_args, ids, known, zeros)
    dsink = None
    if sink is not None:  # the value of the sink's column is 0, so its dP is 0, and dS = P (0 - delta)
        share = jnp.exp(_float(sink)[:, None] - log_sum)
        dsink = -jnp.sum(share * known.delta, axis=(0, 1, 3)).astype(sink.dtype)
    return *cast_like(sums, Gradients(q, k, v, float_args)), dsink, None


def cast_like(sums: Gradients, inputs: Gradients) -> Gradients:
    """`sums` in the dtypes of `inputs`."""
    return jax.tree.map(lambda d, x: d.astype(jnp.result_type(x)), sums, inputs)


def _float(x: Float[Array, "*shape"]) -> Float32[Array, "*shape"]:
    return x.astype(jnp.float32)


_attention.defvjp(_attention_forward, _attention_backward)

KERNEL = Kernel(attend, has_sinks=True)
