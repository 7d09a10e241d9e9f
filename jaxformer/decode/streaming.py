"""Decoding of one prompt, with its tokens given out as they are chosen.

The programs are those of `generate`, so the tokens are the same. The compiled loop is stopped every few tokens and
launched again from its state: the number of steps is an argument, not part of the program. A launch costs time of its
own, so it takes as many steps as fit into `LATENCY_SECONDS`, measured on the launches before.
"""

from __future__ import annotations

import time
from typing import Iterator

import numpy as np

from jaxformer.config import DecodeConfig
from jaxformer.decode.batching import Prompt
from jaxformer.decode.generate import ModelBundle, PreparedGroup, prepare
from jaxformer.decode.scheduler import ActiveBatch, call_directly
from jaxformer.errors import ConfigError

LATENCY_SECONDS = 0.05
"""Time that the tokens of one launch may take: 20 pieces of text a second, more than anybody reads one by one.

A token that takes longer is given out alone."""
MAX_GROWTH = 2
"""A launch has at most this many times the steps of the one before: a single measurement may be off."""


def stream(
    model: ModelBundle, prompt: Prompt, options: DecodeConfig, row_index: int = 0, steps: int | None = None
) -> Iterator[np.ndarray]:
    """The new tokens of `generate` for one prompt, in pieces int32 `[n]`, n > 0, as they are chosen.

    Checks come before the first token: this is a function that returns an iterator. It decodes as far as it is read;
    between two reads nothing runs.

    Args:
      row_index: number that random draws depend on beside the seed.
      steps: tokens per launch; None: as many as fit into `LATENCY_SECONDS`. The tokens do not depend on it.

    Raises:
      ConfigError: as `generate`; or the options ask for a beam search, whose outputs change until it ends, or for
        several outputs.
    """
    check_streamable(options)
    (group,) = prepare(model, [prompt], options, [row_index])
    return _stream(group, steps)


def check_streamable(options: DecodeConfig) -> None:
    """Raises a ConfigError for options whose output is known at the end only."""
    if options.method == "beam":
        raise ConfigError(
            "decode.method: got beam, expected greedy or sample to stream: a beam search chooses its output when it "
            "ends; change it, or call without streaming"
        )
    if options.hypotheses > 1:
        raise ConfigError(f"decode.hypotheses: got {options.hypotheses}, expected 1 to stream; change it")


def _stream(group: PreparedGroup, steps: int | None) -> Iterator[np.ndarray]:
    queue, given = group.queue, 0
    count = 1 if steps is None else steps
    begun = time.monotonic()
    batch = ActiveBatch(group.run, queue.pop_batch(1), call_directly, queue, count)
    while True:
        tokens, lengths, _ = batch.hypotheses()
        batch.collect_finished()
        end = int(lengths[0, 0])
        if steps is None:
            count = next_steps(count, time.monotonic() - begun)
        if end > given:
            yield np.array(tokens[0, 0, given:end])
            given = end
        if not batch.has_prompts:
            return
        begun = time.monotonic()
        batch.launch(queue, count)


def next_steps(steps: int, seconds: float) -> int:
    """Number of steps of the next launch, after one of `steps` steps took `seconds`."""
    return min(max(int(LATENCY_SECONDS * steps / max(seconds, 1e-9)), 1), MAX_GROWTH * steps)
