"""The parts of a run's config that only its data and tokenizers determine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxformer import tasks
from jaxformer.config import Config
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
    side = model.decoder_part or model.encoder_part
    if head.kind == "tokens" and not head.projection and side is not None and side.width != side.embed.vocab:
        expected = f"{side.embed.vocab}, the padded vocabulary, since head.projection is False"
        raise ConfigError(f"config.model.{model.parts[-1]}.width: got {side.width}, expected {expected}; change it")
    output = tokenizers.target if model.has_decoder else tokenizers.source
    task = dataclasses.replace(config.task, classes=names or (), vocab=output.size)
    resolved = dataclasses.replace(config, model=model, task=task)
    tasks.get(config.task.name).check(resolved)
    if "validation" in dataset.splits:
        metric_settings.check_metric_is_measured(resolved)
    return resolved
