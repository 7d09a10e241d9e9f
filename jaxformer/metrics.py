"""Measures: sums that add up over any split of the data, and scores of finished text."""

from __future__ import annotations

import functools
import importlib.metadata
import math
import re
import string
from collections import Counter
from typing import Any, Iterable, NamedTuple, Sequence

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


# --- pairs of numbers


def pearson(found: Num[np.ndarray, " n"], true: Num[np.ndarray, " m"]) -> float:
    """The correlation of two series, -1 to 1; NaN where one of them is constant, or there are fewer than two."""
    x, y = found.astype(np.float64), true.astype(np.float64)
    if len(x) != len(y):
        raise ValueError(f"correlation: got {len(x)} numbers, expected {len(y)}, as many as the others")
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan
    x, y = x - x.mean(), y - y.mean()
    return float(np.clip(x @ y / np.sqrt((x @ x) * (y @ y)), -1.0, 1.0))


def spearman(found: Num[np.ndarray, " n"], true: Num[np.ndarray, " m"]) -> float:
    """The correlation of the ranks of two series; NaN as `pearson`."""
    return pearson(ranks(found), ranks(true))


def ranks(values: Num[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Ranks from 1; of equal values the mean of theirs."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]


# --- tagged words


class Entities(NamedTuple):
    """Shares (0 to 1) of entities that are right in place and kind: of those found, of the true ones, and F1."""

    precision: float
    recall: float
    f1: float


def entities(found: Sequence[Sequence[str]], true: Sequence[Sequence[str]]) -> Entities:
    """Of the entities of all sentences together, as the CoNLL shared tasks count them (Tjong Kim Sang 2002).

    Args:
      found: the tags of every sentence ("O", "B-person", "I-person"), see `spans`.
      true: the right ones; as many.

    Returns:
      NaN where there is nothing to divide by.
    """
    pairs = [(set(spans(a)), set(spans(b))) for a, b in zip(found, true, strict=True)]
    counts = np.array([(len(a & b), len(a), len(b)) for a, b in pairs], int).reshape(-1, 3)
    both, ours, theirs = counts.sum(axis=0).tolist()
    share = lambda part, whole: part / whole if whole else math.nan  # noqa: E731
    return Entities(share(both, ours), share(both, theirs), share(2 * both, ours + theirs))


def spans(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """(kind, first, one past the last word) of the entities that tags mark.

    IOB1, IOB2 (BIO) and BIOES are read by the same rules, those of the script conlleval: an entity begins at every B
    and S, and at an I or E that does not go on with an open one of its kind; it ends after every E and S, and before
    whatever does not go on with it.
    """
    found: list[tuple[str, int, int]] = []
    open_kind = None
    for place, (mark, kind) in enumerate((tag[:1], tag[2:]) for tag in tags):
        if mark in ("I", "E") and kind == open_kind:
            found[-1] = (kind, found[-1][1], place + 1)
        elif mark in MARKS:
            found.append((kind, place, place + 1))
        open_kind = kind if mark in ("B", "I") else None
    return found


MARKS = ("B", "I", "E", "S")
"""How a tag begins that says where in an entity a word stands: beginning, inside, end, single."""


def marks_spans(tags: Iterable[str]) -> bool:
    """Whether such tags mark spans, and are not names of something else (parts of speech)."""
    tags = set(tags)
    return tags != {"O"} and all(tag == "O" or _marks(tag) for tag in tags)


def unknown_marks(tags: Iterable[str]) -> list[str]:
    """The tags, sorted, that mark no part of an entity although others of them do. None where all do, or none does.

    Tags are taken for those of entities where one of them is "O" and another begins with a mark.
    """
    tags = set(tags)
    others = {tag for tag in tags if tag != "O" and not _marks(tag)}
    return sorted(others) if "O" in tags and len(others) < len(tags) - 1 else []


def _marks(tag: str) -> bool:
    return tag[:1] in MARKS and tag[1:2] == "-" and len(tag) > 2


# --- answers


def answer_scores(found: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Exact match and F1 (0 to 1), each answer's best over its references, mean over all (Rajpurkar et al. 2016, 2018).

    Args:
      found: an answer a question; "" says that there is none.
      references: the right ones of each question; none: it has no answer.
    """
    _paired(found, references)
    if not references:
        return {"exact_match": math.nan, "f1": math.nan}
    exact, shared = [], []
    for answer, right in zip(found, references, strict=True):
        # SQuAD 2.0's script counts a question whose answers are nothing but articles and punctuation as one without.
        right = [text for text in right if normal_answer(text)] or [""]
        exact.append(max(normal_answer(answer) == normal_answer(text) for text in right))
        shared.append(max(_shared_words(normal_answer(answer).split(), normal_answer(text).split()) for text in right))
    return {"exact_match": float(np.mean(exact)), "f1": float(np.mean(shared))}


def normal_answer(text: str) -> str:
    """An answer as SQuAD compares it: lower case, without ASCII punctuation, without a, an, the, single blanks."""
    text = "".join(letter for letter in text.lower() if letter not in PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _shared_words(found: Sequence[str], right: Sequence[str]) -> float:
    """F1 of two bags of words; where one is empty, whether both are."""
    if not found or not right:
        return float(found == right)
    both = (Counter(found) & Counter(right)).total()
    return 2.0 * both / (len(found) + len(right))


PUNCTUATION = frozenset(string.punctuation)


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


def rouge(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Score]:
    """ROUGE-1, ROUGE-2 and ROUGE-L, 0 to 100: F1 of shared words, of shared pairs of words and of the longest common
    subsequence, mean over texts (Lin 2004). Words are lower-case letters and digits, stemmed if longer than 3."""
    from rouge_score import rouge_scorer

    _paired(hypotheses, references)
    names = {"rouge1": "rouge1", "rouge2": "rouge2", "rougeL": "rouge_l"}
    scorer = rouge_scorer.RougeScorer(list(names), use_stemmer=True)
    each = [scorer.score(*pair) for pair in zip(references, hypotheses, strict=True)]
    signature = f"f1|stem:porter|mean|version:rouge-score {importlib.metadata.version('rouge-score')}"
    mean = {
        name: 100.0 * float(np.mean([found[name].fmeasure for found in each])) if each else math.nan for name in names
    }
    return {ours: Score(mean[theirs], signature) for theirs, ours in names.items()}


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


def _paired(hypotheses: Sequence[str], references: Sequence[Any]) -> None:
    if len(hypotheses) != len(references):
        raise ValueError(f"score: got {len(hypotheses)} hypotheses, expected {len(references)}, one a reference")
