"""Text of which the best possible loss is known: a random Markov chain (Shannon 1948, section 7)."""

from __future__ import annotations

import numpy as np

SHARPNESS = 1.5  # of the transitions: standard deviation of their logits


class Chain:
    """A stationary chain, drawn from a seed.

    Attributes:
      transitions: `[V, V]`, from each token to each; rows sum to 1.
      stationary: `[V]`, how often each token occurs.
    """

    def __init__(self, tokens: int, seed: int) -> None:
        rng = np.random.default_rng([2, seed])
        weights = np.exp(SHARPNESS * rng.standard_normal((tokens, tokens)))
        self.transitions = weights / weights.sum(axis=1, keepdims=True)
        self.stationary = np.linalg.matrix_power(self.transitions, 1000)[0]

    @property
    def entropy_rate(self) -> float:
        """Nats a token, given those before it: no model's loss on the next token is below."""
        return float(-np.sum(self.stationary[:, None] * self.transitions * np.log(self.transitions)))

    @property
    def entropy(self) -> float:
        """Nats a token of a guess from the tokens' frequencies alone."""
        return float(-np.sum(self.stationary * np.log(self.stationary)))

    def draw(self, rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
        """Texts, int32 `[rows, length]`."""
        uniform = rng.random((length, rows))
        tokens = [np.searchsorted(np.cumsum(self.stationary)[:-1], uniform[0])]
        edges = np.cumsum(self.transitions, axis=1)[:, :-1]
        for each in uniform[1:]:
            tokens.append((edges[tokens[-1]] < each[:, None]).sum(axis=1))
        return np.stack(tokens, axis=1).astype(np.int32)
