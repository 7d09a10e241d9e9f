"""Shared by token-level tasks: special tokens, next-token labels, and the sums of loss and metrics."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxformer import losses, metrics
from jaxformer.config import Config
from jaxformer.data.tokenizers import Tokenizer, Tokenizers
from jaxformer.errors import ConfigError
from jaxformer.tasks import Features
from jaxformer.types import Array, Batch, DeferredLogits, Stream, Sums


def seq2seq_prompt(config: Config, tokenizer: Tokenizer, task: str, ids: Sequence[int]) -> Features:
    """Source `ids <eos>`, truncated to `config.data.length`, and a target that holds only the start token."""
    start, end = start_token(tokenizer, task), required_token(tokenizer, task, "eos", "sep")
    room = config.data.length - 1
    source = np.array([*ids[:room], end], np.int32)
    return {"source": source, "target": np.array([start], np.int32), **truncation(len(ids) - room)}


def required_token(tokenizer: Tokenizer, task: str, *roles: str) -> int:
    """The id of the first of these special tokens that the vocabulary has.

    Raises:
      ConfigError: it has none of them.
    """
    for role in roles:
        token = getattr(tokenizer, role)
        if token is not None:
            return token
    raise ConfigError(f"task {task}: got a tokenizer without {' or '.join(roles)} token, expected one; use another")


def joint_tokenizer(tokenizers: Tokenizers, task: str) -> Tokenizer:
    """The tokenizer of both sides, for tasks whose source and target are of one text.

    Raises:
      ConfigError: the two sides have different ones.
    """
    if not tokenizers.joint:
        raise ConfigError(f"task {task}: got a tokenizer for each side, expected one for both; use another model")
    return tokenizers.source


def start_token(tokenizer: Tokenizer, task: str) -> int:
    """The token before the first: <bos>, or <eos> where a vocabulary has no other (GPT-2's)."""
    return required_token(tokenizer, task, "bos", "eos")


def existing(token: int | None) -> list[int]:
    """A special token as a list, empty if the vocabulary lacks it."""
    return [] if token is None else [token]


def truncate(config: Config, tokenizer: Tokenizer, ids: Sequence[int]) -> Sequence[int]:
    """The first `ids`, as many as fit into `config.data.length` beside <cls> and <sep>."""
    return ids[: config.data.length - len(existing(tokenizer.cls)) - len(existing(tokenizer.sep))]


def input_stream(
    config: Config, tokens: Sequence[int] | np.ndarray, token_types: Sequence[int] | np.ndarray
) -> Features:
    """Tokens as the stream that the model reads, with their types if the model has an embedding of types."""
    features: dict[str, np.ndarray] = {config.model.input_side: np.asarray(tokens, np.int32)}
    encoder = config.model.encoder_part
    type_count = 0 if encoder is None else encoder.embed.kinds
    if type_count:
        features["token_type"] = np.minimum(np.asarray(token_types, np.int32), type_count - 1)
    return features


def truncation(count: int) -> Features:
    """The number of truncated tokens as the feature "cut"; no feature if it is not above 0."""
    return {"cut": np.asarray(count, np.int32)} if count > 0 else {}


def add_special_tokens(tokenizer: Tokenizer, ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """`<cls> ids <sep>`, int32, leaving out special tokens that the vocabulary lacks."""
    return np.array([*existing(tokenizer.cls), *ids, *existing(tokenizer.sep)], np.int32)


def special_tokens_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Tokens that begin and end a text: <cls> and <sep>, else <bos> and <eos>; none that the vocabulary lacks."""
    first = tokenizer.bos if tokenizer.cls is None else tokenizer.cls
    last = tokenizer.eos if tokenizer.sep is None else tokenizer.sep
    return existing(first), existing(last)


def next_token_features(ids: Sequence[int], first: int, last: int, length: int) -> Features:
    """A decoder's input with its labels: `labels[t]` is the token after `target[t]`.

        target   <first> ids[0] ids[1] ...  ids[n-1]
        labels   ids[0]  ids[1] ...  ids[n-1] <last>

    A text of more than `length` slots is truncated without `last`: the model must not learn that it ends there.
    """
    tokens = np.array([first, *ids[:length], last], np.int32)[: length + 1]
    return {**_next(tokens), **truncation(len(ids) + 1 - length)}


def next_token_windows(ids: Sequence[int], first: int, last: int, length: int) -> list[Features]:
    """`next_token_features` of a complete text in pieces of at most `length` slots; each label is in exactly one."""
    tokens = np.array([first, *ids, last], np.int32)
    return [_next(tokens[begin : begin + length + 1]) for begin in range(0, len(tokens) - 1, length)]


def _next(tokens: np.ndarray) -> Features:
    return {"target": tokens[:-1], "labels": tokens[1:], "weights": np.ones(len(tokens) - 1, np.float32)}


def labels_and_weights(batch: Batch) -> tuple[Array, Array]:
    """The labels and weights of a batch.

    Raises:
      ConfigError: it has none: its examples were encoded as prompts.
    """
    if batch.labels is None or batch.weights is None:
        raise ConfigError("batch: got no labels or no weights, expected both for a loss; encode examples, not prompts")
    return batch.labels, batch.weights


def read_stream(batch: Batch, side: str) -> Stream:
    """The stream "source" or "target" of a batch.

    Raises:
      ConfigError: the batch does not have it.
    """
    stream = batch.source if side == "source" else batch.target
    if stream is None:
        raise ConfigError(f"batch: got no {side}, expected one for this model; encode its text")
    return stream


def token_loss(config: Config, logits: Array | DeferredLogits, batch: Batch) -> Sums:
    """The cross-entropy that training minimises, smoothing and z-loss included."""
    task, (labels, weights) = config.task, labels_and_weights(batch)
    return {
        "loss": losses.cross_entropy(logits, labels, weights, task.label_smoothing, task.z_loss, classes=task.vocab)
    }


def token_metrics(config: Config, logits: Array | DeferredLogits, batch: Batch) -> Sums:
    """The negative log likelihood (nats per token) and the accuracy of the likeliest token."""
    labels, weights = labels_and_weights(batch)
    return {
        "loss": losses.cross_entropy(logits, labels, weights),
        "accuracy": metrics.accuracy(logits, labels, weights),
    }
