"""A text about an image, or about another series: an encoder reads patches, a decoder writes the text."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxformer.config import Config
from jaxformer.data.sources import Example
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.tasks import Features, _tokens, series_classification, translation

NAME = "captioning"


def encode(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Features:
    """Source `[T, C]`, decoder input `<bos> ids`, labels `ids <eos>`."""
    tokenizer = tokenizers.target
    first, last = _tokens.start_token(tokenizer, NAME), _tokens.required_token(tokenizer, NAME, "eos", "sep")
    target = _tokens.next_token_features(tokenizer.encode(example["target"]), first, last, config.data.length)
    source = series_classification.encode_values(config, example["values"])
    return {**source, **target, **_tokens.truncation(int(source.get("cut", 0)) + int(target.get("cut", 0)))}


def prompt(config: Config, tokenizers: Tokenizers, line: str) -> Features:
    """A series in one line (see `series.read_line`), and a target that holds only the start token."""
    start = np.array([_tokens.start_token(tokenizers.target, NAME)], np.int32)
    return {**series_classification.prompt(config, tokenizers, line), "target": start}


TASK = dataclasses.replace(
    translation.TASK,
    roles=("values", "target"),
    needs="an encoder of a series and a decoder with a head of tokens",
    encode=encode,
    prompt=prompt,
    input_line=series_classification.input_line,
)
