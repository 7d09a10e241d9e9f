"""Batches whose rows go on with the text of the batch before: contiguous but for a tail, resumable, on hosts."""

import chex
import jax
import numpy as np
import pytest

from jaxformer import tasks
from jaxformer.config import (
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    StackConfig,
    TaskConfig,
    TokenizerConfig,
    TrainConfig,
)
from jaxformer.data import planning
from jaxformer.data.pipeline import Pipeline
from jaxformer.data.sources import Dataset
from jaxformer.data.tokenizers import Tokenizers

BYTES = Tokenizers.build(DataConfig(tokenizer=TokenizerConfig(kind="byte")), [], ("text",))
TEXTS = [{"text": f"{number} " + "abcdefg"[: number % 7]} for number in range(60)]


@pytest.fixture
def made(tmp_path):
    def make(batch=3, length=8, recurrence=True, texts=TEXTS, seed=0, **hosts):
        data = DataConfig(packing="concat", shuffle=False, batch=batch, length=length, cache=str(tmp_path))
        task = TaskConfig("permutation_lm", recurrence=recurrence, predict_every=2)
        config = Config(model=ModelConfig(encoder=StackConfig()), data=data, task=task, train=TrainConfig(seed=seed))
        dataset = Dataset({"train": texts, "validation": texts[:9]}, f"{len(texts)}")
        return Pipeline(config, dataset, BYTES, tasks.get("permutation_lm"), **hosts)

    return make


def running_text(texts) -> np.ndarray:
    tokenizer = BYTES.source
    return np.array([t for x in texts for t in [*tokenizer.encode(x["text"]), tokenizer.eos]])


def take(batches, count):
    try:
        return [next(batches) for _ in range(count)]
    finally:
        batches.close()


@pytest.mark.parametrize("block", [7, 2**16])
def test_each_row_is_one_running_text_and_restarts_with_the_epoch(made, monkeypatch, block):
    monkeypatch.setattr(planning, "MAX_SINGLE_BLOCK", block)
    monkeypatch.setattr(planning, "BLOCK_EXAMPLES", block)
    pipe, text = made(), running_text(TEXTS)
    steps = len(text) // 8 // 3
    assert pipe.epoch_batches == steps
    batches = take(pipe.train(), 2 * steps)
    for epoch in (batches[:steps], batches[steps:]):
        assert [batch.continues.tolist() for batch in epoch] == [[number > 0] * 3 for number in range(steps)]
        rows = np.concatenate([batch.source.tokens for batch in epoch], axis=1)
        for row in range(3):
            begin = row * steps * 8
            np.testing.assert_array_equal(rows[row], text[begin : begin + steps * 8])
        for batch in epoch:
            assert batch.source.slots.segment.all() and (batch.source.slots.position == np.arange(8)).all()
            picked = np.take_along_axis(batch.source.tokens, batch.permutation.targets, axis=1)
            np.testing.assert_array_equal(batch.labels, picked)
    orders = [np.stack([batch.permutation.order for batch in epoch]) for epoch in (batches[:steps], batches[steps:])]
    assert (orders[0] != orders[1]).any(axis=(1, 2)).all(), "every epoch has orders of its own"
    tail = -(-len(text) // 8) - steps * 3
    assert f"train: the last {tail} of {-(-len(text) // 8)} rows are not read (task.recurrence)" in " ".join(
        pipe.truncation_notes(None)
    )


def test_it_resumes_anywhere_on_any_number_of_hosts(made):
    pipe = made(batch=4)
    whole = take(pipe.train(), 9)
    batches = pipe.train()
    for _ in range(3):
        next(batches)
    state = pipe.data_state(batches)
    batches.close()
    for number, batch in enumerate(take(pipe.resume(state), 6)):
        chex.assert_trees_all_equal(batch, whole[3 + number])
    halves = [take(made(batch=4, process_index=i, process_count=2).resume(state), 6) for i in range(2)]
    for number, pair in enumerate(zip(*halves, strict=True)):
        chex.assert_trees_all_equal(_joined(*pair), whole[3 + number])


def _joined(*batches):
    return jax.tree.map(lambda *parts: np.concatenate(parts), *batches)


def test_evaluation_reads_every_token_once_without_memories(made):
    pipe, text = made(), running_text(TEXTS[:9])
    rows = [(b.source.tokens, b.source.slots.segment, b.continues) for b in pipe.evaluate("validation")]
    read = np.concatenate([tokens[segment > 0] for tokens, segment, _ in rows])
    np.testing.assert_array_equal(read, text)
    assert all(continues is None for _, _, continues in rows)


def test_orders_depend_on_the_seed_the_epoch_and_the_row_alone(made):
    shuffled = made(recurrence=False)
    epochs = take(shuffled.train(), 2 * (-(-len(running_text(TEXTS)) // 24)))
    assert epochs[0].continues is None
    alone = made(batch=1, recurrence=False)
    first = take(alone.train(), 3)
    for row, batch in enumerate(first):
        np.testing.assert_array_equal(batch.permutation.order[0], epochs[0].permutation.order[row])
    other = made(batch=1, recurrence=False, seed=1)
    assert any((a.permutation.order != b.permutation.order).any() for a, b in zip(take(other.train(), 3), first))


def test_a_text_shorter_than_a_batch_is_refused(made):
    rows = len(running_text(TEXTS)) // 8
    with pytest.raises(ConfigError, match=f"data.batch: got 64, expected at most {rows} with task.recurrence"):
        made(batch=64).train()
