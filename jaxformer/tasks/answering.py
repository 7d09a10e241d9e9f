"""Extractive question answering: the answer is a span of a context, or there is none (Rajpurkar et al. 2016, 2018).

The model reads `<cls> question <sep> context <sep>` and gives every slot a start and an end score; a span's is the sum
of its two log-probabilities (Devlin et al. 2019, section 4.2). Choices are among the slots of the context and <cls>,
which stands for "no answer". A context that is too long is read in windows that overlap by at least half. Training
draws one window anew every time it sees the question; prediction reads all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxformer import losses, metrics
from jaxformer.config import Config, DecodeConfig
from jaxformer.data.sources import Example
from jaxformer.data.tokenizers import PairTemplate, Tokenizer, Tokenizers
from jaxformer.errors import ConfigError
from jaxformer.tasks import Features, Predictor, Task, _tokens, text_lines
from jaxformer.types import Array, Batch, Sums

NAME = "answering"
START, END = 1, 2
"""Bits of a slot's label. Its weight tells whether it may be chosen at all."""


class EncodedQuestion(NamedTuple):
    """A question and its context in tokens.

    Attributes:
      prefix, context, suffix: the question with its special tokens, the context, and the tokens after it.
      token_types: of the three.
      spans: characters of the context that each of its tokens stands for: (first, one past the last).
      no_answer_slot: the slot of <cls>, from the beginning or, below 0, from the end; None: the vocabulary has none.
      truncated: number of tokens of the question that were cut off. The context is read in windows instead.
    """

    prefix: Sequence[int]
    context: Sequence[int]
    suffix: Sequence[int]
    token_types: tuple[Sequence[int], int, Sequence[int]]
    spans: Sequence[tuple[int, int]]
    no_answer_slot: int | None
    truncated: int = 0


class Span(NamedTuple):
    """A span of characters and its log-probability."""

    log_prob: float
    start: int
    end: int


def encode(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Features:
    """One window, with the first answer whose position is known as labels, and weight 1 at slots that may be chosen.

    A window without the complete answer is labelled at <cls>; without a known position nothing is labelled.

    Raises:
      ConfigError: the question has no answer and the config does not allow that.
    """
    tokenizer = tokenizers.source
    question = encode_question(config, tokenizer, example["question"], example["context"])
    answer = answer_tokens(config, question, example)
    choices = list(context_windows(config, question))
    window = choices[rng.integers(len(choices)) if len(choices) > 1 else 0]
    features = window_features(config, question, window)
    size = len(features[config.model.input_side])
    labels, weights = np.zeros(size, np.int32), np.zeros(size, np.float32)
    first = len(question.prefix)
    weights[first : first + len(window)] = 1.0
    if question.no_answer_slot is not None:
        weights[question.no_answer_slot] = 1.0
    if answer is None:
        pass
    elif answer and answer[0] in window and answer[1] in window:
        labels[first + answer[0] - window.start] |= START
        labels[first + answer[1] - window.start] |= END
    elif question.no_answer_slot is not None:
        labels[question.no_answer_slot] = START | END
    return {**features, "labels": labels, "weights": weights}


def answer_tokens(config: Config, question: EncodedQuestion, example: Example) -> tuple[int, ...] | None:
    """Indices of the first and last context token of the answer; (): there is no answer; None: its position is unknown.

    Raises:
      ConfigError: there is no answer and the config does not allow that.
    """
    if not example["answers"]:
        if config.task.unanswerable:
            return ()
        what = f"task {NAME}: got a question without an answer, {example['question'][:60]!r}, expected answers"
        raise ConfigError(f"{what}; set config.task.unanswerable=True for data with such questions (SQuAD 2.0)")
    for text, start in zip(example["answers"], example["starts"], strict=True):
        if start >= 0:
            inside = [i for i, (a, b) in enumerate(question.spans) if a < start + len(text) and b > start]
            return (inside[0], inside[-1]) if inside else None
    return None


def encode_question(
    config: Config, tokenizer: Tokenizer, question: str, context: str, pairing: PairTemplate | None = None
) -> EncodedQuestion:
    """The tokens of question and context; the question has at most half of `data.length`.

    Args:
      pairing: the special tokens around and between the two; None: the tokenizer's own.
    """
    pairing = tokenizer.pair_template if pairing is None else pairing
    special_count = len(pairing.prefix) + len(pairing.separator) + len(pairing.suffix)
    question_ids = tokenizer.encode(question)
    kept_ids = question_ids[: max((config.data.length - special_count) // 2, 1)]
    context_ids, spans = tokenizer.encode_with_spans(context)
    prefix = [*pairing.prefix, *kept_ids, *pairing.separator]
    before_types, question_type, between_types, context_type, after_types = pairing.token_types
    prefix_types = [*before_types, *[question_type] * len(kept_ids), *between_types]
    no_answer_slot = None
    if tokenizer.cls in pairing.prefix:
        no_answer_slot = pairing.prefix.index(tokenizer.cls)
    elif tokenizer.cls in pairing.suffix:
        no_answer_slot = pairing.suffix.index(tokenizer.cls) - len(pairing.suffix)
    return EncodedQuestion(
        prefix,
        context_ids,
        pairing.suffix,
        (prefix_types, context_type, after_types),
        spans,
        no_answer_slot,
        len(question_ids) - len(kept_ids),
    )


def context_windows(config: Config, question: EncodedQuestion) -> Iterator[range]:
    """Ranges of context tokens that are read together: one if all fit, else overlapping ones.

    They begin `task.stride` tokens apart, or half a window where that is less: an answer of up to half a window is
    complete in one of them.

    Raises:
      ConfigError: the question leaves no slot for the context.
    """
    size = config.data.length - len(question.prefix) - len(question.suffix)
    if size < 1:
        got = f"a question of {len(question.prefix)} tokens, special ones included"
        raise ConfigError(f"task {NAME}: got {got}, expected fewer than data.length ({config.data.length}); shorten it")
    count, begin = len(question.context), 0
    while begin + size < count:
        yield range(begin, begin + size)
        begin += max(min(config.task.stride, size // 2), 1)
    yield range(begin, count)


def window_features(config: Config, question: EncodedQuestion, window: range) -> Features:
    """The framed stream of one window."""
    prefix_types, context_type, suffix_types = question.token_types
    tokens = [*question.prefix, *question.context[window.start : window.stop], *question.suffix]
    token_types = [*prefix_types, *[context_type] * len(window), *suffix_types]
    return {**_tokens.input_stream(config, tokens, token_types), **_tokens.truncation(question.truncated)}


def prompt(config: Config, tokenizers: Tokenizers, line: str) -> Features:
    """A question and, after a tab, the first window of its context. A line without a tab is one text."""
    tokenizer = tokenizers.source
    if "\t" not in line:
        tokens = _tokens.add_special_tokens(tokenizer, _tokens.truncate(config, tokenizer, tokenizer.encode(line)))
        return _tokens.input_stream(config, tokens.tolist(), [0] * len(tokens))
    question = encode_question(config, tokenizer, *split_line(line))
    return window_features(config, question, next(context_windows(config, question)))


def split_line(line: str) -> tuple[str, str]:
    """The question and the context of a line.

    Raises:
      ConfigError: it has no tab.
    """
    question, tab, context = line.partition("\t")
    if not tab:
        raise ConfigError(f"task {NAME}: got a line without a tab, {line[:60]!r}, expected question, tab, context")
    return question, context


def best_span(
    question: EncodedQuestion, window: range, logits: Float[np.ndarray, "T 2"], max_tokens: int
) -> tuple[Span, float]:
    """The likeliest span of a window, and the log-probability that the answer is not in it.

    Without a token to choose, the span is empty and its log-probability -inf.

    Args:
      max_tokens: the greatest number of tokens of a span.
    """
    first, count, no_answer = len(question.prefix), len(window), question.no_answer_slot
    slots = list(range(first, first + count)) + ([] if no_answer is None else [no_answer])
    log_probs = np.asarray(logits, np.float64)[slots]
    log_probs -= np.logaddexp.reduce(log_probs, axis=0) if slots else 0.0
    no_answer_log_prob = -np.inf if no_answer is None else float(log_probs[-1].sum())
    best = Span(-np.inf, 0, 0)
    for more in range(min(max_tokens, count)):
        sums = log_probs[: count - more, 0] + log_probs[more:count, 1]
        begin = int(sums.argmax())
        if sums[begin] > best.log_prob:
            start = question.spans[window.start + begin][0]
            end = question.spans[window.start + begin + more][1]
            best = Span(float(sums[begin]), start, max(start, end))
    return best, no_answer_log_prob


def best_answer(spans: Sequence[tuple[Span, float]], context: str, unanswerable: bool) -> dict[str, Any]:
    """The likeliest span of all windows, `{"answer", "start", "end", "score"}`.

    Args:
      spans: `best_span` of every window.
      unanswerable: the answer is empty if that is likelier than any span. Its log-probability is the least of all
        windows' (Devlin et al. 2019, section 4.3).
    """
    best, no_answer_log_prob = max(span for span, _ in spans), min(log_prob for _, log_prob in spans)
    if unanswerable and no_answer_log_prob > best.log_prob:
        best = Span(no_answer_log_prob, 0, 0)
    text = context[best.start : best.end]
    return {"answer": text, "start": best.start, "end": best.end, "score": float(np.exp(best.log_prob))}


def answer(
    predictor: Predictor, questions: Sequence[str], contexts: Sequence[str], max_tokens: int | None = None
) -> list[dict[str, Any]]:
    """For each question the likeliest span of its context, `{"answer", "start", "end", "score"}`.

    Start and end count characters of the context; the score is the product of both probabilities.

    Args:
      contexts: as many as questions. Long ones are read in windows.
      max_tokens: the greatest number of tokens of an answer; None: `config.decode.max_length`.

    Raises:
      ConfigError: there are more or fewer contexts than questions, or a question leaves no slot for its context.
    """
    config, framing = predictor.config, predictor.framing
    questions, contexts = text_lines(questions), text_lines(contexts)
    max_tokens = config.decode.max_length if max_tokens is None else max_tokens
    if len(questions) != len(contexts) or max_tokens < 1:
        got = f"{len(questions)} questions, {len(contexts)} contexts and longest {max_tokens}"
        raise ConfigError(f"answer: got {got}, expected a context a question, and longest of at least 1")
    tokenizer, pairing = framing.tokenizers.source, framing.pairing
    encoded = [encode_question(config, tokenizer, *both, pairing) for both in zip(questions, contexts, strict=True)]
    pieces = [(index, window) for index, each in enumerate(encoded) for window in context_windows(config, each)]
    prompts = [framing.add_decoder_input(window_features(config, encoded[i], window)) for i, window in pieces]
    length = config.data.length
    buckets = (*(config.data.buckets or (length // 4, length // 2)), length)  # positions may end at `length`
    spans: list[list[tuple[Span, float]]] = [[] for _ in questions]
    for indices, _, outputs in predictor.runner.forward(prompts, buckets=buckets):
        for piece, logits in zip(indices, outputs, strict=True):
            index, window = pieces[piece]
            spans[index].append(best_span(encoded[index], window, logits, max_tokens))
    unanswerable = config.task.unanswerable
    return [best_answer(each, context, unanswerable) for each, context in zip(spans, contexts, strict=True)]


def predict(predictor: Predictor, lines: Sequence[str], options: DecodeConfig) -> list[dict[str, Any]]:
    """`answer` of lines "question, tab, context", with at most `options.max_length` tokens."""
    pairs = [split_line(line) for line in lines]
    questions, contexts = [question for question, _ in pairs], [context for _, context in pairs]
    return answer(predictor, questions, contexts, options.max_length)


def loss(config: Config, logits: Float[Array, "B T 2"], batch: Batch) -> Sums:
    """The cross-entropy that training minimises, mean of start and end, smoothing and z-loss included."""
    task = config.task
    labels, allowed = _labels_and_allowed(*_tokens.labels_and_weights(batch))
    return {"loss": losses.pointer_cross_entropy(logits, labels, allowed, task.label_smoothing, task.z_loss)}


def answer_metrics(config: Config, logits: Float[Array, "B T 2"], batch: Batch) -> Sums:
    """The negative log likelihood (nats, mean of start and end) and the fraction of right starts and ends."""
    labels, allowed = _labels_and_allowed(*_tokens.labels_and_weights(batch))
    best = jnp.argmax(jnp.where(allowed[..., None], logits, -jnp.inf), axis=1)
    known = jnp.any(labels, axis=1)
    right = jnp.sum((best == jnp.argmax(labels, axis=1)) & known).astype(jnp.float32)
    return {
        "loss": losses.pointer_cross_entropy(logits, labels, allowed),
        "accuracy": (right, jnp.sum(known.astype(jnp.float32))),
    }


def _labels_and_allowed(
    labels: Int[Array, "B T"], weights: Float[Array, "B T"]
) -> tuple[Bool[Array, "B T 2"], Bool[Array, "B T"]]:
    """True at start and end; True at slots that may be chosen."""
    return (labels[..., None] & jnp.array([START, END])) != 0, weights != 0


TO_BLANKS = str.maketrans("\t\r\n", "   ")


def input_line(example: Example) -> str:
    """Question, tab, context, each in one line: each other white-space character becomes a blank."""
    return f"{example['question'].translate(TO_BLANKS)}\t{example['context'].translate(TO_BLANKS)}"


def output_line(result: Mapping[str, Any]) -> str:
    """The answer; an empty line means that there is none."""
    return result["answer"].translate(TO_BLANKS)


def reference_line(config: Config, example: Example) -> str:
    """The right answers, each once."""
    return " | ".join(dict.fromkeys(text.translate(TO_BLANKS) for text in example["answers"]))


def score(config: Config, results: Sequence[Mapping[str, Any]], examples: Sequence[Example]) -> dict[str, float]:
    """Exact match and F1 of the answers."""
    return metrics.answer_scores([result["answer"] for result in results], [each["answers"] for each in examples])


TASK = Task(
    roles=("question", "context", "answers", "starts"),
    head="slots",
    sides=("encoder", "decoder"),
    method="answer",
    needs="a head of start and end for every token, and the task answering",
    classes=("start", "end"),
    encode=encode,
    loss=loss,
    metrics=answer_metrics,
    input_line=input_line,
    prompt=prompt,
    predict=predict,
    output_line=output_line,
    reference_line=reference_line,
    score=score,
    score_names=("exact_match", "f1"),
)
