"""The gated delta rule: a linear recurrence whose state is a matrix a head, in chunks and one slot at a time.

    S_t = exp(g_t) S_{t-1} + k_t d_t^T        d_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)        o_t = S_t^T q_t

(Yang et al. 2024, Gated Delta Networks, arXiv:2412.06464, equation 10). The state S `[K, V]` maps keys to values. It
forgets by exp(g), and writes beta of what the value differs from the one that it holds for the key already.

All arrays are float32: rounding errors of the state would add up over the text.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Float32, Int

from jaxformer.types import Array

multiply = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
"""Products in float32, which a TPU would round to bfloat16 by default."""


def chunked(
    q: Float32[Array, "B T H K"],
    k: Float32[Array, "B T H K"],
    v: Float32[Array, "B T H V"],
    log_decay: Float32[Array, "B T H"],
    beta: Float32[Array, "B T H"],
    run: Int[Array, "B T"],
    state: Float32[Array, "B H K V"],
    size: int,
) -> tuple[Float32[Array, "B T H V"], Float32[Array, "B H K V"]]:
    """Outputs of all slots, and the state after the last, by matrix products within chunks of `size` slots.

    Within a chunk the writes d solve one triangular system, (I + A) D = beta (V - exp(c) K S), where A_ij =
    beta_i exp(c_i - c_j) k_i.k_j for j < i and c is the sum of g from the chunk's start (the WY representation; Yang et
    al. 2024, DeltaNet parallelised over length, arXiv:2406.06484, section 3.2; with decay section 3.3 of the other).
    Only the state goes from chunk to chunk.

    Args:
      q, k: normalised; `q` also scaled.
      log_decay: g, at most 0.
      beta: 0 where nothing is written; with `log_decay` 0 such a slot changes nothing (padding).
      run: number of the text in the row, from 0, not falling. A text sees the state of its own slots alone; run 0 goes
        on from `state`.
      state: the state before the first slot.
      size: slots of a chunk; values are the same up to rounding.
    """
    length = q.shape[1]
    size = min(size, length)
    padding = -length % size
    fill = lambda x: jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))  # noqa: E731
    split = lambda x: jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)  # noqa: E731
    q, k, v, log_decay, beta = (jnp.moveaxis(split(fill(x)), 3, 2) for x in (q, k, v, log_decay, beta))
    run = split(jnp.pad(run, [(0, 0), (0, padding)], mode="edge"))[:, :, None]  # [N, B, 1, C], over all heads
    previous = jnp.concatenate([jnp.zeros_like(run[:1, ..., -1:]), run[:-1, ..., -1:]])

    total = jnp.cumsum(log_decay, axis=-1)
    past = jnp.tril(jnp.ones((size, size), bool)) & (run[..., :, None] == run[..., None, :])
    between = jnp.exp(jnp.where(past, total[..., :, None] - total[..., None, :], -jnp.inf))
    reads = jnp.where(run == previous, jnp.exp(total), 0.0)[..., None]
    system = multiply("nbhik,nbhjk->nbhij", k, k) * between * beta[..., None]
    right = jnp.concatenate([v, k * reads], axis=-1) * beta[..., None]
    solved = jax.lax.linalg.triangular_solve(system, right, left_side=True, lower=True, unit_diagonal=True)
    own, from_state = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    scores = multiply("nbhik,nbhjk->nbhij", q, k) * between
    keys = k * between[..., -1, :, None]
    kept = reads[..., -1:, :]

    def step(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        own, from_state, scores, queries, keys, kept = chunk
        writes = own - multiply("bhik,bhkv->bhiv", from_state, state)
        output = multiply("bhik,bhkv->bhiv", queries, state) + multiply("bhij,bhjv->bhiv", scores, writes)
        return state * kept + multiply("bhik,bhiv->bhkv", keys, writes), output

    state, output = jax.lax.scan(step, state, (own, from_state, scores, q * reads, keys, kept))
    output = jnp.moveaxis(output, (0, 2), (1, 3))  # [B, N, C, H, V]
    return output.reshape(output.shape[0], -1, *output.shape[3:])[:, :length], state


def single(
    q: Float32[Array, "B H K"],
    k: Float32[Array, "B H K"],
    v: Float32[Array, "B H V"],
    log_decay: Float32[Array, "B H"],
    beta: Float32[Array, "B H"],
    state: Float32[Array, "B H K V"],
) -> tuple[Float32[Array, "B H V"], Float32[Array, "B H K V"]]:
    """Output of one slot, and the state after it; arguments as in `chunked`."""
    state = state * jnp.exp(log_decay)[..., None, None]
    write = (v - multiply("bhk,bhkv->bhv", k, state)) * beta[..., None]
    state = state + k[..., :, None] * write[..., None, :]
    return multiply("bhk,bhkv->bhv", q, state), state


def slot_by_slot(
    q: Float32[Array, "B T H K"],
    k: Float32[Array, "B T H K"],
    v: Float32[Array, "B T H V"],
    log_decay: Float32[Array, "B T H"],
    beta: Float32[Array, "B T H"],
    state: Float32[Array, "B H K V"],
) -> tuple[Float32[Array, "B T H V"], Float32[Array, "N B H K V"]]:
    """Outputs of all slots of one text, and the N = T + 1 states before the first slot and after each.

    Arguments are as in `chunked`.
    """

    def step(state: Array, slot: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        output, after = single(*slot, state)
        return after, (output, after)

    slots = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, log_decay, beta))
    _, (output, states) = jax.lax.scan(step, state, slots)
    return jnp.moveaxis(output, 0, 1), jnp.concatenate([state[None], states])
