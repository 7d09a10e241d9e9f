"""Which parameters of a run are trained: `config.optimizer.freeze`, and the base of adapters (`config.model.adapter`).

A frozen parameter stays as it is. It has no gradient, no update and no decay, no part in the gradient norm, and neither
optimizer state nor moving average. So optimizers, averages and gradients are trees of the trained parameters alone.
"""

from __future__ import annotations

from flax import traverse_util

from jaxformer.config import Config, patterns
from jaxformer.errors import ConfigError
from jaxformer.models import adapters
from jaxformer.types import PyTree


def frozen_paths(config: Config, params: PyTree) -> set[str]:
    """Paths of the parameters that are not trained. `params` may be abstract.

    With adapters these are all but A, B and what `adapter.train` names; `optimizer.freeze` adds to them.

    Raises:
      ConfigError: a pattern matches no parameter, or nothing is left to train.
    """
    paths = ["/".join(path) for path in traverse_util.flatten_dict(params)]
    trained = adapters.also_trained(config.model, paths)
    frozen = {path for path in paths if path not in trained and path.rpartition("/")[2] not in adapters.TRAINED}
    for pattern in config.optimizer.freeze:
        chosen = patterns.select(paths, (pattern.removeprefix("!"),), "config.optimizer.freeze")
        frozen = frozen - chosen if pattern.startswith("!") else frozen | chosen
    frozen |= {path for path in paths if path.rpartition("/")[2] in adapters.CONSTANTS}
    if len(frozen) == len(paths):
        raise ConfigError(
            f"config.optimizer.freeze: got {config.optimizer.freeze}, which freezes every parameter, expected some "
            'left to train; take away a pattern, or add one as "!head"'
        )
    return frozen


def split(config: Config, params: PyTree) -> tuple[PyTree, PyTree]:
    """The trained and the frozen part of `params`, or of nested dicts of the same structure."""
    frozen = frozen_paths(config, params) if may_freeze(config) else set()
    parts: tuple[dict, dict] = ({}, {})
    for path, value in traverse_util.flatten_dict(params).items():
        parts["/".join(path) in frozen][path] = value
    return traverse_util.unflatten_dict(parts[0]), traverse_util.unflatten_dict(parts[1])


def trained(config: Config, params: PyTree) -> PyTree:
    """The trained part of `params`, or of nested dicts of the same structure."""
    return split(config, params)[0] if may_freeze(config) else params


def may_freeze(config: Config) -> bool:
    """True if some parameters are frozen."""
    return bool(config.optimizer.freeze) or config.model.adapter is not None
