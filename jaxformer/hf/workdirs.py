"""`jaxformer import` and `jaxformer export`: between a directory of the other library and a workdir of ours."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer import checkpoint, files, overrides
from jaxformer.config import Config, ConfigError, ModelConfig
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.hf import convert, generation, keys, loading, pretrained
from jaxformer.hf import files as theirs
from jaxformer.hf.pretrained import Pretrained
from jaxformer.hf.table import Family, Settings, family_of
from jaxformer.hf.tokenizer import open_tokenizers
from jaxformer.model import Model
from jaxformer.train import start
from jaxformer.types import PyTree, TrainState

SETTINGS = "huggingface.json"
"""File of an imported workdir: the other library's config.json and generation_config.json, for calling and export."""


def bring(source: str | os.PathLike[str], workdir: str | os.PathLike[str]) -> Pretrained:
    """Makes a workdir of a directory of the other library: `jaxformer.load` and `config.init.directory` take it.

    Raises:
      ConfigError: the directory cannot be read, or `workdir` already holds something.
    """
    workdir = Path(workdir).absolute()
    if workdir.exists() and any(workdir.iterdir()):
        raise ConfigError(f"--workdir: got {workdir}, which is not empty, expected a new folder; choose another")
    model = loading.from_pretrained(source)
    workdir.mkdir(parents=True, exist_ok=True)
    config = dataclasses.replace(model.config, task=dataclasses.replace(model.config.task, classes=model.classes or ()))
    state = TrainState(jnp.zeros((), jnp.int32), model.params, (), jax.random.key(0), {})
    checkpoints = checkpoint.Checkpoints(workdir, dataclasses.replace(config.checkpoint, keep_best=0))
    checkpoints.save(state, {}, {})
    checkpoints.close()
    if model.tokenizers is not None:
        model.tokenizers.save(workdir)
    kept = {"config": dict(model.settings.values), "generation": dict(model.defaults), "head": model.head}
    files.write(workdir / SETTINGS, json.dumps(kept, indent=2) + "\n")
    files.write(workdir / "config.json", overrides.to_json(config))
    return model


def load(path: str | os.PathLike[str]) -> Pretrained:
    """The model of a run with the other library's calling convention beside ours. Errors are `checkpoint.load`'s."""
    return named(checkpoint.load(path), Path(path))


def named(model: Model, path: Path) -> Pretrained:
    """`model` as a `Pretrained`: with what it was imported with, or with our own conventions."""
    fields = {f.name: getattr(model, f.name) for f in dataclasses.fields(Model)}
    workdir = checkpoint.locate(path.absolute())[0]
    if (workdir / SETTINGS).exists():
        kept = _kept(workdir / SETTINGS)
        settings = Settings(kept["config"], str(workdir / SETTINGS))
        family = family_of(settings)
        settings = keys.named(family, settings)
        # What an earlier version imported without a generation_config.json has nothing here.
        defaults = kept["generation"] or generation.of_config(settings.values)
        return Pretrained(**fields, family=family, head=kept["head"], settings=settings, defaults=defaults)
    target = model.tokenizers.target
    ids = {"pad_token_id": target.pad, "eos_token_id": target.eos, "bos_token_id": target.bos}
    if model.config.model.encoder is not None and model.config.model.decoder is not None:
        ids["decoder_start_token_id"] = target.bos
    head = pretrained.head_of_model(model.config)
    return Pretrained(**fields, head=head, settings=Settings(ids), defaults=ids)


def _kept(path: Path) -> dict[str, Any]:
    """What `bring` wrote beside the model."""
    kept = files.read_json(path)
    parts = {"config": dict, "generation": dict, "head": str}
    wrong = [name for name, kind in parts.items() if not isinstance(kept.get(name), kind)]
    if wrong:
        raise ConfigError(f"{path}: got no {', '.join(wrong)}, expected what an import wrote; restore the file")
    return kept


def send(workdir: str | os.PathLike[str], target: str | os.PathLike[str], family: str | None = None) -> None:
    """Writes the model of a run as a directory of the other library. See `Pretrained.save_pretrained`."""
    load(workdir).save_pretrained(target, family)


def is_theirs(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory is of the other library rather than a run of ours."""
    place = Path(directory)
    return (place / "config.json").exists() and any(place.glob("*.safetensors"))


def _opened(config: Config) -> tuple[Path, Settings, Family, str]:
    """The directory that a run starts from, its config.json and family, and our word for the head of the run's task.

    Of sentences' vectors the other library knows no head: only the body is read.
    """
    directory = Path(config.init.directory)
    settings = Settings(theirs.read_config(directory), str(directory / "config.json"))
    family = family_of(settings)
    settings = keys.named(family, settings)
    name = pretrained.TRAINED_AS.get(config.task.name, config.task.name)
    own = [word for word, task in pretrained.TASKS.items() if task == name]
    head = next((word for word in own or pretrained.BODIES if word in family.heads), None)
    if head is None:
        raise ConfigError(
            f"config.init.directory: got a {family.types[0]} for task {config.task.name}, expected a family with a "
            f"head for it (it has {', '.join(family.heads)})"
        )
    return directory, settings, family, head


def _model(config: Config) -> tuple[ModelConfig, Tokenizers | None]:
    """The body of the directory's model with the head of that family for `config.task`."""
    if not is_theirs(config.init.directory):
        return start.RUN.model(config)
    directory, settings, family, head = _opened(config)
    found = convert.canonical(family, theirs.open_tensors(directory))
    model = loading.untied(family, keys.read_model(family, settings, head), found)
    model = loading.with_tables(family, model, found)
    if head in ("sequence", "token"):
        model = dataclasses.replace(model, head=dataclasses.replace(model.head, classes=None))
    if head in pretrained.BODIES:
        model = dataclasses.replace(model, head=config.model.head)
    return model, open_tokenizers(directory, settings)


def _params(config: Config, params: PyTree) -> PyTree:
    """The directory's tensors, each device reading its own part; what only the new head has stays as it is."""
    if not is_theirs(config.init.directory):
        return start.RUN.params(config, params)
    directory, settings, family, head = _opened(config)
    keep = config.init.head and head not in pretrained.BODIES
    return loading.read_params(directory, settings, family, config.model, head, params, keep)


ORIGIN = start.Origin(_model, _params)
"""Runs of ours and directories of the other library."""
