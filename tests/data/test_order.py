"""What the order of examples and batches depends on."""

import grain
import numpy as np

from jaxformer.data.packing import Shape
from jaxformer.data.planning import SMALL_EPOCH, BlockPlanner, ShuffledOrder


class Texts:
    """Examples of these lengths, as an encoder gives them."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __call__(self, indices, epoch):
        return [{"target": np.zeros(self.lengths[index], np.int32)} for index in indices]


def batches(seed: int, epoch: int) -> set[frozenset[int]]:
    """Which of 40 examples share a batch, in whatever order the batches come."""
    block = BlockPlanner(range(40), ShuffledOrder(40, 40, seed), [Shape(4, 8)], False, seed, None)(epoch)
    return {frozenset(block.indices[place] for row in planned.rows for place in row) for planned in block.batches}


def test_seed_and_epoch_decide_which_examples_share_a_batch():
    assert batches(0, 0) == batches(0, 0)
    assert batches(0, 0) != batches(1, 0), "the seed decides nothing but the order of the batches"
    assert batches(0, 0) != batches(0, 1), "every epoch has the same batches"
    assert sorted(i for batch in batches(3, 2) for i in batch) == list(range(40))


def test_a_small_epoch_is_permuted_as_its_examples_one_by_one():
    shuffle = grain.experimental.index_shuffle
    for examples in (3, SMALL_EPOCH, SMALL_EPOCH + 1):
        order, seed = ShuffledOrder(examples, 2, 7), int(np.random.SeedSequence((7, 5)).generate_state(1)[0])
        last = examples - 1
        alone = [shuffle(position, max_index=last, seed=seed, rounds=4) for position in range(last - 1, examples)]
        assert list(order.indices(5, range(last - 1, examples))) == alone, f"{examples} examples"
        assert order.indices(6, range(3)) != order.indices(5, range(3)) or examples == 3


def test_batches_of_all_lengths_come_in_another_order_every_epoch():
    order = ShuffledOrder(32, 32, 0)
    plan = BlockPlanner(Texts([2, 8] * 16), order, [Shape(4, 2), Shape(4, 8)], False, 0, None)
    orders = [tuple(planned.shape.length for planned in plan(epoch).batches) for epoch in range(8)]
    assert {tuple(sorted(order)) for order in orders} == {(2,) * 4 + (8,) * 4}
    assert len(set(orders)) > 4
    assert any(list(order) != sorted(order) for order in orders)


def test_an_example_as_long_as_the_longest_is_kept():
    plan = BlockPlanner(Texts([3, 4, 5]), ShuffledOrder(3, 3, None), [Shape(4, 4)], False, None, max_length=4)
    assert sum(len(planned.rows) for planned in plan(0).batches) == 2
    assert plan.skipped == {0: 1}
