"""Attention fused into one TPU kernel: JAX's Pallas "splash" attention, with a blocked backward of its own.

It knows masks as rules over slot numbers and segment ids. Slot numbers stand for positions, which is exact where
positions count up by one within a segment, slot by slot, as all batches of `data` have it. Slots of another order (of
a balanced ring, of a cache's queries) give NaN and not a wrong number.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Bool

from jaxformer.config import AttentionConfig
from jaxformer.nn.kernels import Kernel, Keys, Noise, Queries, Score, Site, _sharding
from jaxformer.nn.masks import Mask, visible
from jaxformer.parallel import mesh
from jaxformer.types import Array, Slots

LANES = 128  # of the chip: blocks are multiples of it
NOTHING_QUERIES, NOTHING_KEYS = -2, -1  # segments of empty slots: they match nothing, themselves included


def attend(
    q: Queries,
    k: Keys,
    v: Keys,
    mask: Mask,
    score: Score | None,
    noise: Noise | None,
    config: AttentionConfig,
) -> Queries:
    """Equals the dense kernel. Lengths are filled up to multiples of 128. Without a TPU it is interpreted, slowly.

    A window is the config's, a number: the mask's own may be one that the program computes.
    """
    _sharding.refuse_table("splash", mask)
    window = None if mask.window is None else config.window
    local = functools.partial(_local, mask.causal, window)
    return _sharding.rows_and_heads(local, q, k, v, mask.query, mask.key)


def _local(causal: bool, window: int | None, q: Queries, k: Keys, v: Keys, query: Slots, key: Slots) -> Queries:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    length = q.shape[1]
    seen = jnp.any(visible(query, key, causal, window), axis=-1)
    q, k, v = (jnp.swapaxes(_sharding.pad(x, LANES), 1, 2) for x in (q, k, v))
    segments = splash.SegmentIds(
        q=_sharding.pad(jnp.where(query.segment == 0, NOTHING_QUERIES, jnp.abs(query.segment)), LANES),
        kv=_sharding.pad(jnp.where(key.segment > 0, key.segment, NOTHING_KEYS), LANES),
    )
    kernel = _kernel(q.shape[1], q.shape[2], k.shape[2], causal, window, mesh.platform() != "tpu")
    o = jnp.swapaxes(jax.vmap(kernel)(q, k, v, segments), 1, 2)[:, :length]
    o = jnp.where(seen[:, :, None, None], o, 0.0).astype(q.dtype)
    if causal or window is not None:
        o = jnp.where(_by_slot(query, key)[:, None, None, None], o, jnp.nan)
    return o


def _kernel(heads: int, queries: int, keys: int, causal: bool, window: int | None, interpret: bool):
    """The kernel of `[H, T, K]` inputs."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shape = (queries, keys)
    if window is not None:
        rule = splash.LocalMask(shape, (window - 1, 0 if causal else window - 1), 0)
    else:
        rule = splash.CausalMask(shape) if causal else splash.FullMask(shape)
    rows, columns = (next(size for size in (512, 256, LANES) if length % size == 0) for length in shape)
    blocks = splash.BlockSizes(
        block_q=rows,
        block_kv=columns,
        block_kv_compute=columns,
        block_q_dkv=rows,
        block_kv_dkv=columns,
        block_kv_dkv_compute=columns,
        block_q_dq=rows,
        block_kv_dq=columns,
    )
    every = splash.MultiHeadMask([rule] * heads)
    return splash.make_splash_mha(every, head_shards=1, q_seq_shards=1, block_sizes=blocks, interpret=interpret)


def _by_slot(query: Slots, key: Slots) -> Bool[Array, " B"]:
    """Whether slot numbers may stand for positions: queries and keys are numbered alike, and count up."""
    length = min(query.segment.shape[1], key.segment.shape[1])
    alike = [jnp.all(a[:, :length] == b[:, :length], axis=1) for a, b in zip(query, key, strict=True)]
    return alike[0] & alike[1] & _counts(query) & _counts(key)


def _counts(slots: Slots) -> Bool[Array, " B"]:
    """Whether positions rise by one from slot to slot of a segment, and a segment is one run of slots.

    Padding that reads a segment (its negative) counts as a part of it.
    """
    position, segment = slots.position, jnp.abs(slots.segment)
    real, again = segment[:, 1:] != 0, segment[:, 1:] == segment[:, :-1]
    steps = ~(real & again) | (position[:, 1:] == position[:, :-1] + 1)
    runs = ~real | again | (segment[:, 1:] > jax.lax.cummax(segment, axis=1)[:, :-1])
    return jnp.all(steps & runs, axis=1)


def _refuse(config: AttentionConfig, score: bool, noise: bool) -> str | None:
    if score:
        return "an encoding that adds no score"
    if noise:
        return "attention.dropout 0"
    return "attention.window_every 1" if config.window is not None and config.window_every > 1 else None


def _lacks(site: Site) -> str | None:
    if site.platform != "tpu":
        return "a TPU"
    if site.context > 1:
        return "whole sequences (mesh context 1, or ulysses)"
    return None if site.own or not site.causal else "queries that are not read against a cache"


KERNEL = Kernel(attend, _refuse, _lacks)
