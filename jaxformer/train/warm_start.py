"""Initial parameters from another model: `config.init`."""

from __future__ import annotations

import dataclasses
import functools
import logging
from pathlib import Path
from typing import Callable, NamedTuple

import jax

from jaxformer import storage
from jaxformer.checkpoint import find_run, load_run
from jaxformer.config import Config, ModelConfig, overrides
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.errors import ConfigError
from jaxformer.models import adapters, electra
from jaxformer.nn import moe
from jaxformer.runtime import object_store
from jaxformer.train import freezing
from jaxformer.types import EMA, PyTree, TrainState

LOG = logging.getLogger("jaxformer")


class InitFormat(NamedTuple):
    """Reader of a directory format that runs can start from.

    Attributes:
      read_model: `config -> (model, tokenizers or None)` of `config.init.directory`, with a head for `config.task`.
      read_params: `(config, params) -> params`: the directory's values, with the structure and shardings of `params`.
    """

    read_model: Callable[[Config], tuple[ModelConfig, Tokenizers | None]]
    read_params: Callable[[Config, PyTree], PyTree]


def adopt_model(config: Config, workdir: Path, init_format: InitFormat) -> tuple[Config, Tokenizers | None]:
    """Gives a config without a model that of `config.init.directory`, and returns its tokenizers.

    A resumed run takes the model from its own workdir.

    Raises:
      ConfigError: the model and the rest of the config contradict each other.
    """
    if not config.model.is_empty:
        return config, None
    if (workdir / "config.json").exists():
        model, tokenizers = overrides.read(workdir).model, None
    else:
        model, tokenizers = init_format.read_model(config)
        if tokenizers is None and config.data.tokenizer.kind != "file":
            LOG.warning(
                "config.init.directory: %s has no tokenizer; one is learned from the data, and its ids mean other "
                "tokens than the model was trained on. Put tokenizer.json, vocab.txt or spiece.model there, or set "
                "data.tokenizer.path",
                config.init.directory,
            )
        if config.model.multi_token not in (None, model.multi_token):
            raise ConfigError(
                "config.model.multi_token: got a section, expected None for the model of config.init.directory, whose "
                "modules are others, left out, or none; set it to None"
            )
        model = dataclasses.replace(model, dtype=config.model.dtype, adapter=config.model.adapter or model.adapter)
    return overrides.freeze(dataclasses.asdict(dataclasses.replace(config, model=model))), tokenizers


def load_initial_params(state: TrainState, config: Config, init_format: InitFormat) -> TrainState:
    """`state` with the parameters of `config.init.directory`. With `config.init.head` off the head's stay random."""
    params = init_format.read_params(config, state.params)
    variables = dict(state.variables)
    if EMA in variables:
        variables[EMA] = jax.tree.map(lambda x: x.copy(), freezing.trained(config, params))
    return dataclasses.replace(state, params=params, variables=variables)


def init_directory(config: Config) -> Path:
    """`config.init.directory` as a folder. A run or a model in a bucket is fetched first, once a process."""
    directory = config.init.directory
    return _fetched(directory) if object_store.is_url(directory) else Path(directory)


@functools.cache
def _fetched(url: str) -> Path:
    return storage.fetched(url, "config.init.directory")


def _read_model(config: Config) -> tuple[ModelConfig, Tokenizers | None]:
    workdir, _ = find_run(init_directory(config).absolute())
    model = overrides.read(workdir).model
    head = model.head if config.init.head else config.model.head
    model = dataclasses.replace(model, head=head)
    if config.task.name != "replaced_tokens":  # the discriminator alone is fine-tuned
        model = dataclasses.replace(model, generator=None)
    if model.multi_token is not None and not _trains_modules(config):
        LOG.info("config.init.directory: the modules of model.multi_token are left out: this run cannot train them")
        model = dataclasses.replace(model, multi_token=None)
    return model, Tokenizers.load(workdir) if model.reads_tokens else None


def _trains_modules(config: Config) -> bool:
    """True for the objective that modules of `model.multi_token` have; see `checks.sections`."""
    alone = config.distillation is None and config.data.mixture is None and config.model.adapter is None
    return alone and config.task.name == "language_modelling" and config.optimizer.layer_decay == 1


def _read_params(config: Config, params: PyTree) -> PyTree:
    run = load_run(init_directory(config))
    loaded = dict(run.params)
    if run.config.model.generator is not None and config.model.generator is None:
        loaded = electra.discriminator_params(run.config.model, loaded)
    if run.config.model.multi_token is not None and config.model.multi_token is None:
        loaded = {name: part for name, part in loaded.items() if not name.startswith(moe.MULTI_TOKEN)}
    if config.model.adapter is not None and not adapters.has_adapters(loaded):
        loaded = adapters.with_base(params, loaded)
    if run.config.model.is_seq2seq and not config.model.has_decoder:
        LOG.info("config.init.directory: the encoder of %s is taken, and its decoder left out", config.init.directory)
        loaded = {name: part for name, part in loaded.items() if name not in ("decoder", "target_embed", "head")}
    if not config.init.head and "head" in params:
        loaded["head"] = params["head"]
    shapes, loaded_shapes = (jax.tree.map(lambda x: x.shape, tree) for tree in (dict(params), loaded))
    if shapes != loaded_shapes:
        raise ConfigError(
            f"config.init.directory: got {config.init.directory}, whose parameters differ in structure or shape, "
            "expected the same model; change config.model or the directory, or set config.init.head to False"
        )
    return jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), loaded, dict(params))


RUN_FORMAT = InitFormat(_read_model, _read_params)
"""Reads a workdir of jaxformer, or one of its checkpoints."""
