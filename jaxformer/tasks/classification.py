"""One decision about a text, or about a pair of texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping, Sequence

import numpy as np

from jaxformer import losses, metrics
from jaxformer.config import Config, DecodeConfig
from jaxformer.tasks import Features, Task, _tokens
from jaxformer.types import Array, Batch, Sums

if TYPE_CHECKING:
    from jaxformer.data.sources import Example
    from jaxformer.data.tokenizers import Tokenizers
    from jaxformer.model import Model


def encode(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Features:
    """`<cls> text <sep>` (and `pair <sep>`), and the label."""
    pair = example.get("pair")
    return {**_inputs(config, tokenizers, example["text"], pair), "labels": np.array(example["label"], np.int32)}


def prompt(config: Config, tokenizers: Tokenizers, line: str) -> Features:
    """A text; after a tab, its pair."""
    text, tab, pair = line.partition("\t")
    return _inputs(config, tokenizers, text, pair if tab else None)


def _inputs(config: Config, tokenizers: Tokenizers, text: str, pair: str | None) -> Features:
    """The stream that the model has."""
    tokenizer = tokenizers.source
    first, last = _tokens.ends(tokenizer)
    parts = [tokenizer.encode(part) for part in (text, pair) if part is not None]
    room = max(config.data.length - len(first) - len(last) * len(parts), 0)
    cut = _tokens.left_out(sum(map(len, parts)) - room)
    parts = [[*part, *last] for part in shorten(parts, room)]
    parts[0] = [*first, *parts[0]]
    kinds = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return {**_tokens.streamed(config, [token for part in parts for token in part], kinds), **cut}


def shorten(parts: Sequence[Sequence[int]], room: int) -> list[Sequence[int]]:
    """One or two parts cut at their ends to `room` tokens together; of two, the longer one gives way first."""
    if len(parts) == 1:
        return [parts[0][:room]]
    first, second = parts
    second = second[: max(room // 2, room - len(first))]
    return [first[: room - len(second)], second]


def loss(config: Config, logits: Array, batch: Batch) -> Sums:
    """The cross-entropy that training minimises, smoothing and z-loss included."""
    task = config.task
    return {"loss": losses.cross_entropy(logits, batch.labels, batch.weights, task.label_smoothing, task.z_loss)}


def measures(config: Config, logits: Array, batch: Batch) -> Sums:
    """The negative log likelihood (nats an example), accuracy, and F1 averaged over the classes."""
    given = (logits, batch.labels, batch.weights)
    return {
        "loss": losses.cross_entropy(*given),
        "accuracy": metrics.accuracy(*given),
        "macro_f1": metrics.f1(*given),
    }


def finish(config: Config, values: dict[str, float], size: Mapping[str, float]) -> dict[str, float]:
    """Nothing to add."""
    return values


def text(example: Example) -> str:
    """The text, and after a tab its pair, if it has one. Tabs inside the text become blanks."""
    pair = example.get("pair")
    return example["text"].replace("\t", " ") + ("" if pair is None else "\t" + pair)


def decode(model: Model, lines: Sequence[str], config: DecodeConfig) -> list[dict[str, Any]]:
    """For each line `{"label", "probability", "probabilities"}`."""
    return model.classify(lines)


def line(result: Mapping[str, Any]) -> str:
    """The likeliest class and its probability, with a tab between them."""
    return f"{result['label']}\t{result['probability']:.4f}"


TASK = Task(
    roles=("text", "label"),
    encode=encode,
    loss=loss,
    metrics=measures,
    finish=finish,
    input=text,
    prompt=prompt,
    decode=decode,
    line=line,
)
