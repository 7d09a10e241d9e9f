"""Toy models whose output probabilities can be enumerated."""

from __future__ import annotations

import itertools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxformer.decode.batching import pad_batch
from jaxformer.decode.cache_schedule import prefill, schedule_for
from jaxformer.decode.compiled import SEARCHES
from jaxformer.decode.search.base import RowSettings, decode_loop
from jaxformer.types import Array


@flax.struct.dataclass
class Prefix:
    """The state of `PrefixModel`: a rolling hash of each row's tokens so far."""

    code: Array

    def rows(self, index: Array) -> Prefix:
        return Prefix(self.code[index])


class PrefixModel:
    """Logits depend on the whole prefix: they are a table's row, chosen by a rolling hash of the tokens so far."""

    def __init__(self, vocab: int, seed: int = 0, scale: float = 2.0, buckets: int = 997) -> None:
        self.buckets = buckets
        self.logits = (np.random.default_rng(seed).normal(size=(buckets, vocab)) * scale).astype(np.float32)
        self.table = jnp.asarray(self.logits)

    def start(self, batch, length):
        code = jnp.zeros(batch.target.tokens.shape[0], jnp.int32)
        for slot in range(batch.target.tokens.shape[1]):
            valid = batch.target.slots.segment[:, slot] != 0
            code = jnp.where(valid, self.mix(code, batch.target.tokens[:, slot]), code)
        return self.table[code], Prefix(code)

    def step(self, tokens, state):
        code = self.mix(state.code, tokens[:, 0])
        return self.table[code], Prefix(code)

    def mix(self, code, token):
        return (code * 31 + token + 7) % self.buckets

    def log_probs(self, prompt, output) -> list[np.ndarray]:
        """The log-probability vectors of each token of `output`, computed without any decoding."""
        code, vectors = 0, []
        for token in prompt:
            code = (code * 31 + int(token) + 7) % self.buckets
        for token in output:
            logits = self.logits[code].astype(np.float64)
            vectors.append(logits - np.log(np.exp(logits).sum()))
            code = (code * 31 + int(token) + 7) % self.buckets
        return vectors

    def score(self, prompt, output) -> float:
        return float(sum(vector[token] for vector, token in zip(self.log_probs(prompt, output), output, strict=True)))


class TableModel(PrefixModel):
    """`PrefixModel` with its table as an argument, so that one compilation serves many tables."""

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
    inner = [token for token in range(vocab) if token not in eos]
    for size in range(1, length + 1):
        for body in itertools.product(inner, repeat=size - 1):
            for last in range(vocab) if size == length else eos:
                yield (*body, last)


def batch_of(*prompts, rows: int | None = None, buckets: tuple[int, ...] = ()):
    """A decoder-only batch of prompts."""
    features = [{"target": np.asarray(prompt, np.int32)} for prompt in prompts]
    return jax.tree.map(jnp.asarray, pad_batch(features, rows or len(prompts), (0, 0), buckets or (4,)))


def decode(model, batch, config, eos, pad, max_lengths=None, row_indices=None, key=None):
    """Decodes a batch to its end in one program, for any `Decodable`; `generate` does it in several programs."""

    @jax.jit
    def run(batch, max_lengths, row_indices, key):
        search, (count, prompt_slots) = SEARCHES[config.method](config, eos, pad), batch.target.tokens.shape
        rows = RowSettings(
            max_lengths=jnp.full(count, config.max_length) if max_lengths is None else max_lengths,
            row_indices=jnp.arange(count) if row_indices is None else row_indices,
            key=jax.random.key(config.seed) if key is None else key,
        )
        logits, model_state = prefill(model, batch, config.max_length, search)
        state = search.init(logits, batch, rows)
        schedule = schedule_for(model_state, prompt_slots, config.max_length, search)
        for before, capacity in zip((0, *schedule.capacities), schedule.capacities, strict=False):
            model_state = schedule.grow(model_state, capacity) if before else model_state
            state, model_state, *_ = decode_loop(search, model, state, model_state, capacity - before, count)
        return search.hypotheses(state)

    return run(batch, max_lengths, row_indices, key)
