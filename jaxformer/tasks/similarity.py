"""Similarity in meaning of two sentences: the cosine of their vectors, both from one model (SBERT, Reimers and Gurevych
2019).

The sentences of a pair are two segments of one row, each with positions from 0, so that neither sees the other and any
model reads them as it would alone. The head `pair` makes a vector of each. Two objectives:

- regression: the squared error of cosine and score (SBERT, section 3.1).
- contrastive: each sentence has to find its partner among those of the batch, by cosine / temperature, in both
  directions (InfoNCE, van den Oord et al. 2018; SimCSE, Gao et al. 2021). A sentence paired with itself, under two
  dropout masks, is unsupervised SimCSE: give `data.columns` the same column for text and pair.

"The batch" is the global one, over all devices and hosts, with all its pairs, those that are not partners too. Under
accumulation it is a microbatch, data.batch / train.accumulation rows: the one loss that is not the same in parts. In
evaluation it is evaluate.batch rows in the order of the data, or of their lengths with buckets, so such a loss compares
only between runs that agree in these.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from jaxformer import losses, metrics
from jaxformer.config import Config, DecodeConfig
from jaxformer.data.sources import Example
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.errors import ConfigError
from jaxformer.tasks import Features, Predictor, Task, _embedding, _tokens
from jaxformer.types import Array, Batch, Sums


def encode(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Features:
    """`<cls> text <sep> <cls> pair <sep>` as segments 1 and 2, and the score; contrastive: weight 1 for partners.

    Raises:
      ConfigError: there is no score to regress to.
    """
    features = _encode_sentences(config, tokenizers, (example["text"], example["pair"]))
    if config.task.objective == "contrastive":
        score = example.get("score", 1.0)
        is_partner = np.asarray(score >= config.task.positive, np.float32)
        return {**features, "labels": np.asarray(score, np.float32), "weights": is_partner}
    if "score" not in example:
        got = f"got an example without a score ({', '.join(example)}), expected one for the objective regression"
        raise ConfigError(f"similarity: {got}; set data.columns.score, or task.objective=contrastive")
    return {**features, "labels": np.asarray(example["score"], np.float32)}


def prompt(config: Config, tokenizers: Tokenizers, line: str) -> Features:
    """A sentence; after a tab, its partner."""
    return _encode_sentences(config, tokenizers, line.split("\t", 1))


def _encode_sentences(config: Config, tokenizers: Tokenizers, sentences: Sequence[str]) -> Features:
    """The framed stream. Each sentence has half of a row, whatever its partner, so that its vector is its own."""
    tokenizer = tokenizers.source
    first, last = _tokens.special_tokens_around(tokenizer)
    max_length = max(config.data.length // 2 - len(first) - len(last), 0)
    ids = [tokenizer.encode(sentence) for sentence in sentences]
    cut = _tokens.truncation(sum(max(len(part) - max_length, 0) for part in ids))
    parts = [[*first, *part[:max_length], *last] for part in ids]
    tokens = [token for part in parts for token in part]
    segment = np.repeat(np.arange(1, len(parts) + 1, dtype=np.int32), [len(part) for part in parts])
    return {**_tokens.input_stream(config, tokens, [0] * len(tokens)), "segment": segment, **cut}


def loss(config: Config, vectors: Float[Array, "B 2 D"], batch: Batch) -> Sums:
    """The loss of the objective, which training minimises."""
    sums = _contrastive_sums(config, vectors, batch)["loss"] if couples_rows(config) else _squared_error(vectors, batch)
    return {"loss": sums}


def similarity_metrics(config: Config, vectors: Float[Array, "B 2 D"], batch: Batch) -> Sums:
    """The loss; if contrastive, also the fraction of sentences whose partner is the nearest of the batch."""
    return (
        _contrastive_sums(config, vectors, batch) if couples_rows(config) else {"loss": _squared_error(vectors, batch)}
    )


def couples_rows(config: Config) -> bool:
    """True if rows are each other's negatives."""
    return config.task.objective == "contrastive"


def _squared_error(vectors: Float[Array, "B 2 D"], batch: Batch) -> tuple[Array, Array]:
    labels, weights = _tokens.labels_and_weights(batch)
    return losses.squared_error(losses.cosine(vectors[:, 0], vectors[:, 1]), labels, weights)


def _contrastive_sums(config: Config, vectors: Float[Array, "B 2 D"], batch: Batch) -> Sums:
    scores = losses.cosine_matrix(vectors[:, 0], vectors[:, 1]) / config.task.temperature
    has_pair, partner = _rows_with_pair(batch), jnp.arange(len(vectors))
    _, weights = _tokens.labels_and_weights(batch)
    return {
        "loss": losses.contrastive(scores, has_pair, weights),
        "accuracy": metrics.accuracy(losses.mask_scores(scores, has_pair), partner, weights),
    }


def _rows_with_pair(batch: Batch) -> Bool[Array, " B"]:
    """True for rows that hold a pair. A weight of 0 does not tell: pairs that are no partners have it too."""
    stream = _tokens.read_stream(batch, "target" if batch.source is None else "source")
    return jnp.any(stream.slots.segment != 0, axis=1)


def input_line(example: Example) -> str:
    """Both sentences with a tab between them. Tabs inside of them become blanks."""
    return "\t".join(example[role].replace("\t", " ") for role in ("text", "pair"))


def predict(predictor: Predictor, lines: Sequence[str], options: DecodeConfig) -> list[float]:
    """The cosine of each line's two sentences.

    Raises:
      ConfigError: a line has not exactly one tab.
    """
    pairs = [line.split("\t") for line in lines]
    for line, pair in zip(lines, pairs, strict=True):
        if len(pair) != 2:
            shown = line if len(line) < 60 else line[:60] + "..."
            raise ConfigError(
                f"similarity: got {shown!a}, expected two sentences with a tab between them; mend the line"
            )
    return _embedding.cosines(predictor, pairs)


def output_line(result: float) -> str:
    """The cosine with four decimals."""
    return f"{result:.4f}"


def reference_line(config: Config, example: Example) -> str:
    """The score, between 0 and 1, if there is one."""
    return output_line(example["score"]) if "score" in example else ""


def score(config: Config, results: Sequence[float], examples: Sequence[Example]) -> dict[str, float]:
    """The correlation of cosines and scores, of ranks (Spearman) and of values (Pearson); nothing without scores."""
    if not all("score" in example for example in examples):
        return {}
    predicted, true = np.array(results), np.array([example["score"] for example in examples])
    return {"spearman": metrics.spearman(predicted, true), "pearson": metrics.pearson(predicted, true)}


TASK = Task(
    roles=("text", "pair"),
    head="pair",
    sides=("encoder", "decoder"),
    method="embed",
    needs="a head of vectors of sentences",
    encode=encode,
    loss=loss,
    metrics=similarity_metrics,
    input_line=input_line,
    prompt=prompt,
    predict=predict,
    output_line=output_line,
    reference_line=reference_line,
    score=score,
    score_names=("spearman", "pearson"),
    couples_rows=couples_rows,
)
