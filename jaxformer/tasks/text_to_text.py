"""Any task as text: templates turn an example into a source and a target, and one model writes all targets.

This is T5's form (Raffel et al. 2020, section 2.4; T0: Sanh et al. 2022). `config.task.template` has the two templates,
the words of the classes, and the scores. An encoder reads the source and a decoder writes the target, as in
translation. A decoder alone reads the source before the target, and the loss is of the target only.

A prediction is the decoded text, or the likeliest of a list of choices (rank classification: the log-likelihood of a
choice given the source, the sum over its tokens, not divided by its length; Sanh et al. 2022, section 5.2).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from jaxformer import metrics
from jaxformer.config import Config, DecodeConfig
from jaxformer.data import templates
from jaxformer.data.sources import Dataset, Example
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.tasks import Features, Predictor, Task, _generation, _likelihood, _tokens, text_lines, translation

NAME = "text_to_text"


def prepare(config: Config, dataset: Dataset) -> Dataset:
    """`dataset` with the texts of the templates as "source" and "target"."""
    return templates.rendered(dataset, config.task.texts)


def encode(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Features:
    """Source `ids <eos>`, decoder input `<bos> ids`, labels `ids <eos>`; of a decoder alone, all in one stream.

        target   <bos> source ... target[0] ... target[n-1]
        labels   source ...       target[0] ... target[n-1] <eos>
        weights  0                1         ... 1           1

    What is too long for such a stream loses the end of its source first, then that of its target.
    """
    if config.model.has_encoder:
        return translation.encode(config, tokenizers, example, rng)
    tokenizer, length = tokenizers.target, config.data.length
    first, last = _tokens.start_token(tokenizer, NAME), _tokens.required_token(tokenizer, NAME, "eos", "sep")
    source, target = tokenizer.encode(example["source"]), tokenizer.encode(example["target"])
    kept = source[: max(length - 1 - len(target), 0)]
    features = _tokens.next_token_features([*kept, *target], first, last, length)
    weights = np.array(features["weights"])
    weights[: len(kept)] = 0.0
    cut = len(source) - len(kept) + int(features.get("cut", 0))
    return {**features, "weights": weights, **_tokens.truncation(cut)}


def prompt(config: Config, tokenizers: Tokenizers, line: str) -> Features:
    """A source text, and the beginning of its target."""
    if config.model.has_encoder:
        return translation.prompt(config, tokenizers, line)
    tokenizer, max_length = tokenizers.target, config.data.length - 1
    ids = tokenizer.encode(line)
    tokens = np.array([_tokens.start_token(tokenizer, NAME), *ids[:max_length]], np.int32)
    return {"target": tokens, **_tokens.truncation(len(ids) - max_length)}


def predict(predictor: Predictor, lines: Sequence[str], options: DecodeConfig) -> list[str]:
    """The target of each source text: decoded, or the likeliest choice."""
    config = predictor.config
    if config.task.texts.predict == "generate":
        return [text.strip() for text in _generation.best_texts(predictor, lines, options)]
    choices = templates.choices(config.task.texts, config.task.classes)
    best = choice_log_likelihoods(predictor, lines, choices).argmax(axis=1)
    return [choices[index] for index in best]


def choice_log_likelihoods(
    predictor: Predictor, lines: Sequence[str], choices: Sequence[str]
) -> Float[np.ndarray, "n C"]:
    """The log-likelihood (natural logarithm) of each choice as the target of each source text.

    Raises:
      ConfigError: a choice has more tokens than `config.data.length`.
    """
    config, tokenizers = predictor.config, predictor.framing.tokenizers
    _likelihood.check_lengths(tokenizers.target, choices, config.data.length)
    rng = np.random.default_rng(0)
    pieces = [
        encode(config, tokenizers, {"source": line, "target": choice}, rng)
        for line in text_lines(lines)
        for choice in choices
    ]
    scores = np.zeros(len(pieces))
    for indices, _, sums in predictor.runner.forward(pieces, finish=_likelihood.summed_log_probs):
        scores[indices] = sums
    return scores.reshape(-1, len(choices))


def check(config: Config) -> None:
    """Raises ConfigError if predictions are chosen from a list, and the data and the config give none."""
    if config.task.texts.predict == "rank":
        templates.choices(config.task.texts, config.task.classes)


def reference_line(config: Config, example: Example) -> str:
    """The right targets."""
    return " | ".join(templates.references(config.task.texts, example))


def score(config: Config, results: Sequence[str], examples: Sequence[Example]) -> dict[str, float]:
    """The scores that the config names. Exact matches and F1 are 0 to 1, BLEU, chrF and ROUGE 0 to 100."""
    names, targets = config.task.texts.scores, [example["target"] for example in examples]
    scores = {name: each.value for name, each in _text_scores(config, results, targets).items()}
    if "exact_match" in names:
        right = [templates.references(config.task.texts, example) for example in examples]
        exact = [result.strip() in map(str.strip, each) for result, each in zip(results, right, strict=True)]
        scores["exact_match"] = float(np.mean(exact)) if exact else float("nan")
    if "squad" in names:
        right = [templates.references(config.task.texts, example) for example in examples]
        scores |= metrics.answer_scores(results, right)
    return scores


def score_signatures(config: Config) -> dict[str, str]:
    """The signature of each score that has one. It does not depend on the text."""
    return {name: each.signature for name, each in _text_scores(config, ["a b c d"], ["a b c d"]).items()}


def _text_scores(config: Config, results: Sequence[str], targets: Sequence[str]) -> dict[str, metrics.Score]:
    names, scores = config.task.texts.scores, {}
    if "bleu" in names and metrics.bleu_is_defined(targets, config.task.language):
        scores["bleu"] = metrics.bleu(results, targets, config.task.language)
    if "chrf" in names:
        scores["chrf"] = metrics.chrf(results, targets)
    return scores | (metrics.rouge(results, targets) if "rouge" in names else {})


TASK = Task(
    roles=("source", "target"),
    head="tokens",
    sides=("encoder, decoder", "decoder"),
    method="translate",
    needs="a decoder with a head of tokens, and the task text_to_text",
    prepare=prepare,
    encode=encode,
    loss=_tokens.token_loss,
    metrics=_tokens.token_metrics,
    derived_metrics=translation.derived_metrics,
    prompt=prompt,
    predict=predict,
    reference_line=reference_line,
    score=score,
    score_names=("exact_match", "f1", "bleu", "chrf", "rouge1", "rouge2", "rouge_l"),
    score_signatures=score_signatures,
    check=check,
)
