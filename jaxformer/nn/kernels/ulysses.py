"""All-to-all attention: devices that hold parts of a sequence exchange them for whole sequences of some heads.

Jacobs et al. 2023 (DeepSpeed Ulysses). Sequences are divided over the mesh's axis `context`. One exchange gives every
device all slots of 1/c of the heads, so that any local kernel does, and another returns the outputs. Each device sends
(c - 1) / c of its part of q, k, v and o: less than a ring passes on when c exceeds 2, but c must divide the heads.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxformer.config import AttentionConfig
from jaxformer.nn import kernels
from jaxformer.nn.kernels import Kernel, Keys, Noise, Queries, Score, Site, _sharding
from jaxformer.nn.masks import Mask
from jaxformer.parallel import shards
from jaxformer.types import Array

AXIS = "context"


def attend(
    q: Queries,
    k: Keys,
    v: Keys,
    mask: Mask,
    score: Score | None,
    noise: Noise | None,
    config: AttentionConfig,
) -> Queries:
    """Equals the dense kernel; the local kernel is what "auto" takes. Uneven lengths are filled up.

    Key heads are repeated where there are fewer than devices.

    Raises:
      ConfigError: the mask hides single pairs, or the score does not name its heads.
    """
    _sharding.refuse_table("ulysses", mask)
    local = dataclasses.replace(config, kernel="auto")
    where = _sharding.layout(q.shape[0], q.shape[2])
    if where is None or not where.length:
        return kernels.apply(q, k, v, mask, score, noise, local)
    devices, length = shards.parts(where.length), q.shape[1]
    ways = devices * shards.parts(where.heads)
    k, v, score = _sharding.spread(k, v, score, q.shape[2], ways)
    q, k, v = (_sharding.pad(x, devices) for x in (q, k, v))
    query, key = (_sharding.pad_slots(side, devices) for side in (mask.query, mask.key))
    window = None if mask.window is None else jnp.asarray(mask.window, jnp.int32)

    def whole(x: Array) -> Array:
        return jax.lax.all_to_all(x, AXIS, split_axis=2, concat_axis=1, tiled=True)

    def look(q: Array, k: Array, v: Array, query, key, window, args, noise_key) -> Array:
        given = None if score is None else score._replace(args=args)
        drop = None if noise is None else Noise(noise.rate, _sharding.own(where, noise_key))
        see = Mask(query, key, mask.causal, window, own=mask.own)
        o = kernels.apply(whole(q), whole(k), whole(v), see, given, drop, local)
        return jax.lax.all_to_all(o, AXIS, split_axis=1, concat_axis=2, tiled=True)

    all_slots, everywhere = PartitionSpec(where.batch), PartitionSpec()
    args = _sharding.score_specs(score, (*where.heads, AXIS))
    specs = (*(where.tensor,) * 3, all_slots, all_slots, everywhere, args, everywhere)
    o = shards.shard(look, specs, where.tensor)(
        *(q, k, v, query, key),
        window,
        None if score is None else score.args,
        None if noise is None else noise.key,
    )
    return o[:, :length]


def _lacks(site: Site) -> str | None:
    ways = site.context * site.tensor
    return f"heads that context x tensor ({ways}) divides, not {site.heads}" if site.heads % ways else None


KERNEL = Kernel(attend, lacks=_lacks)
