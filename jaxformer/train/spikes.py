"""Gradients far larger than those before them: a running mean and deviation of the norm, and a bound above it.

The mean m and variance s are exponentially weighted: with d = |g| - m and a = 1 / 100, m grows by a d, and s becomes
(1 - a) (s + a d^2) (Finch 2009). They are part of the optimizer's state: a step that is left out does not change them,
and a resumed run goes on with them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import optax

from jaxformer.types import Array, PyTree

MEMORY = 100
"""Updates that the mean is about of; before there were as many, nothing is a spike."""


class Norms(NamedTuple):
    """Scalars: of how many updates, their norms' mean and variance."""

    count: Array
    mean: Array
    variance: Array


def track() -> optax.GradientTransformationExtraArgs:
    """Changes no update; takes the gradient's norm, before clipping, as the argument `norm`."""

    def update(updates: PyTree, state: Norms, params: PyTree | None = None, *, norm: Array, **_) -> tuple:
        weight = 1.0 / jnp.minimum(state.count + 1, MEMORY)  # the plain mean, as long as there are few
        away = norm.astype(jnp.float32) - state.mean
        variance = (1.0 - weight) * (state.variance + weight * away**2)
        return updates, Norms(state.count + 1, state.mean + weight * away, variance)

    return optax.GradientTransformationExtraArgs(
        lambda params: Norms(jnp.zeros((), jnp.int32), jnp.zeros(()), jnp.zeros(())), update
    )


def beyond(state: PyTree, norm: Array, sigma: float) -> Array:
    """Whether `norm` is more than `sigma` deviations above the mean, as the `Norms` in an optimizer's state have it."""
    norms: Norms = state[0]
    return (norms.count >= MEMORY) & (norm > norms.mean + sigma * jnp.sqrt(norms.variance))
