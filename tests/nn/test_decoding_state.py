"""The decoding state alone: rows, slots and branches that are moved take everything that belongs to them along."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.nn.cache import DeltaState, KeyValues, TransformerState
from jaxformer.types import Slots

ROWS, SLOTS, GROUPS, WIDTH, HEADS = 3, 6, 2, 2, 4


def numbered(rows, slots, first=0):
    """A state of an attention layer, alone and in a stack of one, and of a layer with the delta rule.

    Every entry says its row (hundreds, from `first`) and its slot (ones), which is also its position.
    """
    row, slot = 100.0 * (first + np.arange(rows)), np.arange(slots, dtype=float)
    keys = np.broadcast_to((row[:, None] + slot)[:, None, None], (rows, GROUPS, WIDTH, slots))
    attention = KeyValues(jnp.array(keys), jnp.array(keys.swapaxes(2, 3)))
    matrices = np.broadcast_to(row[:, None, None, None], (rows, HEADS, 3, 2))
    delta = DeltaState(jnp.array(matrices), jnp.array(np.broadcast_to(row[:, None, None, None], (rows, 1, 2, 5))))
    return TransformerState(
        keys_values=(attention, delta),
        slots=Slots(jnp.broadcast_to(jnp.arange(slots), (rows, slots)), jnp.ones((rows, slots), jnp.int32)),
        index=jnp.int32(slots),
        position=jnp.array(row, jnp.int32) + slots,
        memory=attention,
    )


def contents(state):
    """Of every row the entries of its slots that are read, after a check that all arrays say the same."""
    attention, delta = state.keys_values
    keys, values, used = np.asarray(attention.k), np.asarray(attention.v), np.asarray(state.slots.segment) != 0
    np.testing.assert_array_equal(keys, values.swapaxes(2, 3))
    np.testing.assert_array_equal(keys, np.broadcast_to(keys[:, :1, :1], keys.shape))
    found = [keys[i, 0, 0, used[i]].tolist() for i in range(len(keys))]
    for i, row in enumerate(100 * (np.asarray(state.position) // 100)):
        assert [each - row for each in found[i]] == np.asarray(state.slots.position)[i, used[i]].tolist()
        assert set(np.ravel(delta.state[i])) | set(np.ravel(delta.inputs[i])) == {row}
        assert set(np.ravel(state.memory.k[i, ..., 0])) == {row}
    return found


def test_rows_take_along_all_that_they_remember():
    chosen, replaced = jax.jit(
        lambda state, other: (
            state.rows(jnp.array([2, 0, 0])),
            state.replace_rows(jnp.array([1, ROWS]), other),  # a row beyond the last one is of no use
        )
    )(numbered(ROWS, SLOTS), numbered(2, 4, first=7))
    assert [row[0] for row in contents(chosen)] == [200, 0, 0]
    first, second, third = contents(replaced)
    assert (first[0], second, third[0]) == (0, [700, 701, 702, 703], 200)
    assert replaced.position.tolist() == [6, 704, 206] and replaced.index == SLOTS


def test_slots_that_are_read_stay_in_their_order_and_new_ones_are_empty():
    used = np.zeros((ROWS, SLOTS), np.int32)
    used[0, [0, 2, 5]] = used[1, 4] = used[2] = 1
    state = numbered(ROWS, SLOTS)
    state = dataclasses.replace(state, slots=state.slots._replace(segment=jnp.array(used)))
    active = jnp.array([True, True, False])
    compact, grown, most = jax.jit(
        lambda state: (state.compact(active, 4), state.compact(active, 4).grow(9), state.max_used_slots(active))
    )(state)
    for each, size in ((compact, 4), (grown, 9)):
        assert each.slots.segment.shape == (ROWS, size) and each.index == most == 3
        assert contents(each)[:2] == [[0, 2, 5], [104]]
        np.testing.assert_array_equal(each.slots.segment[:2], [[1, 1, 1] + [0] * (size - 3), [1] + [0] * (size - 1)])
    assert not np.asarray(grown.keys_values[0].k)[..., 4:].any()


def test_a_branch_has_the_past_of_its_parent_and_its_own_new_slots():
    start = numbered(ROWS, SLOTS)
    with pytest.raises(ValueError, match="got a state without branches"):
        start.select_branches(jnp.zeros((ROWS, 2), jnp.int32))

    @jax.jit
    def run(state):
        state = state.grow(SLOTS + 4).branch(2)
        new, state = state.append(2)
        state = dataclasses.replace(state, index=state.index + 2)
        state = state.select_branches(jnp.array([[1, 1], [0, 1], [1, 0]]))
        return new, dataclasses.replace(state.append(2)[1], index=state.index + 2)

    new, state = run(start)
    assert new.position.tolist() == [[6, 6], [106, 106], [206, 206]]
    assert state.position.tolist() == [8, 108, 208]
    prompt, read = list(range(SLOTS)), [[np.flatnonzero(row).tolist() for row in rows] for rows in state.branch_slots]
    for row, parents in zip(read, ([7, 7], [6, 7], [7, 6]), strict=True):
        assert row == [[*prompt, parents[0], 8], [*prompt, parents[1], 9]]
    # The slot that no branch of the first row reads any more is free.
    kept = state.compact(jnp.array([True, False, False]), SLOTS + 4)
    assert np.asarray(kept.slots.position)[0, : kept.index].tolist() == [*prompt, 6, 7, 7]
