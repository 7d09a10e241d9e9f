"""Positions of a call's slots: counted as the family counts them, or given as `position_ids`."""

from __future__ import annotations

import jax.numpy as jnp

from jaxformer.config import StackConfig
from jaxformer.errors import ConfigError
from jaxformer.types import Array


def positions_of_mask(real: Array, has_table: bool) -> tuple[Array, Array | None]:
    """Positions `[B, T]` that count the real tokens, and the prefix that padding sees.

    Padding sees the real tokens before it. With a table it reads the row before the first position's, as if it stood
    before the text, and the tokens that it sees are its prefix (see `types.Slots`).
    """
    count = jnp.cumsum(real, axis=1)
    if not has_table:
        return count - 1, None
    return count * real - 1, count * (1 - real)


def out_of_order(stack: StackConfig, position: Array, real: Array, causal: bool) -> tuple[Array, str]:
    """Rows whose given positions would change which slots see each other, bool `[B]`, and what is expected of them.

    In the other library `position_ids` choose rows of a table or angles of a rotation, and slots are ordered by their
    numbers. Here one number does both. So the two are equal if a causal stack's positions increase, and if those of
    windows and of relative distances differ as slots do. Blocks of sparse attention are of slots in both.

    Args:
      position: given positions, int32 `[B, T]`.
      real: 1 where the attention mask shows a token, int32 `[B, T]`; other slots have any position.
      causal: each slot sees those before it.
    """
    index = jnp.arange(position.shape[1])
    if stack.attention.window is not None or stack.encoding.kind == "deberta":
        ahead = position - index
        low = jnp.min(jnp.where(real == 1, ahead, jnp.iinfo(jnp.int32).max), axis=1)
        high = jnp.max(jnp.where(real == 1, ahead, jnp.iinfo(jnp.int32).min), axis=1)
        return low < high, "positions that grow by 1 from slot to slot"
    if not causal:
        return jnp.zeros(position.shape[:1], bool), ""
    shown = jnp.where(real == 1, position, jnp.iinfo(jnp.int32).min)
    largest = jnp.maximum.accumulate(shown, axis=1)
    return jnp.any((shown[:, 1:] <= largest[:, :-1]) & (real[:, 1:] == 1), axis=1), "positions that increase"


def refuse_order(position: Array, wrong: Array, expected: str) -> None:
    """Raises a ConfigError for the first row that is `out_of_order`."""
    if bool(wrong.any()):
        row = int(jnp.argmax(wrong))
        shown = ", ".join(str(number) for number in position[row, :8].tolist())
        more = ", ..." if position.shape[1] > 8 else ""
        raise ConfigError(
            f"call: got position_ids [{shown}{more}] in row {row}, expected {expected}: they order the slots, too; "
            "give each text a row of its own, and hide padding by an attention_mask"
        )
