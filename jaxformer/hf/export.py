"""Export: a model as a directory of the other library, in the first family that computes the same."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import Any

from jaxformer import tasks
from jaxformer.config import Config, ModelConfig
from jaxformer.data.tokenizers import Tokenizers, write
from jaxformer.errors import ConfigError
from jaxformer.hf import convert, keys, rewrite, writing
from jaxformer.hf.comparison import config_differences
from jaxformer.hf.origin import BODIES, PROBLEMS, HuggingFaceOrigin, special_token_ids
from jaxformer.hf.table import NO_HEAD, Family, Settings, families, head_of
from jaxformer.hf.tokenizer import PAIR_FOLDERS
from jaxformer.model import Model
from jaxformer.nn import kernels

log = logging.getLogger("jaxformer")

UNREADABLE = 100
"""Rank of a family that cannot express a model at all, beyond any number of differences."""


def save_pretrained(
    model: Model, origin: HuggingFaceOrigin, directory: str | os.PathLike[str], family: str | None, dtype: Any
) -> None:
    """Writes config.json, model.safetensors and the tokenizer; see `Model.save_pretrained`.

    Raises:
      ConfigError: no family computes what this model does; the message names the differences.
    """
    config, params = model.config.model, model.params
    if config.series is not None:
        raise ConfigError(
            "export: got a model of series, expected one of tokens: the other library's families have no other; use "
            "the workdir"
        )
    _check_objective(model.config)
    if config.head.kind == "pair":
        config = _without_sentence_head(config)
        log.warning(
            "%s: the body alone; a sentence's vector is the %s pooling of its last hidden states here",
            directory,
            model.config.model.head.pooling,
        )
    as_trained = config
    if origin.family is None:
        config, params = rewrite.rewrite_for_export(config, params)
    try:
        chosen, head, settings = choose_family(model, origin, config, family)
    except ConfigError as error:
        if config == as_trained:
            raise
        try:  # a pair's decoder has no bias where the other encoder-decoders have one
            chosen, head, settings = choose_family(model, origin, as_trained, family)
        except ConfigError:
            raise error from None
        config, params = as_trained, model.params
    if head == "pretraining" and model.config.task.relation not in (chosen.relation, "none"):
        raise ConfigError(
            f"export: got a model of task.relation {model.config.task.relation}, expected {chosen.relation} or none: "
            "the other library's second output says that"
        )
    tensors = {
        **convert.export_tensors(chosen.file_rows(config, head), params, dtype),
        **chosen.constant_tensors(config),
    }
    if not config.head.tied:
        tensors |= {name: tensors[weaker] for name, weaker in chosen.duplicate_tensors if weaker in tensors}
    if head in BODIES:
        tensors = {name.removeprefix(chosen.prefix): make for name, make in tensors.items()}
    writing.write_checkpoint(directory, settings, tensors)
    _save_tokenizer(model, origin, chosen, Path(directory))


def choose_family(
    model: Model, origin: HuggingFaceOrigin, config: ModelConfig, name: str | None
) -> tuple[Family, str, dict[str, Any]]:
    """The family to export to, its head, and the config.json.

    Args:
      config: the model to express.
      name: the only family to try; None: the model's own if it was imported, else each of them.

    Raises:
      ConfigError: none expresses the model; the message names the nearest.
    """
    heads = BODIES if model.config.model.head.kind == "pair" else (origin.head,)
    problems: list[tuple[int, str]] = []  # the number of differences, and a sentence
    for family_name, family in families():
        if name is not None and family_name != name:
            continue
        if name is None and origin.family is not None and family.model_types != origin.family.model_types:
            continue
        own = origin.family is not None and family.model_types == origin.family.model_types
        family = origin.family if own and origin.family is not None else family
        for head in [head for head in heads if head in family.heads]:
            try:
                settings = {**family.write_config(config, head), **_class_labels(model, head)}
                settings = {"model_type": family.model_types[0], "architectures": [family.heads[head]], **settings}
                family = family if family.specialise is None else family.specialise(Settings(settings))
                reread = family.read_config(keys.with_defaults(family, Settings(settings)), head)
            except (ConfigError, AttributeError, KeyError) as error:
                problems.append((UNREADABLE, f"{family_name}: {error}"))
                continue
            if family.embedding_tables is not None and not config.head.tied:
                reread = dataclasses.replace(reread, share_embeddings=config.share_embeddings)
            differences = config_differences(config, reread)
            if not differences:
                return family, head, _merge_settings(model, origin, config, family, head, settings)
            problems.append((len(differences), f"{family_name}: {'; '.join(differences)}"))
    if not problems:
        known = ", ".join(family_name for family_name, family in families() if origin.head in family.heads)
        raise ConfigError(f"export: got family {name!r} for head {origin.head}, expected one of {known}")
    raise ConfigError(f"export: got a model that no family computes; the nearest is {min(problems)[1]}")


def _merge_settings(
    model: Model, origin: HuggingFaceOrigin, config: ModelConfig, family: Family, head: str, settings: dict[str, Any]
) -> dict[str, Any]:
    """The config.json to write: the imported model's own, as far as it still describes the model."""
    if origin.family is not family:
        return settings | _special_tokens(model, origin)
    imported = dict(origin.settings.values)
    if head_of(family, origin.settings) != head:  # read with another head than the file's
        imported["architectures"] = settings["architectures"]
    unchanged = {**settings, **imported}
    reread = family.read_config(keys.with_defaults(family, Settings(unchanged)), head)
    return unchanged if not config_differences(config, reread) else {**imported, **settings}


def _class_labels(model: Model, head: str) -> dict[str, Any]:
    """`id2label` and `label2id` of a classifier."""
    if head not in ("sequence", "token"):
        return {}
    count = model.config.model.head.classes or 0
    names = model.classes or model.config.task.classes or tuple(f"LABEL_{i}" for i in range(count))
    problems = {task: problem for problem, task in PROBLEMS.items() if task != "classification"}
    problem = problems.get(model.config.task.name) if head == "sequence" else None
    labels = {"id2label": {str(i): n for i, n in enumerate(names)}, "label2id": {n: i for i, n in enumerate(names)}}
    return labels if problem is None else {**labels, "problem_type": problem}


def _special_tokens(model: Model, origin: HuggingFaceOrigin) -> dict[str, Any]:
    """Ids of the special tokens of a model that was trained here."""
    if origin.family is not None or model.tokenizers is None:
        return {}
    ids = special_token_ids(model.config, model.tokenizers)
    return {name: value for name, value in ids.items() if value is not None}


def _save_tokenizer(model: Model, origin: HuggingFaceOrigin, family: Family, directory: Path) -> None:
    """Writes tokenizer.json, if one tokenizer serves both sides and the other library has its kind; of a pair, two."""
    if model.tokenizers is None:
        return
    tokenizer, template = model.tokenizers.target, model.tokenizers.chat_template
    if template is not None:
        write(directory / Tokenizers.TEMPLATE, template)
    sides = (model.tokenizers.source, model.tokenizers.target)
    if family.convention.is_pair and not model.tokenizers.joint and all(side.is_exportable for side in sides):
        for folder, side in zip(PAIR_FOLDERS, sides, strict=True):
            (directory / folder).mkdir(exist_ok=True)
            side.export(directory / folder / "tokenizer.json")
        return
    if not model.tokenizers.joint or not tokenizer.is_exportable:
        reason = f"cannot express a {tokenizer.vocabulary.kind} tokenizer that is set as this one is"
        if not model.tokenizers.joint:
            reason = "has one tokenizer for both sides, and this model has two"
        log.warning("%s: no tokenizer.json, the other library %s; encode texts here", directory, reason)
        return
    trained_here = origin.family is None
    heads = ("masked_lm", "pretraining", "sequence", "token", "qa")
    is_encoder = model.config.model.decoder is None and origin.head in heads
    tokenizer.export(
        directory / "tokenizer.json",
        closing=trained_here and origin.head == "seq2seq",
        framing=trained_here and is_encoder,
    )
    if trained_here:  # or the other library would take the tokenizer's class from the model's
        names = {f"{role}_token": piece for role, piece in tokenizer.names.items()}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
        settings |= {} if template is None else {"chat_template": template}  # which older versions read
        write(directory / "tokenizer_config.json", json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def _check_objective(config: Config) -> None:
    """Raises a ConfigError if the other library would read this model's inputs, or its outputs, as something else."""
    task = config.task
    if task.name != "none" and tasks.get(task.name).has_prefix:
        raise ConfigError(
            f"export: got a model of task {task.name}, expected language_modelling: the other library's decoders "
            "read a prompt in one direction; train on without a prefix first"
        )
    stacks = [stack for stack in (config.model.encoder, config.model.decoder) if stack is not None]
    for attention in (stack.attention for stack in stacks):
        if kernels.own_weights(attention) is not None:
            raise ConfigError(
                f"export: got attention.kernel {attention.kernel}, which defines weights of its own, expected softmax "
                "attention: the other library computes no other; keep the run's workdir"
            )
    if any(stack.layers == 0 for stack in stacks):
        raise ConfigError(
            "export: got a model with layers 0, expected at least 1: no family of the other library has none"
        )


def _without_sentence_head(config: ModelConfig) -> ModelConfig:
    """A sentence model without its head, for which the other library has no architecture.

    Raises:
      ConfigError: the head has parameters.
    """
    if config.head.width is not None:
        raise ConfigError(
            f"export: got a head of sentences with a layer of width {config.head.width}, expected none: the other "
            "library has no architecture for it; train with model.head.width=None"
        )
    return dataclasses.replace(config, head=NO_HEAD)
