"""Permutation language modelling: each token is predicted from those before it in a random order (Yang et al. 2019).

For an order z of the tokens x, the last 1/K of it are predicted (section 2.3, equation 5):

    - sum_{t > c} log p(x_{z_t} | x_{z_1}, ..., x_{z_{t-1}}),   K = config.task.predict_every

An example's order depends on the seed, the epoch and the example. The tokens before position c of the order are visible
to all; special tokens are never predicted. With packing "concat", rows are cut from the running text as for language
models. With `config.task.recurrence` a row of training also reads memories of the row before it in the text.
Evaluation reads every row by itself, so that its measures do not depend on the batch.

It predicts masked tokens, as masked language models do: each from all tokens that are not masked.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxformer.config import Config
from jaxformer.data.sources import Example
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.tasks import Features, Task, _tokens, masked_lm

NAME = "permutation_lm"


def encode(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Features:
    """Source `<cls> ids <sep>`, a random order, and the ids of its last part as labels."""
    tokenizer = tokenizers.source
    ids = tokenizer.encode(example["text"])
    kept_ids = _tokens.truncate(config, tokenizer, ids)
    return {**_frame(config, tokenizers, kept_ids, rng), **_tokens.truncation(len(ids) - len(kept_ids))}


def encode_windows(
    config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator
) -> list[Features]:
    """One text as many rows as it takes, each with an order of its own."""
    pieces = masked_lm.windows(config, tokenizers.source, example["text"])
    return [_frame(config, tokenizers, ids, rng) for ids in pieces]


def encode_row(config: Config, tokenizers: Tokenizers, ids: np.ndarray, rng: np.random.Generator) -> Features:
    """A row of the running text, which has no special tokens but those between texts."""
    return permuted(config, ids, np.arange(len(ids)), rng)


def _frame(config: Config, tokenizers: Tokenizers, ids: Sequence[int], rng: np.random.Generator) -> Features:
    """Features of `<cls> ids <sep>`, whose special tokens are not predicted."""
    begin = len(_tokens.existing(tokenizers.source.cls))
    tokens = _tokens.add_special_tokens(tokenizers.source, ids)
    return permuted(config, tokens, np.arange(begin, begin + len(ids)), rng)


def permuted(config: Config, tokens: np.ndarray, candidates: np.ndarray, rng: np.random.Generator) -> Features:
    """Features of `tokens` with the last part of a random order of the slots `candidates` as targets.

    One in `predict_every` candidates is predicted, and at least one, but never the only token that could be seen.
    """
    every = config.task.predict_every
    count = min(max(len(candidates) // every, 1), len(candidates), len(tokens) - 1)
    permutation = rng.permutation(candidates)
    return ordered(tokens, permutation[len(permutation) - count :], targets_per_row(config))


def targets_per_row(config: Config) -> int:
    """The number of targets of a row without padding: M of `types.Permutation`."""
    return max(config.data.length // config.task.predict_every, 1)


def ordered(tokens: np.ndarray, targets: np.ndarray, count: int) -> Features:
    """Features of `tokens` whose slots `targets` are predicted in this order, from the other slots and each other.

    Args:
      count: length of the features of targets, filled up with -1 and weights 0.
    """
    order, slots = np.zeros(len(tokens), np.int32), np.full(count, -1, np.int32)
    order[targets], slots[: len(targets)] = np.arange(1, len(targets) + 1), targets
    labels = np.where(slots >= 0, tokens[slots], 0).astype(np.int32)
    weights = (slots >= 0).astype(np.float32)
    return {"source": tokens, "order": order, "targets": slots, "labels": labels, "weights": weights}


def prompt(config: Config, tokenizers: Tokenizers, line: str) -> Features:
    """A line in which the mask token's name ("the <mask> sat") is the token to fill in.

    Masks have the same number in the order, so that none is visible to another.
    """
    features = masked_lm.prompt(config, tokenizers, line)
    masked = features["source"] == tokenizers.source.mask
    return {**features, "order": masked.astype(np.int32), "targets": np.flatnonzero(masked).astype(np.int32)}


TASK = Task(
    roles=("text",),
    head="tokens",
    sides=("encoder",),
    method="fill_mask",
    needs="an encoder with a head of tokens",
    encode=encode,
    encode_windows=encode_windows,
    encode_row=encode_row,
    loss=_tokens.token_loss,
    metrics=_tokens.token_metrics,
    derived_metrics=masked_lm.derived_metrics,
    prompt=prompt,
    predict=masked_lm.predict,
    output_line=masked_lm.output_line,
    sample=masked_lm.sample,
)
