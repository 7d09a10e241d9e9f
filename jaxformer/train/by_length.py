"""Measures of an evaluation by the length of the source: how a model does on short and on long inputs.

A length is the number of tokens that the model reads of an input, special tokens included, at most `data.length`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from jaxformer import metrics, tasks
from jaxformer.config import Config
from jaxformer.errors import ConfigError
from jaxformer.types import Batch, PyTree, Sums

QUANTILES = (0.25, 0.5, 0.75)
"""Default bounds of the bins, as fractions of the measured inputs."""


@dataclass(frozen=True)
class LengthBins:
    """Intervals of lengths: up to and with `upper[0]`, from there up to and with `upper[1]`, ..., and all above."""

    upper: tuple[int, ...]

    def index(self, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
        """Number of the bin of each length."""
        return np.searchsorted(np.asarray(self.upper), np.asarray(lengths), side="left")

    def labels(self) -> list[str]:
        """Each bin in words: "1-9", "10-12", "13-"."""
        lows = [1, *(bound + 1 for bound in self.upper)]
        return [f"{low}-{high}" for low, high in zip(lows, [*map(str, self.upper), ""], strict=True)]


def applies(config: Config) -> bool:
    """True if each row of an evaluation is one input, apart from what is predicted, so that it has a length."""
    task = tasks.get(config.task.name)
    predicts_input = config.model.head.kind == "tokens" and not config.model.has_encoder
    single = config.data.packing == "none" or config.model.is_seq2seq  # pairs are packed in training only
    whole = single and task.encode_windows is None and not task.couples_rows(config)
    return whole and not predicts_input


def row_lengths(config: Config, batch: Batch) -> Int[np.ndarray, " B"]:
    """Number of input tokens of each row; 0 for rows that only fill the batch."""
    stream = batch.source if config.model.input_side == "source" else batch.target
    if stream is None:
        raise ValueError("batch: got no input, expected one")
    return np.sum(np.asarray(stream.slots.segment) > 0, axis=1)


def choose_bins(config: Config, lengths: np.ndarray) -> LengthBins:
    """The bins of `config.evaluate.length_bins`; without them the quartiles of these lengths.

    Raises:
      ConfigError: bins are given for a task whose rows have no lengths.
    """
    if config.evaluate.length_bins:
        if not applies(config):
            raise ConfigError(
                f"config.evaluate.length_bins: got {config.evaluate.length_bins} for the task {config.task.name} with "
                f"data.packing {config.data.packing}, expected (): its rows are not single inputs with a length"
            )
        return LengthBins(config.evaluate.length_bins)
    present = lengths[lengths > 0]
    quantiles = np.quantile(present, QUANTILES, method="lower").astype(int) if len(present) else []
    longest = int(present.max()) if len(present) else 0
    return LengthBins(tuple(sorted({int(bound) for bound in quantiles if bound < longest})))


class BinnedEvaluation:
    """An evaluation step that adds up the sums of each bin beside those of all rows.

    Args:
      eval_step: `(variables, batch) -> sums, sums by bin`: `step.make_binned_eval_step`.

    Attributes:
      bins: the bins.
    """

    def __init__(self, eval_step: Any, bins: LengthBins) -> None:
        self.eval_step, self.bins = eval_step, bins
        self.total: Sums = {}

    def __call__(self, variables: PyTree, batch: Batch) -> Sums:
        """The sums over all rows."""
        sums, parts = self.eval_step(variables, batch)
        parts = jax.device_get(parts)
        self.total = metrics.add(self.total, parts) if self.total else parts
        return sums

    def rows(self) -> list[dict[str, Any]]:
        """For each bin its lengths ("tokens"), the number of inputs ("examples"), and their measures."""
        found = []
        for number, label in enumerate(self.bins.labels()):
            own = {name: tuple(np.asarray(part)[number] for part in pair) for name, pair in self.total.items()}
            count = int(own.pop("examples")[0])
            found.append({"tokens": label, "examples": count, **(metrics.divide(own) if count else {})})
        return found


def add_scores(
    config: Config,
    rows: Sequence[Mapping[str, Any]],
    bins: LengthBins,
    lengths: Sequence[int],
    results: Sequence[Any],
    examples: Sequence[Any],
) -> list[dict[str, Any]]:
    """`rows` with the task's scores of the decoded text of each bin, and the number of texts decoded if not all are."""
    score, index = tasks.get(config.task.name).score, bins.index(lengths)
    if score is None:
        return [dict(row) for row in rows]
    found = []
    for number, row in enumerate(rows):
        members = np.flatnonzero(index == number)
        own = [[values[i] for i in members] for values in (results, examples)]
        decoded = {"decoded_examples": len(members)} if len(members) != row["examples"] else {}
        found.append({**row, **decoded, **(score(config, *own) if len(members) else {})})
    return found


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each bin: lengths, number of inputs, measures."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [tuple(names), *(tuple(_cell(row.get(name)) for name in names) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "-" if math.isnan(value) else f"{value:.6g}"
    return "-" if value is None else str(value)
