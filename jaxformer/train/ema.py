"""Exponential moving average of the parameters (`config.train.ema`).

The average lies in the variables of a `TrainState` under `types.EMA`. Training updates it here. Evaluation, decoding
and loading use it in place of the parameters: `TrainState.evaluation_variables` and `checkpoint.read_weights`.
"""

from __future__ import annotations

from typing import Mapping

import jax
import jax.numpy as jnp

from jaxformer.config import TrainConfig
from jaxformer.types import EMA, Array, PyTree


def with_average(config: TrainConfig, variables: Mapping[str, PyTree], average: PyTree) -> dict[str, PyTree]:
    """`variables`, with `average` as the moving average if the config asks for one."""
    return dict(variables) if config.ema is None else {**variables, EMA: average}


def updated(average: PyTree, params: PyTree, decay: Array | float) -> PyTree:
    """The average after one update: `decay * average + (1 - decay) * params`."""
    return jax.tree.map(lambda old, new: decay * old + (1.0 - decay) * new, average, params)


def decay_at(config: TrainConfig, update_count: Array) -> Array | float:
    """Decay of the average: `config.ema`, or `min(ema, (1 + n) / (10 + n))` during the warm-up (`ema_warmup`).

    The warm-up is that of TensorFlow's `ExponentialMovingAverage` with `num_updates`.

    Args:
      update_count: n, the number of optimizer updates so far. Skipped steps do not count.

    Raises:
      ValueError: the config has no average.
    """
    if config.ema is None:
        raise ValueError("train.ema: got None, expected a decay")
    if not config.ema_warmup:
        return config.ema
    return jnp.minimum(config.ema, (1.0 + update_count) / (10.0 + update_count))
