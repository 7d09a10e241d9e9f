"""Positions of a call's slots: counted as the family counts them, or given as `position_ids`."""

from __future__ import annotations

import jax.numpy as jnp
from jax.core import Tracer

from jaxformer.config import StackConfig
from jaxformer.errors import ConfigError
from jaxformer.types import Array

NO_POSITION = -(2**30)
"""Below all positions: those that are given may be below 0, where a family's first one has another number."""


def positions_of_mask(real: Array, has_table: bool) -> tuple[Array, Array | None]:
    """Positions `[B, T]` that count the real tokens, and the prefix that padding sees.

    Padding sees the real tokens before it. With a table it reads the row before the first position's, as if it stood
    before the text, and the tokens that it sees are its prefix (see `types.Slots`).
    """
    count = jnp.cumsum(real, axis=1)
    if not has_table:
        return count - 1, None
    return count * real - 1, count * (1 - real)


def tokens_before(position: Array, real: Array) -> Array:
    """The prefix `[B, T]` (see `types.Slots`) by which slots that are no token see the tokens before them.

    Args:
      position: int32 `[B, T]`, which rises from token to token; of other slots it may be any.
      real: 1 for a token, else 0, `[B, T]`.
    """
    before = jnp.maximum.accumulate(jnp.where(real == 1, position, NO_POSITION), axis=1)
    return jnp.where(real == 1, NO_POSITION, before + 1)


def check_order(
    stack: StackConfig,
    tokens: Array,
    position: Array,
    real: Array,
    causal: bool,
    after: Array | None = None,
    first: int = 0,
) -> Array:
    """The tokens `[B, T]` (or embeddings `[B, T, D]`) of a call with given positions, if these order slots as there.

    In the other library `position_ids` choose rows of a table or angles of a rotation, and slots are ordered by their
    numbers. Here one number does both. So the two are equal if a causal stack's positions increase, and if those of
    windows and of relative distances differ as slots do. Blocks of sparse attention are of slots in both.
    Under `jit`, or over several hosts, rows where they are not equal become NaN.

    Args:
      position: given positions, int32 `[B, T]`.
      real: 1 where the attention mask shows a token `[B, T]`; other slots have any position.
      causal: each slot sees those before it.
      after: `[B, 1]`, the last position in a cache; None without one.
      first: the caller's number of position 0, for the message.

    Raises:
      ConfigError: a row has other positions.
    """
    wrong, expected = _out_of_order(stack, position, real, causal, after)
    if not isinstance(wrong, Tracer) and getattr(wrong, "is_fully_addressable", True):
        _refuse_order(position + first, wrong, expected)
        return tokens
    if tokens.ndim == 2:
        return jnp.where(wrong[:, None], -1, tokens)  # without a row in the table, so NaN
    return jnp.where(wrong[:, None, None], jnp.nan, tokens)


def _out_of_order(
    stack: StackConfig, position: Array, real: Array, causal: bool, after: Array | None
) -> tuple[Array, str]:
    """Rows whose positions would change which slots see each other, bool `[B]`, and what is expected of them."""
    low, high = jnp.iinfo(jnp.int32).min, jnp.iinfo(jnp.int32).max
    wrong, expected = jnp.zeros(position.shape[:1], bool), "positions that increase"
    if causal:
        shown = jnp.where(real == 1, position, low)
        start = jnp.full_like(shown[:, :1], low) if after is None else after
        largest = jnp.maximum.accumulate(jnp.concatenate([start, shown], axis=1), axis=1)[:, :-1]
        wrong = jnp.any((shown <= largest) & (real == 1), axis=1)
    if stack.attention.window is not None or stack.encoding.kind == "deberta":
        ahead = position - jnp.arange(position.shape[1])
        least = jnp.min(jnp.where(real == 1, ahead, high), axis=1)
        wrong |= least < jnp.max(jnp.where(real == 1, ahead, low), axis=1)
        expected = "positions that grow by 1 from slot to slot"
    return wrong, expected


def _refuse_order(position: Array, wrong: Array, expected: str) -> None:
    """Raises a ConfigError for the first row that is `wrong`."""
    if bool(wrong.any()):
        row = int(jnp.argmax(wrong))
        shown = ", ".join(str(number) for number in position[row, :8].tolist())
        more = ", ..." if position.shape[1] > 8 else ""
        raise ConfigError(
            f"call: got position_ids [{shown}{more}] in row {row}, expected {expected}: they order the slots, too; "
            "give each text a row of its own, and hide padding by an attention_mask"
        )
