"""The cache: keyed by content, whole or absent, one build for two processes."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxformer.config import ConfigError, DataConfig, TokenizerConfig
from jaxformer.data import cache, concatenation
from jaxformer.data.sources import build
from jaxformer.data.tokenizers import Tokenizers

WORKER = """
import logging, sys
logging.basicConfig(level=logging.INFO)
from jaxformer.config import DataConfig
from jaxformer.data.sources import build
folder, cache = sys.argv[1:]
sys.stdin.readline()  # both start at the same moment
data = build(DataConfig(source="text", dir=folder, cache=cache, splits={"train": ("a.txt",)}))
train = data.splits["train"]
print(data.key, len(train), train[0]["text"], train[len(train) - 1]["text"])
print("tensorflow" in sys.modules, "torch" in sys.modules)
"""


def text_config(folder, **changes):
    options = {"source": "text", "dir": str(folder), "cache": str(folder / "cache"), "splits": {"train": ("a.txt",)}}
    return DataConfig(**{**options, **changes})


def entries(folder):
    return sorted(path.name for path in (folder / "cache" / "sources").iterdir() if path.is_dir())


def test_two_processes_that_start_at_once_build_once(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"line {i}\n" for i in range(5000)))
    environment = {**os.environ, "PYTHONPATH": str(Path(cache.__file__).parents[2])}
    command = [sys.executable, "-c", WORKER, str(tmp_path), str(tmp_path / "cache")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    workers = [subprocess.Popen(command, env=environment, **pipes) for _ in range(2)]
    for worker in workers:
        worker.stdin.write("go\n")
        worker.stdin.flush()
    ended = [worker.communicate(timeout=60) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], ended
    assert ended[0][0] == ended[1][0], "both must read the same, and nothing else may reach stdout"
    assert ended[0][0].endswith("5000 line 0 line 4999\nFalse False\n")
    assert sum(error.count("prepared ") for _, error in ended) == 1
    assert len(entries(tmp_path)) == 1


def test_an_entry_is_built_once_and_again_when_content_or_settings_change(tmp_path, monkeypatch):
    written = []
    write = cache._write
    monkeypatch.setattr(cache, "_write", lambda place, parse: (written.append(place.name), write(place, parse)))
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    first = build(text_config(tmp_path)).key
    assert build(text_config(tmp_path)).key == first
    os.utime(tmp_path / "a.txt", (0, 0))  # another date, the same content
    assert build(text_config(tmp_path)).key == first
    assert len(written) == 1
    as_file = build(text_config(tmp_path, document="file")).key
    (tmp_path / "a.txt").write_text("one\nthree\n")
    changed = build(text_config(tmp_path))
    assert len({first, as_file, changed.key}) == len(written) == len(entries(tmp_path)) == 3
    assert changed.splits["train"][1] == {"text": "three"}


def test_what_was_left_out_is_said_whenever_the_entry_is_used(tmp_path, caplog, capsys):
    (tmp_path / "a").write_text("one\n\nthree\n")
    (tmp_path / "b").write_text("eins\nzwei\ndrei\n")
    settings = text_config(tmp_path, source="parallel", splits={"train": ("a", "b")})
    for _ in range(2):
        caplog.clear()
        build(settings)
        said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(said) == 1 and said[0].startswith("dropped 1 training examples with an empty side, the first at ")


def test_a_killed_build_leaves_nothing_that_counts(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("one\n")
    key = build(text_config(tmp_path)).key
    place = tmp_path / "cache" / "sources" / key
    leftover = place.with_name(f"{key}.partial-killed")
    place.rename(leftover)
    assert build(text_config(tmp_path)).splits["train"][0] == {"text": "one"}
    assert entries(tmp_path) == [key], "the leftover of a killed writer goes"


def test_where_the_cache_is(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "variable"))
    assert cache.cache_directory(DataConfig()) == tmp_path / "variable"
    assert cache.cache_directory(DataConfig(cache=str(tmp_path / "field"))) == tmp_path / "field"
    monkeypatch.delenv("JAXFORMER_CACHE")
    assert cache.cache_directory(DataConfig()) == Path.home() / ".cache" / "jaxformer"


def test_a_cache_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "cache").write_text("a file where a folder must be")
    with pytest.raises(ConfigError, match=r"expected to write prepared data there; set --config.data.cache"):
        build(text_config(tmp_path))


@pytest.mark.parametrize("kept", [0, 1 << 20], ids=["from disk", "from memory"])
def test_records_read_the_same_from_disk_and_memory_and_after_pickling(tmp_path, monkeypatch, kept):
    monkeypatch.setattr(cache, "MAX_IN_MEMORY_BYTES", kept)
    lines = [f"line {i} ü" for i in range(50)]
    (tmp_path / "a.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    train = build(text_config(tmp_path)).splits["train"]
    assert [train[i]["text"] for i in range(50)] == lines
    assert [row["text"] for row in train.__getitems__([49, 0, 7])] == [lines[49], lines[0], lines[7]]
    stored = pickle.dumps(train)
    assert len(stored) < 1000, "the content must not travel to loader processes"
    assert pickle.loads(stored)[3] == {"text": lines[3]}


def test_size_counts_line_ends_and_all_roles():
    examples = [{"source": "a dog", "target": "ein Hünd"}, {"source": "", "target": "x"}]
    assert cache.text_size(examples, ("source",)) == {"examples": 2, "lines": 2, "bytes": 7, "words": 2}
    assert cache.text_size(examples, ("source", "target")) == {"examples": 2, "lines": 4, "bytes": 19, "words": 5}
    assert cache.text_size([{"text": "a\nb c\n"}], document="file") == {
        "examples": 1,
        "lines": 2,
        "bytes": 6,
        "words": 3,
    }


# --- damage -----------------------------------------------------------------------------------------------------------


def damaged(place, how):
    record = next(place.glob("*.array_record*"))
    if how == "truncated":
        record.write_bytes(record.read_bytes()[:-10])
    elif how == "a changed byte":
        content = bytearray(record.read_bytes())
        content[len(content) // 2] ^= 1
        record.write_bytes(bytes(content))
    elif how == "missing":
        record.unlink()
    elif how == "bad JSON":
        (place / "dataset_info.json").write_text("{")
    elif how == "bad list":
        (place / cache.MANIFEST).write_text('{"files": [1]}')
    elif how == "a file":
        place.rename(place.with_name("away"))
        place.write_text("")
    return place


HOW = ("truncated", "a changed byte", "missing", "bad JSON", "bad list", "a file")


@pytest.mark.parametrize("how", HOW)
def test_a_damaged_entry_is_named_and_made_again(how, tmp_path, caplog):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    key = build(text_config(tmp_path)).key
    place = tmp_path / "cache" / "sources" / key
    assert cache.entry_problem(place) == "" and cache.entry_problem(place.with_name("none")) is None
    damaged(place, how)
    data = build(text_config(tmp_path))
    assert [row["text"] for row in data.splits["train"].__getitems__([0, 1])] == ["one", "two"]
    said = [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()]
    assert len(said) == 1 and f"prepared data {place} is damaged (" in said[0]
    caplog.clear()
    build(text_config(tmp_path))
    assert "damaged" not in caplog.text
    assert not list(place.parent.glob("*.partial-*"))


@pytest.mark.parametrize("kept", [True, False], ids=["no list", "empty"])
def test_an_entry_without_a_list_is_of_an_earlier_version_and_made_again(kept, tmp_path, caplog):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    place = tmp_path / "cache" / "sources" / build(text_config(tmp_path)).key
    for path in place.iterdir():
        if not kept or path.name == cache.MANIFEST:
            path.unlink()
    assert build(text_config(tmp_path)).splits["train"][1]["text"] == "two"
    said = f"prepared data {place} is made again: {cache.NO_MANIFEST}"
    assert [record.getMessage() for record in caplog.records if "again" in record.getMessage()] == [said]
    assert cache.entry_problem(place) == "" and "damaged" not in caplog.text


def test_two_processes_that_find_damage_make_the_entry_again_once(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("one\n")
    place = damaged(tmp_path / "cache" / "sources" / build(text_config(tmp_path)).key, "truncated")
    reader = build(text_config(tmp_path)).splits["train"]
    damaged(place, "truncated")
    written, write = [], cache._write
    found = cache.entry_problem

    def other_process(path):
        reason = found(path)
        if reason and not written:  # it finds the same, and is first
            written.append("other")
            monkeypatch.setattr(cache, "_write", lambda *_: written.append("this"))
            write(path, source)
        return reason

    def source():
        import tensorflow_datasets as tfds

        return {"text": tfds.features.Text()}, {"train": [{"text": "one"}]}

    monkeypatch.setattr(cache, "entry_problem", other_process)
    assert build(text_config(tmp_path)).splits["train"][0] == {"text": "one"}
    assert written == ["other"]
    assert reader[0] == {"text": "one"}


@pytest.mark.parametrize("damage", ["truncated", "a changed byte", "empty", "longer"])
def test_damaged_tokens_are_named_and_made_again(damage, tmp_path, caplog):
    tokenizer = Tokenizers.build(DataConfig(tokenizer=TokenizerConfig(kind="byte")), [{"text": "x"}], ("text",)).target
    examples = [{"text": "the cat"}, {"text": "sat"}]
    whole = np.array(concatenation.token_stream(tmp_path, "key", examples, tokenizer))
    (path,) = tmp_path.glob("*.tokens")
    content = path.read_bytes()
    changed = bytes([content[0] ^ 1]) + content[1:]
    path.write_bytes({"truncated": content[:-4], "a changed byte": changed, "empty": b""}.get(damage, content + b"12"))
    assert np.array_equal(concatenation.token_stream(tmp_path, "key", examples, tokenizer), whole)
    assert f"tokens {path} are damaged (they differ from their checksum): made again" in caplog.text
    assert path.read_bytes() == content
    caplog.clear()
    assert len(concatenation.token_stream(tmp_path, "key", [], tokenizer)) == len(whole) == 1 + 8 + 4, (
        "read, not made again"
    )
    assert not caplog.text
