"""Classification: frames, pairs, which stream, measures."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from task_toys import config, encoded, without, words

from jaxformer import metrics, tasks
from jaxformer.tasks import classification
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
