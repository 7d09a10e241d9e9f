"""What is cut is counted exactly, by every task, and said when a run starts."""

from __future__ import annotations

import numpy as np
import pytest

from jaxformer import registry, tasks
from jaxformer.config import Config, DataConfig, EmbedConfig, ModelConfig, StackConfig, TaskConfig, TokenizerConfig
from jaxformer.data import pipeline, truncation
from jaxformer.data.pipeline import Pipeline
from jaxformer.data.sources import Dataset
from jaxformer.data.tokenizers import Tokenizers

BYTES = Tokenizers.build(DataConfig(tokenizer=TokenizerConfig(kind="byte")), [], ("text",))
SIDES = {"language_modelling": ("decoder",), "translation": ("encoder", "decoder")}
SIDES["summarisation"] = SIDES["translation"]
SHORT, LONG = "ab", "a long text of 25 bytes.."
OTHERS = (
    *("captioning", "forecasting", "series_classification"),  # read no text, or a series beside it
    *("cbow", "skip_gram", "span_corruption"),  # need the counts or the sentinels of a learned vocabulary
    *("denoising", "dialogue", "preference"),  # noise, and turns that are left out whole, change the number of tokens
)
"""Tasks whose cuts are tested beside them (tests/tasks/); `test_tasks.py` shows that each counts what it cuts."""
NAMES = [name for name in registry.names("jaxformer.tasks") if name not in OTHERS]
ROUNDED = {"masked_lm": 2, "permutation_lm": 2, "prefix_lm": 16}
"""Tasks that predict a part of each window, rounded: difference from the part of the whole; prefixes are drawn."""


def example(task, text):
    values = {role: text for role in tasks.get(task).roles}
    fixed = {
        "label": 0,
        "labels": (1,),
        "tags": (1,) * len(text.split()),
        "context": "ab",
        "answers": ("a",),
        "starts": (0,),
    }
    return values | {role: fixed[role] for role in values if role in fixed} | {"score": 1.0}


def made(task, length=16, packing="none", train=(SHORT, LONG), validation=(SHORT, LONG, LONG), **data):
    stacks = {side: StackConfig(embed=EmbedConfig(vocab=264)) for side in SIDES.get(task, ("encoder",))}
    config = Config(
        model=ModelConfig(**stacks),
        data=DataConfig(length=length, packing=packing, batch=4, **data),
        task=TaskConfig(name=task, classes=("O", "x")),
    )
    splits = {"train": [example(task, text) for text in train], "validation": [example(task, t) for t in validation]}
    return Pipeline(config, Dataset(splits, "key"), BYTES, tasks.get(task))


@pytest.mark.parametrize("task", NAMES)
def test_tokens_that_are_read_and_tokens_that_are_cut_are_all_there_are(task):
    kept, whole = made(task), made(task, length=256)
    encoded = {name: list(pipe._encoder("train", 2, pipe.config).iterate(range(2))) for name, pipe in
               (("kept", kept), ("whole", whole))}  # fmt: skip
    found, uncut = truncation.count_truncated(encoded["kept"]), truncation.count_truncated(encoded["whole"])
    assert (uncut.cut_examples, uncut.cut_tokens, uncut.tokens) == (0, 0, found.tokens)
    assert (found.examples, found.cut_examples) == (2, 1) and found.cut_tokens > 0
    assert "cut" not in encoded["kept"][0] and encoded["kept"][1]["cut"] == found.cut_tokens


@pytest.mark.parametrize("task", NAMES)
def test_evaluation_cuts_nothing_or_says_how_much(task):
    pipe = made(task)
    count, first = pipe.truncated("validation"), pipe.truncated("validation", 2)
    if tasks.get(task).encode_windows is None:
        assert (count.examples, count.cut_examples, first.cut_examples) == (3, 2, 1)
        assert count.counts()["cut_tokens"] == 2 * first.counts()["cut_tokens"] > 0
    else:
        assert (count.cut_tokens, count.examples) == (0, 3)
        labels = sum(float((batch.weights > 0).sum()) for batch in pipe.evaluate("validation"))
        plain = sum(float((batch.weights > 0).sum()) for batch in made(task, length=256).evaluate("validation"))
        assert labels == pytest.approx(plain, abs=ROUNDED.get(task, 0))


def test_masked_windows_hold_the_text_once_and_a_text_that_fits_is_as_in_training():
    pipe, task = made("masked_lm"), tasks.get("masked_lm")
    generator = lambda: np.random.default_rng(3)  # noqa: E731
    parts = task.encode_windows(pipe.config, BYTES, {"text": LONG}, generator())
    assert "".join(BYTES.source.decode(part["labels"]) for part in parts) == LONG
    assert all(len(part["source"]) <= 16 and part["weights"].sum() > 0 for part in parts)
    (one,) = task.encode_windows(pipe.config, BYTES, {"text": SHORT}, generator())
    for name, value in task.encode(pipe.config, BYTES, {"text": SHORT}, generator()).items():
        np.testing.assert_array_equal(one[name], value)
    assert len(task.encode_windows(pipe.config, BYTES, {"text": ""}, generator())) == 1


def test_a_run_says_what_does_not_fit(monkeypatch, tmp_path):
    tags = made("tagging")
    train, validation = tags.truncation_notes(None)
    assert train == (
        "train: 1 of 2 examples are longer than data.length (16); 11 of 31 tokens (35.5%) are cut off; "
        "2 of 7 words have no token and count as tagged O"
    )
    assert validation.startswith("validation: 2 of 3 examples") and "words have no token" in validation
    assert tags.truncation_notes(1) == [train], "nothing is cut of the part that is measured"
    (line,) = made("language_modelling").truncation_notes(None)
    assert line == "train: 1 of 2 examples are longer than data.length (16); 10 of 29 tokens (34.5%) are cut off"
    assert made("language_modelling", packing="concat", cache=str(tmp_path)).truncation_notes(None) == []
    (line,) = made("language_modelling", skip_long=True).truncation_notes(None)
    assert line == "train: 1 of 2 examples are longer than data.length (16); 26 of 29 tokens (89.7%) are left out"
    assert made("classification", train=(SHORT,), validation=(SHORT,)).truncation_notes(None) == []
    monkeypatch.setattr(pipeline, "MAX_SAMPLED_EXAMPLES", 2)
    (line,) = made("classification", train=(SHORT, LONG) * 3, validation=(SHORT,)).truncation_notes(None)
    assert line.endswith("are cut off, counted in 2 of 6 examples") and line.startswith("train: 1 of 2 examples")


def test_only_training_examples_that_are_used_are_counted():
    pipe = made("classification", train=(SHORT, LONG), examples=1)
    assert [line for line in pipe.truncation_notes(None) if line.startswith("train")] == []


def test_nothing_cut_is_nothing_said():
    assert truncation.Truncation(3, tokens=9).sentence("test", 4) == ""
