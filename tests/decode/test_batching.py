import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.config import ConfigError
from jaxformer.decode.batching import (
    COMPILE_COST_TOKENS,
    PromptQueue,
    bucket_length,
    buckets_within,
    choose_buckets,
    pad_batch,
    prompt_batches,
)


@pytest.mark.parametrize(
    ("length", "buckets", "expected"),
    [
        (0, (), 1),
        (1, (), 1),
        (2, (), 8),
        (8, (), 8),
        (9, (), 16),
        (100, (), 128),
        (9, (12, 24), 12),
        (25, (12, 24), 32),
    ],
)
def test_bucket_length(length, buckets, expected):
    assert bucket_length(length, buckets) == expected


@pytest.mark.parametrize(
    ("buckets", "limits", "length", "expected"),
    [
        ((), (None, None), 20, 32),
        ((), (24, None), 20, 24),
        ((), (24, None), 3, 8),
        ((), (24, 40), 33, 40),
        ((), (32,), 32, 32),
        ((12,), (20,), 3, 12),
        ((12,), (20,), 13, 20),
    ],
)
def test_no_shape_is_longer_than_the_position_limits(buckets, limits, length, expected):
    assert bucket_length(length, buckets_within(buckets, *limits)) == expected


def test_a_prompt_may_have_positions_of_its_own():
    prompts = [{"source": [5, 6], "position": [1, 3], "target": [0]}, {"source": [7], "position": [4], "target": [0]}]
    batch = pad_batch(prompts, 3, (0, 0))
    assert batch.source.slots.position[:, :3].tolist() == [[1, 3, 0], [4, 0, 0], [0, 0, 0]]
    assert batch.source.slots.segment[:, :3].tolist() == [[1, 1, 0], [1, 0, 0], [0, 0, 0]]


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(0, 20), min_size=1, max_size=12), rows=st.integers(1, 5))
def test_every_prompt_is_in_one_batch_with_exactly_its_tokens(lengths, rows):
    prompts = [{"source": np.arange(size) + 100 * i, "target": np.array([i])} for i, size in enumerate(lengths)]
    seen = []
    for indices, batch in prompt_batches(prompts, rows, (7, 9)):
        assert batch.source.tokens.shape[0] <= max(rows, 1)
        for row, i in enumerate(indices):
            valid = batch.source.slots.segment[row] == 1
            assert batch.source.tokens[row][valid].tolist() == prompts[i]["source"].tolist()
            assert batch.source.slots.position[row][valid].tolist() == list(range(lengths[i]))
            assert (batch.source.tokens[row][~valid] == 7).all()
            assert batch.target.tokens[row].tolist() == [i]
        assert (batch.source.slots.segment[len(indices) :] == 0).all()
        assert (batch.target.slots.segment[len(indices) :] == 0).all()
        seen += indices.tolist()
    assert sorted(seen) == list(range(len(lengths)))
    ordered = [lengths[i] for i in seen]
    assert ordered == sorted(ordered, reverse=True)


def test_token_types_and_absent_streams():
    batch = pad_batch([{"source": [1, 2], "token_type": [0, 1]}, {"source": [3], "token_type": [1]}], 2, (0, 0), (2,))
    assert batch.target is None
    assert batch.source.token_type.tolist() == [[0, 1], [1, 0]]
    assert pad_batch([{"target": [1]}], 1, (0, 0)).source is None


def test_mixed_fields_are_rejected():
    with pytest.raises(ConfigError, match="some without 'source'"):
        pad_batch([{"source": [1]}, {"target": [1]}], 2, (0, 0))


@settings(max_examples=50, deadline=None)
@given(counts=st.lists(st.integers(0, 400), min_size=6, max_size=6))
def test_the_chosen_buckets_cost_least_of_all_choices(counts):
    buckets, lengths = (12, 16, 22, 34), [1, 9, 15, 20, 30, 50]
    all_lengths = [length for length, count in zip(lengths, counts, strict=True) for _ in range(count)]
    sizes = sorted({bucket_length(length, buckets) for length in all_lengths})

    def cost(chosen):
        return COMPILE_COST_TOKENS * len(chosen) + sum(
            min(size for size in chosen if size >= length) for length in all_lengths
        )

    choices = [
        (*some, sizes[-1]) for n in range(len(sizes)) for some in itertools.combinations(sizes[:-1], n)
    ] if sizes else []  # fmt: skip
    result = choose_buckets(all_lengths, buckets)
    assert (result in choices) if choices else result == ()
    assert not choices or cost(result) == min(map(cost, choices))


def test_few_prompts_get_one_bucket_and_many_get_all():
    lengths, buckets = [10, 12, 14, 16] * 5, (10, 12, 14, 16)
    assert choose_buckets(lengths, buckets) == (16,)
    assert choose_buckets(lengths * 1000, buckets) == buckets


def test_refills_are_padded_at_most_to_the_lengths_of_the_batch():
    prompts = [{"source": np.arange(size), "target": [1]} for size in (60, 30, 20, 20, 9, 9, 9)]
    queue = PromptQueue(prompts, (0, 0), (10, 24, 34))
    assert queue.next_lengths(1) == (64, 1)
    assert queue.refill_buckets == ((64,), (1,))
    assert queue.pop_batch(1).batch.source.tokens.shape == (1, 64)
    shapes = []
    while queue:
        indices, batch = queue.pop_refill(4, (34, 1))
        shapes.append((batch.source.tokens.shape, batch.target.tokens.shape, indices.tolist()))
    assert shapes == [((4, 34), (4, 1), [1, 2, 3, 4]), ((4, 34), (4, 1), [5, 6])]
