"""Exact attention in memory linear in length: tiles, an online softmax, and a backward that recomputes its tiles.

The method of FlashAttention-2 (Dao 2023) in plain JAX. For query rows i and key tiles j = 1, 2, ...

    S_ij = q_i k_j^T + score_ij
    m' = max(m, rowmax S_ij),  l' = e^(m - m') l + rowsum e^(S_ij - m'),  o' = e^(m - m') o + e^(S_ij - m') v_j

and at the end o / l. Only o and the rows' L = m + log l are kept for the backward, which needs no more than

    P_ij = e^(S_ij - L_i),   dP_ij = do_i v_j^T,   dS_ij = P_ij (dP_ij - rowsum(do_i o_i)),   dv_j = sum_i P_ij^T do_i

and pulls dS back through the tile's S to q, k and the arguments of the score. Dropout multiplies P_ij in o and dP_ij in
the backward by one and the same random factor, drawn from the key folded with the tile's number.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Float32, Int, Shaped

from jaxformer.config import AttentionConfig
from jaxformer.nn.kernels import Kernel, Keys, Noise, Queries, Score, _sharding
from jaxformer.nn.masks import Mask, visible
from jaxformer.types import Array, PyTree, Slots

HIDDEN = -1e30

QueryTiles = Float[Array, "I B T H K"]
KeyTiles = Float[Array, "J B S G K"]


class Rule(NamedTuple):
    """What is fixed when the program is traced: the mask's rules, the score function, the dropout rate."""

    causal: bool
    score: object | None
    rate: float


class Ids(NamedTuple):
    """Integer data of the tiles: slots `[tiles, B, rows]` of both sides, which tiles matter, the score's integers."""

    query: Slots
    key: Slots
    window: Array | None
    active: Array  # bool [query tiles, key tiles]
    score: PyTree  # leaves of the score's arguments that have no gradient (None where the leaf has one)
    noise: Array | None


class Running(NamedTuple):
    """An online softmax that has read some of the keys: m and l `[tiles, B, H, rows]`, o `[tiles, B, H, rows, K]`."""

    top: Array
    total: Array
    o: Array


class Given(NamedTuple):
    """What the backward knows of a query tile besides q: do, L and rowsum(do o), with leading axis tiles."""

    do: Array
    log_sum: Array
    delta: Array


class Gradients(NamedTuple):
    """Float32 sums so far: dq, dk and dv in tiles, and those of the score's real arguments."""

    q: Array
    k: Array
    v: Array
    real: PyTree


def attend(
    q: Queries,
    k: Keys,
    v: Keys,
    mask: Mask,
    score: Score | None,
    noise: Noise | None,
    config: AttentionConfig,
) -> Queries:
    """Equals the dense kernel. Tiles are `config.block` rows by as many columns; lengths are padded up to whole tiles.

    Tiles in which nothing can be visible (above the diagonal of a causal mask, beyond a window, between different
    documents) are skipped at run time.

    Raises:
      ConfigError: the mask hides single pairs.
    """
    _sharding.refuse_table("blockwise", mask)
    rows, columns = min(config.block, q.shape[1]), min(config.block, k.shape[1])
    query = Slots(*(tiles(ids, rows) for ids in mask.query))
    key = Slots(*(tiles(ids, columns) for ids in mask.key))
    rule, real, fixed = split(mask, score, noise)
    window = None if mask.window is None else jnp.asarray(mask.window, jnp.int32)
    ids = Ids(query, key, window, active(query, key, mask.causal, window), fixed, None if noise is None else noise.key)
    o = _attention(rule, tiles(q, rows), tiles(k, columns), tiles(v, columns), real, ids)
    return whole(o, q.shape[1])


def split(mask: Mask, score: Score | None, noise: Noise | None) -> tuple[Rule, PyTree, PyTree]:
    """The static rule, and the score's arguments apart: those with a gradient, and the others (None elsewhere)."""
    rule = Rule(mask.causal, None if score is None else score.function, 0.0 if noise is None else noise.rate)
    args = None if score is None else score.args
    real = jax.tree.map(lambda leaf: leaf if _has_gradient(leaf) else None, args)
    return rule, real, jax.tree.map(lambda leaf: None if _has_gradient(leaf) else leaf, args)


def _has_gradient(leaf: Shaped[Array, "..."]) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def tiles(x: Shaped[Array, "B T *rest"], size: int) -> Shaped[Array, "I B _ *rest"]:
    """Tiles of `size` slots, filled up with zeros (for ids: segment 0, nothing there)."""
    batch, length = x.shape[:2]
    count = -(-length // size)
    x = jnp.pad(x, [(0, 0), (0, count * size - length)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(batch, count, size, *x.shape[2:]), 1, 0)


def whole(x: Shaped[Array, "I B _ *rest"], length: int) -> Shaped[Array, "B T *rest"]:
    """The inverse of `tiles`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def active(query: Slots, key: Slots, causal: bool, window: Int[Array, ""] | int | None) -> Bool[Array, "I J"]:
    """For each tile of queries and tile of keys, False only where no row of the batch has a visible pair in it.

    Compares the ranges of segments and positions that occur in the tiles, so it costs next to nothing; where segment
    ids or positions are not monotonic it may call an empty tile active, which wastes time and changes nothing.
    """

    def ranges(slots: Slots) -> tuple[Array, ...]:
        there = slots.segment != 0
        return tuple(
            edge
            for ids in (jnp.abs(slots.segment), slots.position)
            for edge in (
                jnp.min(jnp.where(there, ids, jnp.iinfo(jnp.int32).max), axis=-1),
                jnp.max(jnp.where(there, ids, -1), axis=-1),
            )
        )

    # An empty tile has an empty range of segments (from the largest integer to -1), which overlaps with none.
    segment_from, segment_to, position_from, position_to = (edge[:, None] for edge in ranges(query))
    key_segment_from, key_segment_to, key_from, key_to = (edge[None] for edge in ranges(key))
    see = (segment_from <= key_segment_to) & (key_segment_from <= segment_to)
    if causal:
        see &= key_from <= position_to
    if window is not None:
        see &= (position_from - window) < key_to
        if not causal:
            see &= (key_from - window) < position_to
    return jnp.any(see, axis=-1)


def _logits(
    rule: Rule, q: Queries, k: Keys, real: PyTree, fixed: PyTree, query: Slots, key: Slots
) -> Float32[Array, "B H T S"]:
    """Scores of one tile, before the mask. The backward differentiates this function."""
    batch, rows, heads, _ = q.shape
    scores = jnp.einsum("bgrk,bsgk->bgrs", _fold(q, k.shape[2]), k, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, heads, rows, -1)
    if rule.score is not None:
        args = jax.tree.map(lambda a, b: b if a is None else a, real, fixed, is_leaf=lambda leaf: leaf is None)
        scores = scores + rule.score(args, q, k, query.position, key.position)
    return scores


def _fold(x: Queries, groups: int) -> Float[Array, "B G _ K"]:
    """As `[B, G, H/G * T, K]`: the rows of all query heads that read one key head."""
    return jnp.moveaxis(x, 1, 2).reshape(x.shape[0], groups, -1, x.shape[-1])


def _fold_scores(x: Float[Array, "B H T S"], groups: int) -> Float[Array, "B G _ S"]:
    """As `[B, G, H/G * T, S]`, the same rows."""
    return x.reshape(x.shape[0], groups, -1, x.shape[-1])


def _visible(rule: Rule, ids: Ids, query: Slots, key: Slots) -> Bool[Array, "B 1 T S"]:
    return visible(query, key, rule.causal, ids.window)[:, None]


def _drop(
    rule: Rule, ids: Ids, i: Int[Array, ""], j: Int[Array, ""], x: Float32[Array, "B H T S"]
) -> Float32[Array, "B H T S"]:
    """Dropout of one tile: the same draw in forward and backward."""
    if ids.noise is None:
        return x
    return Noise(rule.rate, jax.random.fold_in(ids.noise, i * ids.active.shape[1] + j)).drop(x)


def _numbered(tiles: PyTree) -> PyTree:
    """`(number, tile)` to scan over."""
    return jnp.arange(jax.tree.leaves(tiles)[0].shape[0]), tiles


def start(q: QueryTiles, width: int) -> Running:
    """Nothing read yet, for query tiles and values of that width."""
    count, batch, rows, heads, _ = q.shape
    shape = (count, batch, heads, rows)
    return Running(jnp.full(shape, HIDDEN), jnp.zeros(shape), jnp.zeros((*shape, width)))


def read(rule: Rule, q: QueryTiles, k: KeyTiles, v: KeyTiles, real: PyTree, ids: Ids, running: Running) -> Running:
    """`running` after all key tiles have been read by all query tiles."""
    groups = k.shape[3]

    def row(args):
        i, (q_i, query, before) = args

        def column(carry, xs):
            j, (k_j, v_j, key) = xs

            def add(top, total, o):
                see = _visible(rule, ids, query, key)
                scores = jnp.where(see, _logits(rule, q_i, k_j, real, ids.score, query, key), HIDDEN)
                higher = jnp.maximum(top, jnp.max(scores, axis=-1))
                # `see` once more: in a row that has seen nothing yet, hidden scores equal the maximum.
                probs = jnp.where(see, jnp.exp(scores - higher[..., None]), 0.0)
                shrink = jnp.exp(top - higher)
                dropped = _drop(rule, ids, i, j, probs).astype(v_j.dtype)
                dropped = _fold_scores(dropped, groups)
                new = jnp.einsum("bgrs,bsgk->bgrk", dropped, v_j, preferred_element_type=jnp.float32)
                o = o * shrink[..., None] + new.reshape(o.shape)
                return Running(higher, total * shrink + jnp.sum(probs, axis=-1), o)

            return jax.lax.cond(ids.active[i, j], add, Running, *carry), None

        return jax.lax.scan(column, before, _numbered((k, v, ids.key)))[0]

    return jax.lax.map(row, _numbered((q, ids.query, running)))


def finish(running: Running, dtype: jnp.dtype) -> tuple[QueryTiles, Float32[Array, "I B H T"]]:
    """Outputs and log-sums L."""
    total = jnp.where(running.total == 0.0, 1.0, running.total)  # a row that sees nothing: o is 0 already
    o = jnp.moveaxis(running.o / total[..., None], 3, 2)
    return o.astype(dtype), running.top + jnp.log(total)


def given(do: QueryTiles, o: QueryTiles, log_sum: Float32[Array, "I B H T"]) -> Given:
    """Of tiles of the output, its cotangent and the log-sums."""
    return Given(do, log_sum, jnp.moveaxis(jnp.sum(_float(do) * _float(o), axis=-1), 3, 2))


def no_gradients(q: QueryTiles, k: KeyTiles, v: KeyTiles, real: PyTree) -> Gradients:
    """Zeros of their shapes."""
    return jax.tree.map(lambda leaf: jnp.zeros(jnp.shape(leaf)), Gradients(q, k, v, real))


def pull(
    rule: Rule, q: QueryTiles, k: KeyTiles, v: KeyTiles, real: PyTree, ids: Ids, known: Given, sums: Gradients
) -> Gradients:
    """`sums` with what these query and key tiles add.

    One pass over key tiles j, and for each over query tiles i. dq is carried along: it gathers from every j.
    """
    groups = k.shape[3]

    def column(carry, xs):
        dq, dreal = carry
        j, (k_j, v_j, key, dk_j, dv_j) = xs

        def row(carry, xs):
            i, (q_i, known_i, query, dq_i) = xs

            def add(dk_j, dv_j, dreal, dq_i):
                scores, back = jax.vjp(
                    lambda q, k, real: _logits(rule, q, k, real, ids.score, query, key), q_i, k_j, real
                )
                see = _visible(rule, ids, query, key)
                probs = jnp.where(see, jnp.exp(scores - known_i.log_sum[..., None]), 0.0)
                rows = _fold(known_i.do, groups)
                dropped = _fold_scores(_drop(rule, ids, i, j, probs).astype(known_i.do.dtype), groups)
                dv = jnp.einsum("bgrs,bgrk->bsgk", dropped, rows, preferred_element_type=jnp.float32)
                dprobs = jnp.einsum("bgrk,bsgk->bgrs", rows, v_j, preferred_element_type=jnp.float32)
                dscores = probs * (_drop(rule, ids, i, j, dprobs.reshape(probs.shape)) - known_i.delta[..., None])
                added = (dv, *back(dscores))
                before = (dv_j, dq_i, dk_j, dreal)
                dv_j, dq_i, dk_j, dreal = jax.tree.map(lambda a, b: a + _float(b), before, added)
                return dk_j, dv_j, dreal, dq_i

            carry = jax.lax.cond(ids.active[i, j], add, lambda *carry: carry, *carry, dq_i)
            return carry[:-1], carry[-1]

        (dk_j, dv_j, dreal), dq = jax.lax.scan(row, (dk_j, dv_j, dreal), _numbered((q, known, ids.query, dq)))
        return (dq, dreal), (dk_j, dv_j)

    (dq, dreal), (dk, dv) = jax.lax.scan(column, (sums.q, sums.real), _numbered((k, v, ids.key, sums.k, sums.v)))
    return Gradients(dq, dk, dv, dreal)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(rule: Rule, q: QueryTiles, k: KeyTiles, v: KeyTiles, real: PyTree, ids: Ids) -> QueryTiles:
    return _attention_forward(rule, q, k, v, real, ids)[0]


def _attention_forward(rule: Rule, q: QueryTiles, k: KeyTiles, v: KeyTiles, real: PyTree, ids: Ids):
    o, log_sum = finish(read(rule, q, k, v, real, ids, start(q, v.shape[-1])), q.dtype)
    return o, (q, k, v, real, ids, o, log_sum)


def _attention_backward(rule: Rule, saved, do: QueryTiles):
    q, k, v, real, ids, o, log_sum = saved
    sums = pull(rule, q, k, v, real, ids, given(do, o, log_sum), no_gradients(q, k, v, real))
    return *like(sums, Gradients(q, k, v, real)), None


def like(sums: Gradients, inputs: Gradients) -> Gradients:
    """The sums in the inputs' precision."""
    return jax.tree.map(lambda d, x: d.astype(jnp.result_type(x)), sums, inputs)


def _float(x: Float[Array, "*shape"]) -> Float32[Array, "*shape"]:
    return x.astype(jnp.float32)


_attention.defvjp(_attention_forward, _attention_backward)

KERNEL = Kernel(attend)
