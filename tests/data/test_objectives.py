"""The pipeline under objectives that draw at random: the same batches on any hosts and after a stop, all text read."""

import dataclasses

import chex
import jax
import numpy as np
import pytest

from jaxformer import tasks
from jaxformer.config import (
    Config,
    ConfigError,
    DataConfig,
    EmbedConfig,
    EvaluateConfig,
    HeadConfig,
    ModelConfig,
    StackConfig,
    TaskConfig,
    TokenizerConfig,
    TrainConfig,
)
from jaxformer.data.encoding import Encoder
from jaxformer.data.pipeline import Pipeline
from jaxformer.data.sources import Dataset
from jaxformer.data.tokenizers import Tokenizers

BYTES = Tokenizers.build(DataConfig(tokenizer=TokenizerConfig(kind="byte", sentinels=8)), [], ("text",))
STACK = StackConfig(embed=EmbedConfig(kinds=2))
MODELS = {
    "prefix_lm": ModelConfig(decoder=StackConfig()),
    "masked_lm": ModelConfig(encoder=STACK, head=HeadConfig(relation=True)),
    "span_corruption": ModelConfig(encoder=STACK, decoder=StackConfig()),
    "denoising": ModelConfig(encoder=STACK, decoder=StackConfig()),
}
CASES = [
    ("prefix_lm", "none"),
    ("prefix_lm", "first_fit"),
    ("prefix_lm", "concat"),
    ("span_corruption", "first_fit"),
    ("span_corruption", "concat"),
    ("denoising", "first_fit"),
    ("denoising", "concat"),
    ("masked_lm", "none"),
    ("masked_lm", "concat"),
]
TEXTS = [{"text": f"{number}. " + "Some words! " * (number % 4)} for number in range(23)]


def made(name, mode, cache, split=None, **hosts):
    relation = "next_sentence" if name == "masked_lm" and mode != "concat" else "none"
    model = MODELS[name] if relation != "none" else dataclasses.replace(MODELS[name], head=HeadConfig())
    config = Config(
        model=model,
        data=DataConfig(batch=4, length=20, packing=mode, cache=str(cache)),
        task=TaskConfig(name=name, relation=relation, mask_rate=0.4, span=2.0),  # several spans even in short rows
        train=TrainConfig(seed=3),
        evaluate=EvaluateConfig(batch=4),
    )
    dataset = Dataset(split or {"train": TEXTS, "validation": TEXTS[:9]}, "key")
    return Pipeline(config, dataset, BYTES, tasks.get(name), **hosts)


def take(iterator, count):
    try:
        return [next(iterator) for _ in range(count)]
    finally:
        iterator.close()


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_hosts_and_stops_change_no_batch_and_epochs_draw_anew(name, mode, tmp_path):
    pipe = made(name, mode, tmp_path)
    whole = take(pipe.train(), 30)
    halves = [take(made(name, mode, tmp_path, process_index=i, process_count=2).train(), 12) for i in (0, 1)]
    for batch, *parts in zip(whole, *halves):
        joined = jax.tree.map(lambda *rows: np.concatenate(rows), *parts)
        chex.assert_trees_all_equal(joined, batch)
    iterator = pipe.train()
    for _ in range(11):
        next(iterator)
    state = pipe.data_state(iterator)
    iterator.close()
    again = take(made(name, mode, tmp_path).resume(state), 12)
    chex.assert_trees_all_equal(again, whole[11:23])
    rows = {b"".join(leaf[row].tobytes() for leaf in jax.tree.leaves(batch)) for batch in whole for row in range(4)}
    assert len(rows) > 50, "a text is drawn otherwise in every epoch"


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_evaluation_is_the_same_every_time_and_reads_all_of_the_text(name, mode, tmp_path):
    first, second = (list(made(name, mode, tmp_path).evaluate("validation")) for _ in range(2))
    chex.assert_trees_all_equal(first, second)
    assert made(name, mode, tmp_path).truncated("validation").cut_tokens == 0
    if name == "prefix_lm":
        labels = sum(int((batch.target.slots.segment > 0).sum()) for batch in first)
        assert labels == sum(len(text["text"]) + 1 for text in TEXTS[:9])
    if name == "denoising":
        labels = sum(int(batch.weights.sum()) for batch in first)
        assert labels == sum(len(text["text"]) + 1 for text in TEXTS[:9])


def test_packed_texts_have_their_own_prefixes(tmp_path):
    batches = take(made("prefix_lm", "first_fit", tmp_path).train(), 5)
    for batch in batches:
        slots, weights = batch.target.slots, batch.weights
        for row in range(4):
            for segment in range(1, slots.segment[row].max() + 1):
                here = slots.segment[row] == segment
                (prefix,) = set(slots.prefix[row][here].tolist())
                assert 1 <= prefix <= here.sum()
                np.testing.assert_array_equal(weights[row][here], np.arange(here.sum()) >= prefix - 1)
        assert not slots.prefix[slots.segment == 0].any()
    assert max(batch.target.slots.segment.max() for batch in batches) > 1


def test_empty_rows_have_no_relation(tmp_path):
    *_, last = made("masked_lm", "none", tmp_path).evaluate("validation")
    empty = last.source.slots.segment[:, 0] == 0
    assert empty.any() and (last.relation[empty] == -1).all() and (last.relation[~empty] >= 0).all()


def test_the_other_text_is_any_but_ones_own(tmp_path):
    """Of the first `count` examples, each as likely, by the example's own generator."""
    config = made("masked_lm", "none", tmp_path).config
    seen = {number: set() for number in range(4)}

    def encode(config, tokenizers, example, rng):
        seen[int(example["text"].split(".")[0])].add(int(example["other"].split(".")[0]))
        return {"source": np.zeros(2, np.int32)}

    task = dataclasses.replace(tasks.get("masked_lm"), encode=encode)
    encoder = Encoder(config, BYTES, task, TEXTS, 4)
    for epoch in range(60):
        encoder(range(4), epoch)
    assert seen == {number: {0, 1, 2, 3} - {number} for number in range(4)}
    with pytest.raises(ConfigError, match="got a split of one example"):
        Encoder(config, BYTES, task, TEXTS[:1], 1)


def test_rows_of_running_text_are_the_text_in_order(tmp_path):
    """Rows of span corruption hold the stream's tokens, each once, in pieces that fill a source."""
    pipe = made("span_corruption", "concat", tmp_path)
    stream = [token for text in TEXTS[:9] for token in (*BYTES.target.encode(text["text"]), BYTES.target.eos)]
    found = []
    for batch in pipe.evaluate("validation"):
        for row in range(4):
            source = batch.source.tokens[row][batch.source.slots.segment[row] > 0].tolist()[:-1]
            labels = batch.labels[row][batch.weights[row] > 0].tolist()[:-1]
            if not source:
                continue
            spans, at = {}, None
            for token in labels:
                at = token if token in BYTES.target.sentinels else at
                spans.setdefault(at, []).append(token)
            for token in source:
                found += spans[token][1:] if token in spans else [token]
    assert found == stream


def test_rows_of_running_text_are_masked_whole_and_framed(tmp_path):
    """The labels of the rows are the stream in order, `<cls>` and `<sep>` around each row, some of them hidden."""
    stream = [token for text in TEXTS[:9] for token in (*BYTES.source.encode(text["text"]), BYTES.source.eos)]
    found, hidden = [], 0
    for batch in made("masked_lm", "concat", tmp_path).evaluate("validation"):
        real = batch.source.slots.segment > 0
        for row in np.flatnonzero(real[:, 0]):
            tokens, labels = batch.source.tokens[row][real[row]], batch.labels[row][real[row]]
            weights = batch.weights[row][real[row]]
            assert (labels[0], labels[-1]) == (BYTES.source.cls, BYTES.source.sep)
            assert weights.sum() == max(1, round(0.4 * (len(labels) - 2))) and not weights[[0, -1]].any()
            np.testing.assert_array_equal(tokens[weights == 0], labels[weights == 0])
            hidden += int((tokens == BYTES.source.mask).sum())
            found += labels[1:-1].tolist()
    assert found == stream
    assert 0.8 * 0.25 < hidden / len(stream) < 0.8 * 0.55


def test_packings_that_a_task_cannot_honour_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="data.packing: got first_fit for task 'masked_lm'"):
        made("masked_lm", "first_fit", tmp_path)
