"""The pipeline: every example once an epoch, the same global batches on any number of hosts, exact resuming."""

import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import signal
import threading
import time

import chex
import loader_stand_in
import numpy as np
import pytest
import recipes
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer import tasks
from jaxformer.config import (
    Config,
    ConfigError,
    DataConfig,
    EvaluateConfig,
    ModelConfig,
    StackConfig,
    TokenizerConfig,
    TrainConfig,
    overrides,
)
from jaxformer.data import packing, planning
from jaxformer.data.pipeline import Pipeline
from jaxformer.data.sources import Dataset, FirstExamples
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.errors import StorageError
from jaxformer.tasks import _datasets
from jaxformer.train import by_length

BYTES = Tokenizers.build(DataConfig(tokenizer=TokenizerConfig(kind="byte")), [], ("text",))
LENGTH = 12


def names(count, split="t", longest=9):
    """Distinct texts of different lengths: the number, and a tail."""
    return [{"text": f"{number}{split}" + "x" * (number * 7 % longest)} for number in range(count)]


def record(encode, roles=("text",)):
    task = tasks.get("language_modelling")
    return dataclasses.replace(task, roles=roles, encode=encode, encode_windows=None)


def encode_text(config, tokenizers, example, rng):
    ids = tokenizers.target.encode(example["text"])[: config.data.length - 1]
    return {
        "target": np.array([tokenizers.target.bos, *ids], np.int32),
        "labels": np.array([*ids, tokenizers.target.eos], np.int32),
    }


def encode_pair(config, tokenizers, example, rng):
    source = tokenizers.source.encode(example["text"][:2])
    return encode_text(config, tokenizers, example, rng) | {"source": np.array(source, np.int32)}


def encode_uneven(config, tokenizers, example, rng):
    """A source that is long where the target is short."""
    source = tokenizers.source.encode("s" * (14 - len(example["text"])))
    return encode_text(config, tokenizers, example, rng) | {"source": np.array(source, np.int32)}


def encode_noise(config, tokenizers, example, rng):
    ids = np.array(tokenizers.source.encode(example["text"])[: config.data.length], np.int32)
    return {"source": ids, "labels": rng.integers(0, 1000, len(ids)), "weights": rng.random(len(ids))}


def encode_class(config, tokenizers, example, rng):
    ids = tokenizers.source.encode(example["text"])[: config.data.length]
    return {"source": np.array(ids, np.int32), "labels": np.array(len(ids) % 2)}


LANGUAGE, PAIR, UNEVEN, NOISE, CLASS = map(
    record, (encode_text, encode_pair, encode_uneven, encode_noise, encode_class)
)


def made(data=None, task=LANGUAGE, count=37, seed=0, splits=None, tokenizers=BYTES, model=None, **hosts):
    data = {"batch": 4, "length": LENGTH} | (data or {})
    config = Config(
        data=DataConfig(**data),
        model=model or ModelConfig(),
        train=TrainConfig(seed=seed),
        evaluate=EvaluateConfig(batch=4),
    )
    dataset = Dataset(splits or {"train": names(count), "validation": names(10, "v")}, "key")
    return Pipeline(config, dataset, tokenizers, task, **hosts)


def take(iterator, count):
    try:
        return [next(iterator) for _ in range(count)]
    finally:
        iterator.close()


def epochs(pipe, count):
    """The batches of each of the first epochs."""
    iterator, found = pipe.train(), [[] for _ in range(count + 1)]
    try:
        while not found[count]:
            batch = next(iterator)  # after an epoch's last batch the state still names that epoch
            found[iterator.get_state()["epoch"]].append(batch)
    finally:
        iterator.close()
    return found[:count]


def texts(batch):
    """The labelled texts of a batch's segments, end tokens taken off."""
    found = []
    for labels, segments in zip(batch.labels, batch.target.slots.segment, strict=True):
        found += [BYTES.target.decode(labels[segments == number]) for number in range(1, segments.max() + 1)]
    return found


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(planning, "MAX_SINGLE_BLOCK", 16)
    monkeypatch.setattr(planning, "BLOCK_EXAMPLES", 16)


SETTINGS = {
    "fixed": {},
    "buckets": {"buckets": (5, 8)},
    "budget": {"buckets": (5, 8), "tokens": 40, "batch": 100},
    "first_fit": {"packing": "first_fit", "length": 24},
}


@pytest.mark.parametrize("whole", [16, 2**16])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_example_once_an_epoch(name, whole, monkeypatch):
    monkeypatch.setattr(planning, "MAX_SINGLE_BLOCK", whole)
    monkeypatch.setattr(planning, "BLOCK_EXAMPLES", 16)
    expected = sorted(example["text"] for example in names(37))
    pipe = made(SETTINGS[name])
    orders = []
    for batches in epochs(pipe, 3):
        seen = [text for batch in batches for text in texts(batch)]
        assert sorted(seen) == expected
        orders.append(seen)
        if pipe.epoch_batches is not None:
            assert len(batches) == pipe.epoch_batches
        shapes = {batch.target.tokens.shape for batch in batches}
        assert shapes <= set(map(tuple, pipe.shapes()))
        assert sum(batch.weights.sum() for batch in batches) == sum(len(text) + 1 for text in expected)
    assert orders[0] != orders[1] != orders[2]
    assert orders[0] != expected
    assert (pipe.epoch_batches is None) == (name != "fixed")


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=40),
    name=st.sampled_from(sorted(SETTINGS)),
    seed=st.integers(0, 3),
)
def test_every_example_once_with_any_lengths(lengths, name, seed):
    examples = [{"text": chr(65 + number) + "y" * length} for number, length in enumerate(lengths)]
    pipe = made(SETTINGS[name], seed=seed, splits={"train": examples})
    (batches,) = epochs(pipe, 1)
    assert sorted(text for batch in batches for text in texts(batch)) == sorted(e["text"] for e in examples)


@pytest.mark.parametrize("name", SETTINGS)
def test_hosts_share_the_same_global_batches(name, small_blocks):
    whole = take(made(SETTINGS[name], multiple=4).train(), 14)
    for count in (2, 4):
        parts = [
            take(made(SETTINGS[name], multiple=4, process_index=index, process_count=count).train(), 14)
            for index in range(count)
        ]
        for step, batch in enumerate(whole):
            joined = jax_concatenate([part[step] for part in parts])
            chex.assert_trees_all_equal(joined, batch)


def jax_concatenate(batches):
    import jax

    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *batches)


@pytest.mark.parametrize("name", SETTINGS)
def test_resuming_is_exact(name, small_blocks):
    iterator = made(SETTINGS[name], task=LANGUAGE).train()
    states, batches = [iterator.get_state()], []
    for _ in range(40):
        batches.append(next(iterator))
        states.append(iterator.get_state())
    iterator.close()
    assert states[-1]["epoch"] >= 1
    fresh = made(SETTINGS[name]).train()
    for start in (0, 1, 3, 7, 12, 21, 30, 5):  # within blocks, at their ends, in another epoch, and back
        fresh.set_state(json.loads(json.dumps(states[start])))
        assert fresh.get_state() == states[start]
        for offset in range(4):
            chex.assert_trees_all_equal(next(fresh), batches[start + offset])
            assert fresh.get_state() == states[start + offset + 1]
    fresh.close()


def test_batches_begun_early_are_at_their_position(small_blocks):
    """The first position is asked for only after the background has filled its buffer."""
    pipe = made({}, splits={"train": names(37)})
    iterator = pipe.train()
    iterator.start_prefetch()
    while iterator._buffer.qsize() < 2:
        time.sleep(0.001)
    assert iterator.get_state() == {"epoch": 0, "block": 0, "batch": 0}
    iterator.close()


@pytest.mark.parametrize("name", [*SETTINGS, "skip_long"])
def test_loader_processes_change_neither_order_nor_state(name, small_blocks, monkeypatch):
    loader_stand_in.install(monkeypatch)
    data = SETTINGS.get(name, {"skip_long": True})
    hosts = {"process_index": 1, "process_count": 2}
    splits = {"train": [*names(37), {"text": "z" * 30}]}
    pipe = made(data, NOISE if name == "fixed" else LANGUAGE, splits=splits, **hosts)
    iterator, batches, states = pipe.train(), [], []
    for _ in range(24):
        states.append(pipe.data_state(iterator))
        batches.append(next(iterator))
    iterator.close()
    assert states[-1]["epoch"] >= 1
    for start, workers in ((0, 3), (7, 1), (14, 2), (5, 0)):
        other = made({**data, "workers": workers}, pipe.task, splits=splits, **hosts)
        resumed = other.resume(json.loads(json.dumps(states[start])))
        if start:
            resumed.start_prefetch()  # and once more, which changes nothing
            resumed.start_prefetch()
            time.sleep(0.02)
        assert resumed.get_state() == {name: states[start][name] for name in ("epoch", "block", "batch")}
        for offset in range(10):
            assert other.data_state(resumed) == states[start + offset]
            chex.assert_trees_all_equal(next(resumed), batches[start + offset])
        resumed.set_state({name: states[3][name] for name in ("epoch", "block", "batch")})
        chex.assert_trees_all_equal(next(resumed), batches[3])
        assert start or other.skipped_examples == (name == "skip_long"), "of the epoch's blocks that were read"
        resumed.close()


def test_loader_processes_open_a_long_text_and_learn_no_cached_text(tmp_path, monkeypatch):
    sent = loader_stand_in.install(monkeypatch)
    data = {"packing": "concat", "cache": str(tmp_path), "length": 4}
    splits = {"train": [{"text": "abc " * 9000}]}
    whole = take(made(data, splits=splits).train(), 5)
    for batch, expected in zip(take(made({**data, "workers": 2}, splits=splits).train(), 5), whole, strict=True):
        chex.assert_trees_all_equal(batch, expected)
    assert sent[0].size < 60_000, "36,000 tokens of two bytes are in a file"
    monkeypatch.chdir(tmp_path)
    pipe = made({"workers": 2}, splits={"train": names(9)})
    pipe._caching_tokenizers.target.encode("x" * 50_000)
    assert len(take(pipe.train(), 1)) == 1 and sent[1].size < 40_000


def test_loader_processes_leave_signals_to_their_parent_and_their_death_is_one_line():
    """Two processes, started off the main thread."""
    iterator = made({"workers": 2}).train()
    expected = take(made().train(), 8)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        chex.assert_trees_all_equal(pool.submit(next, iterator).result(), expected[0])
    children = multiprocessing.active_children()
    assert len(children) == 2
    for child in children:
        os.kill(child.pid, signal.SIGINT)
        os.kill(child.pid, signal.SIGTERM)
    for batch in expected[1:]:
        chex.assert_trees_all_equal(next(iterator), batch)
    children[0].kill()
    with pytest.raises(StorageError, match=r"^config.data.workers: got a loader process that ended \(.*-9.*lower it"):
        take(iterator, 64)
    assert not multiprocessing.active_children()


def test_what_loader_processes_cannot_do_is_one_line(monkeypatch):
    lock = threading.Lock()

    def encode(config, tokenizers, example, rng):
        with lock:
            return encode_text(config, tokenizers, example, rng)

    iterator = made({"workers": 1}, record(encode)).train()
    with pytest.raises(ConfigError, match=r"config.data.workers: got 1 and data that cannot be sent .*lock.*set it to"):
        next(iterator)
    assert not multiprocessing.active_children()
    loader_stand_in.install(monkeypatch)
    iterator = made({"skip_long": True, "workers": 2}, splits={"train": [{"text": "z" * 30}] * 3}).train()
    with pytest.raises(ConfigError, match=r"^data\.skip_long: got an epoch without examples"):
        next(iterator)


def test_state_does_not_depend_on_the_number_of_hosts(small_blocks):
    one = made(SETTINGS["buckets"], multiple=2).train()
    take_one = [next(one) for _ in range(14)]
    state = one.get_state()
    take_one += [next(one) for _ in range(3)]
    one.close()
    for index in range(2):
        part = made(SETTINGS["buckets"], process_index=index, process_count=2).train()
        part.set_state(state)
        for offset, batch in enumerate(take(part, 3)):
            rows = take_one[14 + offset].target.tokens
            half = len(rows) // 2
            np.testing.assert_array_equal(batch.target.tokens, rows[index * half : (index + 1) * half])


def test_other_devices_go_on_with_the_batches_that_the_run_began_with(small_blocks):
    """A token budget of 100 is 6 rows for 2 devices and 4 for 4: the run stays at what it began with."""
    data = {"batch": 16, "tokens": 6 * LENGTH + 5}
    pipe = made(data, multiple=2)
    assert [shape.rows for shape in pipe.shapes()] == [6]
    begun = pipe.train()
    for _ in range(5):
        next(begun)
    place = json.loads(json.dumps(pipe.data_state(begun)))
    rest = take(begun, 9)
    for multiple in (1, 2, 3, 6):
        chex.assert_trees_all_equal(take(made(data, multiple=multiple).resume(dict(place)), 9), rest)
    with pytest.raises(ConfigError, match=r"got batches of 6 rows in the checkpoint, expected multiples of 4"):
        made(data, multiple=4).resume(place)
    for wrong in (
        {},
        {"epoch": 0, "block": 0, "batch": "x"},
        {"epoch": 0, "block": -1, "batch": 0},
        place | {"shapes": []},
    ):
        with pytest.raises(ConfigError, match="as the state of the data"):
            made(data, multiple=2).resume(wrong)


def test_seed_decides_the_order():
    first, again, other = (take(made(seed=seed).train(), 5) for seed in (0, 0, 1))
    chex.assert_trees_all_equal(first, again)
    assert [texts(batch) for batch in first] != [texts(batch) for batch in other]
    # Seed 1's first epoch is not seed 0's second.
    second = epochs(made(seed=0), 2)[1]
    assert texts(second[0]) != texts(other[0])


def test_order_of_the_data_without_shuffling():
    batches = take(made({"shuffle": False}, count=10).train(), 6)
    in_order = [example["text"] for example in names(10)]
    assert [texts(batch) for batch in batches] == [in_order[:4], in_order[4:8], in_order[8:]] * 2


def test_token_budget_and_multiple():
    pipe = made({"buckets": (5, 8), "tokens": 50, "batch": 9}, multiple=2)
    assert pipe.shapes() == [(8, 5), (6, 8), (4, 12)]
    for batch in take(pipe.train(), 12):
        assert batch.target.tokens.size <= 50


def test_first_fit_fills_rows():
    pipe = made(SETTINGS["first_fit"], count=200)
    (batches,) = epochs(pipe, 1)
    empty, slots = map(sum, zip(*map(packing.padding_counts, batches), strict=True))
    assert empty / slots < 0.1
    for batch in batches:
        segment, position = batch.target.slots.segment, batch.target.slots.position
        begins = np.diff(segment, axis=1, prepend=0) > 0
        assert (position[begins] == 0).all()
        inside = (segment > 0) & ~begins
        assert (position[inside] == position[:, :-1][inside[:, 1:]] + 1).all()
        assert (batch.target.tokens[begins] == BYTES.target.bos).all()


def test_packed_pairs_keep_their_sides_together():
    pipe = made(SETTINGS["first_fit"], task=UNEVEN, count=200)
    assert pipe.shapes() == [(4, 24)]  # one program
    seen = []
    for batch in epochs(pipe, 1)[0]:
        for source, target in zip(batch.source.slots.segment, batch.target.slots.segment, strict=True):
            assert np.bincount(source)[1:].tolist() == [14 - (n - 1) for n in np.bincount(target)[1:]]
        seen += texts(batch)
    assert sorted(seen) == sorted(example["text"] for example in names(200))


def test_the_quickstart_trains_on_little_padding_with_one_program():
    config = overrides.parse(
        [
            f"--config={recipes.CONFIGS}/quickstart.py",
            "--config.data.examples=3000",
            "--config.data.tokenizer.vocab=300",
        ]
    )
    dataset = _datasets.build(config)
    tokenizers = Tokenizers.build(config.data, FirstExamples(dataset.splits["train"], 500), ("source", "target"))
    pipe = Pipeline(config, dataset, tokenizers, tasks.get("translation"))
    assert len(pipe.shapes()) == 1
    (batches,) = epochs(pipe, 1)
    empty, slots = map(sum, zip(*map(packing.padding_counts, batches), strict=True))
    assert empty / slots < 0.12


def test_evaluation_gives_each_pair_a_row():
    both = ModelConfig(encoder=StackConfig(), decoder=StackConfig())
    pairs = made(SETTINGS["first_fit"], task=UNEVEN, model=both)
    for batch in pairs.evaluate("validation"):
        assert batch.target.slots.segment.max() == batch.source.slots.segment.max() == 1
    single = made(SETTINGS["first_fit"], task=LANGUAGE)
    assert max(batch.target.slots.segment.max() for batch in single.evaluate("validation")) > 1
    assert by_length.applies(pairs.config)


def test_hosts_and_stops_change_no_packed_pair(small_blocks):
    setting = SETTINGS["first_fit"]
    whole = made(setting, task=UNEVEN, multiple=2).train()
    batches = [next(whole) for _ in range(5)]
    state = json.loads(json.dumps(whole.get_state()))
    batches += take(whole, 9)
    assert state["block"] > 0 or state["epoch"] > 0
    parts = []
    for index in range(2):
        part = made(setting, task=UNEVEN, process_index=index, process_count=2).train()
        part.set_state(state)
        parts.append(take(part, 9))
    for step, batch in enumerate(batches[5:]):
        chex.assert_trees_all_equal(jax_concatenate([part[step] for part in parts]), batch)


def test_pairs_share_a_bucket():
    for batch in take(made(SETTINGS["buckets"], task=PAIR).train(), 8):
        assert batch.source.tokens.shape == batch.target.tokens.shape == batch.labels.shape
        assert [BYTES.source.decode(row) for row in batch.source.tokens] == [
            text[:2] for text in (BYTES.target.decode(row) for row in batch.target.tokens)
        ]


def test_noise_depends_on_seed_epoch_and_example_only(small_blocks):
    def labels(batches):
        found = {}
        for batch in batches:
            for tokens, row, weights, segment in zip(
                batch.source.tokens, batch.labels, batch.weights, batch.source.slots.segment, strict=True
            ):
                if segment.any():
                    found[BYTES.source.decode(tokens[segment > 0])] = row, weights
        return {text: (np.trim_zeros(row).tolist(), np.trim_zeros(w).tolist()) for text, (row, w) in found.items()}

    first, second = map(labels, epochs(made({"buckets": (5, 8)}, task=NOISE), 2))
    assert len(first) == 37
    assert all(first[text] != second[text] for text in first)
    assert len({noise[1][0] for noise in first.values()}) == 37  # no two examples share their noise
    (alone,) = map(labels, epochs(made({"batch": 3}, task=NOISE), 1))  # other batches, one shape, encoded lazily
    assert alone == first
    (other,) = map(labels, epochs(made(task=NOISE, seed=1), 1))
    assert all(first[text] != other[text] for text in first)


def test_class_labels():
    (batches,) = epochs(made(task=CLASS), 1)
    assert sum(batch.weights.sum() for batch in batches) == 37
    for batch in batches:
        assert batch.labels.shape == batch.weights.shape == (4,)
        assert batch.target is None
        lengths = (batch.source.slots.segment > 0).sum(1)
        np.testing.assert_array_equal(batch.labels, lengths % 2 * (lengths > 0))


@pytest.mark.parametrize("name", SETTINGS)
def test_evaluation_is_one_pass_with_full_shapes(name, small_blocks):
    pipe = made(SETTINGS[name], splits={"train": names(3), "validation": names(37, "v")})
    batches = list(pipe.evaluate("validation"))
    assert sorted(text for batch in batches for text in texts(batch)) == sorted(e["text"] for e in names(37, "v"))
    assert {len(batch.labels) for batch in batches} == {4}
    chex.assert_trees_all_equal(batches, list(pipe.evaluate("validation")))
    assert (batches[-1].weights.sum(1) == 0).any()
    first = list(pipe.evaluate("validation", examples=6, rows=3))
    assert sorted(text for batch in first for text in texts(batch)) == sorted(e["text"] for e in names(6, "v"))
    assert {len(batch.labels) for batch in first} == {3}


def test_evaluation_keeps_the_order_and_splits_among_hosts():
    whole = list(made().evaluate("validation"))
    assert [text for batch in whole for text in texts(batch)] == [e["text"] for e in names(10, "v")]
    parts = [list(made(process_index=index, process_count=4).evaluate("validation")) for index in range(4)]
    for step, batch in enumerate(whole):  # the last host's rows of the last batch are empty, and have the same shape
        chex.assert_trees_all_equal(jax_concatenate([part[step] for part in parts]), batch)


DOCUMENTS = [{"text": text} for text in ("the first one", "", "b", "another document, longer than a row of tokens")]


@pytest.mark.parametrize("shuffle", [True, False])
def test_concat_predicts_every_token_once(tmp_path, shuffle):
    data = {"packing": "concat", "cache": str(tmp_path), "length": 8, "shuffle": shuffle}
    pipe = made(data, splits={"train": DOCUMENTS, "validation": DOCUMENTS[:1]})
    stream = [1]
    for document in DOCUMENTS:
        stream += [*BYTES.target.encode(document["text"]), 2]
    rows = -(-(len(stream) - 1) // 8)
    for batches in epochs(pipe, 2):
        assert len(batches) == pipe.epoch_batches == -(-rows // 4)
        found = {}
        for batch in batches:
            np.testing.assert_array_equal(batch.weights, batch.target.slots.segment)
            for inputs, labels, weights in zip(batch.target.tokens, batch.labels, batch.weights, strict=True):
                if weights.any():
                    end = int(weights.sum())
                    np.testing.assert_array_equal(inputs[1:end], labels[: end - 1])
                    found[tuple(inputs[:end])] = labels[:end]
        if not shuffle:
            assert np.concatenate(list(found.values())).tolist() == stream[1:]
        assert len(found) == rows
        ordered = [stream[begin : begin + 8] for begin in range(0, len(stream) - 1, 8)]
        for inputs in ordered:
            begin = ordered.index(inputs) * 8
            end = min(begin + 8, len(stream) - 1)
            assert found[tuple(stream[begin:end])].tolist() == stream[begin + 1 : end + 1]


def test_concat_is_written_once_and_read_again(tmp_path):
    data = {"packing": "concat", "cache": str(tmp_path), "length": 8}
    first = made(data, splits={"train": DOCUMENTS})
    (path,) = (tmp_path / "streams").iterdir()
    stamp = path.stat().st_mtime_ns
    second = made(data, splits={"train": DOCUMENTS})
    assert list((tmp_path / "streams").iterdir()) == [path]
    assert path.stat().st_mtime_ns == stamp
    chex.assert_trees_all_equal(take(first.train(), 5), take(second.train(), 5))
    made(data | {"examples": 2}, splits={"train": DOCUMENTS})
    words = DataConfig(tokenizer=TokenizerConfig(kind="character"))
    made(data, splits={"train": DOCUMENTS}, tokenizers=Tokenizers.build(words, DOCUMENTS, ("text",)))
    assert len(list((tmp_path / "streams").iterdir())) == 3  # other documents, another tokenizer


def test_concat_resumes_and_splits_among_hosts(tmp_path):
    data = {"packing": "concat", "cache": str(tmp_path), "length": 4}
    iterator = made(data, splits={"train": DOCUMENTS}).train()
    batches = [next(iterator) for _ in range(3)]
    state = iterator.get_state()
    batches += [next(iterator) for _ in range(6)]
    iterator.close()
    parts = []
    for index in range(2):
        part = made(data, splits={"train": DOCUMENTS}, process_index=index, process_count=2).train()
        part.set_state(state)
        parts.append(take(part, 6))
    for step in range(6):
        chex.assert_trees_all_equal(jax_concatenate([part[step] for part in parts]), batches[3 + step])


def test_long_examples_are_dropped_in_training_only():
    long = [{"text": "z" * 30}, {"text": "q" * 12}]
    splits = {"train": [*names(9), *long], "validation": long}
    pipe = made({"skip_long": True}, splits=splits)
    (batches,) = epochs(pipe, 1)
    assert sorted(text for batch in batches for text in texts(batch)) == sorted(e["text"] for e in names(9))
    assert pipe.skipped_examples == 2
    assert pipe.epoch_batches is None
    (batch,) = pipe.evaluate("validation")
    assert texts(batch) == ["z" * (LENGTH - 1), "q" * (LENGTH - 1)]
    cut = epochs(made(splits=splits), 1)[0]
    assert sum(batch.weights.sum(1).astype(bool).sum() for batch in cut) == 11


def test_nothing_left_is_an_error_and_not_an_endless_loop():
    iterator = made({"skip_long": True}, splits={"train": [{"text": "z" * 30}] * 3}).train()
    with pytest.raises(ConfigError, match=r"data\.skip_long: got an epoch without examples"):
        next(iterator)
    iterator.close()


def test_texts_are_split_once(monkeypatch):
    calls = []
    encode = BYTES.source.vocabulary.encode
    monkeypatch.setattr(BYTES.source.vocabulary, "encode", lambda text: calls.append(text) or encode(text))
    epochs(made(SETTINGS["buckets"]), 3)
    assert len(calls) == len(set(calls)) == 37


def test_only_the_first_training_examples():
    (batches,) = epochs(made({"examples": 5}), 1)
    assert sorted(text for batch in batches for text in texts(batch)) == sorted(e["text"] for e in names(5))


def test_size():
    pipe = made(splits={"train": names(3), "validation": [{"text": "ab cd"}, {"text": "ä"}]})
    assert pipe.size("validation") == {"examples": 2, "lines": 2, "bytes": 9, "words": 3}
    assert pipe.size("validation", 1) == {"examples": 1, "lines": 1, "bytes": 6, "words": 2}


@pytest.mark.parametrize(
    ("data", "task", "splits", "message"),
    [
        ({}, LANGUAGE, {"train": []}, "got no examples in split 'train'"),
        ({"packing": "tight"}, LANGUAGE, None, "data.packing: got 'tight'"),
        ({"packing": "concat"}, PAIR, None, "data.packing: got concat for task 'translation'"),
        ({"packing": "first_fit"}, CLASS, None, "data.packing: got first_fit"),
    ],
)
def test_bad_settings(data, task, splits, message):
    with pytest.raises(ConfigError) as error:
        made(data, task=task, splits=splits)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_pipeline_without_a_training_split_only_evaluates():
    pipeline = made({}, task=LANGUAGE, splits={"validation": names(3)})
    assert len(list(pipeline.evaluate("validation"))) == 1
    with pytest.raises(ConfigError, match="split: got 'train', expected one of validation"):
        pipeline.train()


def test_evaluating_an_absent_split():
    with pytest.raises(ConfigError, match="split: got 'tset', expected one of train, validation"):
        made().evaluate("tset")


def test_concat_needs_an_end_token(tmp_path):
    import tokenizers as hf

    hf.Tokenizer(hf.models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>")).save(str(tmp_path / "t.json"))
    config = DataConfig(tokenizer=TokenizerConfig(kind="file", path=str(tmp_path / "t.json")))
    loaded = Tokenizers.build(config, [], ("text",))

    def encode(config, tokenizers, example, rng):
        return {"target": np.array(tokenizers.target.encode(example["text"]), np.int32)}

    with pytest.raises(ConfigError, match="without end token"):
        made({"packing": "concat", "cache": str(tmp_path)}, task=record(encode), tokenizers=loaded)
