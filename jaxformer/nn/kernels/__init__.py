"""Attention kernels: implementations of softmax(q k^T + bias) v that are equal in value and gradient.

Each file of this folder defines one, as `KERNEL`. A kernel from outside of the project may compute other weights than
those of softmax attention; it then defines `weights`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32

from jaxformer import registry
from jaxformer.config import AttentionConfig
from jaxformer.errors import ConfigError
from jaxformer.nn.masks import Mask
from jaxformer.parallel import mesh, shards
from jaxformer.types import Array, PyTree, Rate

Queries = Float[Array, "B T H K"]
Keys = Float[Array, "B S G K"]
"""Shapes of a kernel's arguments: values have the shape of the keys, outputs that of the queries."""


class AttentionBias(NamedTuple):
    """An additive bias of the scores, as a function of a tile, so that no kernel needs the full `[T, S]` table.

    Attributes:
      function: `function(args, q, k, query_position, key_position) -> [b, H, T, S]`, float32, with b = B or 1.
      args: pytree that the function is differentiable in.
      heads: index of the axis of heads for each leaf of `args` (-1 for none); None if unknown. A leaf with G heads has
        the key heads.
    """

    function: Callable[..., Array]
    args: PyTree
    heads: PyTree | None = None


class AttentionDropout(NamedTuple):
    """Dropout of the attention probabilities at `rate`, drawn from `key`. All kernels but dense need a static rate."""

    rate: Rate
    key: Array

    def drop(self, probs: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
        """`probs` with entries set to zero with probability `rate`, and the others scaled to preserve the mean.

        Each random 32-bit word decides two entries, since drawing bits is most of the cost on a CPU. The rate, rounded
        to a multiple of 1/65536, also determines the scale, so the mean is exact.
        """
        threshold: Any
        if isinstance(self.rate, float | int):
            threshold = min(round(self.rate * 65536), 65535)
        else:
            threshold = jnp.minimum(jnp.round(self.rate * 65536), 65535.0)
        *outer, last = probs.shape
        words = jax.random.bits(self.key, (*outer, -(-last // 2)), jnp.uint32)
        halves = jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(*outer, -1)[..., :last]
        return jnp.where(halves >= threshold, probs * (65536 / (65536 - threshold)), 0.0)


class CallSite(NamedTuple):
    """Static properties of one attention call, by which a kernel is chosen.

    Attributes:
      platform: cpu, gpu or tpu: the platform of the mesh, which may differ from this machine's.
      dtype: dtype of queries and keys.
      heads, kv_heads, head_width: H, G and K.
      queries, keys: numbers of slots T and S.
      same_slots: the keys are those of the query slots: self-attention without a cache.
      hidden_pairs: the mask hides single pairs.
      prefix: the mask is causal and has a prefix.
      bias, dropout: the call has a bias, dropout.
      context, tensor: number of devices over which the mesh shards sequences, and heads.
    """

    platform: str
    dtype: str
    heads: int
    kv_heads: int
    head_width: int
    queries: int
    keys: int
    causal: bool = False
    same_slots: bool = True
    hidden_pairs: bool = False
    prefix: bool = False
    bias: bool = False
    dropout: bool = False
    context: int = 1
    tensor: int = 1


@dataclass(frozen=True)
class Kernel:
    """An attention kernel.

    Attributes:
      apply: `apply(q [B,T,H,K], k [B,S,G,K], v [B,S,G,K], mask, bias, dropout, config) -> [B,T,H,K]`. `q` is already
        scaled. H is a multiple of G: query head h reads key head h // (H // G). The softmax is float32; a query that
        sees nothing returns 0. Kernels that never build the full mask raise ConfigError for `hidden_pairs`.
      refuse: `refuse(config, bias, dropout)` returns what the kernel needs of these arguments, or None if it supports
        them.
      missing: `missing(site)` returns what the call lacks for the kernel (a device, a dtype, a shape), or None.
      has_sinks: `apply` takes a further argument `sink`, `[H]`: a score that each softmax has beside those of the keys.
      weights: `weights(q, k, mask, bias, config) -> [B,H,T,S]`, float32: the weights with which `apply` sums values,
        without dropout; None: those of softmax attention. No other kernel takes the place of one with `weights`.
    """

    apply: Callable[..., Array]
    refuse: Callable[[AttentionConfig, bool, bool], str | None] = lambda config, bias, dropout: None
    missing: Callable[[CallSite], str | None] = lambda site: None
    has_sinks: bool = False
    weights: Callable[..., Array] | None = None

    def needs(self, config: AttentionConfig, bias: bool, dropout: bool) -> str | None:
        """The requirement that a config does not meet: the answer of `refuse`, or that there is no sink."""
        lacks_sinks = config.sink and not self.has_sinks
        return "attention.sink False" if lacks_sinks else self.refuse(config, bias, dropout)


def get(kind: str) -> Kernel:
    """The kernel that the file `kind` of this folder defines."""
    return registry.member(__name__, kind, "KERNEL")


def own_weights(config: AttentionConfig) -> Callable[..., Array] | None:
    """The `weights` of the config's kernel, or None if it computes softmax attention, as all that "auto" chooses do."""
    return None if config.kernel == "auto" else get(config.kernel).weights


def apply(
    q: Queries,
    k: Keys,
    v: Keys,
    mask: Mask,
    bias: AttentionBias | None,
    dropout: AttentionDropout | None,
    config: AttentionConfig,
    sink: Float[Array, " H"] | None = None,
) -> Queries:
    """Attention output `[B, T, H, K]` by the kernel of `config`, or the one that "auto" chooses."""
    site = CallSite(
        platform=mesh.platform(),
        dtype=q.dtype.name,
        heads=q.shape[2],
        kv_heads=k.shape[2],
        head_width=q.shape[3],
        queries=q.shape[1],
        keys=k.shape[1],
        causal=mask.causal,
        same_slots=mask.same_slots,
        hidden_pairs=mask.hidden_pairs is not None,
        prefix=mask.causal and mask.query.prefix is not None,
        bias=bias is not None,
        dropout=dropout is not None,
        **shard_counts(),
    )
    more = {} if sink is None else {"sink": sink}
    return get(choose_kernel(config, site)[0]).apply(q, k, v, mask, bias, dropout, config, **more)


def choose_kernel(config: AttentionConfig, site: CallSite) -> tuple[str, str]:
    """Name of the kernel for `site`, and the reason for the choice.

    The kernel of the config is used for full sequences. Against a cache, where few queries see all keys, any kernel but
    "dense" and those with `weights` means "auto". "auto" takes dense if the mask has `hidden_pairs`; ulysses or ring if
    sequences are sharded and there is no sink; the fused kernel of the device; rowwise for causal texts of 128 to 512
    slots on one CPU; else dense up to 1024 x 1024 scores (causal on a CPU 511 x 511) and blockwise beyond.

    Raises:
      ConfigError: the kernel of the config does not support `site`.
    """
    cached = site.causal and not site.same_slots
    is_named = config.kernel != "auto" and not cached
    if is_named or config.kernel == "dense" or own_weights(config) is not None:
        lacking = _unable(config.kernel, config, site)
        if lacking:
            raise ConfigError(
                f"attention.kernel: got {config.kernel}, which needs {lacking}, expected a kernel that works here; "
                "set it to auto"
            )
        return config.kernel, "as the config says"
    if site.hidden_pairs:
        return "dense", "the mask is a table of pairs"
    if not config.sink and site.context > 1 and site.queries % site.context == 0 and site.keys % site.context == 0:
        ways = f"context {site.context} x tensor {site.tensor}"
        wrong = [n for n in (site.heads, site.kv_heads) if n % (site.context * site.tensor)]
        if wrong:
            return "ring", f"{ways} does not divide {wrong[0]} heads"
        return "ulysses", f"{ways} divides {site.kv_heads} key heads"
    lacking = {name: _unable(name, config, site) for name in ("splash", "cudnn")}
    for name, reason in lacking.items():
        if reason is None:
            return name, f"the fused kernel of this {site.platform}"
    # Speed and memory of the three on a CPU: docs/measurements/training.md.
    leaves_out = site.platform == "cpu" and site.causal and site.same_slots and not (site.prefix or site.bias)
    scores = site.queries * site.keys
    short = site.queries >= 128 and scores <= 512 * 512 and site.context * site.tensor == 1
    if leaves_out and short and _unable("rowwise", config, site) is None:
        return "rowwise", f"{site.queries} x {site.keys} causal scores on a CPU"
    small = scores < 512 * 512 if leaves_out else scores <= 1024 * 1024
    size = f"{site.queries} x {site.keys} scores are {'few' if small else 'many'}"
    return "dense" if small else "blockwise", "; ".join([size, *(f"{n} needs {why}" for n, why in lacking.items())])


def _unable(name: str, config: AttentionConfig, site: CallSite) -> str | None:
    kernel = get(name)
    return kernel.missing(site) or kernel.needs(config, site.bias, site.dropout)


def shard_counts() -> dict[str, int]:
    """Number of devices over which the mesh shards sequences and heads: `context` and `tensor` of `CallSite`."""
    sizes = shards.auto_axes()
    return {name: sizes.get(name, 1) for name in ("context", "tensor")}
