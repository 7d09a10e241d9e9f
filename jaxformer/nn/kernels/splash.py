"""Fused TPU attention: JAX's Pallas "splash" attention, with a blocked backward pass.

The kernel expresses masks by slot indices and segment ids. Slot indices replace positions, which is exact if positions
increase by one from slot to slot within a segment, as in all batches of `data`. In any other order (a balanced ring,
queries against a cache) the result is NaN rather than wrong.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Bool

from jaxformer.config import AttentionConfig
from jaxformer.errors import ConfigError
from jaxformer.nn.kernels import AttentionBias, AttentionDropout, CallSite, Kernel, Keys, Queries, _sharding
from jaxformer.nn.masks import Mask, visible
from jaxformer.parallel import mesh
from jaxformer.types import Array, Slots

LANES = 128  # lanes of a TPU's vector unit: block sizes are multiples
NO_PREFIX = "a mask without a prefix: its masks are fixed when it is compiled, and a prefix differs between rows"
EMPTY_QUERY_SEGMENT, EMPTY_KEY_SEGMENT = -2, -1  # segment ids of padding, which match no other id


def attend(
    q: Queries,
    k: Keys,
    v: Keys,
    mask: Mask,
    bias: AttentionBias | None,
    dropout: AttentionDropout | None,
    config: AttentionConfig,
) -> Queries:
    """Attention output `[B, T, H, K]`, equal to the dense kernel's. Without a TPU it is interpreted, slowly.

    Lengths are padded to multiples of 128. The window is that of the config, since the mask's may be a traced value.
    """
    _sharding.refuse_hidden_pairs("splash", mask)
    _sharding.refuse_whole_rows("splash", mask)
    if mask.causal and mask.query.prefix is not None:
        raise ConfigError(f"attention.kernel: got splash, expected another, which needs {NO_PREFIX}; set it to auto")
    window = None if mask.window is None else config.window
    local = functools.partial(_local, mask.causal, window, config.soft_cap)
    return _sharding.shard_rows_and_heads(local, q, k, v, mask.query, mask.key)


def _local(
    causal: bool, window: int | None, cap: float | None, q: Queries, k: Keys, v: Keys, query: Slots, key: Slots
) -> Queries:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    length = q.shape[1]
    seen = jnp.any(visible(query, key, causal, window), axis=-1)
    q, k, v = (jnp.swapaxes(_sharding.pad(x, LANES), 1, 2) for x in (q, k, v))
    segments = splash.SegmentIds(
        q=_sharding.pad(jnp.where(query.segment == 0, EMPTY_QUERY_SEGMENT, jnp.abs(query.segment)), LANES),
        kv=_sharding.pad(jnp.where(key.segment > 0, key.segment, EMPTY_KEY_SEGMENT), LANES),
    )
    kernel = _kernel(q.shape[1], q.shape[2], k.shape[2], causal, window, cap, mesh.platform() != "tpu")
    o = jnp.swapaxes(jax.vmap(kernel)(q, k, v, segments), 1, 2)[:, :length]
    o = jnp.where(seen[:, :, None, None], o, 0.0).astype(q.dtype)
    if causal or window is not None:
        o = jnp.where(_slots_are_positions(query, key)[:, None, None, None], o, jnp.nan)
    return o


def _kernel(heads: int, queries: int, keys: int, causal: bool, window: int | None, cap: float | None, interpret: bool):
    """The splash kernel for inputs `[H, T, K]`."""
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
    return splash.make_splash_mha(
        every,
        head_shards=1,
        q_seq_shards=1,
        block_sizes=blocks,
        attn_logits_soft_cap=cap,
        interpret=interpret,
    )


def _slots_are_positions(query: Slots, key: Slots) -> Bool[Array, " B"]:
    """True for rows in which slot indices can replace positions: equal for queries and keys, and consecutive."""
    length = min(query.segment.shape[1], key.segment.shape[1])
    same_position = jnp.all(query.position[:, :length] == key.position[:, :length], axis=1)
    same_segment = jnp.all(query.segment[:, :length] == key.segment[:, :length], axis=1)
    return same_position & same_segment & _positions_are_consecutive(query) & _positions_are_consecutive(key)


def _positions_are_consecutive(slots: Slots) -> Bool[Array, " B"]:
    """True for rows in which positions rise by one within a segment, and each segment is one run of slots.

    Padding that sees a segment (negative ids) counts as a part of it.
    """
    position, segment = slots.position, jnp.abs(slots.segment)
    real, again = segment[:, 1:] != 0, segment[:, 1:] == segment[:, :-1]
    steps = ~(real & again) | (position[:, 1:] == position[:, :-1] + 1)
    runs = ~real | again | (segment[:, 1:] > jax.lax.cummax(segment, axis=1)[:, :-1])
    return jnp.all(steps & runs, axis=1)


def _refuse(config: AttentionConfig, bias: bool, dropout: bool) -> str | None:
    if bias:
        return "an encoding that adds no bias"
    if (reason := _sharding.whole_rows(config)) is not None:
        return reason
    if dropout:
        return "attention.dropout 0"
    if config.window is not None and config.window_layers:
        return "attention.window_layers ()"
    return "attention.window_every 1" if config.window is not None and config.window_every > 1 else None


def _missing(site: CallSite) -> str | None:
    if site.platform != "tpu":
        return "a TPU"
    if site.context > 1:
        return "whole sequences (mesh context 1, or ulysses)"
    if site.prefix:
        return NO_PREFIX
    return None if site.same_slots or not site.causal else "queries that are not read against a cache"


KERNEL = Kernel(attend, _refuse, _missing)
