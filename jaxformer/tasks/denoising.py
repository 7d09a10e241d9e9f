"""Denoising: an encoder reads a corrupted text, a decoder writes the original (Lewis et al. 2020, BART, section 2.2).

Five kinds of noise, each with a rate, in this order: sentences change places, masks take the place of spans, masks take
the place of single tokens, tokens are deleted, and the text is rotated. BART's own mixture, spans and sentences, is the
default.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxformer import metrics
from jaxformer.config import Config
from jaxformer.data.sources import Example
from jaxformer.data.tokenizers import Tokenizer, Tokenizers
from jaxformer.tasks import Features, Sample, Task, _generation, _tokens

NAME = "denoising"


def encode(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Features:
    """Source `noisy ids <eos>`, decoder input `<bos> ids`, labels `ids <eos>`; a truncated text has no <eos> label."""
    ids, length = _tokens.joint_tokenizer(tokenizers, NAME).encode(example["text"]), config.data.length
    return _features(config, tokenizers, ids[:length], len(ids) < length, len(ids) + 1 - length, rng)


def encode_windows(
    config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator
) -> list[Features]:
    """One text as many rows as it takes, each corrupted by itself; the last one ends."""
    ids, size = _tokens.joint_tokenizer(tokenizers, NAME).encode(example["text"]), config.data.length - 1
    begins = range(0, max(len(ids), 1), size)
    return [_features(config, tokenizers, ids[i : i + size], i + size >= len(ids), 0, rng) for i in begins]


def encode_row(config: Config, tokenizers: Tokenizers, ids: np.ndarray, rng: np.random.Generator) -> Features:
    """Features of a row of a running text, which does not end."""
    return _features(config, tokenizers, ids.tolist(), False, 0, rng)


def _features(
    config: Config, tokenizers: Tokenizers, ids: list[int], ends: bool, cut: int, rng: np.random.Generator
) -> Features:
    """Source and target of `ids`.

    Args:
      ends: the text ends after them, which the model learns.
      cut: tokens of the target that were truncated.
    """
    tokenizer = _tokens.joint_tokenizer(tokenizers, NAME)
    start, end = _tokens.start_token(tokenizer, NAME), _tokens.required_token(tokenizer, NAME, "eos", "sep")
    target = np.array([start, *ids, *([end] if ends else [])], np.int32)
    noisy, room = corrupt(config, tokenizer, np.asarray(ids, np.int32), rng), config.data.length - 1
    return {
        "source": np.array([*noisy[:room], end], np.int32),
        "target": target[:-1],
        "labels": target[1:],
        "weights": np.ones(len(target) - 1, np.float32),
        **_tokens.truncation(max(cut, 0) + max(len(noisy) - room, 0)),
    }


def corrupt(config: Config, tokenizer: Tokenizer, ids: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """`ids` with the noise of `config.task`."""
    task = config.task
    if task.permutation:
        ids = permute_sentences(ids, tokenizer.sentence_starts(ids), task.permutation, rng)
    if task.infilling or task.masking:
        mask = _tokens.required_token(tokenizer, NAME, "mask")
        ids = infill(ids, task.infilling, task.span, mask, rng)
        ids = mask_tokens(ids, task.masking, mask, rng)
    if task.deletion:
        ids = delete_tokens(ids, task.deletion, tokenizer.mask, rng)
    return rotate(ids, rng) if task.rotation and rng.random() < task.rotation else ids


def permute_sentences(ids: np.ndarray, starts: np.ndarray, fraction: float, rng: np.random.Generator) -> np.ndarray:
    """`ids` with a fraction of the sentences in each other's places, in random order; `starts` is True at the first."""
    sentences = np.split(ids, np.flatnonzero(starts)[1:])
    moved = np.sort(rng.permutation(len(sentences))[: round(fraction * len(sentences))])
    order = np.arange(len(sentences))
    order[moved] = rng.permutation(moved)
    return np.concatenate([sentences[i] for i in order])


def infill(ids: np.ndarray, rate: float, mean: float, mask: int, rng: np.random.Generator) -> np.ndarray:
    """`ids` with spans replaced by one `mask` each, which cover a fraction `rate` of them together.

    Lengths are drawn from a Poisson distribution; a span of length 0 inserts a mask. Spans and the tokens between them
    are in uniformly random order.
    """
    lengths = _span_lengths(round(rate * len(ids)), mean, rng)
    if not lengths:
        return ids
    kept = len(ids) - sum(lengths)
    is_span = np.zeros(kept + len(lengths), bool)
    is_span[rng.permutation(len(is_span))[: len(lengths)]] = True
    size = np.ones(len(is_span), np.int64)
    size[is_span] = lengths
    first = np.cumsum(size) - size  # of each token or span in `ids`; a span of length 0 at the end has none
    return np.where(is_span, mask, ids[np.minimum(first, len(ids) - 1)])


def _span_lengths(total: int, mean: float, rng: np.random.Generator) -> list[int]:
    """Poisson lengths up to the one that reaches `total`, which is shortened to it."""
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(int(rng.poisson(mean)), left))
    return lengths


def mask_tokens(ids: np.ndarray, rate: float, mask: int, rng: np.random.Generator) -> np.ndarray:
    """`ids` with a fraction `rate` of those that are no mask replaced by one."""
    masked = ids.copy()
    masked[_choose(ids, rate, mask, rng)] = mask
    return masked


def delete_tokens(ids: np.ndarray, rate: float, mask: int | None, rng: np.random.Generator) -> np.ndarray:
    """`ids` without a fraction `rate` of those that are no mask."""
    return np.delete(ids, _choose(ids, rate, mask, rng))


def _choose(ids: np.ndarray, rate: float, mask: int | None, rng: np.random.Generator) -> np.ndarray:
    """Indices of a fraction `rate` of the ids that are no mask."""
    ordinary = np.arange(len(ids)) if mask is None else np.flatnonzero(ids != mask)
    return rng.permutation(ordinary)[: round(rate * len(ordinary))]


def rotate(ids: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """`ids` from a random one on, those before it at the end."""
    return np.roll(ids, -int(rng.integers(max(len(ids), 1))))


def prompt(config: Config, tokenizers: Tokenizers, line: str) -> Features:
    """A corrupted line, in which the name of the mask token is the mask, and the start of a target."""
    tokenizer = _tokens.joint_tokenizer(tokenizers, NAME)
    return _tokens.seq2seq_prompt(config, tokenizer, NAME, tokenizer.parse(line))


def sample(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Sample:
    """A corrupted text, and the text itself. The line is tokenized again."""
    features, decode = encode(config, tokenizers, example, rng), tokenizers.source.decode_with_sentinels
    return Sample(decode(features["source"]), decode(features["labels"]))


def derived_metrics(config: Config, values: Mapping[str, float], size: Mapping[str, float]) -> dict[str, float]:
    """Adds the perplexity per token of the original text, which a model that copies well makes small."""
    return {**values, "perplexity": metrics.perplexity(values["loss"])}


TASK = Task(
    roles=("text",),
    head="tokens",
    sides=("encoder, decoder",),
    method="predict",
    needs="an encoder and a decoder with a head of tokens",
    encode=encode,
    encode_windows=encode_windows,
    encode_row=encode_row,
    loss=_tokens.token_loss,
    metrics=_tokens.token_metrics,
    derived_metrics=derived_metrics,
    prompt=prompt,
    predict=_generation.best_texts,
    sample=sample,
)
