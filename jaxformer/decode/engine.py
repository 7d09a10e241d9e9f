"""Decoding, end to end: encoded prompts in, hypotheses out, in order."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Callable, NamedTuple, Sequence

import jax
import numpy as np
from flax import linen as nn

from jaxformer.config import ConfigError, DecodeConfig, StackConfig
from jaxformer.decode.batching import Job, Prompt, Waiting, bucket, within
from jaxformer.decode.lanes import Lane, directly, from_thread
from jaxformer.decode.programs import Now, Programs, Vocabulary, forward
from jaxformer.decode.sample import Hypotheses
from jaxformer.parallel import mesh
from jaxformer.types import PyTree

__all__ = ["Hypothesis", "Vocabulary", "forward", "run"]

LANES = 2
"""Batches on their way at once on a CPU, where much of a pass keeps one core busy. Elsewhere it is one."""
PATIENCE = 2e-4
"""Seconds between two looks at which of them is ready."""
ALLOWANCE = 10
"""New tokens that a source gets beside `max_ratio` times its length."""


class Hypothesis(NamedTuple):
    """One output: its new tokens int32 `[n]` (with the end token, if reached) and its score (see `Hypotheses`)."""

    tokens: np.ndarray
    score: float


def run(
    module: nn.Module,
    variables: PyTree,
    prompts: Sequence[Prompt],
    config: DecodeConfig,
    vocabulary: Vocabulary,
    *,
    source_pad: int = 0,
    buckets: tuple[int, ...] = (),
    room: int | None = None,
    source_room: int | None = None,
    rows: Sequence[int] | np.ndarray | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[Hypothesis]]:
    """Decodes prompts of any lengths; result i belongs to prompt i and holds up to `config.hypotheses`, best first.

    Prompts are sorted by length and batched into few static shapes; when some are done, others take their places, if
    the model's state is `Refilling` and on one device. A prompt's result does not depend on the others (a draw depends
    on the seed and the prompt's id).

    Args:
      module: a Linen module with `start` and `step`; `variables` are its own.
      prompts: see `Prompt`; a prompt without "target" starts from `vocabulary.start`.
      source_pad: fills empty places of the source.
      buckets: preferred prompt lengths (see `batching.bucket`).
      room: the most target positions the model has, prompt included; None: no bound.
      source_room: the most source positions the model has; None: no bound.
      rows: ids of the prompts; None: their places in the list.
      progress: called with how many prompts are done, and of how many, whenever some are.

    Raises:
      ConfigError: a prompt is empty or leaves no room, or an option names a token that the vocabulary does not have.
    """
    _known(config, vocabulary)
    prompts = [_with_target(prompt, vocabulary) for prompt in prompts]
    _fit(prompts, source_room)
    limits = np.asarray([_limit(prompt, config, room) for prompt in prompts], np.int32)
    results: list[list[Hypothesis]] = [[] for _ in prompts]
    ids = np.arange(len(prompts), dtype=np.int32) if rows is None else np.asarray(rows, np.int32)
    if not prompts:
        return results
    # What is the same for every batch must not make another program of it.
    longest = int(limits.max())
    length = longest if longest == config.max_length else min(config.max_length, bucket(longest))
    static = dataclasses.replace(config, max_length=length, seed=0, batch=1, max_ratio=None)
    programs, key = Programs(module, static, vocabulary), jax.random.key(config.seed)
    variables, alone = programs.variables(variables), _on_one_device(variables)
    waiting, done = Waiting(prompts, (source_pad, vocabulary.pad), within(buckets, room, source_room)), 0

    def begin(job: Job, width: int | None) -> Now:
        fill = (0, job.batch.target.tokens.shape[0] - len(job.index))
        limit, names = (np.pad(values[job.index], fill) for values in (limits, ids))
        return programs.begin(variables, job.batch, limit, names, key, width=width)

    with contextlib.ExitStack() as stack:
        idle = [directly]
        if alone and mesh.platform() == "cpu":
            idle = [from_thread(stack.enter_context(ThreadPoolExecutor(1))) for _ in range(LANES)]
        lanes: list[Lane] = []
        while waiting or lanes:
            while waiting and idle and not (lanes and lanes[0].refills and len(waiting) < config.batch):
                job = waiting.take(config.batch)
                lanes.append(Lane(programs, variables, begin, job, refills=alone, send=idle.pop()))
                lanes[-1].go(waiting)
            lane = _ready(lanes)
            ended = list(lane.ended())
            for place, found in ended:
                results[place] = _unpad(found)
            done += len(ended)
            if ended and progress is not None:
                progress(done, len(prompts))
            lane.refill(waiting)
            if lane.busy:
                lane.go(waiting)
            else:
                lanes.remove(lane)
                idle.append(lane.send)
    return results


def _ready(lanes: Sequence[Lane]) -> Lane:
    """The first of `lanes` to be; where there is one, without looking."""
    while len(lanes) > 1:
        for lane in lanes:
            if lane.ready():
                return lane
        time.sleep(PATIENCE)
    return lanes[0]


def _on_one_device(variables: PyTree) -> bool:
    """Several run a batch to its end: its rows are divided among them."""
    return all(len(x.sharding.device_set) == 1 for x in jax.tree.leaves(variables) if isinstance(x, jax.Array))


def _known(config: DecodeConfig, vocabulary: Vocabulary) -> None:
    """Judges the token ids among the options, which only now can be compared with the vocabulary."""
    forced = [*config.forced_last, *([] if config.forced_first is None else [config.forced_first])]
    named = [*forced, *config.suppress, *(token for word in config.bad_words for token in word)]
    if vocabulary.size is not None and named and max(named) >= vocabulary.size:
        raise ConfigError(
            f"decode: got token {max(named)} to force or ban, expected ids below the vocabulary's {vocabulary.size}"
        )
    if named and min(named) < 0:  # an array's negative index is one from its end
        raise ConfigError(f"decode: got token {min(named)} to force or ban, expected ids from 0")
    if not all(config.bad_words):
        raise ConfigError("decode: got an empty sequence in bad_words, expected at least one token in each")


def _with_target(prompt: Prompt, vocabulary: Vocabulary) -> Prompt:
    if len(prompt.get("target", ())) > 0:
        return prompt
    if vocabulary.start is None:
        raise ConfigError("prompt: got no tokens, expected at least one; begin it with a token that starts a text")
    return {**prompt, "target": np.asarray([vocabulary.start], np.int32)}


def _fit(prompts: Sequence[Prompt], room: int | None) -> None:
    """Refuses sources that have more positions than the encoder."""
    for prompt in prompts:
        size = 1 + max(prompt["position"], default=-1) if "position" in prompt else len(prompt.get("source", ()))
        if room is not None and size > room:
            raise ConfigError(f"source: got {size} slots, expected at most the model's {room} positions; shorten it")


def positions(stack: StackConfig | None) -> int | None:
    """How many positions a stack has: learned ones have a table of them, the others no end."""
    learned = stack is not None and stack.encoding.kind == "learned"
    return stack.encoding.max_length - stack.encoding.offset if learned else None


def _limit(prompt: Prompt, config: DecodeConfig, room: int | None) -> int:
    """New tokens that a prompt may get."""
    limit = config.max_length
    if config.max_ratio is not None and "source" in prompt:
        limit = min(limit, int(config.max_ratio * len(prompt["source"])) + ALLOWANCE)
    if room is not None:
        # The last token is never read again, so it needs no position.
        limit = min(limit, room - len(prompt["target"]) + 1)
        if limit < 1:
            size = len(prompt["target"])
            raise ConfigError(f"prompt: got {size} tokens, expected at most the model's {room} positions; shorten it")
    return limit


def _unpad(found: Hypotheses) -> list[Hypothesis]:
    """The hypotheses of one row, without those that do not exist."""
    return [
        Hypothesis(tokens[:length].copy(), float(score))
        for tokens, length, score in zip(*found, strict=True)
        if length > 0
    ]
