"""When beam search may end, by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import DecodeConfig
from jaxformer.decode import beam


@pytest.mark.parametrize(
    ("alpha", "stopping", "pool", "settled"),
    [
        # The best alive has log-probability -2 at length 2 and may end at 3 to 8: at -2 / 8 if long outputs gain,
        (1.0, "exact", [-0.1, -0.2], True),
        (1.0, "exact", [-0.1, -0.3], False),
        (1.0, "exact", [-0.2, -0.6], False),
        # at -2 x 3 if short ones do.
        (-1.0, "exact", [-4.0, -5.0], True),
        (-1.0, "exact", [-4.0, -10.0], False),
        # Scored as if it ended now: -2 / 2.
        (1.0, "estimate", [-0.5, -0.9], True),
        (1.0, "estimate", [-0.5, -1.1], False),
        (1.0, "estimate", [-0.5, -np.inf], False),
        (1.0, "first", [-8.0, -9.0], True),
        (1.0, "first", [-8.0, -np.inf], False),
    ],
)
def test_a_search_is_settled_when_what_lives_cannot_enter(alpha, stopping, pool, settled):
    config = DecodeConfig(
        method="beam", beams=2, hypotheses=2, length_norm="power", length_penalty=alpha, stopping=stopping
    )
    beams = beam.empty(1, 2, 8, 9, jnp.array([8]))
    beams = beams.replace(step=jnp.array([2]), scores=jnp.array([[-2.0, -5.0]]))
    beams = beams.replace(pool=beams.pool._replace(scores=jnp.array([pool])))
    assert bool(beam.settled(beams, config)[0]) == settled
