"""Rotations stretched to longer texts where a definition can be read off: magnitude, and both ends of the ramp."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import AttentionConfig, EncodingConfig, RopeScalingConfig
from jaxformer.nn.encodings import rope
from jaxformer.types import Slots

THETA = 100.0 ** -(np.arange(4) / 4)


def angles(length: int = 2, **scaling) -> tuple[np.ndarray, np.ndarray]:
    """Angles at position 1 and the length of the vectors (cos, sin), of 8 channels, in a text of so many slots."""
    config = EncodingConfig("rope", base=100.0, scaling=RopeScalingConfig(**scaling))
    slots = Slots(jnp.arange(length)[None], jnp.ones((1, length), jnp.int32))
    cos, sin = (np.asarray(x)[0, 1] for x in rope.Angles(config, AttentionConfig(heads=1), 8).apply({}, slots))
    return np.arctan2(sin, cos), np.hypot(cos, sin)


def test_yarn_keeps_short_waves_divides_long_ones_and_lengthens_both_sides():
    theta, size = angles(kind="yarn", factor=4.0, original=64)
    np.testing.assert_allclose(size, 0.1 * np.log(4.0) + 1.0, rtol=1e-5)
    np.testing.assert_allclose(theta[[0, -1]], [THETA[0], THETA[-1] / 4.0], rtol=1e-4)


@pytest.mark.parametrize(("length", "growth"), [(4, 1.0), (8, 2.0 * 8 / 4 - 1.0)])
def test_dynamic_rotations_grow_their_base_beyond_the_original_length(length, growth):
    theta, _ = angles(length, kind="dynamic", factor=2.0, original=4)
    np.testing.assert_allclose(theta, (100.0 * growth ** (8 / 6)) ** -(np.arange(4) / 4), rtol=1e-4)
