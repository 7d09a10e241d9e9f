"""Replaced-token detection: an encoder says which tokens a small masked language model has replaced.

From ELECTRA (Clark et al. 2020). The model is `models.electra`: the generator restores masked tokens, tokens sampled
from it replace these, and the discriminator tells for every token whether it is the original. A sampled token that
equals the original counts as original. For a row with n tokens, m of them masked, the loss is

    - 1/m sum_masked log p_G(x_i)  +  lambda * 1/n sum_all [cross-entropy of "replaced"],   lambda = detection_weight,

and rows are averaged with their m as weights, so that the sums of microbatches add up. It is the sum of the two means
`generator_loss` and `detection_loss` where all rows have the same share of masked tokens.

It predicts, for each token of a line, the probability that it was replaced. Fine-tuning starts from the discriminator
(`config.init.directory`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxformer import losses, metrics
from jaxformer.config import Config, DecodeConfig
from jaxformer.data.sources import Example
from jaxformer.data.tokenizers import Tokenizer, Tokenizers
from jaxformer.models.electra import Detection
from jaxformer.tasks import Features, Predictor, Task, _tokens, classification, masked_lm, text_lines
from jaxformer.types import Array, Batch, Sums

NAME = "replaced_tokens"
ORIGINAL, REPLACED = 0, 1
CLASSES = ("original", "replaced")


def encode(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Features:
    """Source `<cls> ids <sep>` with some ids masked, the true ids as labels, and weight 1 at masked ones."""
    tokenizer = tokenizers.source
    ids = tokenizer.encode(example["text"])
    kept_ids = _tokens.truncate(config, tokenizer, ids)
    return {**_mask(config, tokenizer, kept_ids, rng), **_tokens.truncation(len(ids) - len(kept_ids))}


def encode_windows(
    config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator
) -> list[Features]:
    """One text as many rows as it takes, each masked by itself."""
    tokenizer = tokenizers.source
    return [_mask(config, tokenizer, ids, rng) for ids in masked_lm.windows(config, tokenizer, example["text"])]


def encode_row(config: Config, tokenizers: Tokenizers, ids: np.ndarray, rng: np.random.Generator) -> Features:
    """A row of the running text, which has no special tokens but those between texts; these may be masked, too."""
    return _mask(config, tokenizers.source, ids, rng, framed=False)


def _mask(
    config: Config,
    tokenizer: Tokenizer,
    ids: Sequence[int] | np.ndarray,
    rng: np.random.Generator,
    framed: bool = True,
) -> Features:
    """Features of `<cls> ids <sep>`, or of `ids` alone. Unlike in BERT, all chosen tokens become <mask> (section 2)."""
    mask, tokens = _tokens.required_token(tokenizer, NAME, "mask"), np.array(ids, np.int32)
    word_starts = np.array(tokenizer.word_starts(tokens.tolist()), bool) if config.task.whole_words else None
    weights = np.zeros(len(tokens), np.float32)
    weights[masked_lm.choose(len(tokens), config.task.mask_rate, rng, word_starts)] = 1.0
    labels = tokens
    if framed:
        labels, prefix = _tokens.add_special_tokens(tokenizer, tokens), len(_tokens.existing(tokenizer.cls))
        weights = np.pad(weights, (prefix, len(labels) - len(tokens) - prefix))
    source = np.where(weights > 0, mask, labels).astype(np.int32)
    return {"source": source, "labels": labels, "weights": weights}


def prompt(config: Config, tokenizers: Tokenizers, line: str) -> Features:
    """A text, framed as in training, without masked tokens."""
    ids = tokenizers.source.encode(line)
    kept_ids = _tokens.truncate(config, tokenizers.source, ids)
    source = _tokens.add_special_tokens(tokenizers.source, kept_ids)
    return {"source": source, **_tokens.truncation(len(ids) - len(kept_ids))}


def loss(config: Config, output: Detection, batch: Batch) -> Sums:
    """The loss of both models, and its parts as plain means over masked and over all tokens."""
    labels, weights = _tokens.labels_and_weights(batch)
    replaced, real = replaced_tokens(output, batch)
    masked, count = jnp.sum(weights, axis=1, keepdims=True), jnp.sum(real, axis=1, keepdims=True)
    generator = losses.cross_entropy(output.generated, labels, weights)
    by_row = real * masked / jnp.maximum(count, 1.0)
    detection = losses.cross_entropy(output.detected, replaced, by_row)
    return {
        "loss": (generator[0] + config.task.detection_weight * detection[0], generator[1]),
        "generator_loss": generator,
        "detection_loss": losses.cross_entropy(output.detected, replaced, real),
    }


def task_metrics(config: Config, output: Detection, batch: Batch) -> Sums:
    """The losses, the accuracies of both models, and how often tokens are replaced and found.

    `replaced` is the share of all tokens, `recall` that of the replaced ones that are found, `precision` that of the
    found ones that are replaced.
    """
    labels, weights = _tokens.labels_and_weights(batch)
    replaced, real = replaced_tokens(output, batch)
    found = jnp.argmax(output.detected, axis=-1) == REPLACED
    both = jnp.sum(real * replaced * found)
    return {
        **loss(config, output, batch),
        "generator_accuracy": metrics.accuracy(output.generated, labels, weights),
        "detection_accuracy": metrics.accuracy(output.detected, replaced, real),
        "replaced": (jnp.sum(real * replaced), jnp.sum(real)),
        "recall": (both, jnp.sum(real * replaced)),
        "precision": (both, jnp.sum(real * found)),
    }


def replaced_tokens(output: Detection, batch: Batch) -> tuple[Array, Array]:
    """1 for tokens that differ from the original, int32 `[B, T]`, and 1 for tokens that are no padding, float32."""
    labels, _ = _tokens.labels_and_weights(batch)
    real = _tokens.read_stream(batch, "source").slots.segment > 0
    return jnp.where(real & (output.tokens != labels), REPLACED, ORIGINAL), real.astype(jnp.float32)


def detect(predictor: Predictor, lines: Sequence[str]) -> list[list[dict[str, Any]]]:
    """For each line, for each of its tokens but the special ones, `{"token", "id", "replaced"}`, a probability."""
    lines, tokenizer = text_lines(lines), predictor.framing.tokenizers.source
    special = {getattr(tokenizer, role) for role in masked_lm.SPECIAL_ROLES if role != "unk"}
    results: list[list[dict[str, Any]]] = [[] for _ in lines]
    for indices, batch, probs in predictor.runner.forward(
        predictor.prompts(lines), finish=classification.probabilities
    ):
        source = _tokens.read_stream(batch, "source")
        for index, tokens, segment, row in zip(indices, source.tokens, source.slots.segment, probs, strict=False):
            slots = [slot for slot in np.flatnonzero(segment) if int(tokens[slot]) not in special]
            results[index] = [
                {"token": tokenizer.decode([int(tokens[s])]), "id": int(tokens[s]), "replaced": float(row[s, REPLACED])}
                for s in slots
            ]
    return results


def predict(predictor: Predictor, lines: Sequence[str], options: DecodeConfig) -> list[list[dict[str, Any]]]:
    """`detect`, as the command line calls it."""
    return detect(predictor, lines)


def output_line(result: Sequence[Mapping[str, Any]]) -> str:
    """Every token with the probability that it was replaced, as `cat/0.031`, with a blank between them."""
    return " ".join(f"{token['token'].strip() or token['token']}/{token['replaced']:.3f}" for token in result)


def reference_line(config: Config, example: Example) -> str:
    """The text itself: none of its tokens is replaced."""
    return example["text"]


TASK = Task(
    roles=("text",),
    head="slots",
    sides=("encoder",),
    method="detect",
    needs="an encoder with a generator and a head of two classes for every token",
    encode=encode,
    encode_windows=encode_windows,
    encode_row=encode_row,
    loss=loss,
    metrics=task_metrics,
    prompt=prompt,
    predict=predict,
    output_line=output_line,
    reference_line=reference_line,
    classes=CLASSES,
)
