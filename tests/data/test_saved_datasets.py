"""Folders that the `datasets` library saved: rows, classes, splits and slices, read without it; and builds of them."""

import json
import pickle
import sys

import pytest

from jaxformer.config import Config, ConfigError, DataConfig, TokenizerConfig
from jaxformer.data import build as builds
from jaxformer.data import sources
from jaxformer.data.build import pieces

LINES = [f"line {number} " + "ä€x"[number % 3] * (number * 7 % 23) for number in range(60)]
FEATURES = {
    "body": {"dtype": "string", "_type": "Value"},
    "label": {"names": ["bad", "good"], "_type": "ClassLabel"},
    "stars": {"dtype": "int32", "_type": "Value"},
    "translation": {"languages": ["de", "en"], "_type": "Translation"},
}


def save_split(folder, lines, files=2, **state):
    """As `save_to_disk` writes a split: Arrow streams, the list of them, and the features."""
    import pyarrow

    folder.mkdir(parents=True, exist_ok=True)
    names, size = [], -(-len(lines) // files)
    for number in range(files):
        names.append(f"data-{number:05d}-of-{files:05d}.arrow")
        part = lines[number * size : (number + 1) * size]
        both = [{"de": line, "en": line and line.upper()} for line in part]
        columns = {"body": part, "label": [(line or "").count("x") % 2 for line in part], "stars": range(len(part))}
        schema = pyarrow.schema(
            {"body": "string", "label": "int64", "stars": "int32",
             "translation": pyarrow.struct({"de": "string", "en": "string"})}
        )  # fmt: skip
        table = pyarrow.table({**columns, "translation": both}, schema=schema)
        with pyarrow.ipc.new_stream(str(folder / names[-1]), schema) as writer:
            writer.write_table(table, max_chunksize=7)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names], **state}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": FEATURES}))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow.ipc", reason="pyarrow is not installed (extra [parquet])")
    monkeypatch.setattr(pieces, "MIN_SHARD_BYTES", 2000)
    monkeypatch.setattr(pieces, "USUAL_SHARDS", 10**6)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    save_split(tmp_path / "saved" / "train", LINES)
    save_split(tmp_path / "saved" / "test", LINES[:5], files=1)
    return tmp_path


def config_of(folder, splits=(), columns=(("text", "body"),), **fields):
    tokenizer = TokenizerConfig(kind="byte")
    return DataConfig(
        source="datasets", dir=str(folder), splits=dict(splits), columns=dict(columns), tokenizer=tokenizer, **fields
    )


def rows(dataset, split="train"):
    return [dataset.splits[split][index] for index in range(len(dataset.splits[split]))]


def test_rows_of_all_splits_and_kinds_of_columns(folder):
    dataset = sources.build(config_of(folder / "saved"))
    assert rows(dataset) == [{"text": line} for line in LINES] and len(dataset.splits["test"]) == 5
    columns = {"text": "translation/en", "pair": "body", "label": "label", "score": "stars"}
    dataset = sources.build(config_of(folder / "saved", columns=columns, score_range=(0.0, 58.0)))
    assert dataset.classes == ("bad", "good")
    expected = {"text": LINES[43].upper(), "pair": LINES[43], "label": LINES[43].count("x") % 2, "score": 13 / 58}
    assert dataset.splits["train"][43] == expected and type(expected["label"]) is int
    assert pickle.loads(pickle.dumps(dataset.splits["train"]))[43] == expected
    with pytest.raises(IndexError):
        dataset.splits["train"][60]


def test_a_single_data_set_slices_and_several_parts(folder):
    single = sources.build(config_of(folder / "saved" / "train", {"train": ("train[:90%]",), "dev": ("train[90%:]",)}))
    assert [row["text"] for row in rows(single)] == LINES[:54]
    assert [row["text"] for row in rows(single, "dev")] == LINES[54:]
    both = sources.build(config_of(folder / "saved", {"train": ("train[50:]", "test[1:3]")}))
    assert [row["text"] for row in rows(both)] == LINES[50:] + LINES[1:3]
    assert both.key != single.key


def test_builds_have_the_same_rows(folder):
    save_split(folder / "saved" / "train", [*LINES[:20], None, " ", *LINES[20:]])
    index = builds.build(Config(data=config_of(folder / "saved")), folder / "out")
    shards = sources.build(DataConfig(source="shards", dir=str(folder / "out")))
    assert [row["text"] for row in rows(shards)] == LINES and [row["text"] for row in rows(shards, "test")] == LINES[:5]
    assert index["dropped"] == {"train": {"empty": 2}, "test": {}} and len(index["splits"]["train"]["shards"]) > 2
    builds.build(Config(data=config_of(folder / "saved", {"train": ("train[3:18]",)})), folder / "sliced")
    shards = sources.build(DataConfig(source="shards", dir=str(folder / "sliced")))
    assert [row["text"] for row in rows(shards)] == LINES[3:18]
    save_split(folder / "saved" / "test", ["a", ""], files=1)
    with pytest.raises(ConfigError, match="row 1 of record batch 0: got an empty text.*from the test files"):
        builds.build(Config(data=config_of(folder / "saved")), folder / "empty")


@pytest.mark.parametrize(("changes", "message"), [
    ({"splits": {"train": ("trian",)}}, "data.splits.train: got 'trian', expected one of train, test; did you mean"),
    ({"columns": {"text": "bodi"}}, "data.columns.text: got 'bodi', expected one of body, .*did you mean 'body'"),
    ({"columns": {"text": "label"}}, "got column 'label' of type int64, expected strings for text"),
    ({"columns": {"text": "translation/fr"}}, "got no column 'translation/fr', expected one of body"),
    ({"columns": {"text": "body", "label": "stars"}}, "data.columns.label: got 'stars', which is no ClassLabel"),
    ({"columns": {"text": "body", "score": "stars"}}, r"00000-of-00002.arrow: got score 0, expected a number from 5"),
    ({"columns": {"txt": "body"}}, "data.columns: got 'txt', expected roles among .*did you mean 'text'"),
    ({"splits": {"train": ("train[99:]",)}}, r"train\[99:\]: got a slice that leaves none of 60 rows"),
    ({"folder": "nowhere"}, "which has neither dataset_dict.json nor state.json, expected a folder that save_to_disk"),
    ({"folder": ""}, "which has neither dataset_dict.json nor state.json"),
])  # fmt: skip
def test_what_does_not_fit_is_one_line(folder, changes, message):
    where = folder / changes.get("folder", "saved")
    fields = {name: value for name, value in changes.items() if name != "folder"}
    with pytest.raises(ConfigError, match=message) as error:
        rows(sources.build(config_of(where, **fields, score_range=(5.0, 99.0))))
    assert "\n" not in str(error.value)


def test_damaged_folders_are_one_line(folder):
    train = folder / "saved" / "train"
    refused = []

    def check(message):
        with pytest.raises(ConfigError, match=message) as error:
            rows(sources.build(config_of(folder / "saved")))
        refused.append(str(error.value))

    save_split(train, [*LINES[:3], None])
    check("row 3 of the split: got null in column 'body', expected a value; remove the row")
    save_split(train, LINES, _indices_data_files=[{"filename": "indices.arrow"}])
    check("train: got rows selected by an index file")
    save_split(train, LINES)
    arrow = train / "data-00001-of-00002.arrow"
    whole = arrow.read_bytes()
    arrow.write_bytes(whole[:100])
    check("data-00001-of-00002.arrow: got no readable Arrow file")
    arrow.write_bytes(whole.replace("ä".encode(), b"\xff\xfe"))
    check("data-00001-of-00002.arrow: got no readable Arrow file .*utf-8")
    with pytest.raises(ConfigError, match="data-00001-of-00002.arrow: got no readable Arrow file .*UTF8"):
        builds.build(Config(data=config_of(folder / "saved")), folder / "damaged")
    arrow.unlink()
    check("data-00001-of-00002.arrow: got no such file, expected one that state.json names")
    (train / "dataset_info.json").unlink()
    check(r"dataset_info.json: got no such file \(No such file or directory\)")
    (train / "state.json").write_text('{"_data_files": 3}')
    check("state.json: got int under '_data_files', expected a list")
    assert len(refused) == 7 and not any("\n" in line for line in refused)


def test_without_pyarrow_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"got datasets, which needs pyarrow.*pip install 'jaxformer\[parquet\]'"):
        sources.build(config_of(folder / "saved"))
