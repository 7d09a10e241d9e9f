"""One decision about a text, or about a pair of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer import losses, metrics, registry
from jaxformer.config import Config, DecodeConfig
from jaxformer.config.checks import sections
from jaxformer.data.sources import Example
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.errors import ConfigError
from jaxformer.tasks import Features, Predictor, Sample, Task, _diagnosis, _tokens, text_lines
from jaxformer.types import Array, Batch, Sums


def encode(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Features:
    """`<cls> text <sep>` (and `pair <sep>`), and the label."""
    pair = example.get("pair")
    return {**_encode_texts(config, tokenizers, example["text"], pair), "labels": np.array(example["label"], np.int32)}


def prompt(config: Config, tokenizers: Tokenizers, line: str) -> Features:
    """A text; after a tab, its pair."""
    text, tab, pair = line.partition("\t")
    return _encode_texts(config, tokenizers, text, pair if tab else None)


def _encode_texts(config: Config, tokenizers: Tokenizers, text: str, pair: str | None) -> Features:
    """The framed stream of one or two texts."""
    tokenizer = tokenizers.source
    first, last = _tokens.special_tokens_around(tokenizer)
    parts: list[Sequence[int]] = [tokenizer.encode(part) for part in (text, pair) if part is not None]
    max_length = max(config.data.length - len(first) - len(last) * len(parts), 0)
    cut = _tokens.truncation(sum(map(len, parts)) - max_length)
    framed = [[*part, *last] for part in truncate_parts(parts, max_length)]
    framed[0] = [*first, *framed[0]]
    token_types = np.repeat(np.arange(len(framed)), [len(part) for part in framed])
    return {**_tokens.input_stream(config, [token for part in framed for token in part], token_types.tolist()), **cut}


def truncate_parts(parts: Sequence[Sequence[int]], max_length: int) -> list[Sequence[int]]:
    """One or two parts, truncated to `max_length` tokens together; of two, the longer one loses tokens first."""
    if len(parts) == 1:
        return [parts[0][:max_length]]
    first, second = parts
    second = second[: max(max_length // 2, max_length - len(first))]
    return [first[: max_length - len(second)], second]


def class_weights(config: Config) -> np.ndarray | None:
    """The weight of each class in the training loss, float32 `[C]`; None: all count alike.

    Balanced weights are `n / (C n_c)` for n labels, n_c of them of class c: each class then has the same total weight.
    A class that does not occur has weight 0.

    Raises:
      ConfigError: a name is none of the classes, or is given twice, or every weight is 0.
    """
    task = config.task
    if not task.class_weights:
        return None
    if task.class_weights == (sections.BALANCED,):
        counts = np.asarray(task.class_counts, np.float64)
        return np.where(counts > 0, counts.sum() / (len(counts) * np.maximum(counts, 1)), 0.0).astype(np.float32)
    names = class_names(config, config.model.head.classes or 0)
    weights: dict[str, float] = {}
    for entry in task.class_weights:
        name, _, number = entry.rpartition("=")
        if name not in names or name in weights:
            expected = f"each of the classes ({', '.join(names[:10])}) at most once{registry.nearest(name, names)}"
            raise ConfigError(f"config.task.class_weights: got {entry!a}, expected {expected}")
        weights[name] = float(number)
    values = np.asarray([weights.get(name, 1.0) for name in names], np.float32)
    if not values.any():
        raise ConfigError(f"config.task.class_weights: got {task.class_weights}, all 0, expected one above 0")
    return values


def check(config: Config) -> None:
    """Raises a ConfigError if the weights of the classes do not fit the classes."""
    class_weights(config)


def loss(config: Config, logits: Array, batch: Batch) -> Sums:
    """The cross-entropy that training minimises, smoothing and z-loss included.

    With weights of classes each label counts as its class does, in the sum of the losses and in that of the weights.
    """
    task, (labels, weights) = config.task, _tokens.labels_and_weights(batch)
    by_class = class_weights(config)
    if by_class is not None:
        weights = weights * jnp.asarray(by_class)[jnp.where(weights != 0, labels, 0)]
    return {"loss": losses.cross_entropy(logits, labels, weights, task.label_smoothing, task.z_loss)}


def classification_metrics(config: Config, logits: Array, batch: Batch) -> Sums:
    """The negative log likelihood (nats per example), accuracy, and F1 averaged over the classes."""
    labels, weights = _tokens.labels_and_weights(batch)
    return {
        "loss": losses.cross_entropy(logits, labels, weights),
        "accuracy": metrics.accuracy(logits, labels, weights),
        "macro_f1": metrics.f1(logits, labels, weights),
    }


def input_line(example: Example) -> str:
    """The text, and after a tab its pair, if it has one. Tabs inside the text become blanks."""
    pair = example.get("pair")
    return example["text"].replace("\t", " ") + ("" if pair is None else "\t" + pair)


def class_names(config: Config, count: int) -> tuple[str, ...]:
    """Names of the head's `count` classes; numbers if the config has no names."""
    return config.task.classes or tuple(map(str, range(count)))


def probabilities(logits: Array, batch: Batch) -> Array:
    """The softmax over classes, part of the compiled forward pass."""
    return jax.nn.softmax(logits, axis=-1)


def predict(predictor: Predictor, lines: Sequence[str], options: DecodeConfig) -> list[dict[str, Any]]:
    """For each line `{"label", "probability", "probabilities"}`, the last a dict of all labels."""
    prompts = predictor.prompts(text_lines(lines))
    results: list[dict[str, Any]] = [{} for _ in prompts]
    for indices, _, outputs in predictor.runner.forward(prompts, finish=probabilities):
        for index, probs in zip(indices, outputs, strict=True):
            names, best = class_names(predictor.config, len(probs)), int(probs.argmax())
            by_name = dict(zip(names, map(float, probs), strict=True))
            results[index] = {"label": names[best], "probability": float(probs[best]), "probabilities": by_name}
    return results


def output_line(result: Mapping[str, Any]) -> str:
    """The likeliest class and its probability, with a tab between them."""
    return f"{result['label']}\t{result['probability']:.4f}"


def sample(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Sample:
    """The text and the name of its class."""
    names = class_names(config, config.model.head.classes or example["label"] + 1)
    return Sample(input_line(example), names[example["label"]])


def diagnose(config: Config, results: Sequence[Mapping[str, Any]], examples: Sequence[Example]) -> dict[str, Any]:
    """Confusion matrix and calibration, see `_diagnosis`."""
    names = class_names(config, config.model.head.classes or 0)
    true, predicted = [names[example["label"]] for example in examples], [result["label"] for result in results]
    is_correct = [a == b for a, b in zip(true, predicted, strict=True)]
    return {
        "confusion": _diagnosis.confusion(names, true, predicted),
        "calibration": _diagnosis.calibration([result["probability"] for result in results], is_correct),
    }


TASK = Task(
    roles=("text", "label"),
    head="classes",
    sides=("encoder", "decoder"),
    method="classify",
    needs="a head of classes",
    encode=encode,
    loss=loss,
    metrics=classification_metrics,
    input_line=input_line,
    prompt=prompt,
    predict=predict,
    output_line=output_line,
    check=check,
    sample=sample,
    diagnose=diagnose,
)
