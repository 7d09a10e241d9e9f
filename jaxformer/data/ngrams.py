"""Interpolated, modified Kneser-Ney n-gram model of token ids: the baseline beside a neural language model.

For an n-gram of context h and token w, with h' the context without its first token (Chen and Goodman 1999, An empirical
study of smoothing techniques for language modeling, section 3 and appendix A):

    p(w | h) = max(c(hw) - D(c(hw)), 0) / c(h) + g(h) p(w | h')        p(w | no context, no counts) = 1 / V

At the highest order c are counts. Below it c(hw) is the number of different tokens before hw, or its count where hw
begins a sequence. D(1), D(2) and D(3 or more) are the discounts of that order, and g(h) makes the sum over w one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int, Int64

DEFAULT_DISCOUNTS = (0.5, 1.0, 1.5)
"""D(1), D(2) and D(3 or more) where the counts of counts do not determine them: in small texts and vocabularies."""


@dataclass(frozen=True)
class Order:
    """The n-grams of one length k, numbered in the order of their keys.

    Attributes:
      keys: ascending, number of the first k - 1 tokens * V + last token.
      discounted: max(c - D(c), 0) of each n-gram.
      total: c(h), the sum of c over the n-grams of each context of k - 1 tokens.
      backoff: g(h) of each context; 1 where nothing followed it.
    """

    keys: Int64[np.ndarray, " N"]
    discounted: Float64[np.ndarray, " N"]
    total: Float64[np.ndarray, " M"]
    backoff: Float64[np.ndarray, " M"]


@dataclass(frozen=True)
class NgramModel:
    """Interpolated Kneser-Ney model over V = `vocab` tokens, with n-grams of 1 to `len(orders)` tokens."""

    vocab: int
    orders: tuple[Order, ...]

    def log_probs(self, sequences: Sequence[Int[np.ndarray, " _"]]) -> Float64[np.ndarray, " T"]:
        """Natural logarithm of the probability of each token but the first of each sequence, one after the other.

        A token's context is what stands before it in its sequence, up to the length of the model's.
        """
        tokens, depth = _joined(sequences)
        probs = np.full(len(tokens), 1.0 / self.vocab)
        context = np.zeros(len(tokens), np.int64)  # number of the n-gram before each token; -1: unknown, or too long
        before = np.zeros(len(tokens), np.int64)  # the same for the n-gram that ends with it
        for k, order in enumerate(self.orders, 1):
            if k > 1:
                context = np.where(depth >= k - 1, np.roll(before, 1), -1)
            before = _lookup(order.keys, np.where(context >= 0, context * self.vocab + tokens, -1))
            known = np.flatnonzero((context >= 0) & (depth >= 1))
            h = context[known]
            share = np.where(before[known] >= 0, order.discounted[before[known]], 0.0) / np.maximum(order.total[h], 1.0)
            probs[known] = share + order.backoff[h] * probs[known]
        return np.log(probs[depth >= 1])


def fit(sequences: Sequence[Int[np.ndarray, " _"]], order: int, vocab: int) -> NgramModel:
    """Counts the n-grams of up to `order` tokens in `sequences`, which n-grams do not cross.

    The first token of a sequence (<bos>) is context only.

    Raises:
      ValueError: `order` is below 1, there is no token to count, or a token is not in the vocabulary.
    """
    tokens, depth = _joined(sequences)
    if order < 1 or not (depth >= 1).any() or tokens.min() < 0 or tokens.max() >= vocab:
        got = f"order {order}, {int((depth >= 1).sum())} tokens after a first one, ids {tokens.min(initial=0)} to"
        expected = f"an order of at least 1, some tokens, and ids below {vocab}"
        raise ValueError(f"n-grams: got {got} {tokens.max(initial=0)}, expected {expected}")
    levels = list(_number_ngrams(tokens, depth, order, vocab))
    built, contexts = [], 1
    for k, (keys, number) in enumerate(levels, 1):
        counted = depth >= max(k - 1, 1)  # where an n-gram of k tokens ends that is not <bos> alone
        if k < order:
            longer_keys, longer = levels[k]
            ends = depth >= k
            first = np.full(len(longer_keys), -1)
            first[longer[ends]] = number[ends]  # the last k tokens of each different n-gram of k + 1 tokens
            counts = np.bincount(first, minlength=len(keys))
            counts += np.bincount(number[counted & ~ends], minlength=len(keys))
        else:
            counts = np.bincount(number[counted], minlength=len(keys))
        built.append(_discounted(keys, counts, contexts, vocab))
        contexts = len(keys)
    return NgramModel(vocab, tuple(built))


def _joined(sequences: Sequence[Int[np.ndarray, " _"]]) -> tuple[Int64[np.ndarray, " T"], Int64[np.ndarray, " T"]]:
    """All tokens one after the other, and the number of tokens before each in its sequence."""
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    tokens = np.concatenate([np.zeros(0, np.int64), *sequences]).astype(np.int64)
    return tokens, np.arange(len(tokens)) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _number_ngrams(
    tokens: Int64[np.ndarray, " T"], depth: Int64[np.ndarray, " T"], order: int, vocab: int
) -> Iterator[tuple[Int64[np.ndarray, " _"], Int64[np.ndarray, " T"]]]:
    """For 1 to `order` tokens, the keys of all n-grams and the number of the one that ends at each token (-1: none)."""
    number = np.zeros(len(tokens), np.int64)
    for k in range(1, order + 1):
        ends = depth >= k - 1
        key = (np.roll(number, 1) if k > 1 else number) * vocab + tokens
        keys, numbers = np.unique(key[ends], return_inverse=True)
        number = np.full(len(tokens), -1)
        number[ends] = numbers
        yield keys, number


def _discounted(keys: Int64[np.ndarray, " N"], counts: Int64[np.ndarray, " N"], contexts: int, vocab: int) -> Order:
    """The n-grams of one length with the discounts that their counts of counts give (Chen and Goodman, equation 26)."""
    discount = np.array([0.0, *_discounts(np.bincount(counts, minlength=5)[1:5])])
    taken = np.minimum(discount[np.minimum(counts, 3)], counts)
    context = keys // vocab
    total = np.bincount(context, counts, minlength=contexts)
    lost = np.bincount(context, taken, minlength=contexts)
    backoff = np.where(total > 0, lost / np.maximum(total, 1.0), 1.0)
    return Order(keys, counts - taken, total, backoff)


def _discounts(n: Int[np.ndarray, " 4"]) -> tuple[float, float, float]:
    """D(1), D(2) and D(3 or more) from the numbers of n-grams that occur once, twice, three and four times."""
    if (n == 0).any():
        return DEFAULT_DISCOUNTS
    y = n[0] / (n[0] + 2 * n[1])
    one, two, more = (float(k - (k + 1) * y * n[k] / n[k - 1]) for k in (1, 2, 3))
    return (one, two, more) if min(one, two, more) >= 0 else DEFAULT_DISCOUNTS


def _lookup(keys: Int64[np.ndarray, " N"], wanted: Int64[np.ndarray, " T"]) -> Int64[np.ndarray, " T"]:
    """Index of each wanted key in ascending `keys`; -1 where it is not among them."""
    index = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[index] == wanted, index, -1)
