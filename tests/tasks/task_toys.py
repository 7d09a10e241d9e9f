"""Configs, tokenizers and encoded examples for tests of tasks."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxformer import tasks
from jaxformer.config import Config, EmbedConfig, ModelConfig, SeriesConfig, StackConfig, TaskConfig, TokenizerConfig
from jaxformer.data.chat import DEFAULT_TEMPLATE
from jaxformer.data.tokenizers import Tokenizers

TEXT = "the cat sat on the mat while a dog ran after some other cats in our garden"


def words(text: str = TEXT) -> Tokenizers:
    """One word tokenizer for both sides, with a few sentinels."""
    return learned(TokenizerConfig(kind="word", vocab=100, sentinels=4), text)


def learned(settings: TokenizerConfig, text: str = TEXT) -> Tokenizers:
    config = dataclasses.replace(Config().data, tokenizer=settings)
    tokenizers = Tokenizers.build(config, [{"text": text}], ("text",))
    return dataclasses.replace(tokenizers, chat_template=DEFAULT_TEMPLATE)


def config(name: str, length: int = 32, kinds: int = 0, side: str = "encoder", **task) -> Config:
    stack = StackConfig(embed=EmbedConfig(kinds=kinds))
    series = SeriesConfig(channels=2) if "values" in tasks.get(name).roles else None
    if "labels" in tasks.get(name).roles:
        task = {"classes": ("joy", "anger", "fear"), **task}
    base = Config(model=ModelConfig(**{side: stack}, series=series), task=TaskConfig(name=name, **task))
    return dataclasses.replace(base, data=dataclasses.replace(base.data, length=length))


def encoded(settings: Config, tokenizers: Tokenizers, seed: int = 0, **example) -> dict[str, np.ndarray]:
    task = tasks.get(settings.task.name)
    return dict(task.encode(settings, tokenizers, example, np.random.default_rng(seed)))


def without(tokenizers: Tokenizers, *roles: str) -> Tokenizers:
    """A fresh tokenizer that lacks these special tokens, as loaded vocabularies may."""
    for role in roles:
        setattr(tokenizers.source, role, None)
    return tokenizers
