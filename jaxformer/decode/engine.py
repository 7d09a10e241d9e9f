"""Decoding, end to end: encoded prompts in, hypotheses out, in order. The only `jit` of decoding is here."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Float32, Int, Key

from jaxformer.config import ConfigError, DecodeConfig
from jaxformer.decode import beam, sample
from jaxformer.decode.batching import Prompt, bucket, jobs
from jaxformer.decode.sample import Hypotheses
from jaxformer.parallel.rules import constrain
from jaxformer.types import Array, Batch, Decodable, PyTree, State

ALLOWANCE = 10
"""New tokens that a source gets beside `max_ratio` times its length."""


class Hypothesis(NamedTuple):
    """One output: its new tokens int32 `[n]` (with the end token, if reached) and its score (see `Hypotheses`)."""

    tokens: np.ndarray
    score: float


@dataclass(frozen=True)
class Vocabulary:
    """What decoding must know of the target tokens.

    Attributes:
      eos: tokens that end an output.
      pad: fills empty places (never read).
      start: prompt of a seq2seq model when none is given; None: prompts always come with a target.
      size: real tokens; models have rows beyond (padding for even shards), which are never chosen. None: all are real.
    """

    eos: tuple[int, ...]
    pad: int
    start: int | None = None
    size: int | None = None


@dataclass(frozen=True)
class Bound:
    """A Linen module with its variables, as a `Decodable` that never proposes tokens from `size` on."""

    module: nn.Module
    variables: PyTree
    size: int | None = None

    def start(self, batch: Batch, length: int) -> tuple[Float32[Array, "B V"], State]:
        return self._real(self.module.apply(self.variables, batch, length, method="start"))

    def step(self, tokens: Int[Array, "B N"], state: State) -> tuple[Float32[Array, "R V"], State]:
        return self._real(self.module.apply(self.variables, tokens, state, method="step"))

    def _real(self, result: tuple[Float32[Array, "B V"], State]) -> tuple[Float32[Array, "B V"], State]:
        logits, state = result
        if self.size is not None and self.size < logits.shape[-1]:
            logits = jnp.where(jnp.arange(logits.shape[-1]) < self.size, logits, -jnp.inf)
        return logits, state


def bind(module: nn.Module, variables: PyTree, size: int | None = None) -> Decodable:
    """`module` (with methods `start` and `step`) and its variables as one object that a decoder can drive.

    A module may have `unstack(variables)`, which gives them as it reads them best in a loop.
    """
    return Bound(module, module.unstack(variables) if hasattr(module, "unstack") else variables, size)


def decode(
    model: Decodable,
    batch: Batch,
    config: DecodeConfig,
    vocabulary: Vocabulary,
    limit: Int[Array, " B"],
    rows: Int[Array, " B"],
    key: Key[Array, ""],
) -> Hypotheses:
    """One batch by the method that `config` names."""
    eos, pad = vocabulary.eos, vocabulary.pad
    if config.method == "beam":
        return beam.search(model, batch, config, eos, pad, limit)
    return sample.sample(model, batch, config, eos, pad, limit, rows, key)


@functools.partial(jax.jit, static_argnames=("module", "config", "vocabulary"))
def _compiled(module, variables, batch, config, vocabulary, limit, rows, key) -> Hypotheses:
    model = bind(module, variables, vocabulary.size)
    return _everywhere(decode(model, batch, config, vocabulary, limit, rows, key))


def _everywhere(found: PyTree) -> PyTree:
    """Results whole on every device, so that each of several processes can read them."""
    return jax.tree.map(lambda x: constrain(x, *(None,) * x.ndim), found)


@functools.partial(jax.jit, static_argnames=("module", "method", "finish"))
def forward(
    module: nn.Module,
    variables: PyTree,
    batch: Batch,
    method: str | None = None,
    finish: Callable[[Any, Batch], Array] | None = None,
) -> Any:
    """The module applied without decoding, compiled once a shape: for classes, scores and hidden states.

    Args:
      method: one of the module's, or None for its call. "encode" is given the source alone.
      finish: what to make of the output `(output, batch) -> array`, in the same program; a function of a module, since
        each new one is a compilation.
    """
    output = module.apply(variables, batch.source if method == "encode" else batch, method=method)
    return _everywhere(output if finish is None else finish(output, batch))


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
    rows: Sequence[int] | np.ndarray | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[Hypothesis]]:
    """Decodes prompts of any lengths; result i belongs to prompt i and holds up to `config.hypotheses`, best first.

    Prompts are sorted by length and batched into few static shapes; one program is compiled for each. A prompt's
    result does not depend on the others (a draw depends on the seed and the prompt's id).

    Args:
      module: a Linen module with `start` and `step`; `variables` are its own.
      prompts: see `Prompt`; a prompt without "target" starts from `vocabulary.start`.
      source_pad: fills empty places of the source.
      buckets: preferred prompt lengths (see `batching.bucket`).
      room: the most target positions the model has, prompt included; None: no bound.
      rows: ids of the prompts; None: their places in the list.
      progress: called after each batch with how many prompts are done, and of how many.

    Raises:
      ConfigError: a prompt is empty or leaves no room, or an option names a token that the vocabulary does not have.
    """
    _known(config, vocabulary)
    prompts = [_with_target(prompt, vocabulary) for prompt in prompts]
    limits = [_limit(prompt, config, room) for prompt in prompts]
    results: list[list[Hypothesis]] = [[] for _ in prompts]
    ids = range(len(prompts)) if rows is None else rows
    key, done = jax.random.key(config.seed), 0
    for index, batch in jobs(prompts, config.batch, (source_pad, vocabulary.pad), buckets):
        empty = batch.target.tokens.shape[0] - len(index)
        limit = np.pad(np.asarray([limits[i] for i in index], np.int32), (0, empty))
        # What is the same for every batch of a shape must not make another program of it.
        longest = int(limit.max())
        length = longest if longest == config.max_length else min(config.max_length, bucket(longest))
        static = dataclasses.replace(config, max_length=length, seed=0, batch=1, max_ratio=None)
        names = np.pad(np.asarray([ids[i] for i in index], np.int32), (0, empty))
        found = jax.device_get(_compiled(module, variables, batch, static, vocabulary, limit, names, key))
        for row, i in enumerate(index):
            results[i] = _unpad(found, row)
        done += len(index)
        if progress is not None:
            progress(done, len(prompts))
    return results


def _known(config: DecodeConfig, vocabulary: Vocabulary) -> None:
    """Judges the token ids among the options, which only now can be compared with the vocabulary."""
    forced = [token for token in (config.forced_first, config.forced_last) if token is not None]
    named = [*forced, *config.suppress, *(token for word in config.bad_words for token in word)]
    if vocabulary.size is not None and named and max(named) >= vocabulary.size:
        raise ConfigError(
            f"decode: got token {max(named)} to force or ban, expected ids below the vocabulary's {vocabulary.size}"
        )


def _with_target(prompt: Prompt, vocabulary: Vocabulary) -> Prompt:
    if len(prompt.get("target", ())) > 0:
        return prompt
    if vocabulary.start is None:
        raise ConfigError("prompt: got no tokens, expected at least one; begin it with a token that starts a text")
    return {**prompt, "target": np.asarray([vocabulary.start], np.int32)}


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


def _unpad(found: Hypotheses, row: int) -> list[Hypothesis]:
    """The hypotheses of one row, without those that do not exist."""
    return [
        Hypothesis(tokens[:length].copy(), float(score))
        for tokens, length, score in zip(found.tokens[row], found.lengths[row], found.scores[row], strict=True)
        if length > 0
    ]
