"""Data and models in a bucket: a folder that is fetched whole, and again where it changed."""

from __future__ import annotations

import dataclasses

import fake_bucket
import pytest

from jaxformer.config import Config, DataConfig, InitConfig
from jaxformer.data.sources import _files
from jaxformer.errors import ConfigError
from jaxformer.runtime import bucket_folders, directories
from jaxformer.runtime.object_store import Store
from jaxformer.train import warm_start

URL = "gs://bucket/corpora/one"


@pytest.fixture
def store(monkeypatch, tmp_path):
    bucket = fake_bucket.install(monkeypatch, tmp_path)
    monkeypatch.setattr(bucket_folders, "_fetch", bucket_folders._fetch.__wrapped__)  # each call is a new process
    store = Store(URL)
    store.log = bucket.log
    for key, text in (("train.txt", b"a"), ("more/valid.txt", b"b"), ("../evil", b"c")):
        store.write(key, text)
    return store


def folder():
    return bucket_folders.local_folder(URL, "data.dir")


def texts(root):
    return {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*") if path.is_file()}


def test_a_folder_is_fetched_whole_and_again_only_where_it_changed(store, tmp_path):
    root = folder()
    assert root.name == "one" and texts(root) == {"train.txt": "a", "more/valid.txt": "b"}
    assert not list(tmp_path.rglob("evil"))
    written = (root / "train.txt").stat().st_mtime_ns
    assert folder() == root and (root / "train.txt").stat().st_mtime_ns == written
    store.write("train.txt", b"a")  # another generation of the same bytes
    assert texts(folder())["train.txt"] == "a" and (root / "train.txt").stat().st_mtime_ns != written
    store.write("train.txt", b"new")
    store.delete("more/valid.txt")
    assert texts(folder()) == {"train.txt": "new"}


@pytest.mark.parametrize("damage", ["x", None, ""])
def test_a_damaged_copy_is_fetched_again(store, damage):
    root = folder()
    if damage is None:
        (root / "train.txt").unlink()
    else:
        (root / "train.txt").write_text(damage)
    assert texts(folder())["train.txt"] == "a"
    (root.parent / bucket_folders.INDEX).write_text("torn")
    assert texts(folder())["train.txt"] == "a"


def test_an_unchanged_object_is_not_sent(store):
    generation = store.read("train.txt").generation
    assert store.read("train.txt", unless=generation) == (b"", generation)
    assert store.read("train.txt", unless=b"\0other").value == b"a" and store.read("none", unless=generation) is None


def test_a_data_directory_may_be_an_address(store):
    config = DataConfig(source="text", dir=URL, splits={"train": ("train.txt",)})
    assert (_files.data_directory(config) / "train.txt").read_text() == "a"
    with pytest.raises(ConfigError, match="data.dir: got 'gs://bucket/none', where nothing is"):
        _files.data_directory(dataclasses.replace(config, dir="gs://bucket/none"))


def test_a_cache_may_not(monkeypatch):
    with pytest.raises(ConfigError, match="data.cache: got 's3://bucket/cache', expected a folder"):
        directories.expand_user("s3://bucket/cache", "data.cache")
    monkeypatch.setenv("JAXFORMER_CACHE", "gs://bucket/cache")
    with pytest.raises(ConfigError, match="\\$JAXFORMER_CACHE: got 'gs://bucket/cache', expected a folder"):
        directories.cache()


def test_a_run_may_start_from_an_address(store):
    store.write("config.json", b"{}")
    config = Config(init=InitConfig(directory=URL))
    root = warm_start.init_directory(config)
    assert (root / "config.json").read_text() == "{}" and warm_start.init_directory(config) == root
    config = Config(init=InitConfig(directory="runs/x"))
    assert str(warm_start.init_directory(config)) == "runs/x"
