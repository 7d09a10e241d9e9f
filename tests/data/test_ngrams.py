"""The n-gram baseline against a direct, slow reading of the formulas."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from jaxformer.data import ngrams

VOCAB = 5


def direct(sequences, order, vocab):
    """p(token, context) by the recursion, with dictionaries of tuples; see jaxformer/data/ngrams.py."""
    occurrences = [Counter() for _ in range(order + 1)]
    left = [defaultdict(set) for _ in range(order + 1)]
    at_start = [Counter() for _ in range(order + 1)]
    for sequence in sequences:
        for end in range(1, len(sequence)):
            for k in range(1, min(order, end + 1) + 1):
                gram = tuple(sequence[end - k + 1 : end + 1])
                occurrences[k][gram] += 1
                if end - k >= 0:
                    left[k][gram].add(sequence[end - k])
                else:
                    at_start[k][gram] += 1

    def counts(k):
        if k == order:
            return occurrences[k]
        return {gram: len(left[k][gram]) + at_start[k][gram] for gram in occurrences[k]}

    tables = [None, *map(counts, range(1, order + 1))]
    discounts = [None]
    for table in tables[1:]:
        n = [sum(c == times for c in table.values()) for times in (1, 2, 3, 4)]
        found = (0.5, 1.0, 1.5)
        if all(n):
            y = n[0] / (n[0] + 2 * n[1])
            own = tuple(k - (k + 1) * y * n[k] / n[k - 1] for k in (1, 2, 3))
            found = own if min(own) >= 0 else found
        discounts.append((0.0, *found))

    def p(token, context):
        k = len(context) + 1
        shorter = 1 / vocab if k == 1 else p(token, context[1:])
        follow = {gram: c for gram, c in tables[k].items() if gram[:-1] == context}
        total = sum(follow.values())
        if not total:
            return shorter
        taken = {gram: min(discounts[k][min(c, 3)], c) for gram, c in follow.items()}
        gram = (*context, token)
        return (follow.get(gram, 0) - taken.get(gram, 0)) / total + sum(taken.values()) / total * shorter

    return p


def random_sequences(seed, count=6, length=40):
    """Texts in which common tokens follow each other, each after token 0."""
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.full(VOCAB - 1, 0.5), VOCAB)
    texts = []
    for _ in range(count):
        text = [0]
        for _ in range(rng.integers(1, length)):
            text.append(1 + rng.choice(VOCAB - 1, p=weights[text[-1]]))
        texts.append(np.array(text))
    return texts


def test_a_bigram_model_by_hand():
    """<bos> a b a b: p(b | a) = (2 - 1) / 2 + 1 / 2 p(b), where b follows one kind of token and a two."""
    model = ngrams.fit([np.array([0, 1, 2, 1, 2])], 2, 3)
    probs = np.exp(model.log_probs([np.array([1, token]) for token in range(3)]))
    np.testing.assert_allclose(probs, [1 / 12, 1 / 4, 2 / 3], rtol=1e-12)


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_probabilities_are_those_of_the_formulas(order):
    train, held_out = random_sequences(0), [*random_sequences(1), np.array([3]), np.array([4, 4, 4, 4, 4, 4])]
    p = direct([text.tolist() for text in train], order, VOCAB)
    expected = [
        math.log(p(int(text[t]), tuple(text[max(t - order + 1, 0) : t].tolist())))
        for text in held_out
        for t in range(1, len(text))
    ]
    np.testing.assert_allclose(ngrams.fit(train, order, VOCAB).log_probs(held_out), expected, rtol=1e-10)


def test_discounts_are_estimated_where_the_counts_allow_it():
    assert ngrams._discounts(np.array([40, 20, 10, 5])) == pytest.approx((0.5, 1.25, 2.0))
    assert ngrams._discounts(np.array([40, 20, 10, 0])) == ngrams.DEFAULT_DISCOUNTS
    assert ngrams._discounts(np.array([9, 1, 9, 9])) == ngrams.DEFAULT_DISCOUNTS  # D(2) would be below 0


@pytest.mark.parametrize("order", [1, 4])
def test_probabilities_sum_to_one(order):
    model = ngrams.fit(random_sequences(2), order, VOCAB)
    for context in ([0], [0, 1, 2], [1, 2, 3, 4], [2, 2, 2, 2, 2]):
        queries = [np.array([*context, token]) for token in range(VOCAB)]
        last = model.log_probs(queries).reshape(VOCAB, -1)[:, -1]
        assert np.exp(last).sum() == pytest.approx(1.0, abs=1e-12)


def test_sequences_do_not_see_each_other():
    parts = [np.array([0, 1, 2]), np.array([1, 3, 4])]
    model = ngrams.fit(random_sequences(3), 3, VOCAB)
    separate = np.concatenate([model.log_probs([part]) for part in parts])
    np.testing.assert_array_equal(model.log_probs(parts), separate)
    assert not np.array_equal(model.log_probs([np.concatenate(parts)])[[0, 1, 3, 4]], separate)


@pytest.mark.parametrize(("sequences", "order"), [([[0, 1]], 0), ([[0]], 2), ([[0, VOCAB]], 2), ([], 2)])
def test_what_cannot_be_counted_is_refused(sequences, order):
    with pytest.raises(ValueError, match="expected an order of at least 1, some tokens, and ids below 5"):
        ngrams.fit([np.array(sequence) for sequence in sequences], order, VOCAB)
