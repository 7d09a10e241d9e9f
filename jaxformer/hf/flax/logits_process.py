"""Logits processors and warpers under the old library's names: functions `(sequences, scores, cur_len) -> scores`.

Sequences are int `[B, max_length]`, of which the first `cur_len` tokens are written; scores are `[B, V]`. Everything is
of static shape, so that they stand in a compiled loop.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.errors import ConfigError
from jaxformer.types import Array

BANNED = -jnp.inf


class FlaxLogitsProcessor(abc.ABC):
    """A function of scores that generation applies at every step; subclasses write `__call__`."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash((type(self), self._values()))

    def _values(self) -> Any:
        """Key under which equal processors share a compiled program; for other objects, the object itself."""
        values = tuple(sorted(vars(self).items()))
        try:
            hash(values)
        except TypeError:
            return id(self)
        return values

    @abc.abstractmethod
    def __call__(self, input_ids: Array, scores: Array, cur_len: Any) -> Array:
        """The scores `[B, V]` of the next token, changed."""


class FlaxLogitsWarper(FlaxLogitsProcessor):
    """A function of scores that sampling applies after the processors."""


class FlaxLogitsProcessorList(list[Any]):
    """Functions of scores, applied in order."""

    def __call__(self, input_ids: Array, scores: Array, cur_len: Any, **options: Any) -> Array:
        for processor in self:
            scores = processor(input_ids, scores, cur_len, **options)
        return scores


class FlaxTemperatureLogitsWarper(FlaxLogitsWarper):
    """Scores divided by a temperature above 0."""

    def __init__(self, temperature: float) -> None:
        if isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or temperature <= 0:
            raise ConfigError(f"temperature: got {temperature!r}, expected a number above 0")
        self.temperature = temperature

    def __call__(self, input_ids: Array, scores: Array, cur_len: Any) -> Array:
        return scores / self.temperature


class FlaxTopKLogitsWarper(FlaxLogitsWarper):
    """Keeps the `top_k` highest scores (Fan et al. 2018)."""

    def __init__(self, top_k: int, filter_value: float = BANNED, min_tokens_to_keep: int = 1) -> None:
        if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
            raise ConfigError(f"top_k: got {top_k!r}, expected a whole number of at least 1")
        self.top_k, self.filter_value = max(top_k, min_tokens_to_keep), filter_value

    def __call__(self, input_ids: Array, scores: Array, cur_len: Any) -> Array:
        _, kept = jax.lax.top_k(scores, min(self.top_k, scores.shape[-1]))
        rows = jnp.arange(len(scores))[:, None]
        keep = jnp.zeros(scores.shape, bool).at[rows, kept].set(True)
        return jnp.where(keep, scores, self.filter_value)


class FlaxTopPLogitsWarper(FlaxLogitsWarper):
    """Keeps the likeliest tokens up to a probability of `top_p` together (Holtzman et al. 2020)."""

    def __init__(self, top_p: float, filter_value: float = BANNED, min_tokens_to_keep: int = 1) -> None:
        if isinstance(top_p, bool) or not isinstance(top_p, (int, float)) or not 0 <= top_p <= 1:
            raise ConfigError(f"top_p: got {top_p!r}, expected a number from 0 to 1")
        self.top_p, self.filter_value, self.min_tokens_to_keep = top_p, filter_value, min_tokens_to_keep

    def __call__(self, input_ids: Array, scores: Array, cur_len: Any) -> Array:
        descending, order = jax.lax.top_k(scores, scores.shape[-1])
        probabilities = jax.nn.softmax(descending, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        keep = (before < self.top_p) | (jnp.arange(scores.shape[-1]) < self.min_tokens_to_keep)
        rows = jnp.arange(len(scores))[:, None]
        return jnp.where(jnp.zeros(scores.shape, bool).at[rows, order].set(keep), scores, self.filter_value)


class FlaxForcedBOSTokenLogitsProcessor(FlaxLogitsProcessor):
    """Makes the second token of the sequence `bos_token_id`."""

    def __init__(self, bos_token_id: int) -> None:
        self.bos_token_id = bos_token_id

    def __call__(self, input_ids: Array, scores: Array, cur_len: Any) -> Array:
        return jnp.where(cur_len == 1, _only(scores, self.bos_token_id), scores)


class FlaxForcedEOSTokenLogitsProcessor(FlaxLogitsProcessor):
    """Makes the last token of `max_length` `eos_token_id`."""

    def __init__(self, max_length: int, eos_token_id: int) -> None:
        self.max_length, self.eos_token_id = max_length, eos_token_id

    def __call__(self, input_ids: Array, scores: Array, cur_len: Any) -> Array:
        return jnp.where(cur_len == self.max_length - 1, _only(scores, self.eos_token_id), scores)


class FlaxMinLengthLogitsProcessor(FlaxLogitsProcessor):
    """Bans the end token while the sequence has at most `min_length` tokens (the text gets one more)."""

    def __init__(self, min_length: int, eos_token_id: int | tuple[int, ...]) -> None:
        if isinstance(min_length, bool) or not isinstance(min_length, int) or min_length < 0:
            raise ConfigError(f"min_length: got {min_length!r}, expected a whole number of at least 0")
        self.min_length, self.eos_token_id = min_length, eos_token_id

    def __call__(self, input_ids: Array, scores: Array, cur_len: Any) -> Array:
        ended = jnp.asarray(self.eos_token_id, jnp.int32)
        return jnp.where(cur_len <= self.min_length, scores.at[:, ended].set(BANNED), scores)


class FlaxSuppressTokensLogitsProcessor(FlaxLogitsProcessor):
    """Bans tokens at every step."""

    def __init__(self, suppress_tokens: Iterable[int]) -> None:
        self.suppress_tokens = tuple(int(token) for token in suppress_tokens)

    def __call__(self, input_ids: Array, scores: Array, cur_len: Any) -> Array:
        return scores.at[:, jnp.asarray(self.suppress_tokens, jnp.int32)].set(BANNED)


class FlaxSuppressTokensAtBeginLogitsProcessor(FlaxLogitsProcessor):
    """Bans tokens where the sequence has `begin_index` tokens."""

    def __init__(self, begin_suppress_tokens: Iterable[int], begin_index: int) -> None:
        self.begin_suppress_tokens = tuple(int(token) for token in begin_suppress_tokens)
        self.begin_index = begin_index

    def __call__(self, input_ids: Array, scores: Array, cur_len: Any) -> Array:
        banned = scores.at[:, jnp.asarray(self.begin_suppress_tokens, jnp.int32)].set(BANNED)
        return jnp.where(cur_len == self.begin_index, banned, scores)


class FlaxForceTokensLogitsProcessor(FlaxLogitsProcessor):
    """Makes the tokens at some indices of the sequence what a list of (index, token) says."""

    def __init__(self, force_token_map: Iterable[tuple[int, int | None]]) -> None:
        pairs = {int(index): -1 if token is None else int(token) for index, token in force_token_map}
        size = max(pairs, default=-1) + 2  # the last entry forces nothing, for all indices beyond
        self.force_token_array = tuple(pairs.get(i, -1) for i in range(size))

    def __call__(self, input_ids: Array, scores: Array, cur_len: Any) -> Array:
        token = jnp.asarray(self.force_token_array)[jnp.minimum(cur_len, len(self.force_token_array) - 1)]
        return jnp.where(token >= 0, _only(scores, jnp.maximum(token, 0)), scores)


class FlaxNoRepeatNGramLogitsProcessor(FlaxLogitsProcessor):
    """Bans tokens that would repeat an n-gram of the sequence (Paulus et al. 2018)."""

    def __init__(self, ngram_size: int) -> None:
        if isinstance(ngram_size, bool) or not isinstance(ngram_size, int) or ngram_size < 1:
            raise ConfigError(f"ngram_size: got {ngram_size!r}, expected a whole number of at least 1")
        self.ngram_size = ngram_size

    def __call__(self, input_ids: Array, scores: Array, cur_len: Any) -> Array:
        n, length = self.ngram_size, input_ids.shape[1]
        if length < n:
            return scores
        starts = jnp.arange(length - n + 1)
        latest = jax.lax.dynamic_slice_in_dim(input_ids, jnp.maximum(cur_len - n + 1, 0), n - 1, axis=1)
        same = (starts + n <= cur_len) & (cur_len >= n - 1)  # the n-gram lies in what is written
        same = jnp.broadcast_to(same, (len(input_ids), len(starts)))
        for i in range(n - 1):
            same &= input_ids[:, i : i + len(starts)] == latest[:, i : i + 1]
        follows = input_ids[:, n - 1 :]
        rows = jnp.arange(len(input_ids))[:, None]
        banned = jnp.zeros(scores.shape, bool).at[rows, follows].max(same)
        return jnp.where(banned, BANNED, scores)


CLASSES = (
    FlaxLogitsProcessor, FlaxLogitsWarper, FlaxLogitsProcessorList, FlaxTemperatureLogitsWarper, FlaxTopKLogitsWarper,
    FlaxTopPLogitsWarper, FlaxForcedBOSTokenLogitsProcessor, FlaxForcedEOSTokenLogitsProcessor,
    FlaxMinLengthLogitsProcessor, FlaxSuppressTokensLogitsProcessor, FlaxSuppressTokensAtBeginLogitsProcessor,
    FlaxForceTokensLogitsProcessor, FlaxNoRepeatNGramLogitsProcessor,
)  # fmt: skip


def _only(scores: Array, token: Any) -> Array:
    """Scores that allow one token alone: 0 for it, and minus infinity for the others."""
    return jnp.full(scores.shape, BANNED, scores.dtype).at[:, token].set(0.0)
