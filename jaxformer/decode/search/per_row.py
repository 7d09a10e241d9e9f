"""Greedy search and sampling whose settings differ by row: one compiled program serves requests with any settings.

A row's tokens are those that `SampleSearch` chooses with the same settings, whatever the other rows ask for.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32, Int, Key

from jaxformer.decode.search.base import RowSampling, RowSettings
from jaxformer.decode.search.sample import Draws, SampleSearch
from jaxformer.decode.top_k import top_k
from jaxformer.types import Array


@dataclass(frozen=True)
class PerRowSearch(SampleSearch):
    """`SampleSearch` with the settings in `RowSettings.sampling`, and one draw a row; see `base.Search`.

    The logits processors of every search strategy come from `config`, which has the method "greedy".
    """

    def keys(self, rows: RowSettings) -> Key[Array, " R"]:
        """PRNG keys `[R]`: those of the first draw that `SampleSearch` has for the row's seed and index."""
        fold = jax.random.fold_in
        seeds = _sampling(rows.sampling).seeds
        return jax.vmap(lambda seed, row: fold(fold(jax.random.key(seed), row), 0))(seeds, rows.row_indices)

    def row_sampling(self, rows: RowSettings) -> RowSampling:
        """The settings of the rows."""
        return RowSampling(*map(jnp.asarray, _sampling(rows.sampling)))

    def next_token(self, logits: Float32[Array, "R V"], state: Draws) -> Int[Array, " R"]:
        """The next token of every row. If no row samples, nothing is drawn or sorted."""
        sampling = _sampling(state.sampling)
        greedy = top_k(logits, 1)[1][:, 0]
        samples = (jnp.asarray(sampling.temperature) > 0) & ~state.done

        def draw() -> Int[Array, " R"]:
            keys = jax.vmap(jax.random.fold_in)(state.keys, state.step)
            return jax.vmap(jax.random.categorical)(keys, process_rows(logits, sampling, samples))

        return jnp.where(samples, jax.lax.cond(jnp.any(samples), draw, lambda: greedy), greedy)


def process_rows(
    logits: Float32[Array, "R V"], sampling: RowSampling, samples: Bool[Array, " R"]
) -> Float32[Array, "R V"]:
    """`logits_processors.process_for_sampling` with each row's own settings.

    Args:
      samples: bool `[R]`, the rows whose result is read.
    """
    temperature, top_k, top_p, min_p = (jnp.asarray(x)[:, None] for x in sampling[:4])
    logits = logits / jnp.where(temperature > 0, temperature, 1.0)
    truncates = samples & ((top_k > 0) | (top_p < 1.0))[:, 0]
    logits = jax.lax.cond(jnp.any(truncates), lambda: _keep_top(logits, top_k, top_p), lambda: logits)
    return jnp.where(logits >= logits.max(axis=1, keepdims=True) + jnp.log(min_p), logits, -jnp.inf)


def _keep_top(
    logits: Float32[Array, "R V"], top_k: Int[Array, "R 1"], top_p: Float32[Array, "R 1"]
) -> Float32[Array, "R V"]:
    """Each row's `top_k` most probable tokens, then the smallest set of them whose mass is at least `top_p`."""
    order = jnp.argsort(logits, axis=1, descending=True, stable=True)
    rank = jnp.argsort(order, axis=1)
    logits = jnp.where((rank < top_k) | (top_k == 0), logits, -jnp.inf)
    probs = jnp.take_along_axis(jax.nn.softmax(logits, axis=1), order, axis=1)
    before = jnp.take_along_axis(jnp.cumsum(probs, axis=1) - probs, rank, axis=1)
    return jnp.where((before < top_p) | (top_p == 1.0), logits, -jnp.inf)


def _sampling(sampling: RowSampling | None) -> RowSampling:
    if sampling is None:
        raise TypeError("rows: got no settings by row, expected RowSettings.sampling")
    return sampling
