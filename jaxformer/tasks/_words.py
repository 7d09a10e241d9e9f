"""Word vectors by negative sampling (Mikolov et al. 2013, https://arxiv.org/abs/1310.4546): for skip-gram and CBOW.

A text is a row of words, without those outside the vocabulary and without a share of the frequent ones. Each word draws
a window b of 1 to `task.window`; its context words are those at distances 1 to b on both sides. Columns stand for the
distances -W ... -1, 1 ... W. Noise words are drawn with probability in proportion to count ** `task.noise_power`; one
that happens to be the true word has weight 0.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32, Float64, Int

from jaxformer.config import Config, DecodeConfig
from jaxformer.data.sources import Example
from jaxformer.data.tokenizers import Tokenizer, Tokenizers
from jaxformer.errors import ConfigError
from jaxformer.nn.layers import embedding_lookup
from jaxformer.registry import nearest as nearest_name
from jaxformer.tasks import Features, Predictor, Task
from jaxformer.types import Array, DeferredLogits, Sums

TOP = 10
"""Neighbours of a word that `jaxformer decode` writes."""
MAX_ROW = 1024
"""Words whose vectors are computed in one row."""


# Training examples.


class Frequencies(NamedTuple):
    """Of each token: its share of the words of the training text, and the cumulative distribution of noise words."""

    shares: Float64[np.ndarray, " V"]
    noise: Float64[np.ndarray, " V"]


@functools.lru_cache(maxsize=8)
def frequencies(tokenizer: Tokenizer, power: float) -> Frequencies:
    """The frequencies of the tokenizer's words; special tokens and <unk> have none.

    Raises:
      ConfigError: the tokenizer has not counted its words.
    """
    if tokenizer.counts is None:
        raise ConfigError(
            "tokenizer: got one without counts of its words, expected one that this version learned; "
            "set data.tokenizer.kind to word and train in a new workdir"
        )
    counts = np.array(tokenizer.counts, np.float64)
    counts[tokenizer.unk] = 0.0
    noise = np.where(counts > 0, counts, 1.0) ** power * (counts > 0)
    cumulative = np.cumsum(noise)  # divided by its own last value, so that none drawn below 1 is beyond it
    return Frequencies(counts / max(counts.sum(), 1.0), cumulative / max(cumulative[-1], 1e-300))


class Context(NamedTuple):
    """A text after subsampling, with the drawn windows of its words.

    Attributes:
      ids: int32 `[n]`.
      words: int32 `[n, 2W]`, the words around each; 0 outside the text.
      inside: bool `[n, 2W]`, True for context words.
      cut: number of words beyond `data.length`.
    """

    ids: Int[np.ndarray, " n"]
    words: Int[np.ndarray, "n _"]
    inside: np.ndarray
    cut: int


def draw_context(config: Config, tokenizer: Tokenizer, text: str, rng: np.random.Generator) -> Context:
    """Words of `text` and their context words: a word of frequency f stays with probability sqrt(subsample / f)."""
    task = config.task
    ids = np.array(tokenizer.encode(text), np.int32)
    ids = ids[ids != tokenizer.unk]
    if task.subsample:
        shares = frequencies(tokenizer, task.noise_power).shares[ids]
        ids = ids[rng.random(len(ids)) ** 2 * shares < task.subsample]
    ids, cut = ids[: config.data.length], max(len(ids) - config.data.length, 0)
    distance = offsets(task.window)
    reach = rng.integers(1, task.window + 1, len(ids))
    index = np.arange(len(ids))[:, None] + distance
    inside = (np.abs(distance) <= reach[:, None]) & (index >= 0) & (index < len(ids))
    words = np.where(inside, ids[np.clip(index, 0, max(len(ids) - 1, 0))], 0) if len(ids) else index
    return Context(ids, words.astype(np.int32), inside, cut)


def offsets(window: int) -> Int[np.ndarray, " _"]:
    """Distances of the columns of a window: -W ... -1, 1 ... W."""
    return np.array([*range(-window, 0), *range(1, window + 1)])


def draw_noise(config: Config, tokenizer: Tokenizer, count: int, rng: np.random.Generator) -> Int[np.ndarray, "n K"]:
    """K = `task.negatives` noise words for each of `count` words, int32."""
    cumulative = frequencies(tokenizer, config.task.noise_power).noise
    draws = rng.random((count, config.task.negatives))
    return np.searchsorted(cumulative, draws, side="right").astype(np.int32)


# Loss.


def scores(output: Array | DeferredLogits, candidates: Int[Array, "B T C"]) -> Float32[Array, "B T C"]:
    """Logits of the candidate words of each slot. From deferred logits, only those are computed."""
    if not isinstance(output, DeferredLogits):
        return jnp.take_along_axis(output, candidates, axis=-1)
    flat = candidates.reshape(candidates.shape[0], -1)
    rows = embedding_lookup(output.table, flat, "vocab").reshape(*candidates.shape, -1)
    products = jnp.einsum("btd,btcd->btc", output.hidden, rows.astype(output.hidden.dtype)).astype(jnp.float32)
    return products if output.bias is None else products + jnp.take(output.bias, candidates)


def sums(scores: Float[Array, "B T C"], words: Int[Array, "B T C"], weights: Float[Array, "B T C"], true: int) -> Sums:
    """The loss of equation 4, -log s(x) - sum_k log s(-y_k) a pair; s is the logistic function.

    Also the accuracy: how often a true word scores higher than every noise word.

    Args:
      scores: x of the first `true` words of each slot, and y of its noise words.
      words: the words themselves.
      weights: 0 or 1 for true words; for noise words, the number of true words that they are drawn for.
    """
    losses = jnp.where(jnp.arange(scores.shape[-1]) < true, jax.nn.softplus(-scores), jax.nn.softplus(scores))
    pairs = weights[..., :true]
    differs = words[..., :true, None] != words[..., None, true:]
    best = jnp.max(jnp.where(differs, scores[..., None, true:], -jnp.inf), axis=-1)
    count = jnp.sum(pairs)
    return {
        "loss": (jnp.sum(losses * weights), count),
        "accuracy": (jnp.sum((scores[..., :true] > best) * pairs), count),
    }


# Use.


def prompt(config: Config, tokenizers: Tokenizers, line: str) -> Features:
    """The words of a line."""
    return {"source": np.array(tokenizers.source.encode(line), np.int32)}


class Neighbours(NamedTuple):
    """Words by falling cosine, with the cosines."""

    words: list[str]
    cosines: list[float]


def vectors(predictor: Predictor) -> Float32[np.ndarray, "V D"]:
    """The vector of each token of the vocabulary: the row of the input table as the model reads it."""
    size = predictor.framing.tokenizers.source.size
    prompts = [
        {"source": np.arange(begin, min(begin + MAX_ROW, size), dtype=np.int32)} for begin in range(0, size, MAX_ROW)
    ]
    found = np.zeros((size, 0), np.float32)
    for indices, _, outputs in predictor.runner.forward(prompts, "encode", buckets=(MAX_ROW,)):
        if not found.size:
            found = np.zeros((size, outputs.shape[-1]), np.float32)
        for index, output in zip(indices, outputs, strict=True):
            begin = index * MAX_ROW
            found[begin : begin + MAX_ROW] = output[: size - begin]
    return found


def neighbours(
    predictor: Predictor, terms: Sequence[Sequence[tuple[str, float]]], top: int = TOP, table: np.ndarray | None = None
) -> list[Neighbours]:
    """For each sum of weighted words, the words whose vectors have the highest cosine with it.

    The vectors have length 1 before they are added. The words of the sum itself are left out, and special tokens.

    Args:
      terms: words with their factors.
      table: the result of `vectors`, if it is known.

    Raises:
      ConfigError: a word is not in the vocabulary, there is none, or `top` is not positive.
    """
    if top < 1:
        raise ConfigError(f"nearest: got top {top}, expected at least 1")
    tokenizer = predictor.framing.tokenizers.source
    ids = [[(word_id(tokenizer, word), factor) for word, factor in term] for term in terms]
    if not all(ids):
        raise ConfigError("nearest: got a line without a word, expected one word or several; mend the line")
    table = vectors(predictor) if table is None else table
    units = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)
    counts = tokenizer.counts
    is_word = np.ones(len(units), bool) if counts is None else np.array(counts) > 0
    is_word[tokenizer.unk] = False
    found = []
    for term in ids:
        total = sum(factor * units[index] for index, factor in term)
        cosines = units @ (total / max(float(np.linalg.norm(total)), 1e-12))
        cosines[~is_word] = -np.inf
        cosines[[index for index, _ in term]] = -np.inf
        best = np.argsort(-cosines, kind="stable")[:top]
        best = best[np.isfinite(cosines[best])]
        found.append(Neighbours([tokenizer.vocabulary.pieces[i] for i in best], cosines[best].tolist()))
    return found


def word_id(tokenizer: Tokenizer, word: str) -> int:
    """Id of a word.

    Raises:
      ConfigError: it is not one word of the vocabulary.
    """
    ids = tokenizer.encode(word) if isinstance(word, str) else []
    if len(ids) != 1 or ids[0] == tokenizer.unk:
        hint = nearest_name(word, tuple(tokenizer.vocabulary.pieces)) if isinstance(word, str) else ""
        raise ConfigError(f"word: got {word!a}, expected one of the vocabulary's {tokenizer.size:,} words{hint}")
    return ids[0]


def predict(predictor: Predictor, lines: Sequence[str], options: DecodeConfig) -> list[Neighbours]:
    """The neighbours of each line's word, or of the sum of its words.

    Raises:
      ConfigError: a word is not in the vocabulary, or a line has none.
    """
    return neighbours(predictor, [[(word, 1.0) for word in line.split()] for line in lines])


def output_line(result: Neighbours) -> str:
    """Words with their cosines, tabs between them: `queen 0.712\\tprince 0.650`."""
    return "\t".join(f"{word} {cosine:.3f}" for word, cosine in zip(*result, strict=True))


def task(**functions) -> Task:
    """A task of word vectors with these functions."""
    return Task(
        roles=("text",),
        head="tokens",
        sides=("encoder",),
        method="nearest",
        needs="word vectors (an encoder without layers)",
        has_layers=False,
        prompt=prompt,
        predict=predict,
        output_line=output_line,
        reference_line=_no_reference,
        **functions,
    )


def _no_reference(config: Config, example: Example) -> str:
    return ""
