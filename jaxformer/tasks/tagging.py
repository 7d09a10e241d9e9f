"""A tag for every word of a text: named entities, parts of speech.

A word is what stands between blanks. Its tokens are those of the word alone, and the first of them carries its tag
(Devlin et al. 2019, section 5.3); the other tokens are read and not judged. A word without a token (truncated, or
unknown to the vocabulary) counts as tagged "O" in accuracy and F1. The loss, which needs a probability, leaves it out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxformer import metrics
from jaxformer.config import Config, DecodeConfig
from jaxformer.data.sources import Example
from jaxformer.data.tokenizers import Tokenizer, Tokenizers
from jaxformer.errors import ConfigError
from jaxformer.tasks import Features, Predictor, Task, _diagnosis, _tokens, classification, text_lines
from jaxformer.types import Sums

OUTSIDE = "O"
"""The tag of a word outside of all entities."""
ENTITY_SCORES = metrics.Entities._fields


def encode(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Features:
    """`<cls> tokens <sep>`, each word's tag as the label of its first token, and weight 1 there.

    Raises:
      ConfigError: there are more or fewer tags than words.
    """
    ids, word_slots, cut = encode_words(config, tokenizers.source, example["text"])
    tags = example["tags"]
    if len(tags) != len(word_slots):
        text = example["text"] if len(example["text"]) < 60 else example["text"][:60] + "..."
        raise ConfigError(
            f"tagging: got {len(tags)} tags for {text!r}, expected {len(word_slots)}, one a word; mend the data"
        )
    labels, weights, unread = np.zeros(len(ids), np.int32), np.zeros(len(ids), np.float32), []
    for slot, tag in zip(word_slots, tags, strict=True):
        if slot is None:
            unread.append(tag)
        else:
            labels[slot], weights[slot] = tag, 1.0
    judged = {"labels": labels, "weights": weights, "unread": np.array(unread, np.int32)}
    return {config.model.input_side: ids, **judged, **_tokens.truncation(cut)}


def prompt(config: Config, tokenizers: Tokenizers, line: str) -> Features:
    """A text, framed as in training."""
    ids, _, cut = encode_words(config, tokenizers.source, line)
    return {config.model.input_side: ids, **_tokens.truncation(cut)}


def split_words(text: str) -> list[str]:
    """The parts between blanks; other white space is part of a word."""
    return [word for word in text.split(" ") if word]


def encode_words(config: Config, tokenizer: Tokenizer, text: str) -> tuple[np.ndarray, list[int | None], int]:
    """A text word by word.

    Returns:
      The framed tokens, int32 `[n]`; the slot of each word's first token (None: it has none); and the number of
      truncated tokens.
    """
    ids: list[int] = []
    begins = []
    for word in split_words(text):
        # A blank belongs to the word after it where vocabularies know blanks at all.
        pieces = tokenizer.encode(f" {word}" if begins else word) or _tokens.existing(tokenizer.unk)
        begins.append(len(ids) if pieces else None)
        ids += pieces
    kept_ids = _tokens.truncate(config, tokenizer, ids)
    prefix = len(_tokens.existing(tokenizer.cls))
    slots = [None if begin is None or begin >= len(kept_ids) else begin + prefix for begin in begins]
    return _tokens.add_special_tokens(tokenizer, kept_ids), slots, len(ids) - len(kept_ids)


def predict(predictor: Predictor, lines: Sequence[str], options: DecodeConfig) -> list[list[dict[str, Any]]]:
    """For each line, for each of its words, `{"word", "label", "probability"}`, as its first token is tagged.

    A word without a token is "O" with probability 0.
    """
    lines = text_lines(lines)
    word_slots = [predictor.framing.word_slots(line) for line in lines]
    results: list[list[dict[str, Any]]] = [[] for _ in lines]
    for indices, _, probs in predictor.runner.forward(predictor.prompts(lines), finish=classification.probabilities):
        for index, row in zip(indices, probs, strict=True):
            words = zip(split_words(lines[index]), word_slots[index], strict=True)
            results[index] = [{"word": word, **_tag(predictor.config, row, slot)} for word, slot in words]
    return results


def tag_tokens(predictor: Predictor, lines: Sequence[str]) -> list[list[dict[str, Any]]]:
    """For each line, for each of its tokens but the special ones, `{"token", "label", "probability"}`."""
    lines, side = text_lines(lines), predictor.config.model.input_side
    tokenizer = getattr(predictor.framing.tokenizers, side)
    results: list[list[dict[str, Any]]] = [[] for _ in lines]
    for indices, batch, probs in predictor.runner.forward(
        predictor.prompts(lines), finish=classification.probabilities
    ):
        stream = getattr(batch, side)
        for index, tokens, segment, row in zip(indices, stream.tokens, stream.slots.segment, probs, strict=False):
            pieces = [(slot, tokenizer.decode([tokens[slot]])) for slot in np.flatnonzero(segment)]
            results[index] = [{"token": text, **_tag(predictor.config, row, slot)} for slot, text in pieces if text]
    return results


def _tag(config: Config, probs: np.ndarray, slot: int | None) -> dict[str, Any]:
    """The likeliest class of a slot, from the probabilities `[T, C]` of all slots."""
    if slot is None:
        return {"label": OUTSIDE, "probability": 0.0}
    best = int(probs[slot].argmax())
    return {"label": classification.class_names(config, probs.shape[-1])[best], "probability": float(probs[slot, best])}


def output_line(result: Sequence[Mapping[str, Any]]) -> str:
    """The tags, with a blank between them: as many as the line has words."""
    return " ".join(word["label"] for word in result)


def reference_line(config: Config, example: Example) -> str:
    """The true tags in the same form."""
    return " ".join(config.task.classes[tag] for tag in example["tags"])


def score(config: Config, results: Sequence[Sequence[Mapping]], examples: Sequence[Example]) -> dict[str, float]:
    """Precision, recall and F1 of entities if the tags mark such; else the fraction of words tagged right.

    Both count all words of `examples`, truncated ones included.
    """
    predicted = [[word["label"] for word in result] for result in results]
    true = [[config.task.classes[tag] for tag in example["tags"]] for example in examples]
    if not metrics.are_span_tags(config.task.classes):
        pairs = [pair for both in zip(predicted, true, strict=True) for pair in zip(*both, strict=True)]
        return {"word_accuracy": sum(a == b for a, b in pairs) / len(pairs) if pairs else float("nan")}
    return metrics.entity_scores(predicted, true)._asdict()


def diagnose(config: Config, results: Sequence[Sequence[Mapping]], examples: Sequence[Example]) -> dict[str, Any]:
    """Confusion of the words' tags, their calibration, and mistakes by type of entity, see `_diagnosis`."""
    predicted = [[word["label"] for word in result] for result in results]
    true = [[config.task.classes[tag] for tag in example["tags"]] for example in examples]
    words = [pair for both in zip(true, predicted, strict=True) for pair in zip(*both, strict=True)]
    is_correct = [a == b for a, b in words]
    found: dict[str, Any] = {
        "confusion": _diagnosis.confusion(config.task.classes, [a for a, _ in words], [b for _, b in words]),
        "calibration": _diagnosis.calibration([word["probability"] for each in results for word in each], is_correct),
    }
    if metrics.are_span_tags(config.task.classes):
        found["entities"] = _diagnosis.entity_errors(true, predicted)
        found["f1_interval"] = _diagnosis.entity_interval(true, predicted)
    return found


def unread_label_metrics(config: Config, labels: Int[np.ndarray, " n"]) -> Sums:
    """Accuracy and F1 of words without a token: tagged "O", or wrong where there is no such class."""
    classes = config.task.classes
    true = np.bincount(labels, minlength=len(classes)).astype(np.float64)
    predicted = np.array([len(labels) if name == OUTSIDE else 0 for name in classes], np.float64)
    right = np.where(predicted > 0, true, 0.0)
    return {"accuracy": (right.sum(), float(len(labels))), "macro_f1": (2.0 * right, predicted + true)}


def check(config: Config) -> None:
    """Raises a ConfigError where the metric needs entities and the tags do not say where they begin and end.

    It does so as well if the weights of the classes do not fit the classes.
    """
    classification.check(config)
    classes, metric = config.task.classes, config.checkpoint.metric
    strange = metrics.unknown_marks(classes)
    if strange:
        raise ConfigError(
            f"task tagging: got the tags {', '.join(strange[:5])} among tags of entities, expected O and tags that "
            "begin with B-, I-, E- or S- (IOB1, IOB2 or BIOES); rename them in the data"
        )
    spans = metrics.are_span_tags(classes)
    if metric in ENTITY_SCORES and not spans:
        some = ", ".join(classes[:5])
        raise ConfigError(
            f"config.checkpoint.metric: got {metric!r}, which is of entities, and tags that mark none ({some}), "
            "expected tags such as B-person; choose word_accuracy, accuracy or loss, or mend the data"
        )
    if metric == "word_accuracy" and spans:
        raise ConfigError(
            "config.checkpoint.metric: got 'word_accuracy', which is of tags that mark no entities, expected f1, "
            "accuracy or loss; choose one of these"
        )


TASK = Task(
    roles=("text", "tags"),
    head="slots",
    sides=("encoder", "decoder"),
    method="tag",
    needs="a head of classes for every token",
    encode=encode,
    loss=classification.loss,
    metrics=classification.classification_metrics,
    prompt=prompt,
    predict=predict,
    output_line=output_line,
    reference_line=reference_line,
    score=score,
    score_names=(*ENTITY_SCORES, "word_accuracy"),
    unread_label_metrics=unread_label_metrics,
    check=check,
    diagnose=diagnose,
)
