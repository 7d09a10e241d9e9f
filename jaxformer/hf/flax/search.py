"""Greedy search, sampling and beam search of the Flax classes: compiled loops over tokens with a key-value cache.

The rules are those of the old library's Flax code, which differ from `jaxformer.decode` in when a beam search stops and
in what it does at the greatest length; its ids are reproduced exactly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxformer.hf.flax import cached, old
from jaxformer.hf.flax.cached import Cache, Memory
from jaxformer.hf.flax.spec import Spec
from jaxformer.types import Array, PyTree, Slots, Stream

WORST = -1.0e7
"""Score of a beam that does not exist."""


@dataclass(frozen=True)
class Plan:
    """Everything of a search that is static when its loop is compiled.

    Attributes:
      max_length: length of the sequences, the prompt included.
      pad: token that follows an end.
      ends: tokens that end a sequence.
      processors: functions (sequences, scores, length) -> scores.
      warpers: the same, of sampling; they follow the processors.
      sample: draws tokens in place of taking the likeliest.
      beams: number of beams; 1: no beam search.
      returned: number of beams that are returned.
      length_penalty: exponent of the number of new tokens by which scores are divided.
      early_stopping: True, False or "never", as in the old library.
      banned: a token that beams never hold.
      counts_mask: positions count the real tokens; False: slots.
      compiled: False runs the loop in Python.
    """

    spec: Spec
    max_length: int
    pad: int
    ends: tuple[int, ...]
    processors: tuple[Callable[..., Array], ...] = ()
    warpers: tuple[Callable[..., Array], ...] = ()
    sample: bool = False
    beams: int = 1
    returned: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    banned: int | None = None
    counts_mask: bool = True
    compiled: bool = True

    def is_end(self, tokens: Array) -> Array:
        """True where a token ends a sequence."""
        return jnp.isin(tokens, jnp.asarray(self.ends, jnp.int32))


class Decoder(flax.struct.PyTreeNode):
    """The inputs of a step that it does not change.

    Attributes:
      params: parameters here.
      mask: int32 `[R, max_length]`, 0 at the prompt's padding.
      memory: the encoder's side.
    """

    params: PyTree
    mask: Array
    memory: Memory | None


def step(plan: Plan, decoder: Decoder, tokens: Array, cache: Cache) -> tuple[Array, Cache]:
    """Logits `[R, V]` of the token after `tokens` `[R, N]`, and the cache with these."""
    spec, count, position = plan.spec, tokens.shape[1], None
    if plan.counts_mask:
        counted = jnp.maximum(jnp.cumsum(decoder.mask, axis=1) - 1, 0)
        position = jax.lax.dynamic_slice_in_dim(counted, cache.index, count, axis=1) - spec.first_row
    slots, cache_slots, written = cached.query_slots(spec, cache, count, decoder.mask, position)
    kind = old.DEFAULT_KIND.get(spec.model_type, 0)
    kinds = jnp.full_like(tokens, kind) if spec.stack.embed.kinds else None
    target = Stream(tokens, slots, kinds)
    _, logits, keys_values, _ = cached.advance(
        spec, decoder.params, target, cache, cache_slots, decoder.memory, None, (False, False)
    )
    return logits[:, -1], Cache(keys_values, written, cache.index + count)


def run(
    plan: Plan, tree: PyTree, prompt: Array, mask: Array, states: Array | None, states_mask: Array | None, key: Array
) -> dict[str, Array]:
    """The sequences `[B, max_length]`, with beams `[B * returned, max_length]` and their scores.

    Args:
      tree: parameters in the old layout.
      prompt: int32 `[B, T]`, tokens of the decoder.
      mask: `[B, T]`, 0 at padding.
      states: the encoder's output `[B, S, D]`.
      states_mask: `[B, S]`.
      key: of sampling.
    """
    function = _compiled if plan.compiled else _run
    return function(plan, tree, prompt, mask, states, states_mask, key)


def _run(
    plan: Plan, tree: PyTree, prompt: Array, mask: Array, states: Array | None, states_mask: Array | None, key: Array
) -> dict[str, Array]:
    spec = plan.spec
    params = spec.params(tree)
    memory = None
    if states is not None and states_mask is not None:
        slots = Slots(*(jnp.repeat(part, plan.beams, 0) for part in memory_slots(states, states_mask)[:2]))
        memory = Memory(cached.project_memory(spec, params, jnp.repeat(states, plan.beams, 0)), slots)
    params = spec.module.unstack({"params": params})["params"]
    mask = jnp.pad(mask, ((0, 0), (0, plan.max_length - mask.shape[1])), constant_values=1)
    decoder = Decoder(params, jnp.repeat(mask, plan.beams, 0).astype(jnp.int32), memory)
    cache = cached.empty(spec, len(prompt) * plan.beams, plan.max_length)
    if plan.beams > 1:
        return _beam_search(plan, decoder, prompt, cache)
    return {"sequences": _one_by_one(plan, decoder, prompt, cache, key)}


_compiled = functools.partial(jax.jit, static_argnames=("plan",))(_run)


def memory_slots(states: Array, mask: Any) -> Slots:
    """Slots of the encoder's output; all are real without a mask."""
    shape = states.shape[:2]
    real = jnp.ones(shape, jnp.int32) if mask is None else jnp.not_equal(jnp.asarray(mask), 0).astype(jnp.int32)
    position = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
    return Slots(position, 2 * real - 1)


def _loop(plan: Plan, goes_on: Callable[[Any], Array], body: Callable[[Any], Any], state: Any) -> Any:
    """`jax.lax.while_loop`, or the same in Python, where `print` and a debugger see values."""
    if plan.compiled:
        return jax.lax.while_loop(goes_on, body, state)
    while bool(goes_on(state)):
        state = body(state)
    return state


def _written(sequences: Array, tokens: Array, index: Array | int) -> Array:
    """`sequences` with `tokens` from column `index` of the last axis on."""
    return jax.lax.dynamic_update_slice_in_dim(sequences, tokens, index, axis=-1)


class _Rows(flax.struct.PyTreeNode):
    """State of greedy search and of sampling: the next tokens are to be read."""

    sequences: Array
    tokens: Array
    ended: Array
    length: Array
    cache: Cache
    key: Array


def _one_by_one(plan: Plan, decoder: Decoder, prompt: Array, cache: Cache, key: Array) -> Array:
    """Sequences `[B, max_length]`, each token the likeliest or drawn."""

    def body(state: _Rows) -> _Rows:
        drawn_with, key = jax.random.split(state.key)
        scores, cache = step(plan, decoder, state.tokens, state.cache)
        for change in (*plan.processors, *plan.warpers):
            scores = change(state.sequences, scores, state.length)
        chosen = jax.random.categorical(drawn_with, scores) if plan.sample else jnp.argmax(scores, axis=-1)
        token = jnp.where(state.ended, plan.pad, chosen.astype(jnp.int32))
        ended = state.ended | plan.is_end(token)
        sequences = _written(state.sequences, token[:, None], state.length)
        return _Rows(sequences, token[:, None], ended, state.length + 1, cache, key)

    sequences = jnp.full((len(prompt), plan.max_length), plan.pad, jnp.int32)
    ended = jnp.zeros(len(prompt), bool)
    state = _Rows(_written(sequences, prompt, 0), prompt, ended, jnp.asarray(prompt.shape[1]), cache, key)
    state = body(state)  # the prompt, of another shape than a token
    goes_on = lambda state: (state.length < plan.max_length) & ~jnp.all(state.ended)  # noqa: E731
    return _loop(plan, goes_on, body, state).sequences


class _Beams(flax.struct.PyTreeNode):
    """State of beam search: K open beams and K that ended, by row, the best first.

    Attributes:
      open, done: token ids `[B, K, max_length]`.
      open_scores, done_scores: `[B, K]`; sums of log-probabilities, and these divided by the length penalty.
      has_ended: bool `[B, K]`, True where `done` holds a sequence.
      length: number of written tokens.
    """

    open: Array
    open_scores: Array
    done: Array
    done_scores: Array
    has_ended: Array
    length: Array
    cache: Cache


def _take(tree: PyTree, index: Array) -> PyTree:
    """Entries `index` `[B, M]` along axis 1 of arrays `[B, N, ...]`."""
    return jax.tree.map(lambda x: jax.vmap(lambda row, i: row[i])(x, index), tree)


def _reorder(cache: Cache, index: Array) -> Cache:
    """The cache whose rows `[B * K]` are beams `index` `[B, K]`."""
    rows, beams = index.shape
    flat = (jnp.arange(rows)[:, None] * beams + index).reshape(-1)
    axis = {True: 1, False: 0}
    keys_values = cache.keys_values
    layers = keys_values if isinstance(keys_values, tuple) else (keys_values,)
    moved = tuple(jax.tree.map(lambda x: jnp.take(x, flat, axis=axis[part.stacked]), part) for part in layers)  # noqa: B023
    return cache.replace(
        keys_values=moved if isinstance(keys_values, tuple) else moved[0], position=cache.position[flat]
    )


def _beam_search(plan: Plan, decoder: Decoder, prompt: Array, cache: Cache) -> dict[str, Array]:
    """The best sequences of K beams, and their scores."""
    (batch, begin), beams = prompt.shape, plan.beams
    never = plan.early_stopping == "never" and plan.length_penalty > 0

    def penalty(length: Array) -> Array:
        return jnp.asarray(length - begin, jnp.float32) ** plan.length_penalty

    def goes_on(state: _Beams) -> Array:
        longest = jnp.asarray(plan.max_length) if never else state.length
        best_open = state.open_scores[:, :1] / penalty(longest)
        worst_done = jnp.where(state.has_ended, jnp.min(state.done_scores, axis=1, keepdims=True), WORST)
        may_improve = jnp.any(best_open > worst_done)
        full = jnp.all(state.has_ended) & (plan.early_stopping is True)
        return (state.length < plan.max_length) & ~full & may_improve

    def body(state: _Beams, count: int = 1) -> _Beams:
        tokens = jax.lax.dynamic_slice_in_dim(state.open, state.length - count, count, axis=2)
        logits, cache = step(plan, decoder, tokens.reshape(-1, count), state.cache)
        if plan.banned is not None:
            logits = logits.at[:, plan.banned].set(-jnp.inf)
        scores = jax.nn.log_softmax(logits)
        for change in plan.processors:
            scores = change(state.open.reshape(-1, plan.max_length), scores, state.length)
        vocab = scores.shape[-1]
        scores = scores.reshape(batch, beams, vocab) + state.open_scores[:, :, None]
        # twice as many as beams, so that enough stay open even if one of each ends
        scores, index = jax.lax.top_k(scores.reshape(batch, -1), 2 * beams)
        parent, token = index // vocab, (index % vocab).astype(jnp.int32)
        sequences = _written(_take(state.open, parent), token[:, :, None], state.length)
        ends = plan.is_end(token)
        # those that stay open
        open_scores, chosen = jax.lax.top_k(scores + ends * WORST, beams)
        # those that ended, among all that did
        is_full = jnp.all(state.has_ended, axis=1, keepdims=True) & (plan.early_stopping is True)
        done_scores = scores / penalty(state.length + 1) + (~ends | is_full) * WORST
        merged = (
            jnp.concatenate([state.done, sequences], 1),
            jnp.concatenate([state.has_ended, ends], 1),
        )
        done_scores, best = jax.lax.top_k(jnp.concatenate([state.done_scores, done_scores], 1), beams)
        done, has_ended = _take(merged, best)
        cache = _reorder(cache, _take(parent, chosen))
        return _Beams(_take(sequences, chosen), open_scores, done, done_scores, has_ended, state.length + 1, cache)

    blank = jnp.full((batch, beams, plan.max_length), plan.pad, jnp.int32)
    first = jnp.full((batch, beams), WORST).at[:, 0].set(0.0)  # the beams of a prompt are the same, so one counts
    state = _Beams(
        open=_written(blank, jnp.repeat(prompt[:, None], beams, 1), 0),
        open_scores=first,
        done=blank,
        done_scores=jnp.full((batch, beams), WORST),
        has_ended=jnp.zeros((batch, beams), bool),
        length=jnp.asarray(begin),
        cache=cache,
    )
    state = _loop(plan, goes_on, body, body(state, begin))
    ended = jnp.any(state.has_ended, axis=1)[:, None]
    sequences = jnp.where(ended[..., None], state.done, state.open)[:, : plan.returned]
    scores = jnp.where(ended, state.done_scores, state.open_scores)[:, : plan.returned]
    return {"sequences": sequences.reshape(-1, plan.max_length), "scores": scores.reshape(-1)}
