"""What a model is trained to do. One file a task, each defining `TASK`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Mapping

import numpy as np

from jaxformer import registry
from jaxformer.config import Config, ConfigError
from jaxformer.types import Array, Batch, Sums

if TYPE_CHECKING:
    from jaxformer.data.sources import Example

Features = Mapping[str, np.ndarray]
"""One encoded example. int32 `source` [n] and `target` [m] (decoder input), optional `kind` [n] (source token types),
`segment` [n] (1 and up, ascending; without it all of an example is one), `labels` [m] or [n] or [] (float32 if they are
scores) and float32 `weights` of the same shape. The pipeline pads and stacks these into a `Batch`.

Two more are counted and never stacked: `cut` [], how many tokens `data.length` cut off (absent where none), and
`unread` [k], the labels that no slot carries (tags of words that were cut off)."""


@dataclass(frozen=True)
class Task:
    """A record; functions only.

    Attributes:
      roles: what an example must have ("source", "target", "text", "pair", "label", "tags", "question", ...).
      encode: `(config, tokenizers, example, rng) -> Features`. `rng` is a numpy Generator that depends on the run's
        seed, the epoch and the example only. Cuts to `config.data.length`, and says how much.
      windows: `(config, tokenizers, example, rng) -> list of Features`: all of an example in as many pieces as
        `config.data.length` needs, which evaluation measures in place of `encode`'s; None: an example is one piece.
      loss: `(config, logits, batch) -> Sums` with at least "loss", whose quotient is minimised.
      metrics: `(config, logits, batch) -> Sums`, added over the whole split in evaluation; includes "loss" without
        smoothing or regularisers, so that it compares between runs.
      finish: `(config, values, size) -> values`: adds measures derived from the divided ones (perplexity, bits per
        byte). `size` has the "examples", "lines", "bytes" and "words" of the text that was measured, and "labels", the
        evaluation's sum of weights.
      unread: `(config, labels) -> Sums` that labels without a slot add to the measures: an answer that is not given is
        judged as well.
      input: `(example) -> str`: the line that `prompt` and `decode` read, made of an example.
      reference: `(config, example) -> str`: what the line made of a result is compared with by whoever looks at it.
      prompt: `(config, tokenizers, line) -> Features` of an input line without labels, for decoding.
      decode: `(model, lines, config.decode) -> list of results`, one a line; `model` is a `jaxformer.Model`.
      line: `(result) -> str`: a result as one line of text output.
      score: `(config, results, examples) -> values`: corpus measures of decoded results (BLEU, exact match).
      scores: names of the measures that `score` may make.
      classes: what the head's classes are, where the task says it and not the data.
      signatures: `(config) -> name -> str`: what exactly a score is (sacreBLEU's signature), to print beside it.
      couples: `(config) -> bool`: whether a row's loss depends on the other rows of its microbatch.
      refuse: `(config) -> None`: raises a ConfigError where the measures cannot be made of the data's classes, which
        the resolved config has.
    """

    roles: tuple[str, ...]
    encode: Callable[..., Features]
    loss: Callable[[Config, Array, Batch], Sums]
    metrics: Callable[[Config, Array, Batch], Sums]
    finish: Callable[[Config, dict[str, float], Mapping[str, float]], dict[str, float]]
    prompt: Callable[..., Features] | None = None
    decode: Callable[..., list[Any]] | None = None
    input: Callable[[Example], str] = lambda example: example["source" if "source" in example else "text"]
    line: Callable[[Any], str] = str
    reference: Callable[[Config, Example], str] = lambda config, example: example["target"]
    score: Callable[..., dict[str, float]] | None = None
    scores: tuple[str, ...] = ()
    windows: Callable[..., list[Features]] | None = None
    unread: Callable[[Config, np.ndarray], Sums] = lambda config, labels: {}
    classes: tuple[str, ...] | None = None
    signatures: Callable[[Config], dict[str, str]] = lambda config: {}
    couples: Callable[[Config], bool] = lambda config: False
    refuse: Callable[[Config], None] = lambda config: None


def get(name: str) -> Task:
    """The task defined by the file `name` of this folder.

    Raises:
      ConfigError: the name is "none": such a model is only called.
    """
    if name == "none":
        known = ", ".join(registry.names(__name__))
        raise ConfigError(f"config.task.name: got none, expected one of {known}; this model can only be called")
    return registry.member(__name__, name, "TASK")
