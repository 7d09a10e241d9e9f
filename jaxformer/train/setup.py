"""The parts of a run's config that only its data and tokenizers determine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from jaxformer import tasks
from jaxformer.config import Config
from jaxformer.config.checks import sections
from jaxformer.data import chat
from jaxformer.data.sources import Dataset
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.errors import ConfigError
from jaxformer.models import build
from jaxformer.train import metric_settings


def build_or_load_tokenizers(config: Config, dataset: Dataset, workdir: Path) -> Tokenizers:
    """The tokenizers saved in `workdir` if it holds a run, else those trained or loaded as the config says."""
    if (workdir / "config.json").exists():
        return Tokenizers.load(workdir)
    return Tokenizers.build(config.data, dataset.splits["train"], tasks.get(config.task.name).roles)


def with_chat_template(config: Config, tokenizers: Tokenizers, workdir: Path) -> Tokenizers:
    """The tokenizers with the template that conversations are written with, if the task reads any.

    A resumed run keeps its own. Otherwise it is the config's, else that of the tokenizers (of `config.init.directory`),
    else `chat.DEFAULT_TEMPLATE`.
    """
    reads_turns = "messages" in tasks.get(config.task.name).roles
    if not reads_turns or ((workdir / "config.json").exists() and tokenizers.chat_template is not None):
        return tokenizers
    path = config.data.tokenizer.chat_template
    template = chat.read_template(path) if path else tokenizers.chat_template or chat.DEFAULT_TEMPLATE
    return dataclasses.replace(tokenizers, chat_template=template)


def resolve_config(config: Config, dataset: Dataset, tokenizers: Tokenizers) -> Config:
    """The config with the sizes that data and tokenizers determine: vocabularies and classes.

    Raises:
      ConfigError: the config gives another number of classes than the data has, or an embedding table with fewer rows
        than the tokenizer has tokens, or a model width that is not the vocabulary where hidden states are the logits;
        or the task rejects the result.
    """
    names = tasks.get(config.task.name).classes or dataset.classes
    classes, head = None if names is None else len(names), config.model.head
    if head.kind in ("classes", "slots") and classes is not None and head.classes not in (None, classes):
        raise ConfigError(f"config.model.head.classes: got {head.classes}, expected {classes} (the data's) or None")
    model = build.resolve(config.model, tokenizers.source.vocab, tokenizers.target.vocab, classes)
    for part in model.parts:
        rows = getattr(model, part).embed.vocab
        size = (tokenizers.source if part.endswith("encoder") else tokenizers.target).size
        if rows < size:  # JAX reads NaN beyond the end of a table
            expected = f"at least {size}, the tokenizer's tokens; take the tokenizer that the model was made for"
            raise ConfigError(f"config.model.{part}.embed.vocab: got {rows}, expected {expected}")
    if model.generator is not None and model.generator.vocab is None:
        model = dataclasses.replace(model, generator=dataclasses.replace(model.generator, vocab=tokenizers.source.size))
    side = model.decoder_part or model.encoder_part
    if head.kind == "tokens" and not head.projection and side is not None and side.width != side.embed.vocab:
        expected = f"{side.embed.vocab}, the padded vocabulary, since head.projection is False"
        raise ConfigError(f"config.model.{model.parts[-1]}.width: got {side.width}, expected {expected}; change it")
    output = tokenizers.target if model.has_decoder else tokenizers.source
    task = dataclasses.replace(config.task, classes=names or (), vocab=output.size)
    if task.class_weights == (sections.BALANCED,):
        task = dataclasses.replace(task, class_counts=count_classes(config, dataset, model.head.classes or 0))
    resolved = dataclasses.replace(config, model=model, task=task)
    tasks.get(config.task.name).check(resolved)
    metric_settings.check_samples_exist(resolved)
    if "validation" in dataset.splits:
        metric_settings.check_metric_is_measured(resolved)
    elif config.train.patience is not None:
        raise ConfigError(
            f"config.train.patience: got {config.train.patience}, expected None: the data has no validation split"
        )
    return resolved


def count_classes(config: Config, dataset: Dataset, classes: int) -> tuple[int, ...]:
    """Number of training labels of each class: of examples, or where every word has a tag, of words."""
    train = dataset.splits["train"]
    counts = np.zeros(classes, np.int64)
    for i in range(min(len(train), config.data.examples or len(train))):
        labels = train[i].get("tags", train[i].get("label"))
        counts += np.bincount(np.atleast_1d(np.asarray(labels, np.int64)), minlength=classes)
    return tuple(counts.tolist())
