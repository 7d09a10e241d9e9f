"""Plans place every example once, in rows that hold it; collation puts tokens, segments and weights in place."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.config import ConfigError
from jaxformer.data import packing
from jaxformer.data.packing import Shape

LENGTHS = st.lists(st.integers(1, 16), max_size=60)


def used(batches):
    return sorted(index for batch in batches for row in batch.rows for index in row)


def features(*numbers, source=None):
    tokens = np.array(numbers, np.int32)
    found = {"target": tokens, "labels": tokens + 100}
    return found if source is None else found | {"source": np.array(source, np.int32)}


@pytest.mark.parametrize(
    ("batch", "tokens", "multiple", "expected"),
    [
        (6, None, 1, [(6, 8), (6, 16)]),
        (512, 64, 1, [(8, 8), (4, 16)]),
        (6, 64, 1, [(6, 8), (4, 16)]),
        (512, 100, 4, [(12, 8), (4, 16)]),
        (3, 10, 4, [(4, 8), (4, 16)]),  # at least one row a shard
    ],
)
def test_shapes(batch, tokens, multiple, expected):
    assert packing.shapes((16, 8, 16), batch, tokens, multiple) == expected


@settings(max_examples=25, deadline=None)
@given(lengths=LENGTHS, rows=st.integers(1, 5))
def test_buckets_hold_every_example_once(lengths, rows):
    buckets = packing.shapes((4, 8, 16), 64, rows * 16, 1)
    batches = packing.bucketed(lengths, buckets)
    assert used(batches) == list(range(len(lengths)))
    for batch in batches:
        assert batch.shape in buckets
        assert 1 <= len(batch.rows) <= batch.shape.rows
        assert all(len(row) == 1 and lengths[row[0]] <= batch.shape.length for row in batch.rows)
    unfilled = [batch for batch in batches if len(batch.rows) < batch.shape.rows]
    assert len(unfilled) <= 1
    assert all(batch.shape == buckets[-1] for batch in unfilled)


def test_leftovers_move_up_and_order_is_kept():
    batches = packing.bucketed([2, 8, 2, 8, 2, 1], [Shape(3, 2), Shape(2, 8)])
    assert [(batch.shape.length, batch.rows) for batch in batches] == [
        (2, [[0], [2], [4]]),
        (8, [[5], [1]]),
        (8, [[3]]),
    ]


@settings(max_examples=25, deadline=None)
@given(lengths=LENGTHS, window=st.integers(1, 4))
def test_first_fit_rows_hold_their_examples(lengths, window):
    batches = packing.first_fit(lengths, Shape(3, 16), window)
    assert used(batches) == list(range(len(lengths)))
    rows = [row for batch in batches for row in batch.rows]
    assert all(sum(lengths[index] for index in row) <= 16 for row in rows)
    assert all(len(batch.rows) == 3 for batch in batches[:-1])
    wide = [row for batch in packing.first_fit(lengths, Shape(3, 16)) for row in batch.rows]
    assert sum(sum(lengths[i] for i in row) <= 8 for row in wide) <= 1  # two half-empty rows would have been one


@settings(max_examples=25, deadline=None)
@given(pairs=st.lists(st.tuples(st.integers(1, 16), st.integers(1, 16)), max_size=60))
def test_both_sides_of_packed_pairs_fit(pairs):
    batches = packing.first_fit(pairs, Shape(3, 16))
    assert used(batches) == list(range(len(pairs)))
    rows = [[pairs[index] for index in row] for batch in batches for row in batch.rows]
    assert all(max(map(sum, zip(*row, strict=True))) <= 16 for row in rows)
    # Two rows whose sides are both at most half full would have been one.
    assert sum(max(map(sum, zip(*row, strict=True))) <= 8 for row in rows) <= 1


def test_pairs_pack_by_both_sides_and_not_by_the_longer_one():
    (batch,) = packing.first_fit([(6, 2), (2, 6), (3, 1), (1, 1)], Shape(4, 8))
    assert batch.rows == [[0, 1], [2, 3]]  # 6 + 6 slots would not share a row of 8


def test_first_fit_example():
    (batch,) = packing.first_fit([5, 6, 3, 2, 4], Shape(4, 8))
    assert batch.rows == [[0, 2], [1, 3], [4]]


def test_collate_packed_rows():
    rows = [[features(5, 6, source=[1]), features(7, source=[2, 3])], [features(8, 9, source=[4, 5, 6])], []]
    batch = packing.collate(rows, 4)
    np.testing.assert_array_equal(batch.target.tokens, [[5, 6, 7, 0], [8, 9, 0, 0], [0] * 4])
    np.testing.assert_array_equal(batch.target.slots.segment, [[1, 1, 2, 0], [1, 1, 0, 0], [0] * 4])
    np.testing.assert_array_equal(batch.target.slots.position, [[0, 1, 0, 0], [0, 1, 0, 0], [0] * 4])
    np.testing.assert_array_equal(batch.labels, [[105, 106, 107, 0], [108, 109, 0, 0], [0] * 4])
    np.testing.assert_array_equal(batch.weights, [[1, 1, 1, 0], [1, 1, 0, 0], [0] * 4])
    np.testing.assert_array_equal(batch.source.tokens, [[1, 2, 3, 0], [4, 5, 6, 0], [0] * 4])
    np.testing.assert_array_equal(batch.source.slots.segment, [[1, 2, 2, 0], [1, 1, 1, 0], [0] * 4])
    np.testing.assert_array_equal(batch.source.slots.position, [[0, 0, 1, 0], [0, 1, 2, 0], [0] * 4])
    slots = [array for stream in (batch.target, batch.source) for array in stream.slots if array is not None]
    integers = [batch.target.tokens, *slots, batch.labels]
    assert {array.dtype for array in integers} == {np.dtype(np.int32)}
    assert batch.weights.dtype == np.float32


def test_collate_source_only_with_kinds_and_weights():
    example = {
        "source": np.array([4, 5]),
        "token_type": np.array([0, 1]),
        "labels": np.array([8, 9]),
        "weights": np.array([0.0, 0.5]),
    }
    batch = packing.collate([[example]], 3)
    assert batch.target is None
    np.testing.assert_array_equal(batch.source.token_type, [[0, 1, 0]])
    np.testing.assert_array_equal(batch.weights, [[0, 0.5, 0]])


def test_collate_scalar_labels():
    example = {"source": np.array([4, 5]), "labels": np.array(3)}
    batch = packing.collate([[example], [example | {"weights": np.float32(0.5)}], []], 2)
    np.testing.assert_array_equal(batch.labels, [3, 3, 0])
    np.testing.assert_array_equal(batch.weights, [1, 0.5, 0])
    assert batch.labels.dtype == np.int32
    assert batch.weights.dtype == np.float32
    with pytest.raises(ConfigError, match="first_fit"):
        packing.collate([[example, example]], 4)


def test_collate_without_labels_or_rows():
    prompt = {"target": np.array([1, 2], np.int32)}
    batch = packing.collate([[prompt]], 2)
    assert batch.labels is None
    assert batch.weights is None
    assert batch.source is None
    empty = packing.collate([[], []], 2, template=features(1))
    assert empty.target.tokens.shape == (2, 2)
    assert empty.weights.sum() == 0
    assert not empty.target.slots.segment.any()


def test_an_example_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="got 3 tokens for a row, expected at most 2"):
        packing.collate([[features(1, 2, 3)]], 2)


def test_padding_counts_both_streams():
    batch = packing.collate([[features(5, 6, source=[1])], []], 4)
    assert packing.padding_counts(batch) == (13, 16)
    assert packing.padding_counts(batch._replace(source=None)) == (6, 8)
