"""What position does. One file a way, each defining `ENCODING`, an `Encoding` of up to five hooks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flax import linen as nn

from jaxformer import registry
from jaxformer.config import EncodingConfig
from jaxformer.types import Array, PyTree


@dataclass(frozen=True)
class Encoding:
    """The places where position can act; a hook that is None does nothing there.

    Attributes:
      embed: module class. `embed(EncodingConfig, width)(slots) -> [B, T, D]`, added to the input of the stack.
      shared: module class. `shared(EncodingConfig, AttentionConfig, head_width)(slots) -> pytree`, made once a stack
        (or decoding step) from the query slots and handed to every layer as `shared`.
      kinds: `shared` takes the slots' token types too, `(slots, kind [B, T] or None)`.
      layer: module class, for encodings with parameters of their own in every layer.
        `layer(EncodingConfig, AttentionConfig, width)(shared, query, key) -> pytree`, called in each attention with its
        query and key projections (Dense modules `[B, T, D] -> [B, T, H, K]`); its value is what `rotate` and `score`
        get as `shared`.
      rotate: function. `rotate(config, x [B, T, H, K], shared) -> [B, T, H, K]`, applied to queries and to keys before
        they are cached.
      heads: function. `heads(shared)` has, for each leaf that `score` gets, the number of its axis of heads, -1 for
        none: what a mesh that divides heads divides there.
      terms: function of the config: how many terms of like variance a score has; it is divided by the root of
        terms * K instead of the root of K.
      score: function. `score(config, shared, q, k, query_position, key_position) -> additive [b, H, T, S]` with b = B
        or 1, for a tile: q `[B, T, H, K]`, k `[B, S, G, K]`, positions int32 `[B, T]`, `[B, S]`. Float32. It must be
        differentiable with respect to `shared`, q and k.
    """

    embed: type[nn.Module] | None = None
    shared: type[nn.Module] | None = None
    layer: type[nn.Module] | None = None
    rotate: Callable[..., Array] | None = None
    score: Callable[..., Array] | None = None
    heads: Callable[[PyTree], PyTree] | None = None
    terms: Callable[[EncodingConfig], int] = lambda config: 1
    kinds: bool = False


def get(kind: str) -> Encoding:
    """The encoding defined by the file `kind` of this folder."""
    return registry.member(__name__, kind, "ENCODING")
