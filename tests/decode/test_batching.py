import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.config import ConfigError
from jaxformer.decode.batching import WORTH, Waiting, bucket, fewer_buckets, jobs, stack, within


@pytest.mark.parametrize(
    ("length", "buckets", "wanted"),
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
def test_bucket(length, buckets, wanted):
    assert bucket(length, buckets) == wanted


@pytest.mark.parametrize(
    ("buckets", "rooms", "length", "wanted"),
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
def test_no_shape_is_larger_than_a_table_of_positions(buckets, rooms, length, wanted):
    assert bucket(length, within(buckets, *rooms)) == wanted


def test_a_source_may_say_its_own_positions():
    prompts = [{"source": [5, 6], "position": [1, 3], "target": [0]}, {"source": [7], "position": [4], "target": [0]}]
    batch = stack(prompts, 3, (0, 0))
    assert batch.source.slots.position[:, :3].tolist() == [[1, 3, 0], [4, 0, 0], [0, 0, 0]]
    assert batch.source.slots.segment[:, :3].tolist() == [[1, 1, 0], [1, 0, 0], [0, 0, 0]]


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(0, 20), min_size=1, max_size=12), rows=st.integers(1, 5))
def test_every_prompt_is_in_one_job_with_exactly_its_tokens(lengths, rows):
    prompts = [{"source": np.arange(size) + 100 * i, "target": np.array([i])} for i, size in enumerate(lengths)]
    seen = []
    for index, batch in jobs(prompts, rows, (7, 9)):
        assert batch.source.tokens.shape[0] <= max(rows, 1)
        for row, i in enumerate(index):
            real = batch.source.slots.segment[row] == 1
            assert batch.source.tokens[row][real].tolist() == prompts[i]["source"].tolist()
            assert batch.source.slots.position[row][real].tolist() == list(range(lengths[i]))
            assert (batch.source.tokens[row][~real] == 7).all()
            assert batch.target.tokens[row].tolist() == [i]
        assert (batch.source.slots.segment[len(index) :] == 0).all()
        assert (batch.target.slots.segment[len(index) :] == 0).all()
        seen += index.tolist()
    assert sorted(seen) == list(range(len(lengths)))
    ordered = [lengths[i] for i in seen]
    assert ordered == sorted(ordered, reverse=True)


def test_token_types_and_absent_sides():
    batch = stack([{"source": [1, 2], "kind": [0, 1]}, {"source": [3], "kind": [1]}], 2, (0, 0), (2,))
    assert batch.target is None
    assert batch.source.kind.tolist() == [[0, 1], [1, 0]]
    assert stack([{"target": [1]}], 1, (0, 0)).source is None


def test_mixed_fields_are_refused():
    with pytest.raises(ConfigError, match="some without 'source'"):
        stack([{"source": [1]}, {"target": [1]}], 2, (0, 0))


@settings(max_examples=50, deadline=None)
@given(counts=st.lists(st.integers(0, 400), min_size=6, max_size=6))
def test_few_shapes_cost_the_least_of_all_choices(counts):
    buckets, lengths = (12, 16, 22, 34), [1, 9, 15, 20, 30, 50]
    all_lengths = [length for length, count in zip(lengths, counts, strict=True) for _ in range(count)]
    sizes = sorted({bucket(length, buckets) for length in all_lengths})

    def cost(chosen):
        return WORTH * len(chosen) + sum(min(size for size in chosen if size >= length) for length in all_lengths)

    choices = [
        (*some, sizes[-1]) for n in range(len(sizes)) for some in itertools.combinations(sizes[:-1], n)
    ] if sizes else []  # fmt: skip
    found = fewer_buckets(all_lengths, buckets)
    assert (found in choices) if choices else found == ()
    assert not choices or cost(found) == min(map(cost, choices))


def test_few_prompts_have_one_shape_and_many_have_all():
    lengths, buckets = [10, 12, 14, 16] * 5, (10, 12, 14, 16)
    assert fewer_buckets(lengths, buckets) == (16,)
    assert fewer_buckets(lengths * 1000, buckets) == buckets


def test_prompts_read_into_a_batch_are_at_most_as_wide_as_it_is():
    prompts = [{"source": np.arange(size), "target": [1]} for size in (60, 30, 20, 20, 9, 9, 9)]
    waiting = Waiting(prompts, (0, 0), (10, 24, 34))
    assert waiting.fewer == ((64,), (1,))
    assert waiting.take(1).batch.source.tokens.shape == (1, 64)
    shapes = []
    while waiting:
        job = waiting.take_into((34, 1), 4)
        shapes.append((job.batch.source.tokens.shape, job.batch.target.tokens.shape, job.index.tolist()))
    assert shapes == [((4, 34), (4, 1), [1, 2, 3, 4]), ((4, 34), (4, 1), [5, 6])]
