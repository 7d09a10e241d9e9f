"""Which tiles the blockwise kernel reads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import AttentionConfig
from jaxformer.nn import kernels
from jaxformer.nn.kernels import blockwise
from jaxformer.nn.masks import Mask, slots_from_segments, visible

LENGTH, COLUMNS = 12, 3


@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_a_tile_is_read_if_and_only_if_a_pair_in_it_is_visible(causal, rows):
    """In one text, for windows of every width: also where a tile's only visible pair is in its corner."""

    def tiles_and_pairs(window):
        side = slots_from_segments(jnp.ones((1, LENGTH), jnp.int32))
        query, key = (jax.tree.map(lambda ids: blockwise.tile(ids, size), side) for size in (rows, COLUMNS))  # noqa: B023
        see = visible(side, side, causal, window)[0].reshape(LENGTH // rows, rows, -1, COLUMNS)
        return blockwise.active_tiles(query, key, causal, window), see.any(axis=(1, 3))

    windows = np.arange(1, LENGTH + 1, dtype=np.int32)
    every, each = jax.jit(lambda: (tiles_and_pairs(None), jax.vmap(tiles_and_pairs)(windows)))()
    np.testing.assert_array_equal(*every)
    np.testing.assert_array_equal(*each)


def test_tiles_of_other_rows_and_columns_draw_other_dropout_masks():
    """Tile (0, 1) beside tile (1, 0) of uniform attention, whose values name the keys that were kept."""
    length, block = 8, 4
    config = AttentionConfig(heads=1, kernel="blockwise", block=block)

    @jax.jit
    def attend():
        slot = slots_from_segments(jnp.ones((1, length), jnp.int32))
        q, v = jnp.zeros((1, length, 1, length)), jnp.eye(length)[None, :, None]
        noise = kernels.AttentionDropout(0.5, jax.random.key(3))
        return kernels.get("blockwise").apply(q, q, v, Mask(slot, slot), None, noise, config)

    kept = np.asarray(attend())[0, :, 0] > 0
    assert (kept[:block, block:] != kept[block:, :block]).any()
