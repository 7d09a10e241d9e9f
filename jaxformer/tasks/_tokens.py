"""What the token-level tasks share: frames, shifted labels, and the sums of their loss and measures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Sequence

import numpy as np

from jaxformer import losses, metrics
from jaxformer.config import Config, ConfigError
from jaxformer.tasks import Features
from jaxformer.types import Array, Batch, Projection, Sums

if TYPE_CHECKING:
    from jaxformer.data.tokenizers import Tokenizer


def required(tokenizer: Tokenizer, task: str, *roles: str) -> int:
    """The id of the first of these special tokens that the vocabulary has.

    Raises:
      ConfigError: it has none of them.
    """
    for role in roles:
        token = getattr(tokenizer, role)
        if token is not None:
            return token
    raise ConfigError(f"task {task}: got a tokenizer without {' or '.join(roles)} token, expected one; use another")


def start(tokenizer: Tokenizer, task: str) -> int:
    """The token before the first: <bos>, or <eos> where a vocabulary has no other (GPT-2's)."""
    return required(tokenizer, task, "bos", "eos")


def known(token: int | None) -> list[int]:
    """A special token where the vocabulary has it."""
    return [] if token is None else [token]


def side(config: Config) -> str:
    """The stream that a model of one side reads: "source" of an encoder, "target" of a decoder."""
    model = config.model
    return "target" if model.encoder is None and model.recurrent_encoder is None else "source"


def cut(config: Config, tokenizer: Tokenizer, ids: Sequence[int]) -> Sequence[int]:
    """As many of `ids` as there is room for beside <cls> and <sep>."""
    return ids[: config.data.length - len(known(tokenizer.cls)) - len(known(tokenizer.sep))]


def streamed(config: Config, tokens: Sequence[int], kinds: Sequence[int]) -> Features:
    """Tokens as the stream that the model reads, and their types where it tells types apart."""
    stream, model = side(config), config.model
    features = {stream: np.asarray(tokens, np.int32)}
    known_kinds = 0 if stream == "target" else (model.encoder or model.recurrent_encoder).embed.kinds
    return {**features, "kind": np.minimum(np.asarray(kinds, np.int32), known_kinds - 1)} if known_kinds else features


def left_out(count: int) -> Features:
    """How many tokens of an example were cut off, for whoever counts them; nothing where none were."""
    return {"cut": np.int32(count)} if count > 0 else {}


def framed(tokenizer: Tokenizer, ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """`<cls> ids <sep>`, of these what the vocabulary has."""
    return np.array([*known(tokenizer.cls), *ids, *known(tokenizer.sep)], np.int32)


def ends(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """What begins and ends a text: <cls> and <sep>, or <bos> and <eos> in their places, of these what there is."""
    first = tokenizer.bos if tokenizer.cls is None else tokenizer.cls
    last = tokenizer.eos if tokenizer.sep is None else tokenizer.sep
    return known(first), known(last)


def shifted(ids: Sequence[int], first: int, last: int, length: int) -> Features:
    """A decoder's input and what it has to say: `labels[t]` is the token after `target[t]`.

        target   <first> ids[0] ids[1] ...  ids[n-1]
        labels   ids[0]  ids[1] ...  ids[n-1] <last>

    A text of more than `length` slots is cut without `last`: the model must not learn that it ends there.
    """
    tokens = np.array([first, *ids[:length], last], np.int32)[: length + 1]
    return {**_next(tokens), **left_out(len(ids) + 1 - length)}


def shifted_windows(ids: Sequence[int], first: int, last: int, length: int) -> list[Features]:
    """The same of a whole text, in pieces of at most `length` slots: every label is in one of them, none in two."""
    tokens = np.array([first, *ids, last], np.int32)
    return [_next(tokens[begin : begin + length + 1]) for begin in range(0, len(tokens) - 1, length)]


def _next(tokens: np.ndarray) -> Features:
    return {"target": tokens[:-1], "labels": tokens[1:], "weights": np.ones(len(tokens) - 1, np.float32)}


def loss(config: Config, logits: Array | Projection, batch: Batch) -> Sums:
    """The cross-entropy that training minimises, smoothing and z-loss included."""
    task = config.task
    return {
        "loss": losses.cross_entropy(
            logits, batch.labels, batch.weights, task.label_smoothing, task.z_loss, classes=task.vocab
        )
    }


def measures(config: Config, logits: Array | Projection, batch: Batch) -> Sums:
    """The negative log likelihood (nats a token) and the share of tokens that are the likeliest."""
    return {
        "loss": losses.cross_entropy(logits, batch.labels, batch.weights),
        "accuracy": metrics.accuracy(logits, batch.labels, batch.weights),
    }
