"""Text, one token after the other: p(text) = prod_t p(token t | the tokens before it)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Mapping, Sequence

import numpy as np

from jaxformer import metrics
from jaxformer.config import Config, DecodeConfig
from jaxformer.tasks import Features, Task, _tokens

if TYPE_CHECKING:
    from jaxformer.data.sources import Example
    from jaxformer.data.tokenizers import Tokenizers
    from jaxformer.model import Model

NAME = "language_modelling"


def encode(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Features:
    """One text as one row: decoder input `<bos> ids`, labels `ids <eos>`.

    With packing "concat" the pipeline cuts the same labels, those of all texts in a row, into rows itself.
    """
    return _tokens.shifted(*_labelled(tokenizers, example), config.data.length)


def windows(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> list[Features]:
    """One text as many rows as it takes: what is measured is the likelihood of all of it.

    A row sees nothing of the row before, as with packing "concat".
    """
    return _tokens.shifted_windows(*_labelled(tokenizers, example), config.data.length)


def _labelled(tokenizers: Tokenizers, example: Example) -> tuple[list[int], int, int]:
    """The ids of a text, the token before it and the one after it."""
    tokenizer = tokenizers.target
    first, last = _tokens.start(tokenizer, NAME), _tokens.required(tokenizer, NAME, "eos", "sep")
    return tokenizer.encode(example["text"]), first, last


def prompt(config: Config, tokenizers: Tokenizers, line: str) -> Features:
    """`<bos> ids`: what the model continues."""
    tokenizer = tokenizers.target
    return {"target": np.array([_tokens.start(tokenizer, NAME), *tokenizer.encode(line)], np.int32)}


def finish(config: Config, values: dict[str, float], size: Mapping[str, float]) -> dict[str, float]:
    """Adds three perplexities of the same likelihood, that of all the text, which differ by what they are divided by.

    `perplexity` is per token; `word_perplexity` per word, line ends counted as words, as the literature on WikiText
    and Penn Treebank does; `bits_per_byte` per UTF-8 byte, the only one that compares between tokenizers.
    """
    nats = values["loss"] * size["labels"]
    return {
        **values,
        "perplexity": metrics.perplexity(values["loss"]),
        "word_perplexity": metrics.perplexity(nats, size["words"] + size["lines"]),
        "bits_per_byte": metrics.bits_per_byte(nats, size["bytes"]),
    }


def decode(model: Model, lines: Sequence[str], config: DecodeConfig) -> list[str]:
    """A continuation of each line, without the line."""
    return model.generate(lines, config)


def line(result: str) -> str:
    """The continuation with its line ends written `\\n`, so that it stays one line."""
    return result.replace("\r", "\\r").replace("\n", "\\n")


TASK = Task(
    roles=("text",),
    encode=encode,
    loss=_tokens.loss,
    metrics=_tokens.measures,
    finish=finish,
    windows=windows,
    prompt=prompt,
    decode=decode,
    line=line,
)
