"""Random Markov chains: token sequences whose best possible loss is known (Shannon 1948, section 7)."""

from __future__ import annotations

import numpy as np

SHARPNESS = 1.5
"""Standard deviation of the logits of the transitions."""


class Chain:
    """A stationary Markov chain with random transitions.

    Attributes:
      transitions: `[V, V]`, probability of each token (column) after each token (row).
      stationary: `[V]`, frequency of each token.
    """

    def __init__(self, tokens: int, seed: int) -> None:
        rng = np.random.default_rng([2, seed])
        weights = np.exp(SHARPNESS * rng.standard_normal((tokens, tokens)))
        self.transitions = weights / weights.sum(axis=1, keepdims=True)
        self.stationary = np.linalg.matrix_power(self.transitions, 1000)[0]

    @property
    def entropy_rate(self) -> float:
        """Entropy of a token given its predecessors, in nats: the lower bound of a model's loss."""
        return float(-np.sum(self.stationary[:, None] * self.transitions * np.log(self.transitions)))

    @property
    def entropy(self) -> float:
        """Entropy of a token by its frequency alone, in nats: the loss of a unigram model."""
        return float(-np.sum(self.stationary * np.log(self.stationary)))

    def draw(self, rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
        """Random token sequences, int32 `[rows, length]`."""
        uniform = rng.random((length, rows))
        tokens = [np.searchsorted(np.cumsum(self.stationary)[:-1], uniform[0])]
        edges = np.cumsum(self.transitions, axis=1)[:, :-1]
        for row in uniform[1:]:
            tokens.append((edges[tokens[-1]] < row[:, None]).sum(axis=1))
        return np.stack(tokens, axis=1).astype(np.int32)
