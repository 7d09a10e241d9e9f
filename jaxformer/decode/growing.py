"""The loop of all decoding: one token a row and pass, in a cache that grows with the outputs.

A pass reads the whole cache, so a cache made for the longest output from the start costs every pass of a short one.
Here it begins with room for `FIRST` new tokens and doubles when that is used up: a loop a size, each compiled for its
own, and entered only while there is something left to do. A state that cannot grow has all its room from the start.
"""

from __future__ import annotations

from typing import Callable, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
from jaxtyping import Bool, Float32

from jaxformer.types import Array, Batch, Branching, Decodable, Growing, State

FIRST = 64


@runtime_checkable
class Search(Protocol):
    """What a decoder knows beside the model's state."""

    step: Array
    """int32 scalar: tokens chosen so far."""

    @property
    def over(self) -> Bool[Array, ""]:
        """No row goes on."""
        ...


S = TypeVar("S", bound=Search)


class Room(NamedTuple):
    """Slots of the prompt, for how many new tokens there is room beside them, one loop after another, and how many
    slots each of these takes."""

    prompt: int
    new: list[int]
    branches: int = 1

    def slots(self, size: int) -> int:
        """Of a state with room for `size` new tokens."""
        return self.prompt + size * self.branches


def sizes(length: int) -> list[int]:
    """`FIRST`, doubled until `length` new tokens fit; the last is `length`."""
    found = [min(FIRST, length)]
    while found[-1] < length:
        found.append(min(2 * found[-1], length))
    return found


def start(
    model: Decodable, batch: Batch, length: int, branches: int | None = None
) -> tuple[Float32[Array, "B V"], State, Room]:
    """Reads the prompts. Logits of the next token, the state, and how it is to grow to `length` new tokens.

    Each row then has so many `branches`, if asked for and the state is one that can have them.
    """
    prompt = batch.target.tokens.shape[1]
    logits, state = model.start(batch, prompt)
    if not isinstance(state, Growing):  # what was just traced is read by nobody, and not compiled
        return *model.start(batch, prompt + length), Room(prompt, [length])
    branching = branches is not None and isinstance(state, Branching)
    room = Room(prompt, sizes(length), branches if branching else 1)
    state = state.grow(room.slots(room.new[0]))
    return logits, state.branch(branches) if branching else state, room


def loop(advance: Callable[[tuple[S, State]], tuple[S, State]], search: S, state: State, room: Room) -> S:
    """Advances until `search` is over: `advance` chooses a token for every row. `state` is as `start` made it."""
    for size in room.new:

        def goes_on(now: tuple[S, State], size: int = size) -> Array:
            return ~now[0].over & (now[0].step < size)

        if size > room.new[0]:
            state = state.grow(room.slots(size))
        search, state = jax.lax.while_loop(goes_on, advance, (search, state))
    return search
