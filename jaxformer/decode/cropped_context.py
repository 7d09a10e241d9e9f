"""Generation past the last position: each new token is computed from the last W tokens that the model can read.

A table of learned positions has W rows. When a text has more than W tokens, its last W get positions 0 to W - 1, and
one forward pass over them gives the logits of the next token. The next step shifts every position by one, so no key or
value of this pass is valid in it. A step costs a pass over W tokens for every row of the batch.

As long as the texts of a batch fit, they are decoded with a key-value cache (`CachedContext`). When a text does not fit
any more, the batch goes on without one (`CroppedContext`, made by `drop_cache`).
"""

from __future__ import annotations

from dataclasses import dataclass

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32, Int

from jaxformer.decode.cache_schedule import prompt_stream
from jaxformer.decode.logits_processors import right_align
from jaxformer.nn.cache import TransformerState, scatter_rows
from jaxformer.types import Array, Batch, Decodable, Slots, State, Stream


@flax.struct.dataclass
class Window:
    """The last W tokens of every text, at the right end of W columns.

    Attributes:
      tokens: int32 `[B, W]`, or `[B, N, W]` if every row has N branches.
      length: int32 `[B]` or `[B, N]`, number of tokens; the columns before them are empty.
      prefix: int32 like `length`, how many of them are the rest of a prefix that is read in both directions; None: the
        prompts have none.
    """

    tokens: Array
    length: Array
    prefix: Array | None = None

    @classmethod
    def from_prompts(cls, prompts: Stream, size: int) -> Window:
        """The last W = `size` tokens of every prompt."""
        aligned = right_align(prompts, max(size, prompts.tokens.shape[1]))
        valid, prefix = aligned.valid[:, -size:], prompts.slots.prefix
        length = jnp.sum(valid, axis=1, dtype=jnp.int32)
        if prefix is not None:
            lost = jnp.sum(aligned.valid, axis=1, dtype=jnp.int32) - length
            prefix = jnp.maximum(jnp.max(prefix, axis=1) - lost, 0)
        return cls(aligned.tokens[:, -size:], length, prefix)

    def append(self, tokens: Int[Array, "B N"]) -> Window:
        """The window after one more token per row or branch; a full window loses its first token."""
        new, size, prefix = tokens.reshape(*self.length.shape, 1), self.tokens.shape[-1], self.prefix
        if prefix is not None:
            prefix = jnp.maximum(prefix - (self.length == size), 0)
        tokens = jnp.concatenate([self.tokens[..., 1:], new], axis=-1)
        return Window(tokens, jnp.minimum(self.length + 1, size), prefix)

    def stream(self) -> Stream:
        """The tokens `[B, W]` as a stream with positions from 0, padded on the left."""
        column, start = jnp.arange(self.tokens.shape[1]), self.tokens.shape[1] - self.length[:, None]
        position = jnp.maximum(column - start, 0)
        prefix = None if self.prefix is None else jnp.broadcast_to(self.prefix[:, None], position.shape)
        return Stream(self.tokens, Slots(position, (column >= start).astype(jnp.int32), prefix))

    def rows(self, index: Int[Array, " B"]) -> Window:
        """The window whose row i is this one's row `index[i]`."""
        return jax.tree.map(lambda x: x[index], self)

    def replace_rows(self, index: Int[Array, " R"], other: Window) -> Window:
        """The window whose row `index[i]` is row i of `other`; indices beyond the rows are ignored."""
        return jax.tree.map(lambda x, new: scatter_rows(x, index, new), self, other)

    def branch(self, count: int) -> Window:
        """The window with `count` branches of every row."""
        return jax.tree.map(lambda x: jnp.repeat(x[:, None], count, axis=1), self)

    def select_branches(self, parent: Int[Array, "B N"]) -> Window:
        """The window whose branch n is this one's branch `parent[:, n]` of the same row."""
        return jax.tree.map(
            lambda x: jnp.take_along_axis(x, parent.reshape(parent.shape + (1,) * (x.ndim - 2)), axis=1), self
        )

    def flatten_branches(self) -> Window:
        """The window with a row per branch."""
        prefix = None if self.prefix is None else self.prefix.reshape(-1)
        return Window(self.tokens.reshape(-1, self.tokens.shape[-1]), self.length.reshape(-1), prefix)


@flax.struct.dataclass
class CroppedContext:
    """The state of texts that do not all fit: their last tokens, which every step reads again. A row per beam."""

    window: Window

    def rows(self, index: Int[Array, " B"]) -> CroppedContext:
        """The state whose row i is this one's row `index[i]`."""
        return CroppedContext(self.window.rows(index))

    def replace_rows(self, index: Int[Array, " R"], other: CroppedContext) -> CroppedContext:
        """The state whose row `index[i]` is row i of `other`; indices beyond the rows are ignored."""
        return CroppedContext(self.window.replace_rows(index, other.window))


@flax.struct.dataclass
class CachedContext:
    """The state of texts that all fit: the model's own, and the tokens to go on from without it.

    The methods are those of `TransformerState`.
    """

    window: Window
    cache: TransformerState

    @property
    def context_length(self) -> int:
        """W, number of tokens that the model can read."""
        return self.window.tokens.shape[-1]

    def rows(self, index: Int[Array, " B"]) -> CachedContext:
        """The state whose row i is this one's row `index[i]`."""
        return CachedContext(self.window.rows(index), self.cache.rows(index))

    def replace_rows(self, index: Int[Array, " R"], other: CachedContext) -> CachedContext:
        """The state whose row `index[i]` is row i of `other`; indices beyond the rows are ignored."""
        window = self.window.replace_rows(index, other.window)
        return CachedContext(window, self.cache.replace_rows(index, other.cache))

    def grow(self, length: int) -> CachedContext:
        """The state with `length` slots in its cache."""
        return CachedContext(self.window, self.cache.grow(length))

    def max_used_slots(self, active: Bool[Array, " B"]) -> Int[Array, ""]:
        """Most slots of the cache that an active row reads."""
        return self.cache.max_used_slots(active)

    def compact(self, active: Bool[Array, " B"], length: int) -> CachedContext:
        """The state with `length` slots in its cache, without those that no active row reads."""
        return CachedContext(self.window, self.cache.compact(active, length))

    def branch(self, count: int) -> CachedContext:
        """The state with `count` branches of every row."""
        return CachedContext(self.window.branch(count), self.cache.branch(count))

    def select_branches(self, parent: Int[Array, "B N"]) -> CachedContext:
        """The state whose branch n is this one's branch `parent[:, n]` of the same row."""
        return CachedContext(self.window.select_branches(parent), self.cache.select_branches(parent))


@dataclass(frozen=True)
class CroppingModel:
    """A model of W positions as a `Decodable` for texts of any length: it reads the last W tokens of each.

    `step` of a `CachedContext` is valid while every text that matters has fewer than W tokens; the caller counts them
    and calls `drop_cache` then.

    Attributes:
      model: a decoder without encoder.
      context_length: W.
    """

    model: Decodable
    context_length: int

    def start(self, batch: Batch, length: int) -> tuple[Float32[Array, "B V"], State]:
        """Reads prompts. The state has a cache of `length` slots if all prompts fit."""
        prompts = prompt_stream(batch)
        window = Window.from_prompts(prompts, self.context_length)
        if prompts.tokens.shape[1] <= self.context_length:
            logits, cache = self.model.start(batch, length)
            if isinstance(cache, TransformerState):
                return logits, CachedContext(window, cache)
        return self._read(window), CroppedContext(window)

    def step(self, tokens: Int[Array, "B N"], state: State) -> tuple[Float32[Array, "R V"], State]:
        """Appends a token to every row or branch; logits of the next token."""
        if isinstance(state, CroppedContext):
            window = state.window.append(tokens)
            return self._read(window), CroppedContext(window)
        if isinstance(state, CachedContext):
            logits, cache = self.model.step(tokens, state.cache)
            if isinstance(cache, TransformerState):
                return logits, CachedContext(state.window.append(tokens), cache)
        raise TypeError(f"step: got a {type(state).__name__}, expected one that `start` returns")

    def _read(self, window: Window) -> Float32[Array, "B V"]:
        """Logits of the next token, by a forward pass over the window."""
        return self.model.start(Batch(None, window.stream()), self.context_length)[0]


def drop_cache(state: State) -> State:
    """The state of a `CroppingModel` without its cache: a text may now have more tokens than the model has positions.

    Other states are returned unchanged.
    """
    return CroppedContext(state.window.flatten_branches()) if isinstance(state, CachedContext) else state
