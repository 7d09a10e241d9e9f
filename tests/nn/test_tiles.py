"""Which tiles the blockwise kernel reads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.nn.kernels import blockwise
from jaxformer.nn.masks import slots, visible

LENGTH, SIZE = 12, 3
COUNT = LENGTH // SIZE


@pytest.mark.parametrize("causal", [False, True])
def test_a_tile_is_read_if_and_only_if_a_pair_in_it_is_visible(causal):
    """In one text, for windows of every width: also where a tile's only visible pair is in its corner."""
    side = slots(jnp.ones((1, LENGTH), jnp.int32))
    tiled = jax.tree.map(lambda ids: blockwise.tiles(ids, SIZE), side)
    for window in (None, *range(1, LENGTH + 1)):
        see = np.asarray(visible(side, side, causal, window))[0].reshape(COUNT, SIZE, COUNT, SIZE)
        np.testing.assert_array_equal(blockwise.active(tiled, tiled, causal, window), see.any(axis=(1, 3)), str(window))
