"""Exact causal attention one block of queries at a time, each with its whole softmax: for short texts on a CPU.

A block of queries is multiplied with the keys up to its end only: four blocks leave out 3/8 of the products and of the
softmax. That is right where the slots are in the order of their positions. Where the mask allows a pair behind a block
(positions out of order, a prefix), a branch of the program takes all keys.

The backward pass is that of FlashAttention-2 (Dao 2023, algorithm 2), with the probabilities P kept. For queries i and
keys j:

    dS_ij = P_ij (do_i v_j^T - rowsum(do_i o_i)),   dv_j = sum_i P_ij do_i,   dq = dS k,   dk = dS^T q

Autodiff of the softmax sums P_ij dP_ij over the keys where this sums do_i o_i over the width of a head, which is less.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Float32

from jaxformer.config import AttentionConfig
from jaxformer.nn import cpu
from jaxformer.nn.kernels import AttentionBias, AttentionDropout, Kernel, Keys, Queries
from jaxformer.nn.masks import Mask
from jaxformer.types import Array

MASKED_SCORE = -1e30
MOST_BLOCKS = 4
"""Each block of queries is a part of the program of its own, so that more take longer to compile."""

Heads = Float[Array, "B H T K"]
KeyHeads = Float[Array, "B G S K"]


class Block(NamedTuple):
    """Queries `start` to `stop`, and the first `keys` keys: all that these queries see."""

    start: int
    stop: int
    keys: int


def attend(
    q: Queries,
    k: Keys,
    v: Keys,
    mask: Mask,
    bias: AttentionBias | None,
    dropout: AttentionDropout | None,
    config: AttentionConfig,
) -> Queries:
    """Attention output `[B, T, H, K]`, equal to the dense kernel's; blocks have `config.block / 2` queries or more."""
    see = mask.dense()
    blocks = _divide(q.shape[1], config.block) if mask.causal and mask.same_slots else ()
    # Written out: the products of all blocks read them, and they then lie as the products need them.
    heads = (jax.lax.optimization_barrier(jnp.moveaxis(x, 1, 2)) for x in (q, k, v))
    o = jnp.moveaxis(_attention(blocks, *heads, see), 2, 1)
    return jnp.where(jnp.any(see, axis=-1)[:, :, None, None], o, 0.0).astype(q.dtype)


def _divide(length: int, block: int) -> tuple[Block, ...]:
    """The blocks of `length` queries in order; empty if one block would hold all."""
    count = min(MOST_BLOCKS, length // max(block // 2, 1))
    edges = [length * i // count for i in range(count + 1)] if count > 1 else []
    return tuple(Block(start, stop, stop) for start, stop in itertools.pairwise(edges))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    blocks: tuple[Block, ...], q: Heads, k: KeyHeads, v: KeyHeads, see: Bool[Array, "B T S"]
) -> Float32[Array, "B H T K"]:
    return _forward(blocks, q, k, v, see)[0]


def _forward(
    blocks: tuple[Block, ...], q: Heads, k: KeyHeads, v: KeyHeads, see: Bool[Array, "B T S"]
) -> tuple[Float32[Array, "B H T K"], tuple]:
    def ordered() -> tuple[Array, list[Array]]:
        return _outputs(blocks, q, k, v, see)

    def unordered() -> tuple[Array, list[Array]]:
        unused = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(ordered)[1])
        return _outputs(_whole(see), q, k, v, see)[0], unused  # the backward pass computes its probabilities again

    if blocks:
        o, probs = jax.lax.cond(_in_order(blocks, see), ordered, unordered)
    else:
        o, probs = _outputs(_whole(see), q, k, v, see)
    return o, (q, k, v, see, o, probs)


def _backward(blocks: tuple[Block, ...], saved: tuple, do: Float32[Array, "B H T K"]) -> tuple:
    q, k, v, see, o, probs = saved

    def ordered() -> tuple[Array, Array, Array]:
        return _gradients(blocks, q, k, v, o, do, probs)

    def unordered() -> tuple[Array, Array, Array]:
        return _gradients(_whole(see), q, k, v, o, do, _outputs(_whole(see), q, k, v, see)[1])

    if blocks:
        return (*jax.lax.cond(_in_order(blocks, see), ordered, unordered), None)
    return (*_gradients(_whole(see), q, k, v, o, do, probs), None)


_attention.defvjp(_forward, _backward)


def _whole(see: Bool[Array, "B T S"]) -> tuple[Block, ...]:
    """All queries and keys as one block."""
    return (Block(0, see.shape[1], see.shape[2]),)


def _in_order(blocks: tuple[Block, ...], see: Bool[Array, "B T S"]) -> Bool[Array, ""]:
    """True if no query sees a key behind those of its block."""
    keys = np.repeat([block.keys for block in blocks], [block.stop - block.start for block in blocks])
    return _none(see & (np.arange(see.shape[2]) >= keys[:, None]))


@jax.custom_batching.custom_vmap
def _none(see: Bool[Array, "..."]) -> Bool[Array, ""]:
    return ~jnp.any(see)


@_none.def_vmap
def _none_of_all(size: int, batched: list[bool], see: Bool[Array, "..."]) -> tuple[Bool[Array, ""], bool]:
    """One answer for all members of a `vmap`, since a branch for each of them would compute both."""
    return _none(see), False


def _outputs(
    blocks: tuple[Block, ...], q: Heads, k: KeyHeads, v: KeyHeads, see: Bool[Array, "B T S"]
) -> tuple[Float32[Array, "B H T K"], list[Float32[Array, "B H _ _"]]]:
    """Outputs of all queries, and the probabilities of each block."""
    outputs, probs = [], []
    for start, stop, keys in blocks:
        scores = _product("bgrk,bgsk->bgrs", _grouped(q[:, :, start:stop], k), k[:, :, :keys])
        scores = scores.reshape(*q.shape[:2], stop - start, keys)
        probs.append(jax.nn.softmax(jnp.where(see[:, None, start:stop, :keys], scores, MASKED_SCORE), axis=-1))
        o = _product("bgrs,bgsk->bgrk", _grouped(probs[-1].astype(v.dtype), v), v[:, :, :keys])
        outputs.append(o.reshape(*q.shape[:2], stop - start, -1))
    return jnp.concatenate(outputs, axis=2), probs


def _gradients(
    blocks: tuple[Block, ...],
    q: Heads,
    k: KeyHeads,
    v: KeyHeads,
    o: Float32[Array, "B H T K"],
    do: Float32[Array, "B H T K"],
    probs: list[Float32[Array, "B H _ _"]],
) -> tuple[Heads, KeyHeads, KeyHeads]:
    """Gradients of `q`, `k` and `v`, with float32 products as autodiff has them."""
    q32, k32, v32 = (x.astype(jnp.float32) for x in (q, k, v))
    delta = jnp.sum(do * o, axis=-1, keepdims=True)
    dq, dk, dv = [], [], []
    for (start, stop, keys), p in zip(blocks, probs, strict=True):
        do_rows = _grouped(do[:, :, start:stop], k)
        dp = _product("bgrk,bgsk->bgrs", do_rows, v32[:, :, :keys]).reshape(p.shape)
        ds = _grouped(p * (dp - delta[:, :, start:stop]), k)
        dq.append(_product("bgrs,bgsk->bgrk", ds, k32[:, :, :keys]).reshape(*p.shape[:3], -1))
        hidden = ((0, 0), (0, 0), (0, k.shape[2] - keys), (0, 0))
        dk.append(jnp.pad(_product("bgrs,bgrk->bgsk", ds, _grouped(q32[:, :, start:stop], k)), hidden))
        dv.append(jnp.pad(_product("bgrs,bgrk->bgsk", _grouped(p, v), do_rows), hidden))
    return jnp.concatenate(dq, axis=2).astype(q.dtype), sum(dk).astype(k.dtype), sum(dv).astype(v.dtype)


def _grouped(x: Float[Array, "B H T N"], keys: KeyHeads) -> Float[Array, "B G R N"]:
    """The query heads of each key head as the rows of one product."""
    return x.reshape(x.shape[0], keys.shape[1], -1, x.shape[-1])


def _product(formula: str, a: Float[Array, "..."], b: Float[Array, "..."]) -> Float32[Array, "..."]:
    return jnp.einsum(formula, *cpu.operands(a, b), preferred_element_type=jnp.float32)


def _refuse(config: AttentionConfig, bias: bool, dropout: bool) -> str | None:
    if bias:
        return "an encoding that adds no bias"
    if config.soft_cap is not None:
        return "attention.soft_cap None"
    return "attention.dropout 0" if dropout else None


KERNEL = Kernel(attend, refuse=_refuse)
