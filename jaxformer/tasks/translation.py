"""Text to text: an encoder reads the source, a decoder writes the target after it (Sutskever et al. 2014)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxformer import metrics
from jaxformer.config import Config
from jaxformer.config.checks.sections import BLEU_LANGUAGES
from jaxformer.data.sources import Example
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.tasks import Features, Task, _generation, _tokens

NAME = "translation"


def encode_source(config: Config, tokenizers: Tokenizers, text: str) -> Features:
    """Ids of a source text, truncated so that its <eos>, the encoder's only sign of an end, still fits."""
    end = _tokens.required_token(tokenizers.source, NAME, "eos", "sep")
    ids, max_length = tokenizers.source.encode(text), config.data.length - 1
    return {"source": np.array([*ids[:max_length], end], np.int32), **_tokens.truncation(len(ids) - max_length)}


def encode(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Features:
    """Source `ids <eos>`, decoder input `<bos> ids`, labels `ids <eos>`."""
    tokenizer = tokenizers.target
    first, last = _tokens.start_token(tokenizer, NAME), _tokens.required_token(tokenizer, NAME, "eos", "sep")
    target = _tokens.next_token_features(tokenizer.encode(example["target"]), first, last, config.data.length)
    source = encode_source(config, tokenizers, example["source"])
    return {**source, **target, **_tokens.truncation(int(source.get("cut", 0)) + int(target.get("cut", 0)))}


def prompt(config: Config, tokenizers: Tokenizers, line: str) -> Features:
    """The source, and a target that holds only the start token."""
    start = np.array([_tokens.start_token(tokenizers.target, NAME)], np.int32)
    return {**encode_source(config, tokenizers, line), "target": start}


def derived_metrics(config: Config, values: Mapping[str, float], size: Mapping[str, float]) -> dict[str, float]:
    """Adds the perplexity per token."""
    return {**values, "perplexity": metrics.perplexity(values["loss"])}


def score(config: Config, results: Sequence[str], examples: Sequence[Example]) -> dict[str, float]:
    """BLEU and chrF (0 to 100), the fraction of exact matches, and tokenised BLEU if the config names a language.

    Languages of which BLEU has words of its own (`BLEU_LANGUAGES`) have no other tokenised one. BLEU is left out where
    no reference has four words (`metrics.bleu_is_defined`).
    """
    references = [example["target"] for example in examples]
    scores = {name: score.value for name, score in _scores(config, results, references).items()}
    return {**scores, "exact_match": metrics.exact_match(results, references)}


def score_signatures(config: Config) -> dict[str, str]:
    """The signature of each score of `score`. It does not depend on the text."""
    return {name: score.signature for name, score in _scores(config, ["a b c d"], ["a b c d"]).items()}


def _scores(config: Config, results: Sequence[str], references: Sequence[str]) -> dict[str, metrics.Score]:
    language, scores = config.task.language, {"chrf": metrics.chrf(results, references)}
    if not metrics.bleu_is_defined(references, language):
        return scores
    scores = {"bleu": metrics.bleu(results, references, language), **scores}
    if language and language not in BLEU_LANGUAGES:
        scores["bleu_lc_tok"] = metrics.bleu_tokenised(results, references, language)
    return scores


TASK = Task(
    roles=("source", "target"),
    head="tokens",
    sides=("encoder, decoder",),
    method="translate",
    needs="an encoder and a decoder with a head of tokens",
    encode=encode,
    loss=_tokens.token_loss,
    metrics=_tokens.token_metrics,
    derived_metrics=derived_metrics,
    prompt=prompt,
    predict=_generation.best_texts,
    score=score,
    score_names=("bleu", "chrf", "bleu_lc_tok", "exact_match"),
    score_signatures=score_signatures,
)
