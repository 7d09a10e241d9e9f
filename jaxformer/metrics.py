"""Measures: sums that add over any split of the data, and scores of generated text."""

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
from jaxformer.types import Array, DeferredLogits, Sums


class Score(NamedTuple):
    """A corpus score, and its signature in the format of sacreBLEU."""

    value: float
    signature: str


# --- sums


def add(left: Sums, right: Sums) -> Sums:
    """Sum of the numerators and denominators of both sides: float32 on the device, float64 for numpy arrays.

    Float32 cannot count beyond 2^24, which the labels of a large split exceed: fetch the sums of a batch, then add.

    Raises:
      ValueError: the sides have different measures.
    """
    if left.keys() != right.keys():
        raise ValueError(f"sums: got {sorted(right)}, expected {sorted(left)}; add sums of one function only")
    return {name: (_plus(left[name][0], right[name][0]), _plus(left[name][1], right[name][1])) for name in left}


def _plus(left: ArrayLike, right: ArrayLike) -> ArrayLike:
    if isinstance(left, jax.Array) or isinstance(right, jax.Array):
        return left + right
    return np.add(left, right, dtype=np.float64)


def divide(sums: Sums) -> dict[str, float]:
    """Numerator / denominator of each measure; NaN where the denominator is 0.

    A measure with one entry for each class is divided by class, and averaged over the classes that occur (macro
    average).
    """
    return {name: _quotient(*pair) for name, pair in jax.device_get(dict(sums)).items()}


def _quotient(numerator: ArrayLike, denominator: ArrayLike) -> float:
    numerator, denominator = (np.atleast_1d(np.asarray(part, np.float64)) for part in (numerator, denominator))
    counted = denominator != 0
    return float(np.mean(numerator[counted] / denominator[counted])) if counted.any() else math.nan


def accuracy(
    logits: Float[Array, "*batch V"] | DeferredLogits, labels: Int[Array, "*batch"], weights: Num[Array, "*batch"]
) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
    """Weighted number of labels that have the highest logit, and sum of the weights."""
    weights = weights.astype(jnp.float32)
    best = chunks.map_chunks(_argmax, logits, ()) if isinstance(logits, DeferredLogits) else jnp.argmax(logits, axis=-1)
    return jnp.sum((best == labels) * weights), jnp.sum(weights)


def _argmax(logits: Float[Array, "N V"], _: tuple, part: chunks.VocabPart) -> Int[Array, " N"]:
    """Vocabulary id of the highest logit, the lowest id of several."""
    highest = jnp.max(logits, axis=-1)
    ids = jnp.argmax(logits, axis=-1) + part.offset
    return part.min(jnp.where(highest == part.max(highest), ids, jnp.iinfo(jnp.int32).max))


def f1(
    logits: Float[Array, "*batch C"], labels: Int[Array, "*batch"], weights: Num[Array, "*batch"]
) -> tuple[Float32[Array, " C"], Float32[Array, " C"]]:
    """Numerators and denominators of F1 by class; the mean of their quotients is macro-F1.

    F1 = 2 TP / (2 TP + FP + FN). The denominator is the number of predictions of a class plus the number of its true
    labels. Both are counts, which add over parts of a corpus, unlike averages of F1 by batch.
    """
    classes = jnp.arange(logits.shape[-1])
    weights = weights.astype(jnp.float32)[..., None]
    predicted = (jnp.argmax(logits, axis=-1)[..., None] == classes) * weights
    true = (labels[..., None] == classes) * weights
    axes = tuple(range(labels.ndim))
    correct = jnp.sum(jnp.where(true != 0, predicted, 0.0), axis=axes)
    return 2.0 * correct, jnp.sum(predicted, axis=axes) + jnp.sum(true, axis=axes)


def set_scores(logits: Float[Array, "B C"], labels: Num[Array, "B C"], weights: Num[Array, " B"]) -> Sums:
    """Sums of "micro_f1", "macro_f1" and "subset_accuracy" of sets of classes.

    A class is predicted where its logit is above 0, a probability above one half. F1 = 2 TP / (2 TP + FP + FN): of all
    decisions together (micro), and with an entry for each class (macro). A set is right if all of its classes are.
    """
    weights = weights.astype(jnp.float32)
    predicted = logits > 0
    true = labels > 0.5
    row = weights[:, None]
    right = 2.0 * jnp.sum((predicted & true) * row, axis=0)
    counted = jnp.sum(predicted * row, axis=0) + jnp.sum(true * row, axis=0)
    equal = jnp.all(predicted == true, axis=-1)
    return {
        "micro_f1": (jnp.sum(right), jnp.sum(counted)),
        "macro_f1": (right, counted),
        "subset_accuracy": (jnp.sum(equal * weights), jnp.sum(weights)),
    }


# --- pairs of numbers


def pearson(predicted: Num[np.ndarray, " n"], true: Num[np.ndarray, " m"]) -> float:
    """Pearson correlation, -1 to 1; NaN if a series is constant or has fewer than two values."""
    x, y = predicted.astype(np.float64), true.astype(np.float64)
    if len(x) != len(y):
        raise ValueError(f"correlation: got {len(x)} numbers, expected {len(y)}, as many as the true ones")
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan
    x, y = x - x.mean(), y - y.mean()
    return float(np.clip(x @ y / np.sqrt((x @ x) * (y @ y)), -1.0, 1.0))


def spearman(predicted: Num[np.ndarray, " n"], true: Num[np.ndarray, " m"]) -> float:
    """Spearman correlation: that of the ranks, -1 to 1; NaN as in `pearson`."""
    return pearson(ranks(predicted), ranks(true))


def ranks(values: Num[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Ranks from 1; equal values share the mean of their ranks."""
    _, index, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[index]


# --- tagged words


class Entities(NamedTuple):
    """Precision, recall and F1 (0 to 1) of entities; one is correct if its span and its type are."""

    precision: float
    recall: float
    f1: float


def entity_scores(predicted: Sequence[Sequence[str]], true: Sequence[Sequence[str]]) -> Entities:
    """Precision, recall and F1 over the entities of all sentences, as in the CoNLL shared tasks (Tjong Kim Sang 2002).

    A score without entities to count is NaN.

    Args:
      predicted: the tags of each sentence ("O", "B-person", "I-person"), see `entity_spans`.
      true: the correct tags of each sentence.
    """
    pairs = [(set(entity_spans(a)), set(entity_spans(b))) for a, b in zip(predicted, true, strict=True)]
    counts = np.array([(len(a & b), len(a), len(b)) for a, b in pairs], int).reshape(-1, 3)
    correct, predictions, labels = counts.sum(axis=0).tolist()
    ratio = lambda part, total: part / total if total else math.nan  # noqa: E731
    return Entities(ratio(correct, predictions), ratio(correct, labels), ratio(2 * correct, predictions + labels))


def entity_spans(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """Entities that `tags` mark, as (type, first word, last word + 1).

    The schemes IOB1, IOB2 (BIO) and BIOES share one set of rules, that of the script conlleval. An entity begins at
    each B and S, and at an I or E that does not continue an open entity of its type. It ends after each E and S, and
    before a tag that does not continue it.
    """
    spans: list[tuple[str, int, int]] = []
    open_type = None
    for index, (mark, entity_type) in enumerate((tag[:1], tag[2:]) for tag in tags):
        if mark in ("I", "E") and entity_type == open_type:
            spans[-1] = (entity_type, spans[-1][1], index + 1)
        elif mark in MARKS:
            spans.append((entity_type, index, index + 1))
        open_type = entity_type if mark in ("B", "I") else None
    return spans


MARKS = ("B", "I", "E", "S")
"""First letters of tags that mark a word of an entity: beginning, inside, end, single."""


def are_span_tags(tags: Iterable[str]) -> bool:
    """True if `tags` mark entities, rather than label single words (parts of speech)."""
    tags = set(tags)
    return tags != {"O"} and all(tag == "O" or _marks(tag) for tag in tags)


def unknown_marks(tags: Iterable[str]) -> list[str]:
    """Sorted tags that mark no word of an entity, if other tags do; [] if all do or none does.

    Tags are those of entities if one of them is "O" and another begins with a mark.
    """
    tags = set(tags)
    unknown = {tag for tag in tags if tag != "O" and not _marks(tag)}
    return sorted(unknown) if "O" in tags and len(unknown) < len(tags) - 1 else []


def _marks(tag: str) -> bool:
    return tag[:1] in MARKS and tag[1:2] == "-" and len(tag) > 2


# --- answers


def answer_scores(predicted: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Mean exact match and F1 (0 to 1), each answer scored by its best reference (Rajpurkar et al. 2016, 2018).

    Args:
      predicted: one answer a question; "" for no answer.
      references: correct answers of each question; empty for a question without an answer.
    """
    _paired(predicted, references)
    if not references:
        return {"exact_match": math.nan, "f1": math.nan}
    exact, shared = [], []
    for answer, correct in zip(predicted, references, strict=True):
        # As in SQuAD 2.0's script, answers of articles and punctuation only mean that there is no answer.
        correct = [normal_answer(text) for text in correct if normal_answer(text)] or [""]
        exact.append(max(normal_answer(answer) == text for text in correct))
        shared.append(max(_word_f1(normal_answer(answer).split(), text.split()) for text in correct))
    return {"exact_match": float(np.mean(exact)), "f1": float(np.mean(shared))}


def normal_answer(text: str) -> str:
    """`text` as SQuAD compares answers: lower case, without ASCII punctuation and articles, with single blanks."""
    text = "".join(letter for letter in text.lower() if letter not in PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _word_f1(predicted: Sequence[str], correct: Sequence[str]) -> float:
    """F1 of two bags of words; if one is empty, 1 if both are and 0 otherwise."""
    if not predicted or not correct:
        return float(predicted == correct)
    shared = (Counter(predicted) & Counter(correct)).total()
    return 2.0 * shared / (len(predicted) + len(correct))


PUNCTUATION = frozenset(string.punctuation)


# --- language models


def perplexity(nats: float, count: float = 1.0) -> float:
    """Perplexity exp(nats / count), for a total negative log likelihood over `count` tokens (or words)."""
    if count <= 0:
        return math.nan
    mean = nats / count
    return math.exp(mean) if mean < 700.0 else math.inf


def bits_per_byte(nats: float, size: float) -> float:
    """Negative log likelihood in bits for each UTF-8 byte of the text: comparable between tokenizers."""
    return nats / math.log(2.0) / size if size > 0 else math.nan


# --- text


def bleu(hypotheses: Sequence[str], references: Sequence[str], language: str = "") -> Score:
    """BLEU of detokenised text, 0 to 100: sacreBLEU, cased (Papineni et al. 2002; Post 2018).

    Args:
      language: two-letter code of the references. Words are those of sacreBLEU for it: of `zh` the characters, of `ja`
        and `ko` MeCab's, else 13a.
    """
    return _corpus(_metric("BLEU", trg_lang=language), hypotheses, references)


def bleu_is_defined(references: Sequence[str], language: str = "") -> bool:
    """True if a reference has the four words in a row that BLEU counts: else it is 0 for perfect text, too."""
    tokenise = _metric("BLEU", trg_lang=language).tokenizer
    return any(len(tokenise(reference).split()) >= 4 for reference in references)


def chrf(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """Character n-gram F2, 0 to 100 (Popović 2015)."""
    return _corpus(_metric("CHRF"), hypotheses, references)


def bleu_tokenised(hypotheses: Sequence[str], references: Sequence[str], language: str) -> Score:
    """BLEU of lower-cased, Moses-normalised, Moses-tokenised text, 0 to 100, as in papers on Multi30k and IWSLT.

    It is some points higher than `bleu`; the two are not comparable.

    Args:
      language: two-letter code of the Moses rules.
    """
    # force: sacreBLEU warns about text that looks tokenised, which is intended here.
    metric = _metric("BLEU", tokenize="none", force=True)
    score = _corpus(metric, moses(hypotheses, language), moses(references, language))
    return Score(score.value, f"{score.signature}|input:lc.norm.tok.{language}(sacremoses)")


def rouge(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Score]:
    """ROUGE-1, ROUGE-2 and ROUGE-L, 0 to 100, as means over texts (Lin 2004).

    They are the F1 of shared words, of shared pairs of words, and of the longest common subsequence. Words are
    lower-case letters a to z and digits, stemmed if longer than 3. Of references most of whose letters are others, such
    as Russian ones, these would be none: words are then of Unicode's letters (`_UnicodeWords`), not stemmed.
    """
    from rouge_score import rouge_scorer

    _paired(hypotheses, references)
    names = {"rouge1": "rouge1", "rouge2": "rouge2", "rougeL": "rouge_l"}
    letters = [letter.isascii() for letter in "".join(references) if letter.isalpha()]
    tokenizer = _UnicodeWords() if sum(letters) < len(letters) / 2 else None
    scorer = rouge_scorer.RougeScorer(list(names), use_stemmer=True, tokenizer=tokenizer)
    scores = [scorer.score(*pair) for pair in zip(references, hypotheses, strict=True)]
    version = importlib.metadata.version("rouge-score")
    signature = f"f1|stem:porter|mean|version:rouge-score {version}|words:a-z0-9, of other scripts unicode unstemmed"
    mean = {
        name: 100.0 * float(np.mean([score[name].fmeasure for score in scores])) if scores else math.nan
        for name in names
    }
    return {key: Score(mean[name], signature) for name, key in names.items()}


UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
"""Scripts without blanks between words."""


class _UnicodeWords:
    """A tokenizer for rouge-score: words of letters and digits in any script, or single characters of `UNSPACED`."""

    def tokenize(self, text: str) -> list[str]:
        """The words of a text, in lower case."""
        import regex

        words = rf"(?V1)[{UNSPACED}]\p{{M}}*|[[\p{{L}}\p{{M}}\p{{N}}]--[{UNSPACED}]]+"
        return regex.findall(words, text.lower())


def moses(texts: Sequence[str], language: str) -> list[str]:
    """Lower-cased texts, normalised and tokenised as by the Moses scripts, with blanks between tokens."""
    import sacremoses

    # Lower-case first: with a capital, "Bart." is taken for an abbreviation and keeps its full stop.
    normalise = sacremoses.MosesPunctNormalizer(lang=language).normalize
    tokenise = sacremoses.MosesTokenizer(lang=language).tokenize
    return [tokenise(normalise(text.lower()), return_str=True, escape=False) for text in texts]


def exact_match(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Fraction (0 to 1) of hypotheses that equal their reference, ignoring blanks at both ends."""
    _paired(hypotheses, references)
    if not references:
        return math.nan
    return sum(h.strip() == r.strip() for h, r in zip(hypotheses, references, strict=True)) / len(references)


@functools.cache
def _metric(name: str, **options: Any) -> Any:
    """A sacreBLEU metric, cached: the package keeps every metric it creates, with the lines that it scored."""
    import sacrebleu  # imported late: scoring is rare, and the import slow

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
