"""Which tokens of a text pair stand in both of its texts: the exact-match features of question answering.

Chen et al. 2017 (section 3.2, "exact match") mark the words of a paragraph that occur in the question; Weissenborn et
al. 2017 (section 3.1) also weigh them, since a function word occurs everywhere.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Float32

from jaxformer.types import Array, Stream

FEATURES = 2
"""Numbers of a slot in `match_features`."""


def match_features(stream: Stream, unmatched: tuple[int, ...] = ()) -> Float32[Array, "B T 2"]:
    """Two numbers a slot: 1 if its token is also in another text of its segment, and the same divided by rarity.

    The second is 1 / (n - 1) for a token that the segment has n times: 1 where a name is once in each text, little for
    a word that is everywhere. Texts of a segment differ by token type; without types there is one text, and nothing
    matches. Padding has zeros and matches nothing.

    Args:
      unmatched: ids that match nothing, as special tokens.
    """
    tokens, segment, types = stream.tokens, stream.slots.segment, stream.token_type
    if types is None:
        return jnp.zeros((*tokens.shape, FEATURES), jnp.float32)
    same = (tokens[:, :, None] == tokens[:, None, :]) & (segment[:, :, None] == segment[:, None, :])
    elsewhere = jnp.any(same & (types[:, :, None] != types[:, None, :]), axis=2)
    found = elsewhere & (segment > 0) & ~jnp.isin(tokens, jnp.asarray(unmatched, tokens.dtype))
    others = jnp.sum(same, axis=2) - 1
    return jnp.stack([found, found / jnp.maximum(others, 1)], axis=-1).astype(jnp.float32)
