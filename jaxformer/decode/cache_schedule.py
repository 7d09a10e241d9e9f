"""Growth of the model's state with the outputs.

Every decode step reads the whole key-value cache. A cache of full length from the start would make every step of a
short output as slow as the last step of the longest one. So the cache starts with slots for `INITIAL_NEW_TOKENS` new
tokens. When they are used up, slots that no active row reads are dropped. The capacity then becomes the smallest of a
few fixed sizes that fits the rest and leaves space for new tokens; each size is compiled once. A state that cannot
grow has full length from the start.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Float32

from jaxformer.decode.search.base import Search, SearchState
from jaxformer.errors import ConfigError
from jaxformer.types import (
    Array,
    Batch,
    BranchingState,
    Decodable,
    Extendable,
    GrowableState,
    RewindableState,
    State,
    Stream,
)

INITIAL_NEW_TOKENS = 64
"""New tokens that a cache has slots for at first; a quarter of it if each token takes a slot per branch."""
MIN_FREE_FRACTION = 1 / 4
"""Fraction of a cache's new tokens that must still fit when decoding goes on at this capacity."""


class CacheSchedule(NamedTuple):
    """The capacities that a state may have, counted in new tokens per row.

    Attributes:
      prompt_slots: slots of the prompt.
      capacities: ascending numbers of new tokens.
      slots_per_token: slots that a new token takes; 0 if the state does not grow.
      lookahead: slots that a step needs beyond those that are counted (see `Search.lookahead`).
    """

    prompt_slots: int
    capacities: tuple[int, ...]
    slots_per_token: int = 1
    lookahead: int = 0

    def total_slots(self, capacity: int) -> int:
        """Slots of prompt and `capacity` new tokens, and of those that the last step proposes."""
        return self.prompt_slots + capacity * self.slots_per_token + self.lookahead

    def smallest_capacity(self, used_slots: int) -> int:
        """The smallest capacity that leaves `MIN_FREE_FRACTION` of it, or at least one token, beside `used_slots`."""
        for capacity in self.capacities:
            min_free = max(int(capacity * MIN_FREE_FRACTION), 1) * self.slots_per_token
            if self.total_slots(capacity) - self.lookahead - used_slots >= min_free:
                return capacity
        return self.capacities[-1]

    def max_steps(self, capacity: int, used_slots: int) -> int:
        """Number of decode steps that fit into the free slots of a state."""
        if self.slots_per_token == 0:
            return self.capacities[-1]
        return (self.total_slots(capacity) - self.lookahead - used_slots) // self.slots_per_token

    def grow(self, state: State, capacity: int) -> State:
        """`state` with slots for `capacity` new tokens; a state that cannot grow is returned unchanged."""
        return state.grow(self.total_slots(capacity)) if isinstance(state, GrowableState) else state


def schedule_for(state: State, prompt_slots: int, max_length: int, search: Search[Any]) -> CacheSchedule:
    """The schedule of a state on its way to `max_length` new tokens of each output of the search."""
    if not isinstance(state, GrowableState):
        return CacheSchedule(prompt_slots, (max_length,), 0)
    slots_per_token = max(supported_branches(state, search.branches), 1)
    return growing_schedule(prompt_slots, max_length, slots_per_token, search.lookahead)


def growing_schedule(prompt_slots: int, max_length: int, slots_per_token: int, lookahead: int = 0) -> CacheSchedule:
    """The schedule of a state that grows, in which a new token takes `slots_per_token` slots."""
    initial = INITIAL_NEW_TOKENS if slots_per_token == 1 else max(INITIAL_NEW_TOKENS // 4, 1)
    return CacheSchedule(prompt_slots, doubling_capacities(max_length, initial), slots_per_token, lookahead)


def doubling_capacities(max_length: int, initial: int) -> tuple[int, ...]:
    """`initial`, doubled until `max_length` new tokens fit; the last capacity is `max_length`."""
    capacities = [min(initial, max_length)]
    while capacities[-1] < max_length:
        capacities.append(min(2 * capacities[-1], max_length))
    return tuple(capacities)


def supported_branches(state: State, branches: int) -> int:
    """`branches`, or 0 if the rows of `state` cannot have branches."""
    return branches if isinstance(state, BranchingState) else 0


def prompt_stream(batch: Batch) -> Stream:
    """The stream that decoding continues: the target, which every batch to decode has."""
    if batch.target is None:
        raise ValueError("batch: got no target, expected the prompts to decode in it")
    return batch.target


def prefill(
    model: Decodable, batch: Batch, max_length: int, search: Search[SearchState]
) -> tuple[Float32[Array, "B V"], State]:
    """Reads the prompts.

    Returns:
      The logits of the first new token, and the state with the initial capacity of its schedule and a row or a branch
      for every output of the search.

    Raises:
      ConfigError: the search proposes tokens, and the state cannot give them back.
    """
    rows, prompt_slots = prompt_stream(batch).tokens.shape
    logits, state = model.start(batch, prompt_slots)
    if not isinstance(state, GrowableState):  # the first call is traced, but not compiled: nothing reads its result
        logits, state = model.start(batch, prompt_slots + max_length)
    if search.lookahead and not (isinstance(state, RewindableState) and isinstance(model, Extendable)):
        raise ConfigError(
            f"decode.speculate: got {search.lookahead} and a model with a {type(state).__name__}, which cannot take "
            "back a token, expected a transformer; set decode.speculate to 0"
        )
    schedule = schedule_for(state, prompt_slots, max_length, search)
    state = schedule.grow(state, schedule.capacities[0])
    if search.branches and isinstance(state, BranchingState):
        return logits, state.branch(search.branches)
    if search.outputs_per_prompt == 1:
        return logits, state
    return logits, state.rows(jnp.repeat(jnp.arange(rows), search.outputs_per_prompt))
