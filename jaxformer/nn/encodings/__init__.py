"""Position encodings: how positions change embeddings, queries, keys and scores.

Each file of this folder defines one, as `ENCODING`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flax import linen as nn
from jaxtyping import Float32, Shaped

from jaxformer import registry
from jaxformer.config import EncodingConfig
from jaxformer.types import Array, PyTree


@dataclass(frozen=True)
class Encoding:
    """A position encoding as hooks, each optional.

    Attributes:
      embed: module class. `embed(EncodingConfig, width)(slots) -> [B, T, D]`, added to the input of the stack.
      shared: module class. `shared(EncodingConfig, AttentionConfig, head_width)(slots) -> pytree`, computed once for a
        stack (or decoding step) from the query slots, and passed to every layer as `shared`.
      uses_token_types: `shared` takes the slots' token types too: `(slots, token_type [B, T] or None)`.
      layer: module class, for encodings with parameters in every layer. `layer(EncodingConfig, AttentionConfig,
        width)(shared, query, key) -> pytree`, called in each attention with its query and key projections (Dense
        modules `[B, T, D] -> [B, T, H, K]`). `rotate` and `bias` receive the result as `shared`.
      rotate: function. `rotate(config, x [B, T, H, K], shared) -> [B, T, H, K]`, applied to queries, and to keys before
        they are cached.
      heads: function. `heads(shared)` gives the index of the axis of heads for each leaf of `shared`, -1 for none, so
        that a mesh can shard it.
      terms: function of the config: number of terms of equal variance in a score, which is divided by
        sqrt(terms * K) instead of sqrt(K).
      bias: function. `bias(config, shared, q, k, query_position, key_position) -> [b, H, T, S]`, float32 and b = B or
        1, added to the scores of a tile: q `[B, T, H, K]`, k `[B, S, G, K]`, positions int32 `[B, T]` and `[B, S]`. It
        must be differentiable in `shared`, q and k.
    """

    embed: type[nn.Module] | None = None
    shared: type[nn.Module] | None = None
    layer: type[nn.Module] | None = None
    rotate: Callable[..., Array] | None = None
    bias: Callable[..., Array] | None = None
    heads: Callable[[PyTree], PyTree] | None = None
    terms: Callable[[EncodingConfig], int] = lambda config: 1
    uses_token_types: bool = False

    def checked_bias(
        self, config: EncodingConfig, shared: PyTree, *tile: Shaped[Array, "..."]
    ) -> Float32[Array, "..."]:
        """The result of `bias`, which has four axes: without the first, rows would silently share one row's bias.

        Raises:
          ValueError: it has another number of axes.
        """
        if self.bias is None:
            raise ValueError(f"encoding {config.kind}: got no bias, expected one; define it")
        result = self.bias(config, shared, *tile)
        if result.ndim != 4:
            got = f"{result.ndim} axes, {result.shape}"
            raise ValueError(f"encoding {config.kind}: got a bias of {got}, expected [b, H, T, S] with b the rows or 1")
        return result


def get(kind: str) -> Encoding:
    """The encoding that the file `kind` of this folder defines."""
    return registry.member(__name__, kind, "ENCODING")
