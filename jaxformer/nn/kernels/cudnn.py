"""Attention fused into one GPU kernel: cuDNN's, through `jax.nn.dot_product_attention`.

The mask is passed as booleans `[B, T, S]`: told of causality only, cuDNN would ignore segments, and align a cache's
queries with its first keys. The table has no axis of heads and is not kept for the backward.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxformer.config import AttentionConfig
from jaxformer.nn.kernels import Kernel, Keys, Noise, Queries, Score, Site, _sharding
from jaxformer.nn.masks import Mask, visible
from jaxformer.types import Array, Slots


def attend(
    q: Queries,
    k: Keys,
    v: Keys,
    mask: Mask,
    score: Score | None,
    noise: Noise | None,
    config: AttentionConfig,
) -> Queries:
    """Equals the dense kernel, on NVIDIA GPUs and in 16 bits."""
    _sharding.refuse_table("cudnn", mask)

    def local(window: Array | None, q: Array, k: Array, v: Array, query: Slots, key: Slots) -> Array:
        see = visible(query, key, mask.causal, window)
        o = jax.nn.dot_product_attention(q, k, v, mask=see[:, None], scale=1.0, implementation="cudnn")
        return jnp.where(jnp.any(see, axis=-1)[:, :, None, None], o, 0.0).astype(q.dtype)

    return _sharding.rows_and_heads(functools.partial(local, mask.window), q, k, v, mask.query, mask.key)


def _refuse(config: AttentionConfig, score: bool, noise: bool) -> str | None:
    if score:
        return "an encoding that adds no score"
    return "attention.dropout 0" if noise else None


def _lacks(site: Site) -> str | None:
    if site.platform != "gpu":
        return "an NVIDIA GPU"
    if site.context > 1:
        return "whole sequences (mesh context 1, or ulysses)"
    if site.dtype not in ("bfloat16", "float16"):
        return f"model.dtype bfloat16, not {site.dtype}"
    capability = _capability()
    if capability < 8.0:
        return f"compute capability 8.0 or more, not {capability}"
    widest = 256 if capability >= 9.0 else 128
    if site.head_width % 8 or site.head_width > widest:
        return f"a head width of a multiple of 8 up to {widest}, not {site.head_width}"
    if site.queries % 2 or site.keys % 2:  # JAX refuses the backward of a masked one, and a decoded token is one query
        return f"even numbers of slots, not {site.queries} x {site.keys}"
    return None


def _capability() -> float:
    """Of this process's GPU: 8.0 is Ampere, 9.0 Hopper; 0 without one (the program is then only compiled)."""
    return float(getattr(jax.local_devices()[0], "compute_capability", 0.0))


KERNEL = Kernel(attend, _refuse, _lacks)
