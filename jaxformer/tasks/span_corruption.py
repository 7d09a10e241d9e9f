"""Span corruption: an encoder reads a text without some spans, a decoder writes them (Raffel et al. 2020, T5).

Section 3.1.4, and the random segmentation of the paper's code. A sentinel takes the place of each dropped span; the
target has the same sentinels, each before its span:

    text     Thank you for inviting me to your party last week
    source   Thank you <extra_id_0> me to your party <extra_id_1> </s>
    labels   <extra_id_0> for inviting <extra_id_1> last week </s>
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from jaxformer import metrics
from jaxformer.config import Config, DecodeConfig
from jaxformer.data.sources import Example
from jaxformer.data.tokenizers import Tokenizer, Tokenizers
from jaxformer.errors import ConfigError
from jaxformer.tasks import Features, Predictor, Sample, Task, _generation, _tokens

NAME = "span_corruption"

MAX_CHECKED_LENGTH = 2**29
"""Sentinels for rows beyond this are not asked for: it stands for a length that nothing exceeds."""


def encode(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Features:
    """Source and target of a text, truncated so that both fit into `config.data.length`."""
    ids = _tokens.joint_tokenizer(tokenizers, NAME).encode(example["text"])
    size = row_length(config)
    features = encode_row(config, tokenizers, np.asarray(ids[:size], np.int32), rng)
    return {**features, **_tokens.truncation(len(ids) - size)}


def encode_windows(
    config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator
) -> list[Features]:
    """One text as many rows as it takes, each corrupted by itself."""
    ids = np.asarray(_tokens.joint_tokenizer(tokenizers, NAME).encode(example["text"]), np.int32)
    size = row_length(config)
    return [encode_row(config, tokenizers, ids[i : i + size], rng) for i in range(0, max(len(ids), 1), size)]


def encode_row(config: Config, tokenizers: Tokenizers, ids: np.ndarray, rng: np.random.Generator) -> Features:
    """Source `kept ids <eos>`, decoder input `<bos> spans`, labels `spans <eos>`.

    A text of fewer than two tokens stays as it is, and nothing is predicted.
    """
    tokenizer = _tokens.joint_tokenizer(tokenizers, NAME)
    sentinels = _sentinels(config, tokenizer)
    start, end = _tokens.start_token(tokenizer, NAME), _tokens.required_token(tokenizer, NAME, "eos", "sep")
    dropped = noise_mask(len(ids), config.task.mask_rate, config.task.span, rng)
    source, spans = corrupt(ids, dropped, sentinels), corrupt(ids, ~dropped, sentinels) if dropped.any() else ids[:0]
    labels = np.array([*spans, end], np.int32)
    weights = np.full(len(labels), dropped.any(), np.float32)
    target = np.array([start, *spans], np.int32)
    return {"source": np.array([*source, end], np.int32), "target": target, "labels": labels, "weights": weights}


def _sentinels(config: Config, tokenizer: Tokenizer) -> np.ndarray:
    """The ids of the tokenizer's sentinels.

    Raises:
      ConfigError: there are fewer than the longest row may need.
    """
    found, length, needed = tokenizer.sentinels, config.data.length, 1
    if length <= MAX_CHECKED_LENGTH:
        needed = counts(row_length(config), config.task.mask_rate, config.task.span)[1]
    if len(found) < needed:
        raise ConfigError(
            f"task {NAME}: got a tokenizer with {len(found)} sentinels (<extra_id_0>, ...), expected {needed} for rows "
            f"of {length} tokens; set data.tokenizer.sentinels={needed}, or take a tokenizer that has them"
        )
    return np.asarray(found, np.int32)


def counts(size: int, rate: float, mean: float) -> tuple[int, int]:
    """Numbers of dropped tokens and of spans in a text of `size` tokens; none below two tokens."""
    if size < 2:
        return 0, 0
    dropped = min(max(round(size * rate), 1), size - 1)
    return dropped, min(max(round(dropped / mean), 1), dropped, size - dropped)


def noise_mask(size: int, rate: float, mean: float, rng: np.random.Generator) -> np.ndarray:
    """True for the tokens to drop, bool `[size]`: kept and dropped segments take turns, a kept one is first.

    Both kinds are divided uniformly at random into as many segments as there are spans, none of them empty. So a text
    with a single span always loses its end, as in the paper's code.
    """
    dropped, spans = counts(size, rate, mean)
    if spans == 0:
        return np.zeros(size, bool)
    lengths = np.stack([_segments(size - dropped, spans, rng), _segments(dropped, spans, rng)], axis=1)
    return np.repeat(np.tile([False, True], spans), lengths.ravel())


def _segments(items: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Lengths `[count]` of at least 1 that sum to `items`, every such division as likely."""
    ends = np.sort(rng.permutation(items - 1)[: count - 1]) + 1
    return np.diff(np.concatenate([[0], ends, [items]]))


def corrupt(ids: np.ndarray, dropped: np.ndarray, sentinels: np.ndarray) -> np.ndarray:
    """`ids` with each run of dropped ones replaced by the next of `sentinels`."""
    begins = dropped & ~np.concatenate([[False], dropped[:-1]])
    numbers = np.minimum(np.cumsum(begins) - 1, len(sentinels) - 1)  # beyond them only in rows that are left out
    return np.where(begins, sentinels[numbers], ids)[begins | ~dropped]


def row_length(config: Config) -> int:
    """The most tokens of text whose source and target, both with <eos>, fit into `config.data.length`."""
    return _row_length(config.data.length, config.task.mask_rate, config.task.span)


@functools.cache
def _row_length(length: int, rate: float, mean: float) -> int:
    if length > MAX_CHECKED_LENGTH:
        return length

    def fits(size: int) -> bool:
        dropped, spans = counts(size, rate, mean)
        return max(size - dropped, dropped) + spans + 1 <= length

    size = length // 2  # source and target have at most `size` tokens, with the sentinels
    while fits(size + 1):
        size += 1
    return max(size, 1)


def prompt(config: Config, tokenizers: Tokenizers, line: str) -> Features:
    """A line in which <extra_id_0>, <extra_id_1>, ... stand where spans are missing, and the start of a target."""
    tokenizer = _tokens.joint_tokenizer(tokenizers, NAME)
    return _tokens.seq2seq_prompt(config, tokenizer, NAME, tokenizer.parse(line))


def predict(predictor: Predictor, lines: Sequence[str], options: DecodeConfig) -> list[str]:
    """For each line the missing spans, each after its sentinel: "<extra_id_0> for inviting <extra_id_1> last week"."""
    tokenizer = predictor.framing.tokenizers.target
    found = _generation.outputs(predictor, lines, options)
    return [tokenizer.decode_with_sentinels(outputs[0].tokens) if outputs else "" for outputs in found]


def sample(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Sample:
    """The text with some spans dropped, and these spans. The line is tokenized again."""
    features, decode = encode(config, tokenizers, example, rng), tokenizers.source.decode_with_sentinels
    return Sample(decode(features["source"]), decode(features["labels"]))


def derived_metrics(config: Config, values: Mapping[str, float], size: Mapping[str, float]) -> dict[str, float]:
    """Adds the perplexity of the target's tokens, sentinels included."""
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
    row_length=row_length,
    loss=_tokens.token_loss,
    metrics=_tokens.token_metrics,
    derived_metrics=derived_metrics,
    prompt=prompt,
    predict=predict,
    sample=sample,
)
