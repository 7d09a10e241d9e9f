"""Text to text: an encoder reads the source, a decoder writes the target after it (Sutskever et al. 2014)."""

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

NAME = "translation"


def source(config: Config, tokenizers: Tokenizers, text: str) -> Features:
    """Ids of a source text, cut so that its <eos>, the encoder's only sign of an end, still fits."""
    end = _tokens.required(tokenizers.source, NAME, "eos", "sep")
    ids, room = tokenizers.source.encode(text), config.data.length - 1
    return {"source": np.array([*ids[:room], end], np.int32), **_tokens.left_out(len(ids) - room)}


def encode(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Features:
    """Source `ids <eos>`, decoder input `<bos> ids`, labels `ids <eos>`."""
    target = tokenizers.target
    first, last = _tokens.start(target, NAME), _tokens.required(target, NAME, "eos", "sep")
    shifted = _tokens.shifted(target.encode(example["target"]), first, last, config.data.length)
    given = source(config, tokenizers, example["source"])
    return {**given, **shifted, **_tokens.left_out(int(given.get("cut", 0)) + int(shifted.get("cut", 0)))}


def prompt(config: Config, tokenizers: Tokenizers, line: str) -> Features:
    """The source, and a target of which only the start is known."""
    first = np.array([_tokens.start(tokenizers.target, NAME)], np.int32)
    return {**source(config, tokenizers, line), "target": first}


def finish(config: Config, values: dict[str, float], size: Mapping[str, float]) -> dict[str, float]:
    """Adds the perplexity a token."""
    return {**values, "perplexity": metrics.perplexity(values["loss"])}


def decode(model: Model, lines: Sequence[str], config: DecodeConfig) -> list[str]:
    """A translation of each line."""
    return model.translate(lines, config)


def score(config: Config, results: Sequence[str], examples: Sequence[Example]) -> dict[str, float]:
    """BLEU and chrF (0 to 100), the share of exact matches, and tokenised BLEU if the config names a language."""
    references = [example["target"] for example in examples]
    scores = {name: score.value for name, score in _scores(config, results, references).items()}
    return {**scores, "exact_match": metrics.exact_match(results, references)}


def signatures(config: Config) -> dict[str, str]:
    """What exactly each score of `score` is. It does not depend on the text."""
    return {name: score.signature for name, score in _scores(config, ["a"], ["a"]).items()}


def _scores(config: Config, results: Sequence[str], references: Sequence[str]) -> dict[str, metrics.Score]:
    scores = {"bleu": metrics.bleu(results, references), "chrf": metrics.chrf(results, references)}
    if config.task.language:
        scores["bleu_lc_tok"] = metrics.bleu_tokenised(results, references, config.task.language)
    return scores


TASK = Task(
    roles=("source", "target"),
    encode=encode,
    loss=_tokens.loss,
    metrics=_tokens.measures,
    finish=finish,
    prompt=prompt,
    decode=decode,
    score=score,
    scores=("bleu", "chrf", "bleu_lc_tok", "exact_match"),
    signatures=signatures,
)
