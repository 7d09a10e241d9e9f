"""A Linen module with its variables as a Flax NNX module, and the way back."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from flax import linen as nn
from flax import nnx
from flax.nnx.bridge import variables as bridge_variables

from jaxformer.errors import ConfigError
from jaxformer.types import PyTree, leaf_path

INTERNAL = ("to_nnx__", "_pytree__")
"""Beginnings of the names of attributes that hold no variables."""


def to_nnx(module: nn.Module, variables: Mapping[str, PyTree], rngs: nnx.Rngs | None = None) -> nnx.bridge.ToNNX:
    """An NNX module that computes what `module.apply(variables, ...)` does, bit for bit, and holds the same arrays.

    Called with a `Batch` it gives the module's output; other methods are called by name, as `decode.start(...)` of the
    Linen module would be: `nnx_module.start(batch, 64)`. `nnx.state(nnx_module, nnx.Param)` are the parameters, so
    `nnx.grad`, `nnx.jit` and `nnx.Optimizer` work on it.

    Args:
      rngs: with a stream `dropout`, each call draws a key from it and computes as a training step does; None: dropout
        is off.
    """
    converted = nnx.bridge.ToNNX(module, rngs=rngs)
    for name, value in bridge_variables.linen_vars_to_nnx_attrs(variables).items():
        setattr(converted, name, nnx.data(value))
    return converted


def from_nnx(converted: nnx.bridge.ToNNX, like: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """The variables that an NNX module of `to_nnx` holds now, by collection.

    Args:
      like: the variables that it was made from.

    Raises:
      ConfigError: the module is none of `to_nnx`, or a variable of it has another name, shape or dtype.
    """
    if not isinstance(converted, nnx.bridge.ToNNX):
        raise ConfigError(f"with_nnx: got a {type(converted).__name__}, expected a module that as_nnx made")
    attributes = {name: value for name, value in vars(converted).items() if not name.startswith(INTERNAL)}
    variables = bridge_variables.nnx_attrs_to_linen_vars(attributes)
    got, expected = _leaves(variables), _leaves(like)
    for path in sorted(got | expected):
        if got.get(path) != expected.get(path):
            raise ConfigError(
                f"with_nnx: got {got.get(path, 'nothing')} at {path}, expected {expected.get(path, 'nothing')}; "
                "the module must be one that as_nnx made of this model"
            )
    return variables


def _leaves(variables: Mapping[str, PyTree]) -> dict[str, str]:
    """Dtype and shape of each variable, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    return {"/".join(leaf_path(keys)): f"{leaf.dtype} {list(leaf.shape)}" for keys, leaf in leaves}
