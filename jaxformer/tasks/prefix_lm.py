"""Prefix language modelling: a decoder reads the beginning of a text in both directions and writes the rest.

Liu et al. 2018 ("Generating Wikipedia by summarizing long sequences"); Raffel et al. 2020, section 3.2.1. The slots of
the prefix see each other, all others what is before them (`Slots.prefix`); only what follows the prefix is predicted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxformer import metrics
from jaxformer.config import Config
from jaxformer.data.sources import Example
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.tasks import Features, _tokens, language_modelling


def encode(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Features:
    """The features of language modelling with a prefix: its labels have weight 0, but for the one after it.

    target   <bos> ids[0] ids[1] ids[2] ...     with a prefix of 2 slots
    labels   ids[0] ids[1] ids[2] ids[3] ...
    weights  0      1      1      1      ...
    """
    return _with_prefix(config, language_modelling.encode(config, tokenizers, example, rng), rng)


def encode_windows(
    config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator
) -> list[Features]:
    """One text as many rows as it takes, each with a prefix of its own."""
    windows = language_modelling.encode_windows(config, tokenizers, example, rng)
    return [_with_prefix(config, features, rng) for features in windows]


def encode_row(config: Config, tokenizers: Tokenizers, ids: np.ndarray, rng: np.random.Generator) -> Features:
    """A row of a running text: `<bos> ids[:-1]`, labels `ids`, and a prefix."""
    first = _tokens.start_token(tokenizers.target, language_modelling.NAME)
    target = np.concatenate([[first], ids[:-1]]).astype(np.int32)
    features = {"target": target, "labels": ids, "weights": np.ones(len(ids), np.float32)}
    return _with_prefix(config, features, rng)


def _with_prefix(config: Config, features: Features, rng: np.random.Generator) -> Features:
    """`features` of language modelling with a prefix of 1 slot up to all of them, so that a label is left."""
    size = len(features["target"])
    prefix = draw_prefix(size, config.task.prefix, rng)
    weights = np.where(np.arange(size) < prefix - 1, np.float32(0), features["weights"])
    return {**features, "weights": weights, "prefix": np.asarray(prefix, np.int32)}


def draw_prefix(size: int, fraction: float | None, rng: np.random.Generator) -> int:
    """Slots of the prefix out of `size`, the start token and `size - 1` tokens of text: 1 to `size`.

    Args:
      fraction: of the tokens of text that are in the prefix, rounded; None: every number of slots is as likely.
    """
    return int(rng.integers(size)) + 1 if fraction is None else 1 + round(fraction * (size - 1))


def prompt(config: Config, tokenizers: Tokenizers, line: str) -> Features:
    """`<bos> ids`, all of it the prefix; the model continues it."""
    features = language_modelling.prompt(config, tokenizers, line)
    return {**features, "prefix": np.asarray(len(features["target"]), np.int32)}


def derived_metrics(config: Config, values: Mapping[str, float], size: Mapping[str, float]) -> dict[str, float]:
    """Adds the perplexity of the tokens after the prefixes."""
    return {**values, "perplexity": metrics.perplexity(values["loss"])}


TASK = dataclasses.replace(
    language_modelling.TASK,
    encode=encode,
    encode_windows=encode_windows,
    encode_row=encode_row,
    encode_score=language_modelling.encode_windows,  # a prefix of the start token alone: every token is scored
    derived_metrics=derived_metrics,
    prompt=prompt,
    has_prefix=True,
)
