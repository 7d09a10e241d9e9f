"""Kept results are those of a fresh computation, and never stale: vocabularies, truncation counts, examples, arrays."""

import dataclasses
import json
import re
import threading

import numpy as np
import pytest

from jaxformer import registry, tasks
from jaxformer.checkpoint import weights
from jaxformer.config import Config, DataConfig, EmbedConfig, ModelConfig, StackConfig, TaskConfig, TokenizerConfig
from jaxformer.data import cache, derived, truncation, vocabularies
from jaxformer.data.pipeline import Pipeline
from jaxformer.data.sources import Dataset, build
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.models import build as models
from jaxformer.runtime import code_version

TEXTS = ["the cat sat on the mat", "the dog ate the cat", "a mat for the dog", "the end"] * 5


@pytest.fixture(autouse=True)
def only_the_projects_code(monkeypatch):
    """Another test of this process may have imported a module from outside the project."""
    monkeypatch.setattr(registry, "has_external_members", lambda: False)


def counting(monkeypatch, module, name):
    """Replaces a function by itself with a list of its calls."""
    calls, function = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: (calls.append(args), function(*args))[1])
    return calls


def test_a_result_is_made_once_for_what_it_depends_on(tmp_path):
    calls = []
    make = lambda: calls.append(1) or {"n": len(calls)}  # noqa: E731
    keep = lambda **depends_on: derived.keep(tmp_path, "numbers", depends_on, make)  # noqa: E731
    assert [keep(a=1, b=2), keep(b=2, a=1), keep(a=2, b=2), keep(a=1, b=2)] == [{"n": 1}, {"n": 1}, {"n": 2}, {"n": 1}]


@pytest.mark.parametrize("damage", ["half", "empty", "value", "key", "list"])
def test_a_file_that_is_not_what_was_written_is_made_again(damage, tmp_path, caplog):
    keep = lambda value: derived.keep(tmp_path, "numbers", {"a": 1}, lambda: value)  # noqa: E731
    keep([1, 2, 3])
    (path,) = (tmp_path / "numbers").iterdir()
    text = path.read_text()
    content = json.loads(text)
    damaged = {
        "half": text[: len(text) // 2],
        "empty": "",
        "value": json.dumps({**content, "value": [1, 2, 4]}),
        "key": json.dumps({**content, "key": "0" * 64}),  # of something else with the same beginning of its hash
        "list": "[]",
    }
    path.write_text(damaged[damage])
    assert keep([5]) == [5]
    assert "damaged" in caplog.text
    assert keep([6]) == [5], "it must have been kept"


def test_two_at_once_both_have_the_result_and_leave_one_whole_file(tmp_path):
    both, found = threading.Barrier(2, timeout=10), []

    def start():
        found.append(derived.keep(tmp_path, "numbers", {"a": 1}, lambda: (both.wait(), [1, 2])[1]))

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[1, 2]] * 2
    assert len(list((tmp_path / "numbers").iterdir())) == 1
    assert derived.keep(tmp_path, "numbers", {"a": 1}, lambda: None) == [1, 2]


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path):
    (tmp_path / "numbers").write_text("a file where the folder should be")
    assert derived.keep(tmp_path, "numbers", {"a": 1}, lambda: [1]) == [1]


def test_texts_that_only_join_to_the_same_have_other_hashes():
    found = {derived.content_digest(texts) for texts in (["ab", "c"], ["a", "bc"], ["abc"], ["c", "ab"])}
    assert len(found) == 4


def test_the_hash_of_code_sees_every_file(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.py").write_text("x = 1\n")
    before = derived.code_digest(tmp_path)
    (tmp_path / "b.py").write_text("x = 2\n")
    code_version.source_digest.cache_clear()
    assert derived.code_digest(tmp_path) != before


def learned(tmp_path, texts=TEXTS, **settings):
    options = {"kind": "bpe", "vocab": 280, **settings}
    config = DataConfig(cache=str(tmp_path), tokenizer=TokenizerConfig(**options))
    return Tokenizers.build(config, [{"text": text} for text in texts], ("text",)).source


@pytest.mark.parametrize(("kind", "vocab"), [("bpe", 280), ("unigram", 280), ("word", 12)])
def test_a_kept_vocabulary_is_the_one_that_would_be_learned(kind, vocab, tmp_path, monkeypatch):
    fresh = vocabularies.learn(TokenizerConfig(kind=kind, vocab=vocab), TEXTS)
    calls = counting(monkeypatch, vocabularies, "learn")
    first, again = (learned(tmp_path, kind=kind, vocab=vocab) for _ in range(2))
    assert len(calls) == 1
    assert again._text() == first._text()
    assert again.vocabulary.to_json() == fresh.to_json()
    assert again.counts == getattr(fresh, "counts", None)
    assert again.encode("the cat ate a zebra") == fresh.encode("the cat ate a zebra")


def test_a_vocabulary_of_other_texts_settings_or_code_is_learned(tmp_path, monkeypatch):
    calls = counting(monkeypatch, vocabularies, "learn")
    learned(tmp_path)
    others = [{"vocab": 284}, {"lowercase": True}, {"sentinels": 2}, {"kind": "unigram"}]
    for number, other in enumerate(others, 2):
        learned(tmp_path, **other)
        assert len(calls) == number, other
    assert learned(tmp_path, texts=[*TEXTS[:-1], "the fox ran to the fox"]).encode("fox")
    assert len(calls) == 6
    monkeypatch.setattr(derived, "code_digest", lambda *_: "another version")
    learned(tmp_path)
    assert len(calls) == 7
    learned(tmp_path, multiple=16)  # pads the table of the model, and changes no token
    assert len(calls) == 7


def pipeline(tmp_path, validation=("ab", "a long text of 25 bytes.."), tokenizers=None, task="classification", **data):
    data = {"length": 16, "batch": 4, "cache": str(tmp_path), **data}
    config = Config(
        model=ModelConfig(encoder=StackConfig(embed=EmbedConfig(vocab=264))),
        data=DataConfig(**data),
        task=TaskConfig(name=task, classes=("O", "x")),
    )
    rows = lambda texts: [{"text": t, "label": 0, "tags": (1,) * len(t.split())} for t in texts]  # noqa: E731
    dataset = Dataset({"train": rows(("ab", "another text of 27 bytes...")), "validation": rows(validation)}, "key")
    bytes_ = Tokenizers.build(DataConfig(tokenizer=TokenizerConfig(kind="byte")), [], ("text",))
    return Pipeline(config, dataset, tokenizers or bytes_, tasks.get(task))


def test_truncation_is_counted_once_for_the_same_data_settings_and_code(tmp_path, monkeypatch):
    calls = counting(monkeypatch, truncation, "count_truncated")
    lines = pipeline(tmp_path).truncation_notes(None)
    assert len(lines) == len(calls) == 2
    assert pipeline(tmp_path).truncation_notes(None) == lines
    assert len(calls) == 2
    pipeline(tmp_path, validation=("ab", "a long text of 25 bytes.!")).truncation_notes(None)  # of the same length
    assert len(calls) == 3
    assert pipeline(tmp_path, length=20).truncation_notes(None) != lines
    assert len(calls) == 5
    other = Tokenizers.build(DataConfig(tokenizer=TokenizerConfig(kind="byte", lowercase=True)), [], ("text",))
    pipeline(tmp_path, tokenizers=other).truncation_notes(None)
    assert len(calls) == 7
    monkeypatch.setattr(registry, "has_external_members", lambda: True)
    pipeline(tmp_path).truncation_notes(None)
    assert len(calls) == 9
    monkeypatch.setattr(registry, "has_external_members", lambda: False)
    monkeypatch.setattr(derived, "code_digest", lambda *_: "another version")
    pipeline(tmp_path).truncation_notes(None)
    assert len(calls) == 11


def test_kept_counts_have_the_labels_without_a_token(tmp_path):
    first, again = (pipeline(tmp_path, task="tagging").truncated("validation") for _ in range(2))
    assert len(first.unread_labels)
    np.testing.assert_array_equal(again.unread_labels, first.unread_labels)
    assert (again.unread_labels.dtype, again[:5]) == (first.unread_labels.dtype, first[:5])


def test_skipped_examples_are_not_mistaken_for_truncated_ones(tmp_path):
    cut = pipeline(tmp_path).truncation_notes(None)[0]
    for _ in range(2):
        skipping = pipeline(tmp_path, skip_long=True)
        assert "left out" in skipping.truncation_notes(None)[0] != cut
        assert skipping.truncated("train").sentence("train", 16) == cut  # as `evaluate` reads the split


TABLES = {
    "label": "label,text\ngood,yes it is\nbad,no\ngood,fine\n",
    "score": "score,text,pair\n0.3,a b,c\n1.0,d,e f\n",
    "labels": "labels;text\na,b;both\n;none\nb;one\n".replace(";", "\t"),
    "target": "source,target\nein Hund,a dog\nzwei,two\n",
}


@pytest.mark.parametrize("role", TABLES)
def test_small_data_sets_read_the_same_without_tfds(role, tmp_path, monkeypatch):
    name = "a.tsv" if "\t" in TABLES[role] else "a.csv"
    (tmp_path / name).write_text(TABLES[role])
    columns = {each: each for each in re.split("[,\t]", TABLES[role].splitlines()[0])}
    config = DataConfig(
        source="table", dir=str(tmp_path), cache=str(tmp_path / "cache"), splits={"train": (name,)}, columns=columns
    )
    build(config)
    with monkeypatch.context() as patch:
        patch.setattr(cache.PreparedSplit, "_builder", property(lambda _: pytest.fail("tfds was opened")))
        kept = build(config)
        rows = [kept.splits["train"][i] for i in range(len(kept.splits["train"]))]
    (entry,) = (path for path in (tmp_path / "cache" / "sources").iterdir() if path.is_dir())
    manifest = json.loads((entry / cache.MANIFEST).read_text())
    (entry / "examples-train.json").unlink()
    del manifest["files"]["examples-train.json"], manifest["summary"]  # as earlier versions wrote entries
    (entry / cache.MANIFEST).write_text(json.dumps(manifest))
    earlier = build(config)
    assert rows == [earlier.splits["train"][i] for i in range(len(rows))]
    assert {role: type(value) for role, value in rows[0].items()} == {
        role: type(value) for role, value in earlier.splits["train"][0].items()
    }
    assert (kept.classes, kept.key) == (earlier.classes, earlier.key)


def test_arrays_of_a_model_are_traced_once(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path))
    small = StackConfig(layers=1, width=8, embed=EmbedConfig(vocab=16))
    config = Config(model=ModelConfig(encoder=small))
    calls = counting(monkeypatch, models, "shapes")
    first, again = (weights._expected_arrays(config, models.build(config.model)) for _ in range(2))
    assert len(calls) == 1
    assert again == first
    assert ("encoder", "embed", "embedding") in first or any("16, 8" in text for text in first.values())
    wider = dataclasses.replace(config, model=ModelConfig(encoder=dataclasses.replace(small, width=16)))
    assert weights._expected_arrays(wider, models.build(wider.model)) != first
    assert len(calls) == 2


def test_examples_that_the_code_draws_are_known_without_reading_any(tmp_path, monkeypatch):
    """A second start learns the same vocabulary of them, and reads no example; other roles or fewer examples learn."""
    config = DataConfig(
        source="numerals", cache=str(tmp_path), examples=40, tokenizer=TokenizerConfig(kind="bpe", vocab=300)
    )
    roles = ("source", "target")
    examples = build(config).splits["train"]
    read = []
    example = type(examples.generator).example
    monkeypatch.setattr(
        type(examples.generator), "example", lambda self, item: read.append(item) or example(self, item)
    )

    def learned(config=config, roles=roles):
        read.clear()
        tokenizers = Tokenizers.build(config, examples, roles)
        return len(read), tokenizers.source.fingerprint

    first, again = learned(), learned()
    assert first[0] == 40 and again == (0, first[1])
    fewer = dataclasses.replace(config, examples=30)
    assert learned(fewer)[0] == 30 and learned(roles=("source",))[0] == 40
    assert learned(fewer)[1] != first[1]
    with monkeypatch.context() as patched:
        patched.setattr(derived, "drawn", lambda _: None)
        assert learned() == (40, first[1])  # the same, learned of the texts
    with monkeypatch.context() as patched:
        patched.setattr(registry, "has_external_members", lambda: True)
        assert derived.drawn(examples) is None
    assert derived.drawn(examples) is not None and derived.drawn([]) is None
