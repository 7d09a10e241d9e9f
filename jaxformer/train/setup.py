"""The parts of a run's config that only its data and tokenizers determine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from jaxformer import tasks
from jaxformer.config import Config, ModelConfig, components
from jaxformer.config.checks import sections
from jaxformer.data import chat, token_shards
from jaxformer.data.pipeline import TOKEN_CACHE_BYTES, Pipeline
from jaxformer.data.sources import Dataset
from jaxformer.data.tokenizers import Tokenizer, Tokenizers
from jaxformer.errors import ConfigError
from jaxformer.models import build
from jaxformer.tasks import _datasets
from jaxformer.train import metric_settings


def build_or_load_tokenizers(config: Config, dataset: Dataset, workdir: Path) -> Tokenizers | None:
    """The tokenizers saved in `workdir` if it holds a run, else those of token shards, trained or loaded.

    None for a model that reads no tokens.
    """
    if not config.model.reads_tokens:
        return None
    if (workdir / "config.json").exists():
        return Tokenizers.load(workdir)
    shared = token_shards.shared_tokenizers(dataset)
    return shared or Tokenizers.build(config.data, dataset.splits["train"], _datasets.roles(config))


def build_pipelines(
    config: Config,
    dataset: Dataset,
    tokenizers: Tokenizers | None,
    process_index: int = 0,
    process_count: int = 1,
    multiple: int = 1,
) -> dict[str, Pipeline]:
    """The pipeline of each component of `dataset`, by name; `{"": pipeline}` without a mixture. See `Pipeline`."""
    views, parts = components.views(config), dataset.components
    cache_bytes = TOKEN_CACHE_BYTES // len(parts) // (1 + config.data.workers)  # every loader process has one
    return {
        name: Pipeline(
            views[name],
            part,
            tokenizers,
            tasks.get(views[name].task.name),
            process_index,
            process_count,
            multiple,
            cache_bytes,
        )
        for name, part in parts.items()
    }


def with_chat_template(config: Config, tokenizers: Tokenizers | None, workdir: Path) -> Tokenizers | None:
    """The tokenizers with the template that conversations are written with, if the task reads any.

    A resumed run keeps its own. Otherwise it is the config's, else that of the tokenizers (of `config.init.directory`),
    else `chat.DEFAULT_TEMPLATE`.
    """
    reads_turns = "messages" in tasks.get(config.task.name).roles
    if (
        tokenizers is None
        or not reads_turns
        or ((workdir / "config.json").exists() and tokenizers.chat_template is not None)
    ):
        return tokenizers
    path = config.data.tokenizer.chat_template
    template = chat.read_template(path) if path else tokenizers.chat_template or chat.DEFAULT_TEMPLATE
    return dataclasses.replace(tokenizers, chat_template=template)


def resolve_config(config: Config, dataset: Dataset, tokenizers: Tokenizers | None) -> Config:
    """The config with what data and tokenizers determine: vocabularies, classes, and the channels of a series.

    Raises:
      ConfigError: the config gives another number of classes than the data has, or an embedding table with fewer rows
        than the tokenizer has tokens, or a model width that is not the vocabulary where hidden states are the logits;
        or the task rejects the result; or components share a head and no classes.
    """
    config = _datasets.with_classes(config, dataset)
    names = tasks.get(config.task.name).classes or dataset.classes
    classes, head = None if names is None else len(names), config.model.head
    if head.kind in ("classes", "slots") and classes is not None and head.classes not in (None, classes):
        raise ConfigError(f"config.model.head.classes: got {head.classes}, expected {classes} (the data's) or None")
    config = _with_channels(config, dataset)
    sizes = build.SeriesSizes(len(config.task.channels) or None, config.data.length, config.data.horizon)
    model, output = config.model, None
    if tokenizers is None:
        model = build.resolve(model, None, None, classes, sizes)
    else:
        model = build.resolve(model, tokenizers.source.vocab, tokenizers.target.vocab, classes, sizes)
        _check_tables(model, tokenizers)
        model = with_unmatched(model, tokenizers.source)
        output = (tokenizers.target if model.has_decoder else tokenizers.source).size
    if head.kind in ("classes", "slots") and model.head.classes is None:
        expected = "a number, since the data has no classes; set it, or name them as `classes` of the task"
        raise ConfigError(f"config.model.head.classes: got None, expected {expected}")
    if tokenizers is not None and model.generator is not None and model.generator.vocab is None:
        model = dataclasses.replace(model, generator=dataclasses.replace(model.generator, vocab=tokenizers.source.size))
    side = model.decoder_part or model.encoder_part
    if head.kind == "tokens" and not head.projection and side is not None and side.width != side.embed.vocab:
        expected = f"{side.embed.vocab}, the padded vocabulary, since head.projection is False"
        raise ConfigError(f"config.model.{model.parts[-1]}.width: got {side.width}, expected {expected}; change it")
    task = dataclasses.replace(config.task, classes=names or (), vocab=output)
    if task.class_weights == (sections.BALANCED,):
        task = dataclasses.replace(task, class_counts=count_classes(config, dataset, model.head.classes or 0))
    resolved = dataclasses.replace(config, model=model, task=task)
    for view in components.views(resolved).values():
        tasks.get(view.task.name).check(view)
    metric_settings.check_samples_exist(resolved)
    if "validation" in dataset.splits:
        metric_settings.check_metric_is_measured(resolved)
    elif config.train.patience is not None:
        raise ConfigError(
            f"config.train.patience: got {config.train.patience}, expected None: the data has no validation split"
        )
    return resolved


def with_unmatched(model: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """The model with the special tokens as those that match nothing, where its embedding compares tokens."""
    for name in model.parts:
        part = getattr(model, name)
        if part.embed.matches and part.embed.unmatched is None:
            embed = dataclasses.replace(part.embed, unmatched=tokenizer.special_tokens)
            model = dataclasses.replace(model, **{name: dataclasses.replace(part, embed=embed)})
    return model


def _check_tables(model: ModelConfig, tokenizers: Tokenizers) -> None:
    """Raises a ConfigError if an embedding table has fewer rows than its tokenizer has tokens."""
    for part in model.parts:
        if part == "encoder" and model.series is not None:
            continue
        rows = getattr(model, part).embed.vocab
        size = (tokenizers.source if part.endswith("encoder") else tokenizers.target).size
        if rows < size:  # JAX reads NaN beyond the end of a table
            expected = f"at least {size}, the tokenizer's tokens; take the tokenizer that the model was made for"
            raise ConfigError(f"config.model.{part}.embed.vocab: got {rows}, expected {expected}")


def _with_channels(config: Config, dataset: Dataset) -> Config:
    """The config with the names of the series' channels, and the means and deviations to standardise them with.

    Raises:
      ConfigError: the config's model or names are of other channels, or its means are not one for each channel.
    """
    channels = dataset.channels
    if config.model.series is None or channels is None:
        return config
    task, names = config.task, channels.names
    if task.channels and task.channels != names:
        got = f"config.task.channels: got {', '.join(task.channels)}"
        raise ConfigError(f"{got}, expected the data's ({', '.join(names)}) or (); leave it empty")
    if config.model.series.channels not in (None, len(names)):
        got = f"config.model.series.channels: got {config.model.series.channels}"
        raise ConfigError(f"{got}, expected {len(names)} (the data's) or None")
    standardise = config.data.standardise
    means = task.means or (channels.means if standardise else ())
    deviations = task.deviations or (channels.deviations if standardise else ())
    for field, values in (("means", means), ("deviations", deviations)):
        if len(values) not in (0, len(names)):
            raise ConfigError(f"config.task.{field}: got {len(values)} numbers, expected {len(names)}, one a channel")
    if not all(value > 0 for value in deviations) or bool(means) != bool(deviations):
        raise ConfigError("config.task.deviations: got 0, less or none beside means, expected positive numbers")
    return dataclasses.replace(
        config, task=dataclasses.replace(task, channels=names, means=means, deviations=deviations)
    )


def count_classes(config: Config, dataset: Dataset, classes: int) -> tuple[int, ...]:
    """Number of training labels of each class: of examples, or where every word has a tag, of words."""
    train = dataset.splits["train"]
    counts = np.zeros(classes, np.int64)
    for i in range(min(len(train), config.data.examples or len(train))):
        labels = train[i].get("tags", train[i].get("label"))
        counts += np.bincount(np.atleast_1d(np.asarray(labels, np.int64)), minlength=classes)
    return tuple(counts.tolist())
