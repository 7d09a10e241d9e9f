"""Measures: sums that add up over any split of the data, and scores of finished text."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Float, Float32, Int, Num

from jaxformer import chunks
from jaxformer.types import Array, Projection, Sums


class Score(NamedTuple):
    """A corpus score and what exactly was computed, in sacreBLEU's notation."""

    value: float
    signature: str


# --- sums


def add(left: Sums, right: Sums) -> Sums:
    """Both sides' numerators and denominators, added. On the device, in jit too, float32; numpy sums become float64.

    Float32 stops counting at 2^24, which the labels of a large split exceed: fetch a batch's sums, then add.

    Raises:
      ValueError: the sides measure different things.
    """
    if left.keys() != right.keys():
        raise ValueError(f"sums: got {sorted(right)}, expected {sorted(left)}; add sums of one function only")
    return {name: tuple(_plus(*parts) for parts in zip(left[name], right[name], strict=True)) for name in left}


def _plus(left: ArrayLike, right: ArrayLike) -> ArrayLike:
    if isinstance(left, jax.Array) or isinstance(right, jax.Array):
        return left + right
    return np.add(left, right, dtype=np.float64)


def divide(sums: Sums) -> dict[str, float]:
    """Numerator / denominator of every measure; NaN where nothing was counted.

    A measure with one entry per class is divided per class and then averaged over the classes that occurred (macro
    average).
    """
    return {name: _quotient(*pair) for name, pair in jax.device_get(dict(sums)).items()}


def _quotient(numerator: ArrayLike, denominator: ArrayLike) -> float:
    numerator, denominator = (np.atleast_1d(np.asarray(part, np.float64)) for part in (numerator, denominator))
    counted = denominator != 0
    return float(np.mean(numerator[counted] / denominator[counted])) if counted.any() else math.nan


def accuracy(
    logits: Float[Array, "*batch V"] | Projection, labels: Int[Array, "*batch"], weights: Num[Array, "*batch"]
) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
    """Sums of the share of labels that are the highest of `logits`."""
    weights = weights.astype(jnp.float32)
    best = chunks.each(_best, logits, ()) if isinstance(logits, Projection) else jnp.argmax(logits, axis=-1)
    return jnp.sum((best == labels) * weights), jnp.sum(weights)


def _best(logits: Float[Array, "N V"], _: tuple, rows: chunks.Rows) -> Int[Array, " N"]:
    """The number of the highest row, the first of several."""
    top = jnp.max(logits, axis=-1)
    number = jnp.argmax(logits, axis=-1) + rows.first
    return rows.min(jnp.where(top == rows.max(top), number, jnp.iinfo(jnp.int32).max))


def f1(
    logits: Float[Array, "*batch C"], labels: Int[Array, "*batch"], weights: Num[Array, "*batch"]
) -> tuple[Float32[Array, " C"], Float32[Array, " C"]]:
    """Per-class sums whose divided mean is macro-F1.

    F1 = 2 TP / (2 TP + FP + FN), and the denominator is how often a class was predicted plus how often it was true:
    both are counts, so parts of a corpus add up, which averages of batch F1s would not.
    """
    classes = jnp.arange(logits.shape[-1])
    weights = weights.astype(jnp.float32)[..., None]
    predicted = (jnp.argmax(logits, axis=-1)[..., None] == classes) * weights
    true = (labels[..., None] == classes) * weights
    axes = tuple(range(labels.ndim))
    both = jnp.sum(jnp.where(true != 0, predicted, 0.0), axis=axes)
    return 2.0 * both, jnp.sum(predicted, axis=axes) + jnp.sum(true, axis=axes)


# --- language models


def perplexity(nats: float, count: float = 1.0) -> float:
    """exp of the mean negative log likelihood: `nats` in total over `count` tokens (or words)."""
    if count <= 0:
        return math.nan
    mean = nats / count
    return math.exp(mean) if mean < 700.0 else math.inf


def bits_per_byte(nats: float, size: float) -> float:
    """Total negative log likelihood in bits over the text's size in UTF-8 bytes: comparable between tokenizers."""
    return nats / math.log(2.0) / size if size > 0 else math.nan


# --- text


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """sacreBLEU of detokenised text: cased, tokenised by 13a, 0 to 100 (Papineni et al. 2002; Post 2018)."""
    return _corpus(_metric("BLEU"), hypotheses, references)


def chrf(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """Character n-gram F2, 0 to 100 (Popović 2015)."""
    return _corpus(_metric("CHRF"), hypotheses, references)


def bleu_tokenised(hypotheses: Sequence[str], references: Sequence[str], language: str) -> Score:
    """BLEU of lower-cased, Moses-normalised, Moses-tokenised text, as much literature (Multi30k, IWSLT) reports it.

    It is some points above `bleu`; the two don't compare.

    Args:
      language: the Moses rules, as a two-letter code.
    """
    # force: sacreBLEU warns about text that looks tokenised, which here is the point.
    metric = _metric("BLEU", tokenize="none", force=True)
    score = _corpus(metric, moses(hypotheses, language), moses(references, language))
    return Score(score.value, f"{score.signature}|input:lc.norm.tok.{language}(sacremoses)")


def moses(texts: Sequence[str], language: str) -> list[str]:
    """Texts lower-cased, punctuation normalised and tokenised as Moses' scripts do, tokens separated by a space."""
    import sacremoses

    # Lower-cased first: with its capital, "Bart." passes for an abbreviation that keeps its full stop.
    normalise = sacremoses.MosesPunctNormalizer(lang=language).normalize
    tokenise = sacremoses.MosesTokenizer(lang=language).tokenize
    return [tokenise(normalise(text.lower()), return_str=True, escape=False) for text in texts]


def exact_match(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """The share (0 to 1) of hypotheses equal to their reference, blanks at either end aside."""
    _paired(hypotheses, references)
    if not references:
        return math.nan
    return sum(h.strip() == r.strip() for h, r in zip(hypotheses, references, strict=True)) / len(references)


@functools.cache
def _metric(name: str, **options: Any) -> Any:
    """Made once a process: sacreBLEU keeps every metric it ever made, with the lines it scored."""
    import sacrebleu  # here, as scoring is rare and the import is not free

    return getattr(sacrebleu, name)(**options)


def _corpus(metric, hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    _paired(hypotheses, references)
    if not references:
        return Score(math.nan, "")
    value = metric.corpus_score(list(hypotheses), [list(references)]).score
    return Score(value, str(metric.get_signature()))


def _paired(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    if len(hypotheses) != len(references):
        raise ValueError(f"score: got {len(hypotheses)} hypotheses, expected {len(references)}, one a reference")
