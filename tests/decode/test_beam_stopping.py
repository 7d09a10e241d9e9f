"""When beam search may stop, with expected values computed by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import DecodeConfig
from jaxformer.decode.search.beam import BeamSearch


@pytest.mark.parametrize(
    ("alpha", "stopping", "pool", "settled"),
    [
        # The best live hypothesis has log-probability -2 at length 2. It may end at a length of 3 to 8. With alpha 1
        # its score is at most -2 / 8,
        (1.0, "exact", [-0.1, -0.2], True),
        (1.0, "exact", [-0.1, -0.3], False),
        (1.0, "exact", [-0.2, -0.6], False),
        # with alpha -1 at most -2 x 3.
        (-1.0, "exact", [-4.0, -5.0], True),
        (-1.0, "exact", [-4.0, -10.0], False),
        # If it ended now, its score would be -2 / 2.
        (1.0, "estimate", [-0.5, -0.9], True),
        (1.0, "estimate", [-0.5, -1.1], False),
        (1.0, "estimate", [-0.5, -np.inf], False),
        (1.0, "first", [-8.0, -9.0], True),
        (1.0, "first", [-8.0, -np.inf], False),
    ],
)
def test_a_search_is_settled_when_no_live_hypothesis_can_enter_the_pool(alpha, stopping, pool, settled):
    search = beam_search(beams=2, hypotheses=2, length_penalty=alpha, stopping=stopping, max_length=8)
    assert is_settled(search, [-2.0, -5.0], pool) == settled


@pytest.mark.parametrize(
    ("stopping", "alpha", "live", "pool", "count", "done"),
    [
        # The length is 2 of at most 4. With alpha 1, log P = -4 may become a mean of -1; at length 2 it is -2.
        ("exact", 1.0, -4.0, (-0.9, -0.95, -0.99), 3, True),
        ("exact", 1.0, -4.0, (-0.9, -0.95, -1.01), 3, False),
        ("exact", 1.0, -4.0, (-0.9, -0.95, -1.01), 2, True),
        ("exact", 1.0, -4.0, (-0.9, -1.01, -np.inf), 1, True),
        # A negative penalty favours short outputs: the best score of log P = -4 is -12, at a length of 3.
        ("exact", -1.0, -4.0, (-1.0, -2.0, -11.0), 3, True),
        ("exact", -1.0, -4.0, (-1.0, -2.0, -13.0), 3, False),
        ("estimate", 1.0, -4.0, (-0.9, -1.5, -1.99), 3, True),
        ("estimate", 1.0, -4.0, (-0.9, -1.5, -2.01), 3, False),
        ("estimate", 1.0, -4.0, (-0.9, -1.5, -2.01), 1, True),
        ("estimate", 1.0, -4.0, (-1.1, -1.5, -np.inf), 1, False),
        ("first", 1.0, -4.0, (-2.9, -3.5, -np.inf), 3, False),
        ("first", 1.0, -4.0, (-2.9, -3.5, -9.0), 3, True),
    ],
)
def test_a_search_is_settled_by_as_many_hypotheses_as_asked_for(stopping, alpha, live, pool, count, done):
    search = beam_search(beams=3, hypotheses=count, length_penalty=alpha, stopping=stopping, max_length=4)
    assert is_settled(search, [live, live - 1, live - 2], pool) == done


def beam_search(**options):
    return BeamSearch(DecodeConfig(method="beam", length_norm="power", **options), eos=(0,), pad=9)


def is_settled(search, scores, pool):
    """True if a search with these live log-probabilities at length 2 and these finished scores is settled."""
    state = search.empty(jnp.array([search.config.max_length]))
    state = state._replace(
        step=jnp.array([2]),
        scores=jnp.array([scores]),
        pool=state.pool._replace(scores=jnp.asarray([pool], jnp.float32)),
    )
    return bool(search.is_settled(state)[0])
