"""Where a run's parameters come from when it does not start from random ones: `config.init`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Callable, NamedTuple

import jax

from jaxformer import overrides
from jaxformer.checkpoint import load, locate
from jaxformer.config import Config, ConfigError, ModelConfig
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.types import PyTree, TrainState


class Origin(NamedTuple):
    """How a directory of some format is read.

    Attributes:
      model: `config -> (model, tokenizers or None)` of `config.init.directory`, with a head for `config.task`.
      params: `(config, params) -> params`: the directory's values in a tree like `params`, laid out like it.
    """

    model: Callable[[Config], tuple[ModelConfig, Tokenizers | None]]
    params: Callable[[Config, PyTree], PyTree]


def with_model(config: Config, workdir: Path, origin: Origin) -> tuple[Config, Tokenizers | None]:
    """A config without a model gets that of `config.init.directory`, and with it its tokenizers.

    A run that is resumed has its model in its own workdir.

    Raises:
      ConfigError: the model and the rest of the config contradict each other.
    """
    if config.model.parts:
        return config, None
    if (workdir / "config.json").exists():
        model, tokenizers = overrides.read(workdir).model, None
    else:
        model, tokenizers = origin.model(config)
        model = dataclasses.replace(model, dtype=config.model.dtype)
    return overrides.freeze(dataclasses.asdict(dataclasses.replace(config, model=model))), tokenizers


def warm(state: TrainState, config: Config, origin: Origin) -> TrainState:
    """`state` with the parameters of `config.init.directory`; with `config.init.head` off the head's stay random."""
    params = origin.params(config, state.params)
    variables = dict(state.variables)
    if "ema" in variables:
        variables["ema"] = jax.tree.map(lambda x: x.copy(), params)
    return state.replace(params=params, variables=variables)


def _model_of_run(config: Config) -> tuple[ModelConfig, Tokenizers | None]:
    workdir, _ = locate(Path(config.init.directory).absolute())
    model = overrides.read(workdir).model
    head = model.head if config.init.head else config.model.head
    return dataclasses.replace(model, head=head), Tokenizers.load(workdir)


def _params_of_run(config: Config, params: PyTree) -> PyTree:
    other = dict(load(config.init.directory).params)
    if not config.init.head and "head" in params:
        other["head"] = params["head"]
    mine, theirs = (jax.tree.map(lambda x: x.shape, tree) for tree in (dict(params), other))
    if mine != theirs:
        raise ConfigError(
            f"config.init.directory: got {config.init.directory}, whose parameters differ in structure or shape, "
            "expected the same model; change config.model or the directory, or set config.init.head to False"
        )
    return jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), other, dict(params))


RUN = Origin(_model_of_run, _params_of_run)
"""A workdir of ours, or one of its checkpoints."""
