"""How alike two sentences mean: the cosine of their vectors, both made by one model (Reimers and Gurevych 2019, SBERT).

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

from typing import TYPE_CHECKING, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from jaxformer import losses, metrics
from jaxformer.config import Config, ConfigError, DecodeConfig
from jaxformer.tasks import Features, Task, _tokens
from jaxformer.types import Array, Batch, Sums

if TYPE_CHECKING:
    from jaxformer.data.sources import Example
    from jaxformer.data.tokenizers import Tokenizers
    from jaxformer.model import Model


def encode(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Features:
    """`<cls> text <sep> <cls> pair <sep>` as segments 1 and 2, and the score; contrastive: weight 1 for partners.

    Raises:
      ConfigError: there is no score to regress to.
    """
    features = _inputs(config, tokenizers, (example["text"], example["pair"]))
    if config.task.objective == "contrastive":
        score = example.get("score", 1.0)
        return {**features, "labels": np.float32(score), "weights": np.float32(score >= config.task.positive)}
    if "score" not in example:
        got = f"got an example without a score ({', '.join(example)}), expected one for the objective regression"
        raise ConfigError(f"similarity: {got}; set data.columns.score, or task.objective=contrastive")
    return {**features, "labels": np.float32(example["score"])}


def prompt(config: Config, tokenizers: Tokenizers, line: str) -> Features:
    """A sentence; after a tab, its partner."""
    return _inputs(config, tokenizers, line.split("\t", 1))


def _inputs(config: Config, tokenizers: Tokenizers, sentences: Sequence[str]) -> Features:
    """The stream that the model has. A sentence has half of a row, whatever its partner: its vector is its own."""
    tokenizer = tokenizers.source
    first, last = _tokens.ends(tokenizer)
    room = max(config.data.length // 2 - len(first) - len(last), 0)
    ids = [tokenizer.encode(sentence) for sentence in sentences]
    cut = _tokens.left_out(sum(max(len(part) - room, 0) for part in ids))
    parts = [[*first, *part[:room], *last] for part in ids]
    tokens = [token for part in parts for token in part]
    segment = np.repeat(np.arange(1, len(parts) + 1, dtype=np.int32), [len(part) for part in parts])
    return {**_tokens.streamed(config, tokens, [0] * len(tokens)), "segment": segment, **cut}


def loss(config: Config, vectors: Float[Array, "B 2 D"], batch: Batch) -> Sums:
    """What training minimises."""
    return {"loss": _contrast(config, vectors, batch)["loss"] if couples(config) else _error(vectors, batch)}


def measures(config: Config, vectors: Float[Array, "B 2 D"], batch: Batch) -> Sums:
    """The loss; contrastive: and the share of sentences whose partner is the nearest of the batch."""
    return _contrast(config, vectors, batch) if couples(config) else {"loss": _error(vectors, batch)}


def couples(config: Config) -> bool:
    """Whether rows are each other's negatives."""
    return config.task.objective == "contrastive"


def _error(vectors: Float[Array, "B 2 D"], batch: Batch) -> tuple[Array, Array]:
    return losses.squared_error(losses.cosine(vectors[:, 0], vectors[:, 1]), batch.labels, batch.weights)


def _contrast(config: Config, vectors: Float[Array, "B 2 D"], batch: Batch) -> Sums:
    scores = losses.cosines(vectors[:, 0], vectors[:, 1]) / config.task.temperature
    real, own = _real(batch), jnp.arange(len(vectors))
    return {
        "loss": losses.contrastive(scores, real, batch.weights),
        "accuracy": metrics.accuracy(losses.among(scores, real), own, batch.weights),
    }


def _real(batch: Batch) -> Bool[Array, " B"]:
    """Rows that hold a pair: a weight of 0 may also be that of a pair that is no partners."""
    stream = batch.target if batch.source is None else batch.source
    return jnp.any(stream.slots.segment != 0, axis=1)


def finish(config: Config, values: dict[str, float], size: Mapping[str, float]) -> dict[str, float]:
    """Nothing to add."""
    return values


def text(example: Example) -> str:
    """Both sentences with a tab between them. Tabs inside of them become blanks."""
    return "\t".join(example[role].replace("\t", " ") for role in ("text", "pair"))


def decode(model: Model, lines: Sequence[str], config: DecodeConfig) -> list[float]:
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
    return model.similarity(pairs)


def reference(config: Config, example: Example) -> str:
    """The score, between 0 and 1, if there is one."""
    return line(example["score"]) if "score" in example else ""


def line(result: float) -> str:
    return f"{result:.4f}"


def score(config: Config, results: Sequence[float], examples: Sequence[Example]) -> dict[str, float]:
    """The correlation of cosines and scores, of ranks (Spearman) and of values (Pearson); nothing without scores."""
    if not all("score" in example for example in examples):
        return {}
    found, true = np.array(results), np.array([example["score"] for example in examples])
    return {"spearman": metrics.spearman(found, true), "pearson": metrics.pearson(found, true)}


TASK = Task(
    roles=("text", "pair"),
    encode=encode,
    loss=loss,
    metrics=measures,
    finish=finish,
    input=text,
    prompt=prompt,
    decode=decode,
    line=line,
    reference=reference,
    score=score,
    scores=("spearman", "pearson"),
    couples=couples,
)
