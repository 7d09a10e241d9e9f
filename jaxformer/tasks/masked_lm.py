"""Masked language modelling: an encoder restores tokens that were hidden from it (Devlin et al. 2019, BERT)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer import metrics
from jaxformer.config import Config, DecodeConfig
from jaxformer.data.sources import Example
from jaxformer.data.tokenizers import Tokenizer, Tokenizers
from jaxformer.errors import ConfigError
from jaxformer.tasks import Features, Predictor, Sample, Task, _tokens, text_lines

NAME = "masked_lm"
MASKED_FRACTION, RANDOM_FRACTION = 0.8, 0.1
"""Fractions of the chosen tokens that become <mask> and a random token; the others stay (BERT, section 3.1)."""

SPECIAL_ROLES = ("pad", "bos", "eos", "unk", "mask", "cls", "sep")


def encode(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Features:
    """Source `<cls> ids <sep>` with some ids hidden, the true ids as labels, and weight 1 at hidden ones."""
    tokenizer = tokenizers.source
    ids = tokenizer.encode(example["text"])
    kept_ids = _tokens.truncate(config, tokenizer, ids)
    return {**_mask(config, tokenizer, kept_ids, rng), **_tokens.truncation(len(ids) - len(kept_ids))}


def encode_windows(
    config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator
) -> list[Features]:
    """One text as many rows as it takes, each masked by itself."""
    tokenizer = tokenizers.source
    ids = tokenizer.encode(example["text"])
    size = len(_tokens.truncate(config, tokenizer, range(config.data.length)))
    begins = range(0, max(len(ids), 1), max(size, 1))
    return [_mask(config, tokenizer, ids[begin : begin + size], rng) for begin in begins]


def _mask(config: Config, tokenizer: Tokenizer, ids: Sequence[int], rng: np.random.Generator) -> Features:
    """Features of `ids` with some of them hidden."""
    tokens = np.array(ids, np.int32)
    word_starts = np.array(tokenizer.word_starts(tokens.tolist()), bool) if config.task.whole_words else None
    chosen = choose(len(tokens), config.task.mask_rate, rng, word_starts)
    labels, weights = _tokens.add_special_tokens(tokenizer, tokens), np.zeros(len(tokens), np.float32)
    weights[chosen] = 1.0
    prefix = len(_tokens.existing(tokenizer.cls))
    weights = np.pad(weights, (prefix, len(labels) - len(tokens) - prefix))
    hidden = _tokens.add_special_tokens(tokenizer, hide(tokens, chosen, tokenizer, rng))
    return {"source": hidden, "labels": labels, "weights": weights}


def choose(count: int, rate: float, rng: np.random.Generator, word_starts: np.ndarray | None = None) -> np.ndarray:
    """Indices of the tokens to predict: a fraction `rate` of `count`, at least one (none of none).

    Args:
      word_starts: bool `[count]`, True where a word begins: words are then chosen with all their tokens. A word that
        would exceed the number is skipped, unless it is the first one drawn.
    """
    if count == 0:
        return np.zeros(0, np.int64)
    target_count = max(1, round(count * rate))
    if word_starts is None:
        return rng.permutation(count)[:target_count]
    word_of_token = np.cumsum(word_starts) - word_starts[0]
    sizes = np.bincount(word_of_token)
    chosen, total = np.zeros(len(sizes), bool), 0
    for word in rng.permutation(len(sizes)):
        if total == 0 or total + sizes[word] <= target_count:
            chosen[word] = True
            total += sizes[word]
        if total >= target_count:
            break
    return np.flatnonzero(chosen[word_of_token])


def hide(ids: np.ndarray, chosen: np.ndarray, tokenizer: Tokenizer, rng: np.random.Generator) -> np.ndarray:
    """`ids` with the chosen ones replaced: by <mask>, by a random ordinary token, or not at all."""
    mask = _tokens.required_token(tokenizer, NAME, "mask")
    ordinary = _ordinary_ids(tokenizer.size, tuple(getattr(tokenizer, role) for role in SPECIAL_ROLES))
    draw = rng.random(len(chosen))
    random_ids = ordinary[rng.integers(len(ordinary), size=len(chosen))]
    hidden = ids.copy()
    replaced_or_kept = np.where(draw < MASKED_FRACTION + RANDOM_FRACTION, random_ids, ids[chosen])
    hidden[chosen] = np.where(draw < MASKED_FRACTION, mask, replaced_or_kept)
    return hidden


@functools.cache
def _ordinary_ids(size: int, special_ids: tuple[int | None, ...]) -> np.ndarray:
    """The ids that stand for text."""
    return np.setdiff1d(np.arange(size, dtype=np.int32), [token for token in special_ids if token is not None])


def prompt(config: Config, tokenizers: Tokenizers, line: str) -> Features:
    """A line in which the mask token's name ("the <mask> sat") is the token to fill in."""
    tokenizer = tokenizers.source
    return {"source": _tokens.add_special_tokens(tokenizer, _tokens.truncate(config, tokenizer, tokenizer.parse(line)))}


def derived_metrics(config: Config, values: Mapping[str, float], size: Mapping[str, float]) -> dict[str, float]:
    """Adds the perplexity of the hidden tokens, which does not compare with a language model's."""
    return {**values, "perplexity": metrics.perplexity(values["loss"])}


def fill_masks(predictor: Predictor, lines: Sequence[str], top: int = 5) -> list[list[list[dict[str, Any]]]]:
    """For each line, for each mask in it, the `top` likeliest `{"token", "id", "probability"}`.

    Raises:
      ConfigError: a line has no mask token (within the model's length), or the tokenizer has none.
    """
    tokenizer, lines = predictor.framing.tokenizers.source, text_lines(lines)
    if tokenizer.mask is None:
        raise ConfigError("fill_mask: got a tokenizer without a mask token, expected one; use another model")
    prompts = predictor.prompts(lines)
    for line, features in zip(lines, prompts, strict=True):
        if tokenizer.mask not in features["source"]:
            name = tokenizer.names["mask"]
            raise ConfigError(f"fill_mask: got {line!r}, expected {name} in it; write it where a word is missing")
    results: list[list[list[dict[str, Any]]]] = [[] for _ in prompts]
    for indices, batch, logits in predictor.runner.forward(prompts):
        tokens = _tokens.read_stream(batch, "source").tokens
        for row, slot in np.argwhere(tokens[: len(indices)] == tokenizer.mask):
            results[indices[row]].append(_candidates(tokenizer, logits[row, slot, : tokenizer.size], top))
    return results


def _candidates(tokenizer: Tokenizer, logits: np.ndarray, top: int) -> list[dict[str, Any]]:
    """The `top` likeliest tokens under logits `[V]`."""
    exponentials = np.exp(logits - logits.max())
    probs = exponentials / exponentials.sum()
    best = np.argsort(-probs, kind="stable")[:top].tolist()
    return [{"token": tokenizer.decode([t]), "id": t, "probability": float(probs[t])} for t in best]


def predict(predictor: Predictor, lines: Sequence[str], options: DecodeConfig) -> list[dict[str, Any]]:
    """For each line `{"text", "masks"}`: the line with its masks filled, and each mask's candidates, best first."""
    candidates = fill_masks(predictor, lines)
    name = predictor.framing.tokenizers.source.names["mask"]
    return [{"text": fill(line, name, masks), "masks": masks} for line, masks in zip(lines, candidates, strict=True)]


def fill(line: str, mask_name: str, masks: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """The line with each mask replaced by its best candidate."""
    for candidates in masks:
        token = candidates[0]["token"]
        line = line.replace(mask_name, token.strip() or token, 1)  # the line has the blanks that a piece may carry
    return line


def sample(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Sample:
    """The text with masks in place of some of its tokens, and the text itself.

    Unlike in training no token is hidden in another way. A text that is too long is cut. The line is tokenized again,
    and may have other tokens beside a mask.
    """
    tokenizer = tokenizers.source
    ids, spans = tokenizer.encode_with_spans(example["text"])
    ids = _tokens.truncate(config, tokenizer, ids)
    word_starts = np.array(tokenizer.word_starts(ids), bool) if config.task.whole_words else None
    mask, line, begin = tokenizer.names["mask"], "", 0
    text = example["text"][: max((end for _, end in spans[: len(ids)]), default=0)]
    for first, last in sorted(spans[index] for index in choose(len(ids), config.task.mask_rate, rng, word_starts)):
        if begin <= first < last:  # neither blanks alone, nor another byte of the same character
            line, begin = line + text[begin:first] + mask, last
    line += text[begin:]
    if tokenizer.mask not in prompt(config, tokenizers, line)["source"]:  # `fill_masks` reads lines with a mask only
        line = mask + " " + line
    return Sample(line, text)


TASK = Task(
    roles=("text",),
    head="tokens",
    sides=("encoder",),
    method="fill_mask",
    needs="an encoder with a head of tokens",
    encode=encode,
    encode_windows=encode_windows,
    loss=_tokens.token_loss,
    metrics=_tokens.token_metrics,
    derived_metrics=derived_metrics,
    prompt=prompt,
    predict=predict,
    output_line=lambda result: result["text"],
    sample=sample,
)
