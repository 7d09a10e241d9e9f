"""A tag for every word of a text: named entities, parts of speech.

A word is what stands between blanks. Its tokens are those of the word alone, and the first of them carries its tag
(Devlin et al. 2019, section 5.3); the others are read and not judged. A word that is cut off, or of which the
vocabulary knows nothing, is "O": accuracy and F1 judge it so, and only the loss, which needs a probability, leaves it
out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping, Sequence

import numpy as np
from jaxtyping import Int

from jaxformer import metrics
from jaxformer.config import Config, ConfigError, DecodeConfig
from jaxformer.tasks import Features, Task, _tokens, classification
from jaxformer.types import Sums

if TYPE_CHECKING:
    from jaxformer.data.sources import Example
    from jaxformer.data.tokenizers import Tokenizer, Tokenizers
    from jaxformer.model import Model


def encode(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Features:
    """`<cls> tokens <sep>`, each word's tag as the label of its first token, and weight 1 there.

    Raises:
      ConfigError: there are more or fewer tags than words.
    """
    ids, places, cut = read(config, tokenizers.source, example["text"])
    tags = example["tags"]
    if len(tags) != len(places):
        text = example["text"] if len(example["text"]) < 60 else example["text"][:60] + "..."
        raise ConfigError(
            f"tagging: got {len(tags)} tags for {text!r}, expected {len(places)}, one a word; mend the data"
        )
    labels, weights = np.zeros(len(ids), np.int32), np.zeros(len(ids), np.float32)
    for place, tag in zip(places, tags, strict=True):
        if place is not None:
            labels[place], weights[place] = tag, 1.0
    unread = np.array([tag for place, tag in zip(places, tags, strict=True) if place is None], np.int32)
    return {_tokens.side(config): ids, "labels": labels, "weights": weights, "unread": unread, **_tokens.left_out(cut)}


def prompt(config: Config, tokenizers: Tokenizers, line: str) -> Features:
    """A text, framed as in training."""
    ids, _, cut = read(config, tokenizers.source, line)
    return {_tokens.side(config): ids, **_tokens.left_out(cut)}


def words(text: str) -> list[str]:
    """What stands between blanks; other white space is part of a word."""
    return [word for word in text.split(" ") if word]


def read(config: Config, tokenizer: Tokenizer, text: str) -> tuple[np.ndarray, list[int | None], int]:
    """The framed tokens of a text, int32 `[n]`, the slot of every word's first one (None: it has none), and how many
    tokens were cut off."""
    ids: list[int] = []
    begins = []
    for word in words(text):
        # A blank belongs to the word after it where vocabularies know blanks at all.
        pieces = tokenizer.encode(f" {word}" if begins else word) or _tokens.known(tokenizer.unk)
        begins.append(len(ids) if pieces else None)
        ids += pieces
    kept = _tokens.cut(config, tokenizer, ids)
    before = len(_tokens.known(tokenizer.cls))
    places = [None if begin is None or begin >= len(kept) else begin + before for begin in begins]
    return _tokens.framed(tokenizer, kept), places, len(ids) - len(kept)


def decode(model: Model, lines: Sequence[str], config: DecodeConfig) -> list[list[dict[str, Any]]]:
    """For each line, for each of its words, `{"word", "label", "probability"}`."""
    return model.tag(lines, words=True)


def line(result: Sequence[Mapping[str, Any]]) -> str:
    """The tags, with a blank between them: as many as the line has words."""
    return " ".join(word["label"] for word in result)


def reference(config: Config, example: Example) -> str:
    """The true tags in the same form."""
    return " ".join(config.task.classes[tag] for tag in example["tags"])


def score(config: Config, results: Sequence[Sequence[Mapping]], examples: Sequence[Example]) -> dict[str, float]:
    """Precision, recall and F1 of entities, of tags that mark such; of others the share of words tagged right.

    Both are of all words of `examples`, those that were cut off too.
    """
    found = [[word["label"] for word in result] for result in results]
    true = [[config.task.classes[tag] for tag in example["tags"]] for example in examples]
    if not metrics.marks_spans(config.task.classes):
        pairs = [pair for both in zip(found, true, strict=True) for pair in zip(*both, strict=True)]
        return {"word_accuracy": sum(a == b for a, b in pairs) / len(pairs) if pairs else float("nan")}
    return metrics.entities(found, true)._asdict()


def unread(config: Config, labels: Int[np.ndarray, " n"]) -> Sums:
    """Accuracy and F1 of words without a token, as `decode` tags them: "O", or wrong where there is no such class."""
    classes = config.task.classes
    true = np.bincount(labels, minlength=len(classes)).astype(np.float64)
    found = np.array([len(labels) if name == OUTSIDE else 0 for name in classes], np.float64)
    right = np.where(found > 0, true, 0.0)
    return {"accuracy": (right.sum(), float(len(labels))), "macro_f1": (2.0 * right, found + true)}


def refuse(config: Config) -> None:
    """Raises a ConfigError where entities are to be judged and the tags do not say where they begin and end."""
    classes, metric = config.task.classes, config.checkpoint.metric
    strange = metrics.unknown_marks(classes)
    if strange:
        raise ConfigError(
            f"task tagging: got the tags {', '.join(strange[:5])} among tags of entities, expected O and tags that "
            "begin with B-, I-, E- or S- (IOB1, IOB2 or BIOES); rename them in the data"
        )
    spans = metrics.marks_spans(classes)
    if metric in ENTITIES and not spans:
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


OUTSIDE = "O"
"""The tag of a word outside of all entities."""
ENTITIES = metrics.Entities._fields

TASK = Task(
    roles=("text", "tags"),
    encode=encode,
    loss=classification.loss,
    metrics=classification.measures,
    finish=classification.finish,
    prompt=prompt,
    decode=decode,
    line=line,
    reference=reference,
    score=score,
    scores=(*ENTITIES, "word_accuracy"),
    unread=unread,
    refuse=refuse,
)
