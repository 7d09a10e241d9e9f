"""What the order of the examples depends on."""

from jaxformer.data.packing import Shape
from jaxformer.data.pipeline import Plan


def batches(seed: int, epoch: int) -> set[frozenset[int]]:
    """Which of 40 examples share a batch, in whatever order the batches come."""
    block = Plan(range(40), [Shape(4, 8)], pack=False, seed=seed, longest=None, size=40)(epoch)
    return {frozenset(block.indices[place] for row in planned.rows for place in row) for planned in block.batches}


def test_seed_and_epoch_decide_which_examples_share_a_batch():
    assert batches(0, 0) == batches(0, 0)
    assert batches(0, 0) != batches(1, 0), "the seed decides nothing but the order of the batches"
    assert batches(0, 0) != batches(0, 1), "every epoch has the same batches"
    assert sorted(i for batch in batches(3, 2) for i in batch) == list(range(40))
