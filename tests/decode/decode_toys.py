"""Models small enough to know everything about: their probabilities can be enumerated."""

from __future__ import annotations

import itertools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxformer.decode import growing
from jaxformer.decode.batching import stack
from jaxformer.decode.programs import METHODS
from jaxformer.types import Array


@flax.struct.dataclass
class Prefix:
    """The state of `PrefixModel`: a running hash of all tokens so far, per row."""

    code: Array

    def rows(self, index: Array) -> Prefix:
        return Prefix(self.code[index])


class PrefixModel:
    """Logits depend on the whole prefix: a table row chosen by a rolling hash of every real token so far."""

    def __init__(self, vocab: int, seed: int = 0, scale: float = 2.0, buckets: int = 997) -> None:
        self.buckets = buckets
        self.known = (np.random.default_rng(seed).normal(size=(buckets, vocab)) * scale).astype(np.float32)
        self.table = jnp.asarray(self.known)

    def start(self, batch, length):
        code = jnp.zeros(batch.target.tokens.shape[0], jnp.int32)
        for slot in range(batch.target.tokens.shape[1]):
            real = batch.target.slots.segment[:, slot] != 0
            code = jnp.where(real, self.mix(code, batch.target.tokens[:, slot]), code)
        return self.table[code], Prefix(code)

    def step(self, tokens, state):
        code = self.mix(state.code, tokens[:, 0])
        return self.table[code], Prefix(code)

    def mix(self, code, token):
        return (code * 31 + token + 7) % self.buckets

    def log_probs(self, prompt, output) -> list[np.ndarray]:
        """The log-probability vectors before each token of `output`, computed without any decoding."""
        code, rows = 0, []
        for token in prompt:
            code = (code * 31 + int(token) + 7) % self.buckets
        for token in output:
            row = self.known[code].astype(np.float64)
            rows.append(row - np.log(np.exp(row).sum()))
            code = (code * 31 + int(token) + 7) % self.buckets
        return rows

    def score(self, prompt, output) -> float:
        return float(sum(row[token] for row, token in zip(self.log_probs(prompt, output), output, strict=True)))


class Seeded(PrefixModel):
    """The same model with its table as an argument, so that one compilation serves many tables."""

    def __init__(self, table):
        self.buckets, self.table = table.shape[0], table


class PrefixModule(nn.Module):
    """`PrefixModel` as a Linen module: its table is the parameter "table"."""

    def setup(self) -> None:
        self.table = self.param("table", nn.initializers.normal(2.0), (97, 16))

    def start(self, batch, length):
        return self.model().start(batch, length)

    def step(self, tokens, state):
        return self.model().step(tokens, state)

    def model(self) -> PrefixModel:
        model = PrefixModel(vocab=1, buckets=97)
        model.table = self.table
        return model


def outputs(vocab: int, length: int, eos: tuple[int, ...]):
    """All outputs: those that end with their first end token, and those cut off at `length`."""
    others = [token for token in range(vocab) if token not in eos]
    for size in range(1, length + 1):
        for body in itertools.product(others, repeat=size - 1):
            for last in range(vocab) if size == length else eos:
                yield (*body, last)


def batch_of(*prompts, rows: int | None = None, buckets: tuple[int, ...] = ()):
    """A decoder-only batch of prompts."""
    features = [{"target": np.asarray(prompt, np.int32)} for prompt in prompts]
    return jax.tree.map(jnp.asarray, stack(features, rows or len(prompts), (0, 0), buckets or (4,)))


def decode(model, batch, config, eos, pad, limit=None, rows=None, key=None):
    """A batch from its prompts to its end in one program: what the engine does in pieces, for any `Decodable`."""
    method, (count, prompt) = METHODS[config.method], batch.target.tokens.shape
    limit = jnp.full(count, config.max_length) if limit is None else limit
    rows = jnp.arange(count) if rows is None else rows
    key = jax.random.key(config.seed) if key is None else key
    logits, state = growing.start(model, batch, config.max_length, method.outputs(config), method.branches(config))
    search = method.begin(logits, batch, config, eos, pad, limit, rows, key)
    room = growing.room(state, prompt, config.max_length, method.branches(config))
    for before, size in zip((0, *room.sizes), room.sizes, strict=False):
        state = room.grow(state, size) if before else state
        search, state, _ = growing.loop(
            lambda search, state: method.advance(model, search, state, config, eos, pad),
            search,
            state,
            size - before,
            lambda search: search.done.all(),
        )
    return method.found(search, config)
