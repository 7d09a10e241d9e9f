"""How the weighted sum is computed. One file a way, each defining `KERNEL`; all equal in value and in gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxformer import registry
from jaxformer.config import AttentionConfig
from jaxformer.nn.masks import Mask
from jaxformer.types import Array, PyTree


class Score(NamedTuple):
    """An additive score as a function of a tile, so that no kernel needs the whole `[T, S]` table.

    `function(args, q, k, query_position, key_position) -> [b, H, T, S]` float32 (b = B or 1); `args` is the pytree it
    is differentiable in.
    """

    function: Callable[..., Array]
    args: PyTree


class Noise(NamedTuple):
    """Dropout of the attention probabilities with probability `rate`, a static number, drawn from `key`."""

    rate: float
    key: Array

    def drop(self, probs: Array) -> Array:
        """Zeroes entries with probability `rate` and scales the rest so that the mean stays.

        Every random word of 32 bits decides two entries: drawing bits is the larger part of attention dropout on a
        CPU. The scale is that of the rate rounded to 1/65536, so there is no bias.
        """
        threshold = min(round(self.rate * 65536), 65535)
        *outer, last = probs.shape
        words = jax.random.bits(self.key, (*outer, -(-last // 2)), jnp.uint32)
        halves = jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(*outer, -1)[..., :last]
        return jnp.where(halves >= threshold, probs * (65536 / (65536 - threshold)), 0.0)


@dataclass(frozen=True)
class Kernel:
    """`apply(q [B,T,H,K], k [B,S,G,K], v [B,S,G,K], mask, score, noise, config) -> [B,T,H,K]`.

    `q` is already scaled. H is a multiple of G: query head h reads key head h // (H // G). The softmax is float32; a
    query that sees nothing returns 0. `refuse(config, score, noise)` returns why the kernel can't honour these
    arguments, or None. A kernel that needs no whole table raises ConfigError at a mask with `hidden`.
    """

    apply: Callable[[Array, Array, Array, Mask, Score | None, Noise | None, AttentionConfig], Array]
    refuse: Callable[[AttentionConfig, bool, bool], str | None] = lambda config, score, noise: None


def get(kind: str) -> Kernel:
    """The kernel defined by the file `kind` of this folder."""
    return registry.member(__name__, kind, "KERNEL")
