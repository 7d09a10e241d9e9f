"""Tasks: what a model is trained to do, and how it is used afterwards. Each file of this folder defines one `TASK`.

A task is one file. It holds the fields of its examples, the features made of them, loss and metrics, the prediction
from lines of text, scores, and the head and sides that a model needs for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxformer import registry
from jaxformer.config import Config, DecodeConfig
from jaxformer.data.sources import Dataset, Example
from jaxformer.data.tokenizers import PairTemplate, Tokenizers
from jaxformer.decode.runner import Runner
from jaxformer.errors import ConfigError
from jaxformer.types import Batch, Sums

Features = Mapping[str, np.ndarray]
"""An encoded example or prompt: arrays by name. The pipeline pads and stacks them into a `Batch`.

int32 "source" [n] and "target" [m] (the decoder's input), optional "token_type" [n] of the source, and "segment" [n]:
1 and up, ascending; without it the example is one segment. "labels" are [m], [n], [n, C] or [], float32 if they are
scores, and "weights" are float32 of the same shape. A "source" of real numbers is float32 [n, C]. Float32 labels of
more axes are of the example as a whole, such as a forecast [H, C], and their weight is a scalar. "prefix" [] is the
number of leading slots of the target that see each other in both directions. "relation" [] is a label of the whole row
beside those of its slots, -1 if it has none.

Tasks that predict in a permuted order have int32 "order" [n] and "targets" [k] (see `types.Permutation`), with "labels"
and "weights" [k]; k is the same for all examples.

"reference" [k] float32 is what another model says about the row (`Task.reference`), in examples that have it.

Three more are counted and never stacked: "cut" [] is the number of tokens beyond `data.length`, absent if there are
none. "unread" [k] holds the labels that no slot carries (tags of words that were cut off). "empty" [] is 1 if nothing
is left to learn of the example, absent otherwise."""


class Framing(Protocol):
    """Text to features: tokenizers, and the special tokens that the model was trained with.

    `jaxformer.framing` has the framing of runs, `jaxformer.hf.framing` that of imported models.
    """

    @property
    def tokenizers(self) -> Tokenizers:
        """Tokenizers of source and target."""
        ...

    @property
    def chat_length(self) -> int | None:
        """Most tokens of a conversation and its next reply; None: no limit is known."""
        ...

    @property
    def pairing(self) -> PairTemplate:
        """Special tokens and token types around two texts, such as a question and its context."""
        ...

    def prompt(self, line: str) -> Features:
        """Features of an input line, without labels. "cut" is the number of tokens that were truncated."""
        ...

    def word_slots(self, line: str) -> list[int | None]:
        """Slot in `prompt(line)` of the first token of each word (`tagging.split_words`); None: it has no token."""
        ...

    def add_decoder_input(self, features: Features) -> Features:
        """`features` of a source, with the target that an encoder-decoder reads beside it when it does not generate."""
        ...


@dataclass(frozen=True, eq=False)
class Predictor:
    """A model that is ready for text, as tasks use it.

    Attributes:
      config: the resolved config; `config.task.classes` names the head's classes, () where only numbers are known.
      runner: runs the module over prompts.
      framing: makes prompts from text.
    """

    config: Config
    runner: Runner
    framing: Framing

    def prompts(self, lines: Sequence[str]) -> list[Features]:
        """The prompt of each line."""
        return [self.framing.prompt(line) for line in lines]


class Sample(NamedTuple):
    """An example as training shows it to people: input, expected output, and a note.

    Attributes:
      input: the line that `predict` reads.
      reference: the expected output line.
      note: what the line is, if it is not the whole input; "": it is.
    """

    input: str
    reference: str
    note: str = ""


def _no_derived_metrics(config: Config, values: Mapping[str, float], size: Mapping[str, float]) -> dict[str, float]:
    return dict(values)


def _first_text(example: Example) -> str:
    return example["source" if "source" in example else "text"]


@dataclass(frozen=True)
class Task:
    """Everything that distinguishes one task from another: functions and names, no state.

    Attributes:
      roles: fields that every example has ("source", "target", "text", "pair", "label", "tags", "question", ...).
      head: `config.model.head.kind` that the task needs.
      sides: parts that a model may have: "encoder", "decoder", "encoder, decoder".
      method: name of the method of `jaxformer.Model` that predicts.
      needs: head and sides in words, for errors.
      prepare: `(config, dataset) -> Dataset`: the data set as the task reads it, where that differs from its source's;
        None: it does not. `roles` are those of its result.
      has_layers: False if the model is a table of vectors: its stack has no layers.
      encode: `(config, tokenizers, example, rng) -> Features`. `rng` is a numpy Generator that depends on the run's
        seed, the epoch and the example only. Truncates to `config.data.length` and counts the truncated tokens.
      encode_windows: `(config, tokenizers, example, rng) -> list of Features`: the complete example in as many pieces
        as `config.data.length` needs. Evaluation measures these in place of `encode`'s; None: one piece per example.
      encode_row: `(config, tokenizers, ids, rng) -> Features` of up to `row_length(config)` ids of a running text, for
        packing "concat"; None: the rows of that packing are for next-token prediction, or the task refuses it.
      row_length: `(config) -> int`, ids of one such row.
      encode_score: like `encode_windows`, the pieces by which `Model.score` measures a complete text; None: those of
        `encode_windows`, or `encode`.
      loss: `(config, logits, batch) -> Sums` with at least "loss", whose quotient is minimised.
      metrics: `(config, logits, batch) -> Sums`, added over the whole split in evaluation; includes "loss" without
        smoothing or regularisers, so that it compares between runs.
      derived_metrics: `(config, values, size) -> values`: adds metrics derived from the divided ones (perplexity, bits
        per byte). `size` has "examples", "lines", "bytes" and "words" of the measured text, and "labels", the sum of
        label weights.
      unread_label_metrics: `(config, labels) -> Sums` that labels without a slot add to the metrics, so that a missing
        answer counts as a wrong one.
      prompt: `(config, tokenizers, line) -> Features` of an input line without labels, framed as in training.
      predict: `(predictor, lines, options) -> results`, one per line.
      input_line: `(example) -> str`: the line that `prompt` and `predict` read.
      output_line: `(result) -> str`: a result as one line of text.
      reference_line: `(config, example) -> str`: the expected output line, for people who compare.
      sample: `(config, tokenizers, example, rng) -> Sample` of a task without `score`, for people who watch a run;
        None: there is nothing to show. Tasks with `score` show `input_line` and `reference_line`.
      score: `(config, results, examples) -> values`: corpus scores of results (BLEU, exact match).
      diagnose: `(config, results, examples) -> values`: what stands behind the scores, as JSON values for reports:
        "confusion", "calibration", "entities", "sets", "numbers" (see `_diagnosis`); None: nothing does.
      diagnose_series: `(predictor, examples) -> values`, the same of a task whose examples are arrays, which are not
        decoded as text.
      score_names: names of the values that `score` may return.
      score_signatures: `(config) -> name -> str`: exact definition of each score (sacreBLEU's signature).
      classes: names of the head's classes, where the task fixes them; None: the data has them.
      reference: `(config, logits, batch) -> float32 [B, ...]`, what the model that a run starts from says of each row.
        It is computed once before training (`train/reference.py`), kept in the cache, and given to `encode` as the
        example's "reference". None: the task needs no other model.
      couples_rows: `(config) -> bool`: True if a row's loss depends on the other rows of its microbatch.
      has_prefix: True if examples have the feature "prefix".
      reads_other_text: `(config) -> bool`: True if `encode` also reads the text of another example, which the pipeline
        draws from the same split and adds as the example's "other".
      slots: `(config, count) -> int`: slots of a text of `count` ids as `encode` makes it. With it, `encode` and
        `encode_windows` read nothing of an example but these ids, so that token shards need not decode them, and
        batches are planned from the lengths of documents. None: what `encode` makes depends on more.
      check: `(config) -> None`: raises a ConfigError where the metrics cannot be computed from the data's classes,
        which the resolved config has.
      reads_document: True if an input is a whole text with its lines, such as a table, and not a line.
      options: frozen dataclass of the task's own settings, the type of `config.task.options`; None: it has none.
    """

    roles: tuple[str, ...]
    head: str
    sides: tuple[str, ...]
    method: str
    needs: str
    encode: Callable[[Config, Any, Example, np.random.Generator], Features]
    loss: Callable[[Config, Any, Batch], Sums]
    metrics: Callable[[Config, Any, Batch], Sums]
    prompt: Callable[[Config, Any, str], Features]
    predict: Callable[[Predictor, Sequence[str], DecodeConfig], Sequence[Any]]
    derived_metrics: Callable[[Config, Mapping[str, float], Mapping[str, float]], dict[str, float]] = (
        _no_derived_metrics
    )
    input_line: Callable[[Example], str] = _first_text
    output_line: Callable[[Any], str] = str
    reference_line: Callable[[Config, Example], str] = lambda config, example: example["target"]
    sample: Callable[[Config, Tokenizers, Example, np.random.Generator], Sample] | None = None
    score: Callable[[Config, Sequence[Any], Sequence[Example]], dict[str, float]] | None = None
    diagnose: Callable[[Config, Sequence[Any], Sequence[Example]], dict[str, Any]] | None = None
    diagnose_series: Callable[[Predictor, Sequence[Example]], dict[str, Any]] | None = None
    score_names: tuple[str, ...] = ()
    encode_windows: Callable[[Config, Tokenizers, Example, np.random.Generator], list[Features]] | None = None
    encode_row: Callable[[Config, Tokenizers, np.ndarray, np.random.Generator], Features] | None = None
    row_length: Callable[[Config], int] = lambda config: config.data.length
    encode_score: Callable[[Config, Tokenizers, Example, np.random.Generator], list[Features]] | None = None
    has_prefix: bool = False
    reads_other_text: Callable[[Config], bool] = lambda config: False
    slots: Callable[[Config, int], int] | None = None
    unread_label_metrics: Callable[[Config, np.ndarray], Sums] = lambda config, labels: {}
    classes: tuple[str, ...] | None = None
    score_signatures: Callable[[Config], dict[str, str]] = lambda config: {}
    reference: Callable[[Config, Any, Batch], Any] | None = None
    couples_rows: Callable[[Config], bool] = lambda config: False
    check: Callable[[Config], None] = lambda config: None
    reads_document: bool = False
    options: type | None = None
    prepare: Callable[[Config, Dataset], Dataset] | None = None
    has_layers: bool = True

    @property
    def has_samples(self) -> bool:
        """True if examples can be decoded for people to see."""
        return self.score is not None or self.sample is not None


def get(name: str) -> Task:
    """The task defined by the file `name` of this folder.

    Raises:
      ConfigError: the name is "none": such a model is only called.
    """
    if name == "none":
        known = ", ".join(registry.names(__name__))
        raise ConfigError(f"config.task.name: got none, expected one of {known}; this model can only be called")
    return registry.member(__name__, name, "TASK")


def fitting(config: Config) -> Task | None:
    """The task that a model can be used for: its own, else the first with its head and sides, else with its head.

    None if no task has such a head: the model only embeds text, or is only called. Dialogue is a model's own task only,
    since it needs a chat template beside the head.
    """
    own = [] if config.task.name == "none" else [get(config.task.name)]
    others = [task for task in map(get, registry.names(__name__)) if task.method != "chat"]
    of_series = config.model.series is not None
    stacks = config.model.stacks.values()
    has_layers = not stacks or any(stack.layers for stack in stacks)
    candidates = [
        task
        for task in (*own, *others)
        if task.head == config.model.head.kind
        and (task.has_layers or not has_layers)
        and ("values" in task.roles) == of_series
    ]
    sides = ", ".join(side for side in ("encoder", "decoder") if getattr(config.model, f"has_{side}"))
    return next((task for task in candidates if sides in task.sides), candidates[0] if candidates else None)


def require(config: Config, *methods: str) -> None:
    """Raises a ConfigError that names the fitting method of `jaxformer.Model`, if it is none of `methods`."""
    task = fitting(config)
    if task is not None and task.method in methods:
        return
    by_method = {task.method: task.needs for task in map(get, registry.names(__name__))}
    expected = " or ".join(by_method[method] for method in methods)
    got, use = ("no head for a task", "embed") if task is None else (task.needs, task.method)
    raise ConfigError(f"model: got {got}, expected {expected} for this method; use model.{use}")


def text_lines(lines: Sequence[str]) -> list[str]:
    """The input as a list of strings.

    Raises:
      ConfigError: it is one string, or holds something else.
    """
    if isinstance(lines, (str, bytes)) or not all(isinstance(line, str) for line in lines):
        got = type(lines).__name__ if isinstance(lines, (str, bytes)) else "other things than strings in it"
        raise ConfigError(f"lines: got {got}, expected a list of strings; write [line]")
    return list(lines)
