"""Mixtures: which component an example comes from, the same batches on any host and after any stop, and the counts."""

import collections
import dataclasses
import json
import math

import chex
import jax
import loader_stand_in
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer import tasks
from jaxformer.config import (
    ComponentConfig,
    Config,
    ConfigError,
    DataConfig,
    MixtureConfig,
    TokenizerConfig,
    TrainConfig,
    components,
)
from jaxformer.data import planning
from jaxformer.data.mixture import Mixture
from jaxformer.data.pipeline import Pipeline
from jaxformer.data.planning import SHARE_UNIT, MixedOrder, ShuffledOrder
from jaxformer.data.sources import Dataset
from jaxformer.data.tokenizers import Tokenizers

BYTES = Tokenizers.build(DataConfig(tokenizer=TokenizerConfig(kind="byte")), [], ("text",))
SIZES = {"a": 23, "b": 9, "c": 5}
WEIGHTS = {"a": 2.0, "b": 1.0, "c": 1.0, "held": 0.0}


def texts(name, count):
    """Distinct texts of different lengths that name their component."""
    return [{"text": f"{name}{number:02}" + "x" * (number * 7 % 5)} for number in range(count)]


def config_of(data=None, weights=None, seed=0, **mixture):
    weights = WEIGHTS if weights is None else weights
    parts = {name: ComponentConfig(weight=weight) for name, weight in weights.items()}
    data = {"batch": 4, "length": 12} | (data or {})
    return Config(data=DataConfig(mixture=MixtureConfig(parts, **mixture), **data), train=TrainConfig(seed=seed))


def made(data=None, weights=None, seed=0, encode=None, mixture=None, **hosts):
    config = config_of(data, weights, seed, **(mixture or {}))
    task = tasks.get("language_modelling")
    task = task if encode is None else dataclasses.replace(task, encode=encode)
    parts = {}
    for name, view in components.views(config).items():
        splits = {"validation": texts(name, 3)}
        if name in SIZES:
            splits["train"] = texts(name, SIZES[name])
        parts[name] = Pipeline(view, Dataset(splits, name), BYTES, task, **hosts)
    return Mixture(config, parts, **hosts)


def take(pipe, count):
    iterator = pipe.train()
    try:
        return [next(iterator) for _ in range(count)]
    finally:
        iterator.close()


def examples_of(batch):
    """(component number, text) of the examples in a batch."""
    found = []
    for labels, segments, component in zip(batch.labels, batch.target.slots.segment, batch.component, strict=True):
        for number in range(1, segments.max() + 1):
            (own,) = set(component[segments == number].tolist())
            found.append((own, BYTES.target.decode(labels[segments == number])))
    return found


SETTINGS = {
    "fixed": {},
    "buckets": {"buckets": (6, 8)},
    "first_fit": {"packing": "first_fit", "length": 24},
}


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(planning, "BLOCK_EXAMPLES", 16)


@settings(max_examples=12, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.001, 5.0), min_size=4, max_size=4),
    size=st.integers(8, 40),
    seed=st.none() | st.integers(0, 3),
    begin=st.integers(0, 7),
)
def test_any_stretch_of_blocks_has_its_share_and_every_part_its_epochs(sizes, weights, size, seed, begin):
    parts = tuple(ShuffledOrder(count, count, seed) for count in sizes)
    share = planning.shares(weights[: len(sizes)], sizes, None, None)
    order = MixedOrder(parts, share, size, seed)
    draws = [draw for number in range(begin, begin + 3) for draw in order(number)]
    counts = collections.Counter(draw.part for draw in draws)
    for part, weight in enumerate(weights[: len(sizes)]):
        exact = 3 * size * weight / sum(weights[: len(sizes)])
        assert abs(counts[part] - exact) <= 1 + 1e-6
    # From the beginning, each part's examples come once an epoch, and no epoch begins before the one before it ends.
    of_part = collections.defaultdict(list)
    for number in range(4):
        for draw in sorted(order(number), key=lambda draw: (draw.part, draw.epoch)):
            of_part[draw.part].append((draw.epoch, draw.index))
    for part, drawn in of_part.items():
        assert len(set(drawn)) == len(drawn)
        epochs = collections.Counter(epoch for epoch, _ in drawn)
        assert all(count == sizes[part] for epoch, count in epochs.items() if epoch < max(epochs))


def test_shares_are_those_of_the_paper():
    """T5: proportional to min(size, limit) ** (1 / temperature)."""
    sizes, limit = (1000, 50, 4), 200
    for temperature in (1.0, 2.0, 7.5):
        got = np.array(planning.shares([1.0] * 3, sizes, temperature, limit)) / SHARE_UNIT
        rates = [math.pow(min(size, limit), 1.0 / temperature) for size in sizes]
        np.testing.assert_allclose(got, np.array(rates) / sum(rates), rtol=1e-8)
    assert planning.shares([1.0, 3.0], (5, 70000), None, None) == (SHARE_UNIT // 4, SHARE_UNIT * 3 // 4)
    weighted = np.array(planning.shares([1.0, 3.0], (90, 10), 1.0, None)) / SHARE_UNIT
    np.testing.assert_allclose(weighted, (0.75, 0.25))
    assert min(planning.shares([1.0, 1e-30], (5, 5), None, None)) == 1


def test_sizes_and_the_temperature_reach_the_mixture():
    assert made().shares() == pytest.approx({"a": 0.5, "b": 0.25, "c": 0.25})
    weights = dict.fromkeys(SIZES, 1.0)
    assert made(weights=weights, mixture={"temperature": 1.0}).shares() == pytest.approx(
        {name: size / 37 for name, size in SIZES.items()}
    )
    limited = made(weights=weights, mixture={"temperature": 2.0, "limit": 9}).shares()
    assert limited == pytest.approx({"a": 3 / (6 + 5**0.5), "b": 3 / (6 + 5**0.5), "c": 5**0.5 / (6 + 5**0.5)})


@pytest.mark.parametrize("name", SETTINGS)
def test_batches_mix_the_components_that_have_a_weight(name, small_blocks):
    batches = take(made(SETTINGS[name]), 30)
    drawn = [example for batch in batches for example in examples_of(batch)]
    for number, text in drawn:
        assert text[0] == "abc"[number]
    counts = collections.Counter(number for number, _ in drawn)
    assert counts[0] / len(drawn) == pytest.approx(0.5, abs=0.05)
    assert counts[1] / len(drawn) == pytest.approx(0.25, abs=0.05)
    assert sum(len({number for number, _ in examples_of(batch)}) > 1 for batch in batches) > 15
    for batch in batches:
        np.testing.assert_array_equal(batch.component.shape, batch.labels.shape)


@pytest.mark.parametrize("name", SETTINGS)
def test_hosts_share_the_same_global_batches(name, small_blocks):
    whole = take(made(SETTINGS[name], multiple=4), 10)
    parts = [take(made(SETTINGS[name], multiple=4, process_index=i, process_count=2), 10) for i in range(2)]
    for step, batch in enumerate(whole):
        joined = jax.tree.map(lambda *arrays: np.concatenate(arrays), *(part[step] for part in parts))
        chex.assert_trees_all_equal(joined, batch)


@pytest.mark.parametrize("name", SETTINGS)
def test_resuming_and_its_counts_are_exact(name, small_blocks):
    pipe = made(SETTINGS[name])
    iterator, counts = pipe.train(), collections.Counter()
    states, batches, progress = [pipe.data_state(iterator)], [], []
    for _ in range(24):
        batches.append(next(iterator))
        states.append(pipe.data_state(iterator))
        progress.append(pipe.progress(iterator))
        counts.update("abc"[number] for number, _ in examples_of(batches[-1]))
        assert progress[-1] == {
            **{f"examples/{name}": counts[name] for name in SIZES},
            **{f"epochs/{name}": counts[name] / SIZES[name] for name in SIZES},
        }
    iterator.close()
    assert states[-1]["epoch"] >= 1 and counts["c"] > 2 * SIZES["c"]
    for start in (3, 17):
        fresh = made(SETTINGS[name], process_count=2)
        resumed = fresh.resume(json.loads(json.dumps(states[start])))
        for offset in range(4):
            batch = next(resumed)
            half = jax.tree.map(lambda array: array[: len(array) // 2], batches[start + offset])
            chex.assert_trees_all_equal(batch, half)
            assert fresh.progress(resumed) == progress[start + offset]
        resumed.close()


@pytest.mark.parametrize("name", SETTINGS)
def test_loader_processes_change_no_batch_and_no_count(name, small_blocks, monkeypatch):
    loader_stand_in.install(monkeypatch)
    pipe = made(SETTINGS[name])
    iterator, found = pipe.train(), []
    for _ in range(20):
        state = pipe.data_state(iterator)
        found.append((state, next(iterator), pipe.progress(iterator)))
    iterator.close()
    for start, workers in ((0, 2), (5, 3)):
        other = made({**SETTINGS[name], "workers": workers})
        resumed = other.resume(json.loads(json.dumps(found[start][0])))
        for state, batch, progress in found[start:]:
            assert other.data_state(resumed) == state
            chex.assert_trees_all_equal(next(resumed), batch)
            assert other.progress(resumed) == progress
        resumed.close()


def test_seed_and_name_decide_the_order_and_other_components_do_not():
    def order(name, **arguments):
        drawn = [text for batch in take(made(**arguments), 8) for _, text in examples_of(batch)]
        return [text for text in drawn if text[0] == name]

    assert order("a") == order("a", weights=dict(reversed(WEIGHTS.items())))
    assert order("a") != order("a", seed=1)
    first = {name: [text[1:3] for text in order(name)[:5]] for name in SIZES}
    assert len(set(map(tuple, first.values()))) == 3

    def epoch(weights):
        """The examples of a, in the order of the data's index: what its first epoch's blocks hold."""
        return made(weights=weights)._order.parts[0].indices(0, range(23))

    assert epoch(WEIGHTS) == epoch({"a": 1.0, "c": 7.0})


def test_without_shuffling_components_take_turns_in_the_order_of_the_data():
    drawn = [
        text for batch in take(made({"shuffle": False}, {"a": 2.0, "b": 1.0}), 6) for _, text in examples_of(batch)
    ]
    assert [text[0] for text in drawn[:9]] == list("abaabaaba")
    for name, size in (("a", 23), ("b", 9)):
        own = [int(text[1:3]) for text in drawn if text[0] == name]
        assert own == [number % size for number in range(len(own))]


def test_rows_of_a_long_text_are_mixed_too(tmp_path):
    pipe = made({"packing": "concat", "length": 8, "cache": str(tmp_path)}, {"a": 1.0, "b": 1.0})
    counts = np.zeros(2)
    for batch in take(pipe, 20):
        for row, weights, component in zip(batch.labels, batch.weights, batch.component, strict=True):
            letters = set(BYTES.target.decode(row[weights > 0])) & set("ab")
            assert letters <= {"ab"[component[0]]}
            counts[component[0]] += weights.any()
    assert abs(counts[0] - counts[1]) <= 4


def test_long_examples_are_left_out_of_a_mixture(small_blocks):
    pipe = made({"skip_long": True, "length": 6})
    drawn = {text for batch in take(pipe, 40) for _, text in examples_of(batch)}
    assert drawn == {
        each["text"] for name, size in SIZES.items() for each in texts(name, size) if len(each["text"]) < 6
    }
    assert pipe.skipped_examples > 0


def test_components_whose_arrays_differ_are_refused():
    def encode(config, tokenizers, example, rng):
        features = {"target": np.ones(3, np.int32), "labels": np.ones(3, np.int32)}
        return features | ({"source": np.ones(2, np.int32)} if example["text"][0] == "b" else {})

    with pytest.raises(ConfigError, match=r"components.b: got examples with target.*source.*expected the arrays of a"):
        made(encode=encode)

    def classes(config, tokenizers, example, rng):
        kind = np.float32 if example["text"][0] == "c" else np.int32
        return {"target": np.ones(3, np.int32), "labels": np.asarray(1, kind)}

    with pytest.raises(ConfigError, match=r"components.c: got .*labels \(float32, one an example\), .*expected"):
        made(encode=classes)


@pytest.mark.parametrize(
    ("feature", "expected"),
    [
        ({"prefix": np.asarray(1)}, "got examples with prefix"),
        ({"labels": np.ones(3, np.float32)}, "got examples with several numbers as labels"),
    ],
)
def test_arrays_without_a_component_are_refused(feature, expected):
    def encode(config, tokenizers, example, rng):
        return {"target": np.ones(3, np.int32), "labels": np.ones(3, np.int32), **feature}

    with pytest.raises(ConfigError, match=f"data.mixture.components.a: {expected}"):
        made(encode=encode)


def test_weights_that_one_component_lacks_are_ones_and_labels_of_rows_have_one_component():
    def encode(config, tokenizers, example, rng):
        features = {"target": np.ones(3, np.int32), "labels": np.asarray(1, np.int32)}
        return features | ({"weights": np.float32(0.5)} if example["text"][0] == "b" else {})

    batches = take(made(encode=encode), 8)
    for batch in batches:
        full = batch.target.slots.segment[:, 0] > 0
        np.testing.assert_array_equal(batch.weights, np.where(batch.component == 1, 0.5, 1.0) * full)
    assert {int(number) for batch in batches for number in batch.component} == {0, 1, 2}
