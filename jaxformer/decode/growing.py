"""The loop of all decoding: one token a row and pass, in a cache that grows with the outputs.

A pass reads the whole cache, so a cache made for the longest output from the start costs every pass of a short one.
Here it begins with room for `FIRST` new tokens. When that is used up, slots that nobody reads any more are dropped,
and the room becomes twice as large, or larger, or small again, as the others need it; each size is compiled for its
own. A state that cannot grow has all its room from the start.
"""

from __future__ import annotations

from typing import Callable, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32, Int

from jaxformer.types import Array, Batch, Branching, Decodable, Growing, State

FIRST = 64
"""New tokens that a cache begins with room for; a quarter as many where each takes a slot for every branch."""
SPARE = 4
"""Of the new tokens that there is room for, one in so many must still fit in where decoding goes on."""


@runtime_checkable
class Search(Protocol):
    """What a decoder knows beside the model's state. Every array has the prompts' rows, or a multiple, first."""

    step: Array
    """int32 `[R]`: tokens chosen so far."""
    done: Array
    """bool `[R]`: no more will be."""


S = TypeVar("S", bound=Search)


class Room(NamedTuple):
    """How a state makes room for new tokens.

    Attributes:
      prompt: slots of the prompt.
      sizes: new tokens that there is room for, one after another.
      slots: that a new token takes; 0: none, and the state does not grow.
    """

    prompt: int
    sizes: tuple[int, ...]
    slots: int = 1

    def total(self, size: int) -> int:
        """Slots with room for `size` new tokens."""
        return self.prompt + size * self.slots

    def size(self, needed: int) -> int:
        """The smallest size that is large enough where so many slots are taken."""
        enough = (size for size in self.sizes if self.total(size) - needed >= max(size // SPARE, 1) * self.slots)
        return next(enough, self.sizes[-1])

    def grow(self, state: State, size: int) -> State:
        """`state` with room for `size` new tokens."""
        return state.grow(self.total(size)) if self.slots else state


def branches(state: State, wanted: int) -> int:
    """How many branches a row of `state` has, where so many are wanted: 0 if it cannot have any."""
    return wanted if isinstance(state, Branching) else 0


def room(state: State, prompt: int, length: int, wanted: int = 0) -> Room:
    """The room of `state`, with `wanted` branches a row if it can have them, on its way to `length` new tokens."""
    if not isinstance(state, Growing):
        return Room(prompt, (length,), 0)
    slots = max(branches(state, wanted), 1)
    return Room(prompt, sizes(length, FIRST if slots == 1 else max(FIRST // 4, 1)), slots)


def sizes(length: int, first: int) -> tuple[int, ...]:
    """`first`, doubled until `length` new tokens fit; the last is `length`."""
    found = [min(first, length)]
    while found[-1] < length:
        found.append(min(2 * found[-1], length))
    return tuple(found)


def start(
    model: Decodable, batch: Batch, length: int, outputs: int = 1, wanted: int = 0
) -> tuple[Float32[Array, "B V"], State]:
    """Reads the prompts. Logits of the next token, and the state with its first room on the way to `length` tokens.

    Args:
      outputs: followed at once for each prompt: `wanted` as branches of a row, if the state can have them, and else as
        rows.
    """
    rows, prompt = batch.target.tokens.shape
    logits, state = model.start(batch, prompt)
    if not isinstance(state, Growing):  # what was just traced is read by nobody, and not compiled
        logits, state = model.start(batch, prompt + length)
    how = room(state, prompt, length, wanted)
    state = how.grow(state, how.sizes[0])
    if branches(state, wanted):
        return logits, state.branch(wanted)
    return logits, state if outputs == 1 else state.rows(jnp.repeat(jnp.arange(rows), outputs))


Advance = Callable[[S, State], tuple[S, State]]


def loop(
    advance: Advance, search: S, state: State, passes: Int[Array, ""] | int, enough: Callable[[S], Bool[Array, ""]]
) -> tuple[S, State, Int[Array, ""]]:
    """Advances, every row by a token a pass, until it is `enough` or so many passes are done. Returns how many were."""

    def goes_on(now: tuple[S, State, Array]) -> Bool[Array, ""]:
        return ~enough(now[0]) & (now[2] < passes)

    def one(now: tuple[S, State, Array]) -> tuple[S, State, Array]:
        return *advance(*now[:2]), now[2] + 1

    return jax.lax.while_loop(goes_on, one, (search, state, jnp.int32(0)))
