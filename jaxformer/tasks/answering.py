"""Extractive question answering: the answer is a span of a context, or there is none (Rajpurkar et al. 2016, 2018).

The model reads `<cls> question <sep> context <sep>` and gives every slot a start and an end score; a span's is the sum
of its two log-probabilities (Devlin et al. 2019, section 4.2). Choices are among the slots of the context and <cls>,
which says "not here". A context that is too long is read in windows that overlap, by half at least. Training draws one
of them anew every time it sees the question, so that over the epochs it sees all; decoding reads all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Iterator, Mapping, NamedTuple, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxformer import losses, metrics
from jaxformer.config import Config, ConfigError, DecodeConfig
from jaxformer.tasks import Features, Task, _tokens, classification
from jaxformer.types import Array, Batch, Sums

if TYPE_CHECKING:
    from jaxformer.data.sources import Example
    from jaxformer.data.tokenizers import Pairing, Tokenizer, Tokenizers
    from jaxformer.model import Model

NAME = "answering"
START, END = 1, 2
"""Bits of a slot's label. Its weight says whether it may be chosen at all."""


class Reading(NamedTuple):
    """A question and its context in tokens.

    Attributes:
      before, context, after: the question with its special tokens, the context, and what closes it.
      kinds: token types of the three.
      places: of each token of the context the characters that it stands for: (first, one past the last).
      none: the slot of <cls>, from the beginning or, below 0, from the end; None: the vocabulary has none.
      cut: tokens of the question that were cut off. Of the context none are: it is read in windows.
    """

    before: Sequence[int]
    context: Sequence[int]
    after: Sequence[int]
    kinds: tuple[Sequence[int], int, Sequence[int]]
    places: Sequence[tuple[int, int]]
    none: int | None
    cut: int = 0


class Found(NamedTuple):
    """A span of characters and its log-probability."""

    gain: float
    start: int
    end: int


def encode(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Features:
    """One window, in it the first answer whose place is known as labels, and weight 1 where there is a choice.

    A window without the whole answer is labelled at <cls>; without a known place nothing is.

    Raises:
      ConfigError: the question has no answer and the task does not say that such may come.
    """
    reading = read(config, tokenizers.source, example["question"], example["context"])
    span = answer_slots(config, reading, example)
    choice = list(windows(config, reading))
    window = choice[rng.integers(len(choice)) if len(choice) > 1 else 0]
    features = prompt_of(config, reading, window)
    size = len(features[_tokens.side(config)])
    labels, weights = np.zeros(size, np.int32), np.zeros(size, np.float32)
    first = len(reading.before)
    weights[first : first + len(window)] = 1.0
    if reading.none is not None:
        weights[reading.none] = 1.0
    if span is None:
        pass
    elif span and span[0] in window and span[1] in window:
        labels[first + span[0] - window.start] |= START
        labels[first + span[1] - window.start] |= END
    elif reading.none is not None:
        labels[reading.none] = START | END
    return {**features, "labels": labels, "weights": weights}


def answer_slots(config: Config, reading: Reading, example: Example) -> tuple[int, ...] | None:
    """First and last token of the context that the answer lies in; (): there is no answer; None: it is not known."""
    if not example["answers"]:
        if config.task.unanswerable:
            return ()
        what = f"task {NAME}: got a question without an answer, {example['question'][:60]!r}, expected answers"
        raise ConfigError(f"{what}; set config.task.unanswerable=True for data with such questions (SQuAD 2.0)")
    for text, start in zip(example["answers"], example["starts"], strict=True):
        if start >= 0:
            inside = [i for i, (a, b) in enumerate(reading.places) if a < start + len(text) and b > start]
            return (inside[0], inside[-1]) if inside else None
    return None


def read(config: Config, tokenizer: Tokenizer, question: str, context: str, pairing: Pairing | None = None) -> Reading:
    """The tokens of both, of the question no more than half of `data.length`.

    Args:
      pairing: the special tokens around and between them; None: the tokenizer's own.
    """
    pairing = tokenizer.pairing if pairing is None else pairing
    special = len(pairing.before) + len(pairing.between) + len(pairing.after)
    whole = tokenizer.encode(question)
    asked = whole[: max((config.data.length - special) // 2, 1)]
    ids, places = tokenizer.located(context)
    before = [*pairing.before, *asked, *pairing.between]
    first, of_question, middle, of_context, last = pairing.kinds
    kinds = ([*first, *[of_question] * len(asked), *middle], of_context, last)
    none = None
    if tokenizer.cls in pairing.before:
        none = pairing.before.index(tokenizer.cls)
    elif tokenizer.cls in pairing.after:
        none = pairing.after.index(tokenizer.cls) - len(pairing.after)
    return Reading(before, ids, pairing.after, kinds, places, none, len(whole) - len(asked))


def windows(config: Config, reading: Reading) -> Iterator[range]:
    """The parts of the context that are read: one if it fits, else overlapping ones, `task.stride` tokens apart.

    They are at most half a window apart, so that an answer of so many tokens is whole in one of them.

    Raises:
      ConfigError: the question leaves no room.
    """
    room = config.data.length - len(reading.before) - len(reading.after)
    if room < 1:
        got = f"a question of {len(reading.before)} tokens, special ones included"
        raise ConfigError(f"task {NAME}: got {got}, expected fewer than data.length ({config.data.length}); shorten it")
    count, begin = len(reading.context), 0
    while begin + room < count:
        yield range(begin, begin + room)
        begin += max(min(config.task.stride, room // 2), 1)
    yield range(begin, count)


def prompt_of(config: Config, reading: Reading, window: range) -> Features:
    """What the model reads of one window."""
    before, context, after = reading.kinds
    tokens = [*reading.before, *reading.context[window.start : window.stop], *reading.after]
    kinds = [*before, *[context] * len(window), *after]
    return {**_tokens.streamed(config, tokens, kinds), **_tokens.left_out(reading.cut)}


def prompt(config: Config, tokenizers: Tokenizers, line: str) -> Features:
    """A question and, after a tab, its context, of a long one the first window. A line without a tab is one text."""
    if "\t" not in line:
        tokenizer = tokenizers.source
        tokens = _tokens.framed(tokenizer, _tokens.cut(config, tokenizer, tokenizer.encode(line)))
        return _tokens.streamed(config, tokens, [0] * len(tokens))
    reading = read(config, tokenizers.source, *parts(line))
    return prompt_of(config, reading, next(windows(config, reading)))


def parts(line: str) -> tuple[str, str]:
    """The question and the context of a line.

    Raises:
      ConfigError: it has no tab.
    """
    question, tab, context = line.partition("\t")
    if not tab:
        raise ConfigError(f"task {NAME}: got a line without a tab, {line[:60]!r}, expected question, tab, context")
    return question, context


def span(reading: Reading, window: range, logits: Float[np.ndarray, "T 2"], longest: int) -> tuple[Found, float]:
    """The best span of a window, of at most `longest` tokens, and the log-probability that the answer is not in it.

    Without a token to choose, the span is empty and its log-probability -inf.
    """
    first, count = len(reading.before), len(window)
    slots = list(range(first, first + count)) + ([] if reading.none is None else [reading.none])
    gains = np.asarray(logits, np.float64)[slots]
    gains -= np.logaddexp.reduce(gains, axis=0) if slots else 0.0
    none = -np.inf if reading.none is None else float(gains[-1].sum())
    best = Found(-np.inf, 0, 0)
    for more in range(min(longest, count)):
        sums = gains[: count - more, 0] + gains[more:count, 1]
        begin = int(sums.argmax())
        if sums[begin] > best.gain:
            places = reading.places[window.start + begin], reading.places[window.start + begin + more]
            best = Found(float(sums[begin]), places[0][0], max(places[0][0], places[1][1]))
    return best, none


def choose(found: Sequence[tuple[Found, float]], context: str, unanswerable: bool) -> dict[str, Any]:
    """The best of all windows' spans; where there may be no answer, none if all windows say so, and more surely."""
    best, none = max(each for each, _ in found), min(none for _, none in found)
    if unanswerable and none > best.gain:
        best = Found(none, 0, 0)
    text = context[best.start : best.end]
    return {"answer": text, "start": best.start, "end": best.end, "score": float(np.exp(best.gain))}


def loss(config: Config, logits: Float[Array, "B T 2"], batch: Batch) -> Sums:
    """The cross-entropy that training minimises, mean of start and end, smoothing and z-loss included."""
    task = config.task
    labels, allowed = _choices(batch.labels, batch.weights)
    return {"loss": losses.pointers(logits, labels, allowed, task.label_smoothing, task.z_loss)}


def measures(config: Config, logits: Float[Array, "B T 2"], batch: Batch) -> Sums:
    """The negative log likelihood (nats, mean of start and end) and the share of starts and ends that are right."""
    labels, allowed = _choices(batch.labels, batch.weights)
    best = jnp.argmax(jnp.where(allowed[..., None], logits, -jnp.inf), axis=1)
    known = jnp.any(labels, axis=1)
    right = jnp.sum((best == jnp.argmax(labels, axis=1)) & known).astype(jnp.float32)
    return {
        "loss": losses.pointers(logits, labels, allowed),
        "accuracy": (right, jnp.sum(known.astype(jnp.float32))),
    }


def _choices(
    labels: Int[Array, "B T"], weights: Float[Array, "B T"]
) -> tuple[Bool[Array, "B T 2"], Bool[Array, "B T"]]:
    """Where start and end are, and which slots may be chosen."""
    return (labels[..., None] & jnp.array([START, END])) != 0, weights != 0


BLANKS = str.maketrans("\t\r\n", "   ")


def line_of(example: Example) -> str:
    """Question, tab, context, each in one line: other white space becomes blanks, as many."""
    return f"{example['question'].translate(BLANKS)}\t{example['context'].translate(BLANKS)}"


def decode(model: Model, lines: Sequence[str], config: DecodeConfig) -> list[dict[str, Any]]:
    """For each line `{"answer", "start", "end", "score"}`, of at most `config.max_length` tokens."""
    both = [parts(line) for line in lines]
    return model.answer([question for question, _ in both], [context for _, context in both], config.max_length)


def line(result: Mapping[str, Any]) -> str:
    """The answer; an empty line says that there is none."""
    return result["answer"].translate(BLANKS)


def reference(config: Config, example: Example) -> str:
    """The right answers, each once."""
    return " | ".join(dict.fromkeys(text.translate(BLANKS) for text in example["answers"]))


def score(config: Config, results: Sequence[Mapping[str, Any]], examples: Sequence[Example]) -> dict[str, float]:
    """Exact match and F1 of the answers."""
    return metrics.answer_scores([result["answer"] for result in results], [each["answers"] for each in examples])


TASK = Task(
    roles=("question", "context", "answers", "starts"),
    classes=("start", "end"),
    encode=encode,
    loss=loss,
    metrics=measures,
    finish=classification.finish,
    input=line_of,
    prompt=prompt,
    decode=decode,
    line=line,
    reference=reference,
    score=score,
    scores=("exact_match", "f1"),
)
