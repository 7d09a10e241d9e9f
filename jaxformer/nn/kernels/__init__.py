"""How the weighted sum is computed. One file a way, each defining `KERNEL`; all equal in value and in gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32

from jaxformer import registry
from jaxformer.config import AttentionConfig, ConfigError
from jaxformer.nn.masks import Mask
from jaxformer.parallel import mesh, shards
from jaxformer.types import Array, PyTree

Queries = Float[Array, "B T H K"]
Keys = Float[Array, "B S G K"]
"""What a kernel gets, values as keys, and what it returns as queries."""


class Score(NamedTuple):
    """An additive score as a function of a tile, so that no kernel needs the whole `[T, S]` table.

    `function(args, q, k, query_position, key_position) -> [b, H, T, S]` float32 (b = B or 1); `args` is the pytree it
    is differentiable in. `heads` has, for each leaf of `args`, the number of its axis of heads (-1: it has none), or is
    None where nobody says; a leaf with as many as there are key heads is one of those.
    """

    function: Callable[..., Array]
    args: PyTree
    heads: PyTree | None = None


class Noise(NamedTuple):
    """Dropout of the attention probabilities with probability `rate`, a static number, drawn from `key`."""

    rate: float
    key: Array

    def drop(self, probs: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
        """Zeroes entries with probability `rate` and scales the rest so that the mean stays.

        Every random word of 32 bits decides two entries: drawing bits is the larger part of attention dropout on a
        CPU. The scale is that of the rate rounded to 1/65536, so there is no bias.
        """
        threshold = min(round(self.rate * 65536), 65535)
        *outer, last = probs.shape
        words = jax.random.bits(self.key, (*outer, -(-last // 2)), jnp.uint32)
        halves = jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(*outer, -1)[..., :last]
        return jnp.where(halves >= threshold, probs * (65536 / (65536 - threshold)), 0.0)


class Site(NamedTuple):
    """What is known of one attention when its program is built.

    Attributes:
      platform: cpu, gpu, tpu: that of the mesh, which need not be this machine's.
      dtype: of queries and keys.
      own: the keys are those of the query slots themselves: self-attention, and not against a cache.
      table: the mask hides single pairs.
      context, tensor: over how many devices the mesh divides sequences, and heads.
    """

    platform: str
    dtype: str
    heads: int
    kv_heads: int
    head_width: int
    queries: int
    keys: int
    causal: bool = False
    own: bool = True
    table: bool = False
    score: bool = False
    dropout: bool = False
    context: int = 1
    tensor: int = 1


@dataclass(frozen=True)
class Kernel:
    """`apply(q [B,T,H,K], k [B,S,G,K], v [B,S,G,K], mask, score, noise, config) -> [B,T,H,K]`.

    `q` is already scaled. H is a multiple of G: query head h reads key head h // (H // G). The softmax is float32; a
    query that sees nothing returns 0. `refuse(config, score, noise)` returns why the kernel can't honour these
    arguments, or None. A kernel that needs no whole table raises ConfigError at a mask with `hidden`.

    `lacks(site)` returns what the place lacks (a device, a precision, a shape), or None.
    """

    apply: Callable[[Array, Array, Array, Mask, Score | None, Noise | None, AttentionConfig], Array]
    refuse: Callable[[AttentionConfig, bool, bool], str | None] = lambda config, score, noise: None
    lacks: Callable[[Site], str | None] = lambda site: None


def get(kind: str) -> Kernel:
    """The kernel defined by the file `kind` of this folder."""
    return registry.member(__name__, kind, "KERNEL")


def apply(
    q: Queries,
    k: Keys,
    v: Keys,
    mask: Mask,
    score: Score | None,
    noise: Noise | None,
    config: AttentionConfig,
) -> Queries:
    """`Kernel.apply` of the kernel that `config` names, or that "auto" takes here."""
    site = Site(
        platform=mesh.platform(),
        dtype=q.dtype.name,
        heads=q.shape[2],
        kv_heads=k.shape[2],
        head_width=q.shape[3],
        queries=q.shape[1],
        keys=k.shape[1],
        causal=mask.causal,
        own=mask.own,
        table=mask.hidden is not None,
        score=score is not None,
        dropout=noise is not None,
        **devices(),
    )
    return get(choose(config, site)[0]).apply(q, k, v, mask, score, noise, config)


def choose(config: AttentionConfig, site: Site) -> tuple[str, str]:
    """The kernel's name, and why it is that one.

    What the config names serves whole sequences. Against a cache, where a few queries see all keys, "dense" stays and
    any other means "auto". "auto": dense where the mask is itself a table; ulysses or ring where sequences are divided;
    the fused kernel of the device; else dense while the `[T, S]` table is small, and blockwise beyond 1024 x 1024.

    Raises:
      ConfigError: the kernel that the config names cannot work here.
    """
    cached = site.causal and not site.own
    if config.kernel == "dense" or (config.kernel != "auto" and not cached):
        lacking = _unable(config.kernel, config, site)
        if lacking:
            raise ConfigError(
                f"attention.kernel: got {config.kernel}, which needs {lacking}, expected a kernel that works here; "
                "set it to auto"
            )
        return config.kernel, "as the config says"
    if site.table:
        return "dense", "the mask is a table of pairs"
    if site.context > 1 and site.queries % site.context == 0 and site.keys % site.context == 0:
        ways = f"context {site.context} x tensor {site.tensor}"
        wrong = [n for n in (site.heads, site.kv_heads) if n % (site.context * site.tensor)]
        if wrong:
            return "ring", f"{ways} does not divide {wrong[0]} heads"
        return "ulysses", f"{ways} divides {site.kv_heads} key heads"
    lacking = {name: _unable(name, config, site) for name in ("splash", "cudnn")}
    for name, reason in lacking.items():
        if reason is None:
            return name, f"the fused kernel of this {site.platform}"
    small = site.queries * site.keys <= 1024 * 1024
    size = f"{site.queries} x {site.keys} scores are {'few' if small else 'many'}"
    return "dense" if small else "blockwise", "; ".join([size, *(f"{n} needs {why}" for n, why in lacking.items())])


def _unable(name: str, config: AttentionConfig, site: Site) -> str | None:
    kernel = get(name)
    return kernel.lacks(site) or kernel.refuse(config, site.score, site.dropout)


def devices() -> dict[str, int]:
    """Over how many devices sequences and heads are divided here: `Site`'s `context` and `tensor`."""
    sizes = shards.free()
    return {name: sizes.get(name, 1) for name in ("context", "tensor")}
