"""Language modelling: alignment, the pipeline's rows, and three perplexities of one likelihood."""

import math

import numpy as np
import pytest
from task_toys import config, encoded, words

from jaxformer import tasks
from jaxformer.data import concatenation

TASK = tasks.get("language_modelling")


def settings(**edits):
    return config("language_modelling", side="decoder", **edits)


def test_labels_are_the_tokens_after_the_targets():
    both = words()
    ids = both.target.encode("the cat sat")
    features = encoded(settings(), both, text="the cat sat")
    assert set(features) == {"target", "labels", "weights"}
    assert features["target"].tolist() == [both.target.bos, *ids]
    assert features["labels"].tolist() == [*ids, both.target.eos]
    np.testing.assert_array_equal(features["labels"][:-1], features["target"][1:])


def test_one_text_is_the_same_row_whole_or_cut_from_the_stream(tmp_path):
    both = words()
    features = encoded(settings(), both, text="the cat sat")
    rows = concatenation.ConcatenatedRows(
        concatenation.token_stream(tmp_path, "key", [{"text": "the cat sat"}], both.target), 32
    )
    assert len(rows) == 1
    for name in ("target", "labels"):
        np.testing.assert_array_equal(rows([0], 0)[0][name], features[name])


def test_a_cut_text_does_not_end():
    both = words()
    features = encoded(settings(length=3), both, text="the cat sat on")
    assert features["labels"].tolist() == both.target.encode("the cat sat")


def test_a_prompt_starts_a_text():
    both = words()
    assert TASK.prompt(settings(), both, "")["target"].tolist() == [both.target.bos]
    assert TASK.prompt(settings(), both, "a cat")["target"].tolist() == [both.target.bos, *both.target.encode("a cat")]


def test_three_perplexities_of_one_likelihood():
    # 12 labels of ln 4 nats: 24 bits over 6 bytes; 3 words and 1 line end.
    size = {"examples": 1, "lines": 1, "words": 3, "bytes": 6, "labels": 12}
    values = TASK.derived_metrics(settings(), {"loss": math.log(4.0), "accuracy": 0.5}, size)
    assert values["perplexity"] == pytest.approx(4.0)
    assert values["word_perplexity"] == pytest.approx(4.0**3)
    assert values["bits_per_byte"] == pytest.approx(4.0)
    assert values["accuracy"] == 0.5
