"""Classification: frames, pairs, which stream, measures."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from task_toys import config, encoded, without, words

from jaxformer import metrics, tasks
from jaxformer.config import ConfigError
from jaxformer.config.checks import check
from jaxformer.data.sources import Dataset
from jaxformer.tasks import classification
from jaxformer.train import setup
from jaxformer.types import Batch

TASK = tasks.get("classification")


def test_a_text_and_its_label():
    both = words()
    tokenizer = both.source
    features = encoded(config("classification"), both, text="a cat sat", label=1)
    assert set(features) == {"source", "labels"}
    assert features["source"].tolist() == [tokenizer.cls, *tokenizer.encode("a cat sat"), tokenizer.sep]
    assert features["labels"].shape == ()
    assert features["labels"] == 1


def test_a_pair_has_two_kinds():
    both = words()
    tokenizer = both.source
    features = encoded(config("classification", kinds=2), both, text="a cat", pair="the dog ran", label=0)
    first, second = tokenizer.encode("a cat"), tokenizer.encode("the dog ran")
    assert features["source"].tolist() == [tokenizer.cls, *first, tokenizer.sep, *second, tokenizer.sep]
    assert features["token_type"].tolist() == [0] * 4 + [1] * 4


@pytest.mark.parametrize(("kinds", "last"), [(0, None), (1, 0), (2, 1)])
def test_kinds_fit_the_model(kinds, last):
    features = encoded(config("classification", kinds=kinds), words(), text="a", pair="cat", label=0)
    assert (features["token_type"][-1] if "token_type" in features else None) == last


def test_a_single_text_has_kinds_too_so_that_a_batch_is_alike():
    features = encoded(config("classification", kinds=2), words(), text="a cat", label=0)
    assert features["token_type"].tolist() == [0] * 4


def test_a_decoder_reads_the_text_as_its_target():
    features = encoded(config("classification", side="decoder"), words(), text="a cat", label=0)
    assert set(features) == {"target", "labels"}


def test_bos_and_eos_stand_in_for_a_missing_frame():
    both = without(words(), "cls", "sep")
    tokens = encoded(config("classification"), both, text="a cat", label=0)["source"]
    assert (tokens[0], tokens[-1]) == (both.source.bos, both.source.eos)
    bare = without(words(), "cls", "sep", "bos", "eos")
    assert len(encoded(config("classification"), bare, text="a cat", label=0)["source"]) == 2


def test_cutting_keeps_the_frame():
    both = words()
    tokens = encoded(config("classification", length=6), both, text="a cat sat on", pair="the dog", label=0)["source"]
    assert len(tokens) == 6
    assert [i for i, token in enumerate(tokens) if token == both.source.sep] == [3, 5]


@settings(max_examples=25, deadline=None)
@given(first=st.integers(0, 9), second=st.integers(0, 9), room=st.integers(0, 15))
def test_the_longer_of_a_pair_gives_way(first, second, room):
    expected = [first, second]
    while sum(expected) > room:  # BERT's rule, one token at a time
        expected[0 if expected[0] > expected[1] else 1] -= 1
    cut = classification.truncate_parts([range(first), range(second)], room)
    assert [len(part) for part in cut] == expected
    assert all(list(part) == list(range(len(part))) for part in cut)


def test_a_tab_separates_a_pair_in_and_out_of_a_line():
    both, settings_ = words(), config("classification", kinds=2)
    example = {"text": "a\tcat", "pair": "the dog", "label": 0}
    line = TASK.input_line(example)
    assert line == "a cat\tthe dog"
    prompt = TASK.prompt(settings_, both, line)
    trained = encoded(settings_, both, text="a cat", pair="the dog", label=0)
    np.testing.assert_array_equal(prompt["source"], trained["source"])
    np.testing.assert_array_equal(prompt["token_type"], trained["token_type"])
    assert TASK.input_line({"text": "a cat", "label": 0}) == "a cat"


def test_measures_of_a_batch_with_an_empty_row():
    logits = jnp.array([[2.0, 0, 0], [0, 2, 0], [0, 2, 0], [5, 0, 0]])
    batch = Batch(None, None, jnp.array([0, 1, 2, 0]), jnp.array([1.0, 1, 1, 0]))
    values = metrics.divide(TASK.metrics(config("classification"), logits, batch))
    right = np.log(np.exp(2) + 2)
    np.testing.assert_allclose(values["loss"], (3 * right - 2 - 2) / 3, rtol=1e-6)
    np.testing.assert_allclose(values["accuracy"], 2 / 3, rtol=1e-6)
    np.testing.assert_allclose(values["macro_f1"], np.mean([1.0, 2 / 3, 0.0]), rtol=1e-6)


def weighted(weights, counts=()):
    base = config("classification", class_weights=weights, class_counts=counts, classes=("no", "yes", "maybe"))
    head = dataclasses.replace(base.model.head, kind="classes", classes=3)
    return dataclasses.replace(base, model=dataclasses.replace(base.model, head=head))


def test_classes_weigh_in_the_loss_and_not_in_the_measures():
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(5, 3)).astype(np.float32), np.array([0, 1, 2, 1, 7])
    batch = Batch(None, None, jnp.asarray(labels), jnp.asarray([1.0, 1.0, 1.0, 1.0, 0.0]))  # the last is padding
    settings = weighted(("yes=3", "maybe=0.5"))
    total, weight = TASK.loss(settings, jnp.asarray(logits), batch)["loss"]
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    scale = np.array([1.0, 3.0, 0.5, 3.0])
    expected = -(scale * log_probs[np.arange(4), labels[:4]]).sum()
    np.testing.assert_allclose([total, weight], [expected, scale.sum()], rtol=1e-5)
    plain = dataclasses.replace(settings, task=dataclasses.replace(settings.task, class_weights=()))
    for name, pair in TASK.metrics(settings, jnp.asarray(logits), batch).items():
        np.testing.assert_array_equal(pair, TASK.metrics(plain, jnp.asarray(logits), batch)[name])


def test_balanced_classes_have_equal_shares():
    weights = classification.class_weights(weighted(("balanced",), (6, 3, 0)))
    np.testing.assert_allclose(weights, [9 / (3 * 6), 9 / (3 * 3), 0.0])
    train = [{"text": "a", "label": label} for label in (0, 0, 1)] + [{"text": "b", "tags": (0, 2, 2)}]
    dataset = Dataset({"train": train}, "key", ("no", "yes", "maybe"))
    assert setup.count_classes(weighted(("balanced",)), dataset, 3) == (3, 1, 2)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (("yse=2",), "got 'yse=2', expected each of the classes .*did you mean 'yes'"),
        (("yes=2", "yes=3"), "got 'yes=3', expected each of the classes .* at most once"),
        (("yes=0", "no=0", "maybe=0"), "all 0, expected one above 0"),
    ],
)
def test_weights_of_other_classes_are_refused(weights, message):
    with pytest.raises(ConfigError, match=f"config.task.class_weights: .*{message}"):
        TASK.check(weighted(weights))


@pytest.mark.parametrize("entry", ["yes", "yes=-1", "=2", "yes=nan", "balanced,yes=2"])
def test_weights_of_another_form_are_refused(entry):
    with pytest.raises(ConfigError, match="config.task.class_weights: got .*expected balanced alone, or CLASS=WEIGHT"):
        check(weighted(tuple(entry.split(","))))
