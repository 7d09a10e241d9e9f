"""Language modelling, one token after the other: p(text) = prod_t p(token t | tokens before it)."""

from __future__ import annotations

import re
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from jaxformer import metrics
from jaxformer.config import Config
from jaxformer.data.sources import Example
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.nn.multi_token import shift_left, slots_ahead
from jaxformer.tasks import Features, Sample, Task, _generation, _tokens
from jaxformer.types import Array, Batch, DeferredLogits, MultiTokenLogits, Sums

NAME = "language_modelling"
MAX_PROMPT_WORDS, MAX_PROMPT_CHARACTERS = 16, 64
"""Longest beginning of a text that samples continue; the reference shows as much of what follows."""
MIN_WORDS = 4
"""Fewest words of a text that is cut between words."""


def encode(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Features:
    """One text as one row: decoder input `<bos> ids`, labels `ids <eos>`.

    With packing "concat" the pipeline cuts the same labels, those of all texts in a row, into rows itself.
    """
    return _tokens.next_token_features(*_ids_and_ends(tokenizers, example), config.data.length)


def encode_windows(
    config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator
) -> list[Features]:
    """One text as many rows as it takes, so that the likelihood of the complete text is measured.

    A row sees nothing of the row before, as with packing "concat".
    """
    return _tokens.next_token_windows(*_ids_and_ends(tokenizers, example), config.data.length)


def _ids_and_ends(tokenizers: Tokenizers, example: Example) -> tuple[list[int], int, int]:
    """The ids of a text, the token before it and the one after it."""
    tokenizer = tokenizers.target
    first, last = _tokens.start_token(tokenizer, NAME), _tokens.required_token(tokenizer, NAME, "eos", "sep")
    return tokenizer.encode(example["text"]), first, last


def prompt(config: Config, tokenizers: Tokenizers, line: str) -> Features:
    """`<bos> ids`, which the model continues."""
    tokenizer = tokenizers.target
    return {"target": np.array([_tokens.start_token(tokenizer, NAME), *tokenizer.encode(line)], np.int32)}


def loss(config: Config, logits: Array | DeferredLogits | MultiTokenLogits, batch: Batch) -> Sums:
    """The cross-entropy of the next tokens, and with `model.multi_token` that of further ones beside it.

    DeepSeek-V3 (DeepSeek-AI 2024), equations 24 and 25: the sums of all depths are divided by the weights of the next
    tokens, so the loss is a sum over slots, and does not depend on how a batch is divided.

    Returns:
      "loss"; with `model.multi_token` also "next_token_loss" and "further_loss_1", ..., each over its own weights.
    """
    if not isinstance(logits, MultiTokenLogits):
        return _tokens.token_loss(config, logits, batch)
    settings = config.model.multi_token
    weight = 0.0 if settings is None else settings.weight / len(logits.further)
    total, count = _tokens.token_loss(config, logits.tokens, batch)["loss"]
    sums: dict[str, tuple] = {"next_token_loss": (total, count)}
    for depth, further in enumerate(logits.further, start=1):
        sums[f"further_loss_{depth}"] = _tokens.token_loss(config, further, _ahead(batch, depth))["loss"]
        total = total + weight * sums[f"further_loss_{depth}"][0]
    return {"loss": (total, count), **sums}


def measures(config: Config, logits: Array | DeferredLogits | MultiTokenLogits, batch: Batch) -> Sums:
    """Loss and accuracy of the next tokens, and with `model.multi_token` "further_loss_1", ... of further ones."""
    if not isinstance(logits, MultiTokenLogits):
        return _tokens.token_metrics(config, logits, batch)
    sums = dict(_tokens.token_metrics(config, logits.tokens, batch))
    for depth, further in enumerate(logits.further, start=1):
        sums[f"further_loss_{depth}"] = _tokens.token_metrics(config, further, _ahead(batch, depth))["loss"]
    return sums


def _ahead(batch: Batch, depth: int) -> Batch:
    """`batch` with the labels that stand `depth` slots further on in the same text, at weight 0 where there is none."""
    labels, weights = _tokens.labels_and_weights(batch)
    inside = slots_ahead(batch.side("target").slots.segment, depth) > 0
    return batch._replace(labels=shift_left(labels, depth), weights=jnp.where(inside, shift_left(weights, depth), 0.0))


def derived_metrics(config: Config, values: Mapping[str, float], size: Mapping[str, float]) -> dict[str, float]:
    """Adds three perplexities of the complete text, which differ by the unit that they are averaged over.

    `perplexity` is per token. `word_perplexity` is per word, line ends counted as words, as in the literature on
    WikiText and Penn Treebank. `bits_per_byte` is per UTF-8 byte, the only one that compares between tokenizers.
    """
    nats = values["loss"] * size["labels"]
    return {
        **values,
        "perplexity": metrics.perplexity(values["loss"]),
        "word_perplexity": metrics.perplexity(nats, size["words"] + size["lines"]),
        "bits_per_byte": metrics.bits_per_byte(nats, size["bytes"]),
    }


def sample(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Sample:
    """The beginning of a text, which the model continues, and how the text itself goes on.

    The beginning is half of the text, at most `MAX_PROMPT_WORDS` words. A text of few words (or of a script without
    blanks between them) is cut between characters, at most `MAX_PROMPT_CHARACTERS`.
    """
    text = example["text"]
    ends = [match.end() for match in re.finditer(r"\S+", text)]
    unit, limit = "words", MAX_PROMPT_WORDS
    if len(ends) < MIN_WORDS:
        ends, unit, limit = list(range(1, len(text) + 1)), "characters", MAX_PROMPT_CHARACTERS
    count = min(len(ends) // 2, limit)
    begin = ends[count - 1] if count else 0
    end = ends[min(count + limit, len(ends)) - 1] if ends else 0
    return Sample(text[:begin], text[begin:end], f"the first {count:,} of {len(ends):,} {unit}")


def output_line(result: str) -> str:
    """The continuation with its line ends written `\\n`, so that it stays one line."""
    return result.replace("\r", "\\r").replace("\n", "\\n")


TASK = Task(
    roles=("text",),
    head="tokens",
    sides=("decoder",),
    method="generate",
    needs="a decoder with a head of tokens",
    encode=encode,
    encode_windows=encode_windows,
    slots=lambda config, count: min(count + 1, config.data.length),
    loss=loss,
    metrics=measures,
    derived_metrics=derived_metrics,
    prompt=prompt,
    predict=_generation.best_texts,
    output_line=output_line,
    sample=sample,
)
