"""Fused GPU attention: the cuDNN kernel, through `jax.nn.dot_product_attention`.

The mask is passed as booleans `[B, T, S]`. cuDNN's own causal mask would ignore segments and align the queries of a
cache with its first keys. The table has no axis of heads and is not stored for the backward pass.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxformer.config import AttentionConfig
from jaxformer.nn.kernels import AttentionBias, AttentionDropout, CallSite, Kernel, Keys, Queries, _sharding
from jaxformer.nn.masks import Mask, visible
from jaxformer.types import Array, Slots


def attend(
    q: Queries,
    k: Keys,
    v: Keys,
    mask: Mask,
    bias: AttentionBias | None,
    dropout: AttentionDropout | None,
    config: AttentionConfig,
) -> Queries:
    """Attention output `[B, T, H, K]`, equal to the dense kernel's; on NVIDIA GPUs in 16-bit dtypes."""
    _sharding.refuse_hidden_pairs("cudnn", mask)
    _sharding.refuse_whole_rows("cudnn", mask)

    def local(window: Array | int | None, q: Array, k: Array, v: Array, query: Slots, key: Slots) -> Array:
        see = visible(query, key, mask.causal, window)
        o = jax.nn.dot_product_attention(q, k, v, mask=see[:, None], scale=1.0, implementation="cudnn")
        return jnp.where(jnp.any(see, axis=-1)[:, :, None, None], o, 0.0).astype(q.dtype)

    return _sharding.shard_rows_and_heads(functools.partial(local, mask.window), q, k, v, mask.query, mask.key)


def _refuse(config: AttentionConfig, bias: bool, dropout: bool) -> str | None:
    if bias:
        return "an encoding that adds no bias"
    if (reason := _sharding.whole_rows(config)) is not None:
        return reason
    if config.soft_cap is not None:
        return "attention.soft_cap None"
    return "attention.dropout 0" if dropout else None


def _missing(site: CallSite) -> str | None:
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
    if site.queries % 2 or site.keys % 2:  # JAX has no backward pass for odd numbers with a mask
        return f"even numbers of slots, not {site.queries} x {site.keys}"
    return None


def _capability() -> float:
    """CUDA compute capability of this process's GPU (8.0 Ampere, 9.0 Hopper); 0 without one."""
    return float(getattr(jax.local_devices()[0], "compute_capability", 0.0))


KERNEL = Kernel(attend, _refuse, _missing)
