"""All-to-all attention (Jacobs et al. 2023, DeepSpeed Ulysses): devices exchange slots for heads.

Sequences are sharded over c devices, the mesh axis `context`. One all-to-all gives each device all slots of 1/c of the
heads, for any local kernel; a second one returns the outputs. Each device sends (c - 1) / c of its part of q, k, v and
o: less than a ring sends if c > 2, but c must divide the heads.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxformer.config import AttentionConfig
from jaxformer.nn import kernels
from jaxformer.nn.kernels import AttentionBias, AttentionDropout, CallSite, Kernel, Keys, Queries, _sharding
from jaxformer.nn.masks import Mask
from jaxformer.parallel import shards
from jaxformer.types import Array

AXIS = "context"


def attend(
    q: Queries,
    k: Keys,
    v: Keys,
    mask: Mask,
    bias: AttentionBias | None,
    dropout: AttentionDropout | None,
    config: AttentionConfig,
) -> Queries:
    """Attention output `[B, T, H, K]`, equal to the dense kernel's. The local kernel is chosen as for "auto".

    Lengths are padded to multiples of c, and key heads are repeated if there are fewer than devices.

    Raises:
      ConfigError: the mask hides single pairs, or the bias does not name its heads.
    """
    _sharding.refuse_hidden_pairs("ulysses", mask)
    _sharding.refuse_whole_rows("ulysses", mask)
    local = dataclasses.replace(config, kernel="auto")
    where = _sharding.layout(q.shape[0], q.shape[2])
    if where is None or not where.length:
        return kernels.apply(q, k, v, mask, bias, dropout, local)
    devices, length = shards.shard_count(where.length), q.shape[1]
    ways = devices * shards.shard_count(where.heads)
    k, v, bias = _sharding.repeat_key_heads(k, v, bias, q.shape[2], ways)
    q, k, v = (_sharding.pad(x, devices) for x in (q, k, v))
    query, key = (_sharding.pad_slots(side, devices) for side in (mask.query, mask.key))
    window = None if mask.window is None else jnp.asarray(mask.window, jnp.int32)

    def gather_slots(x: Array) -> Array:
        return jax.lax.all_to_all(x, AXIS, split_axis=2, concat_axis=1, tiled=True)

    def attend_heads(q: Array, k: Array, v: Array, query, key, window, args, dropout_key) -> Array:
        local_bias = None if bias is None else bias._replace(args=args)
        local_key = _sharding.shard_key(where, dropout_key)
        local_dropout = None if dropout is None or local_key is None else AttentionDropout(dropout.rate, local_key)
        local_mask = Mask(query, key, mask.causal, window, same_slots=mask.same_slots)
        q, k, v = (gather_slots(x) for x in (q, k, v))
        o = kernels.apply(q, k, v, local_mask, local_bias, local_dropout, local)
        return jax.lax.all_to_all(o, AXIS, split_axis=1, concat_axis=2, tiled=True)

    all_slots, everywhere = PartitionSpec(where.batch), PartitionSpec()
    args = _sharding.bias_specs(bias, (*where.heads, AXIS))
    specs = (*(where.tensor,) * 3, all_slots, all_slots, everywhere, args, everywhere)
    o = shards.shard(attend_heads, specs, where.tensor)(
        *(q, k, v, query, key),
        window,
        None if bias is None else bias.args,
        None if dropout is None else dropout.key,
    )
    return o[:, :length]


def _missing(site: CallSite) -> str | None:
    ways = site.context * site.tensor
    return f"heads that context x tensor ({ways}) divides, not {site.heads}" if site.heads % ways else None


KERNEL = Kernel(attend, lambda config, bias, dropout: _sharding.whole_rows(config), _missing)
