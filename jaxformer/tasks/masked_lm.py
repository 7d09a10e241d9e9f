"""Masked language modelling: an encoder restores tokens that were hidden from it (Devlin et al. 2019, BERT)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Mapping, Sequence

import numpy as np

from jaxformer import metrics
from jaxformer.config import Config, DecodeConfig
from jaxformer.tasks import Features, Task, _tokens

if TYPE_CHECKING:
    from jaxformer.data.sources import Example
    from jaxformer.data.tokenizers import Tokenizer, Tokenizers
    from jaxformer.model import Model

NAME = "masked_lm"
MASKED, RANDOM = 0.8, 0.1
"""Shares of the chosen tokens that become <mask> and a random token; the others stay (BERT, section 3.1)."""

SPECIALS = ("pad", "bos", "eos", "unk", "mask", "cls", "sep")


def encode(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> Features:
    """Source `<cls> ids <sep>` with some ids hidden, the true ids as labels, and weight 1 where one was chosen."""
    tokenizer = tokenizers.source
    ids = tokenizer.encode(example["text"])
    kept = _tokens.cut(config, tokenizer, ids)
    return {**_masked(config, tokenizer, kept, rng), **_tokens.left_out(len(ids) - len(kept))}


def windows(config: Config, tokenizers: Tokenizers, example: Example, rng: np.random.Generator) -> list[Features]:
    """One text as many rows as it takes, each masked by itself."""
    tokenizer = tokenizers.source
    ids = tokenizer.encode(example["text"])
    room = len(_tokens.cut(config, tokenizer, range(config.data.length)))
    return [
        _masked(config, tokenizer, ids[begin : begin + room], rng) for begin in range(0, max(len(ids), 1), max(room, 1))
    ]


def _masked(config: Config, tokenizer: Tokenizer, ids: Sequence[int], rng: np.random.Generator) -> Features:
    ids = np.array(ids, np.int32)
    starts = np.array(tokenizer.word_starts(ids.tolist()), bool) if config.task.whole_words else None
    chosen = choose(len(ids), config.task.mask_rate, rng, starts)
    labels, weights = _tokens.framed(tokenizer, ids), np.zeros(len(ids), np.float32)
    weights[chosen] = 1.0
    before = len(_tokens.known(tokenizer.cls))
    weights = np.pad(weights, (before, len(labels) - len(ids) - before))
    return {
        "source": _tokens.framed(tokenizer, hide(ids, chosen, tokenizer, rng)),
        "labels": labels,
        "weights": weights,
    }


def choose(count: int, rate: float, rng: np.random.Generator, starts: np.ndarray | None = None) -> np.ndarray:
    """Which of `count` tokens to predict: `rate` of them, at least one (none of none).

    Args:
      starts: bool `[count]`, True where a word begins: then words are chosen whole. A word that would exceed the
        number wanted is passed over, unless it is the first one drawn.
    """
    if count == 0:
        return np.zeros(0, np.int64)
    wanted = max(1, round(count * rate))
    if starts is None:
        return rng.permutation(count)[:wanted]
    words = np.cumsum(starts) - starts[0]
    sizes = np.bincount(words)
    chosen, total = np.zeros(len(sizes), bool), 0
    for word in rng.permutation(len(sizes)):
        if total == 0 or total + sizes[word] <= wanted:
            chosen[word] = True
            total += sizes[word]
        if total >= wanted:
            break
    return np.flatnonzero(chosen[words])


def hide(ids: np.ndarray, chosen: np.ndarray, tokenizer: Tokenizer, rng: np.random.Generator) -> np.ndarray:
    """`ids` with the chosen ones replaced: by <mask>, by a random ordinary token, or not at all."""
    mask = _tokens.required(tokenizer, NAME, "mask")
    ordinary = _ordinary(tokenizer.size, tuple(getattr(tokenizer, role) for role in SPECIALS))
    draw = rng.random(len(chosen))
    others = ordinary[rng.integers(len(ordinary), size=len(chosen))]
    hidden = ids.copy()
    hidden[chosen] = np.where(draw < MASKED, mask, np.where(draw < MASKED + RANDOM, others, ids[chosen]))
    return hidden


def prompt(config: Config, tokenizers: Tokenizers, line: str) -> Features:
    """A line in which the mask token's name ("the <mask> sat") is the token to fill in."""
    tokenizer = tokenizers.source
    return {"source": _tokens.framed(tokenizer, _tokens.cut(config, tokenizer, tokenizer.parse(line)))}


def finish(config: Config, values: dict[str, float], size: Mapping[str, float]) -> dict[str, float]:
    """Adds the perplexity of the hidden tokens, which does not compare with a language model's."""
    return {**values, "perplexity": metrics.perplexity(values["loss"])}


def decode(model: Model, lines: Sequence[str], config: DecodeConfig) -> list[dict[str, Any]]:
    """For each line `{"text", "masks"}`: it with its masks filled, and the candidates of each mask, best first."""
    name = model.tokenizers.source.names["mask"]
    found = model.fill_mask(lines)
    return [{"text": _filled(line, name, masks), "masks": masks} for line, masks in zip(lines, found, strict=True)]


def _filled(line: str, name: str, masks: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    for candidates in masks:
        token = candidates[0]["token"]
        line = line.replace(name, token.strip() or token, 1)  # the line has the blanks that a piece may carry
    return line


@functools.cache
def _ordinary(size: int, specials: tuple[int | None, ...]) -> np.ndarray:
    """The ids that stand for text."""
    return np.setdiff1d(np.arange(size, dtype=np.int32), [token for token in specials if token is not None])


TASK = Task(
    roles=("text",),
    encode=encode,
    loss=_tokens.loss,
    metrics=_tokens.measures,
    finish=finish,
    windows=windows,
    prompt=prompt,
    decode=decode,
    line=lambda result: result["text"],
)
