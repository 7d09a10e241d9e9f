"""Import and export of runs: a Hugging Face directory becomes a workdir, and a workdir a Hugging Face directory."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer import checkpoint, storage
from jaxformer.config import Config, ModelConfig, overrides
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.errors import ConfigError
from jaxformer.hf import convert, generation_options, hub, keys, loading, pairs, reading, weights
from jaxformer.hf.origin import BODIES, TASKS, TRAINED_AS, head_of_model, special_token_ids
from jaxformer.hf.peft import reading as peft
from jaxformer.hf.peft.sites import CONFIG_FILE as ADAPTER_FILE
from jaxformer.hf.pretrained import HuggingFace
from jaxformer.hf.table import Family, Settings, family_of
from jaxformer.hf.tokenizer import open_tokenizers
from jaxformer.model import Model
from jaxformer.models import adapters
from jaxformer.runtime import files, object_store
from jaxformer.runtime import hub as runtime_hub
from jaxformer.train import warm_start
from jaxformer.types import PyTree, TrainState

log = logging.getLogger("jaxformer")

SETTINGS_FILE = "huggingface.json"
"""File of an imported workdir that keeps the config.json and generation_config.json of the source."""


def import_checkpoint(
    source: str | os.PathLike[str],
    workdir: str | os.PathLike[str],
    base: str | os.PathLike[str] | None = None,
    decoder: str | os.PathLike[str] | None = None,
) -> Model:
    """Writes a Hugging Face directory as a workdir, for `jaxformer.load` and `config.init.directory`.

    Args:
      source: directory of a model, or of an adapter of the peft package; or its name on the hub.
      base: directory or name of an adapter's base model; None: the one that its files name.
      decoder: directory or name of a decoder; `source` is then the encoder of a pair whose cross-attention is random.

    Raises:
      ConfigError: the directory cannot be read, or `workdir` is not empty.
    """
    workdir = Path(workdir).absolute()
    if workdir.exists() and any(workdir.iterdir()):
        raise ConfigError(f"--workdir: got {workdir}, which is not empty, expected a new folder; choose another")
    if decoder is None:
        model = peft.from_pretrained(source, base=base, what="--source")
    elif base is None:
        model = pairs.from_encoder_decoder_pretrained(source, decoder)
    else:
        raise ConfigError(f"--base: got {str(base)!a} beside --decoder, expected none: a pair is made of models")
    origin = model.hf
    if not isinstance(origin, HuggingFace):
        raise ConfigError(f"{source}: got a model without an origin, expected one of a directory; load it again")
    workdir.mkdir(parents=True, exist_ok=True)
    config = dataclasses.replace(model.config, task=dataclasses.replace(model.config.task, classes=model.classes or ()))
    state = TrainState(jnp.zeros((), jnp.int32), model.params, (), jax.random.key(0), {})
    checkpoints = checkpoint.Checkpoints(workdir, dataclasses.replace(config.checkpoint, keep_best=0))
    checkpoints.save(state, {}, {})
    checkpoints.close()
    if model.tokenizers is not None:
        model.tokenizers.save(workdir)
    elif config.model.reads_tokens:
        log.warning("%s: no tokenizer, so %s has none, and jaxformer decode needs one", source, workdir)
    content = {"config": dict(origin.settings.values), "generation": dict(origin.defaults), "head": origin.head}
    files.write_atomic(workdir / SETTINGS_FILE, json.dumps(content, indent=2) + "\n")
    files.write_atomic(workdir / "config.json", overrides.to_json(config))
    return model


def load(path: str | os.PathLike[str], which: str = "") -> Model:
    """The model of a run, ready to use: the one way from a workdir to a model.

    Args:
      path: a workdir, or one of its checkpoints; see `checkpoint.load_run`. An address in a bucket is fetched first.
      which: "best", "last" or the number of a step; "": as `path` and the config say.

    Raises:
      ConfigError: there is no run at `path`, or it cannot be read; see `checkpoint.load_run`.
    """
    path = storage.fetched(path, which=which)
    run = checkpoint.load_run(Path(path), which)
    return Model.of_run(run, origin_of_run(run.config, run.tokenizers, Path(path)))


def origin_of_run(config: Config, tokenizers: Tokenizers | None, path: Path) -> HuggingFace:
    """The origin of an imported run, from its workdir; for a run that was trained here, from its config."""
    workdir = checkpoint.find_run(path.absolute())[0]
    if (workdir / SETTINGS_FILE).exists():
        content = _read_settings(workdir / SETTINGS_FILE)
        settings = Settings(content["config"], str(workdir / SETTINGS_FILE))
        family = family_of(settings)
        settings = keys.with_defaults(family, settings)
        # Imports of earlier versions have no defaults where there was no generation_config.json.
        defaults = content["generation"] or generation_options.config_defaults(family.generation_values(settings))
        return HuggingFace(content["head"], family, settings, defaults, workdir)
    ids = special_token_ids(config, tokenizers)
    return HuggingFace(head_of_model(config), None, Settings(ids), ids, workdir)


def _read_settings(path: Path) -> dict[str, Any]:
    """The file that `import_checkpoint` wrote: keys config, generation and head."""
    content = files.read_json(path)
    parts = {"config": dict, "generation": dict, "head": str}
    wrong = [name for name, expected in parts.items() if not isinstance(content.get(name), expected)]
    if wrong:
        raise ConfigError(f"{path}: got no {', '.join(wrong)}, expected what an import wrote; restore the file")
    return content


def export_checkpoint(
    workdir: str | os.PathLike[str],
    target: str | os.PathLike[str] | None,
    family: str | None = None,
    adapter: bool = False,
    push: str | None = None,
    private: bool = False,
) -> str | None:
    """Writes the model of a run as a Hugging Face directory, or uploads it. See `Model.save_pretrained`.

    Args:
      target: the directory; None: no copy is kept here.
      adapter: write the adapters alone, on the model that the run started from; see `Model.save_adapter`.
      push: "org/name" of the model on the hub; None: nothing is uploaded.
      private: a new model on the hub is private.

    Returns:
      The address of the commit on the hub; None without `push`.
    """
    if target is None and push is None:
        raise ConfigError("--target: got none, expected a new folder, or --push=ORG/NAME")
    if adapter and family is not None:
        raise ConfigError(
            f"--family: got {family!a} with --adapter, expected none: adapters fit the family of their base"
        )
    if push is not None:
        runtime_hub.check_upload(push)
    model = load(workdir)
    if target is not None and adapter:
        model.save_adapter(target, model.config.init.directory or None)
    elif target is not None:
        model.save_pretrained(target, family)
    return None if push is None else model.push_to_hub(push, family=family, adapter=adapter, private=private or None)


def is_hf_directory(directory: str | os.PathLike[str]) -> bool:
    """True if the directory is a Hugging Face checkpoint, and not a workdir."""
    path = Path(directory)
    return (path / "config.json").exists() and weights.has_weights(path)


def _initial_directory(config: Config) -> Path:
    """The directory that a run starts from; that of the cache if the config names a model on the hub or in a bucket."""
    if object_store.is_url(config.init.directory):
        return warm_start.init_directory(config)
    return _located(config.init.directory)


@functools.cache
def _located(source: str) -> Path:
    """Asked once by each process: the model and its parameters are then of the same commit."""
    return hub.locate(source, what="config.init.directory")


def _open_source(config: Config) -> tuple[Path, Settings, Family, str]:
    """The directory that a run starts from, its config.json, its family and the head for the run's task.

    The library has no head for sentence similarity: then the body alone is read.
    """
    directory = _initial_directory(config)
    settings = Settings(reading.read_config(directory), str(directory / "config.json"))
    family = family_of(settings)
    settings = keys.with_defaults(family, settings)
    name = TRAINED_AS.get(config.task.name, config.task.name)
    heads = [head for head, task in TASKS.items() if task == name] or BODIES
    if name == "masked_lm":
        heads = ["masked_lm" if config.task.relation == "none" else "pretraining"]
    head = next((head for head in heads if head in family.heads), None)
    if head is None:
        raise ConfigError(
            f"config.init.directory: got a {family.model_types[0]} for task {config.task.name}, expected a family "
            f"with a head for it (it has {', '.join(family.heads)})"
        )
    return directory, settings, family, head


def _model(config: Config) -> tuple[ModelConfig, Tokenizers | None]:
    """The model config of the directory, with the family's head for `config.task`, and its tokenizers."""
    directory = _initial_directory(config)
    if peft.is_adapter_directory(directory):
        raise ConfigError(
            f"config.init.directory: got {config.init.directory}, which holds an adapter ({ADAPTER_FILE}), expected a "
            "model; import it with its base first: jaxformer import --source=DIR --base=DIR --workdir=DIR"
        )
    if not is_hf_directory(directory):
        return warm_start.RUN_FORMAT.read_model(config)
    directory, settings, family, head = _open_source(config)
    tensors = convert.canonical_tensors(family, weights.open_weights(directory))
    model = loading.untie_output(family, keys.read_model(family, settings, head), tensors)
    model = family.resolve(loading.resolve_embedding_tables(family, model, tensors), tensors)
    if head in ("sequence", "token"):
        model = dataclasses.replace(model, head=dataclasses.replace(model.head, classes=None))
    if head in BODIES:
        model = dataclasses.replace(model, head=config.model.head)
    return model, open_tokenizers(directory, settings)


def _params(config: Config, params: PyTree) -> PyTree:
    """The parameters of the directory; those of a new head keep their values. Every device reads its own part."""
    if not is_hf_directory(_initial_directory(config)):
        return warm_start.RUN_FORMAT.read_params(config, params)
    directory, settings, family, head = _open_source(config)
    keep = config.init.head and head not in BODIES
    plain = dataclasses.replace(config.model, adapter=None)
    base = loading.read_params(directory, settings, family, plain, head, adapters.without(params), keep)
    return adapters.with_base(params, base)


ORIGIN = warm_start.InitFormat(_model, _params)
"""Reads the directories that a run may start from: a workdir, or a Hugging Face directory."""
