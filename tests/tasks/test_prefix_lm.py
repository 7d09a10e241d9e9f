"""Prefix language modelling: the split, what is predicted, prompts, and texts that are measured to their ends."""

import numpy as np
import pytest
from task_toys import TEXT, config, encoded, words

from jaxformer import tasks
from jaxformer.config import ConfigError, overrides
from jaxformer.tasks import prefix_lm

TASK = tasks.get("prefix_lm")


def settings(**options):
    return config("prefix_lm", side="decoder", **options)


def test_every_split_of_a_text_is_as_likely():
    rng = np.random.default_rng(0)
    counts = np.bincount([prefix_lm.draw_prefix(5, None, rng) for _ in range(5000)], minlength=7)
    assert counts[0] == counts[6] == 0
    assert np.abs(counts[1:6] - 1000).max() < 4 * np.sqrt(5000 * 0.2 * 0.8)  # four standard errors


@pytest.mark.parametrize(("fraction", "size", "prefix"), [(0.5, 11, 6), (0.1, 11, 2), (0.99, 11, 11), (0.3, 1, 1)])
def test_a_fixed_fraction_is_of_the_tokens_after_the_start(fraction, size, prefix):
    assert prefix_lm.draw_prefix(size, fraction, np.random.default_rng(0)) == prefix


def test_what_follows_the_prefix_is_predicted_and_nothing_in_it():
    """Labels of weight 1 are exactly the tokens of text that the prefix does not hold, the end included."""
    both, seen = words(), set()
    ids = [both.target.bos, *both.target.encode(TEXT), both.target.eos]
    for seed in range(30):
        features = encoded(settings(), both, seed=seed, text=TEXT)
        prefix = int(features["prefix"])
        seen.add(prefix)
        assert features["target"].tolist() == ids[:-1]
        assert features["labels"][features["weights"] == 1].tolist() == ids[prefix:]
        assert set(features["weights"].tolist()) <= {0.0, 1.0}
    assert len(seen) > 10


def test_a_truncated_text_counts_and_leaves_no_end():
    features = encoded(settings(length=6), words(), text=TEXT)
    assert len(features["target"]) == 6
    assert int(features["cut"]) == len(words().target.encode(TEXT)) + 1 - 6
    assert words().target.eos not in features["labels"]


def test_windows_hold_the_complete_text_and_a_prefix_each():
    both = words()
    windows = TASK.encode_windows(settings(length=6), both, {"text": TEXT}, np.random.default_rng(0))
    labels = np.concatenate([window["labels"] for window in windows])
    assert labels.tolist() == [*both.target.encode(TEXT), both.target.eos]
    assert all(1 <= int(window["prefix"]) <= len(window["target"]) for window in windows)
    assert all(window["weights"][-1] == 1 for window in windows)


def test_rows_of_a_running_text_begin_with_the_start_token():
    both = words()
    ids = np.array(both.target.encode(TEXT)[:6], np.int32)
    features = TASK.encode_row(settings(length=6), both, ids, np.random.default_rng(0))
    assert features["target"].tolist() == [both.target.bos, *ids[:-1].tolist()]
    np.testing.assert_array_equal(features["labels"], ids)
    assert features["weights"].tolist() == [float(i >= int(features["prefix"]) - 1) for i in range(6)]


def test_a_prompt_is_all_prefix():
    prompt = TASK.prompt(settings(), words(), "the cat")
    assert int(prompt["prefix"]) == len(prompt["target"]) == 3


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        (("encoding.kind=t5",), "encoding.bidirectional: got None, expected True for the task prefix_lm"),
        (("causal=false",), "decoder.causal: got 'False', expected True or None"),
    ],
)
def test_a_decoder_that_cannot_have_a_prefix_is_refused(edits, message):
    recipe = ["--config=configs/prefix_lm.py", *(f"--config.model.decoder.{edit}" for edit in edits)]
    with pytest.raises(ConfigError, match=message):
        overrides.parse(recipe)


def test_a_recurrent_decoder_is_refused():
    with pytest.raises(ConfigError, match="got 'prefix_lm', expected language_modelling: a recurrent decoder"):
        overrides.parse(["--config=configs/wikitext2.py:lstm", "--config.task.name=prefix_lm"])
