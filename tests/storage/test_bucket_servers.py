"""The same promises on servers that speak the services' protocols, where their packages are installed."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import shutil
import sys
from pathlib import Path

import builders
import chex
import fake_bucket
import pytest

from jaxformer import checkpoint, storage, tasks
from jaxformer.config import (
    Config,
    DataConfig,
    EmbedConfig,
    EvaluateConfig,
    ModelConfig,
    StackConfig,
    TaskConfig,
    TokenizerConfig,
    TrainConfig,
)
from jaxformer.data import build, sources
from jaxformer.data.build import Options
from jaxformer.data.pipeline import Pipeline
from jaxformer.errors import ConfigError, StorageError
from jaxformer.runtime import object_store
from jaxformer.runtime.object_store import ABSENT, Conflict, Store
from jaxformer.train import loop, setup

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import storage_servers

FAULTS = 0.15
"""Share of the requests that fail."""


@pytest.fixture(params=["s3", "gs"])
def url(request, monkeypatch, tmp_path):
    scheme = request.param
    package = storage_servers.missing(scheme)
    if package:
        pytest.skip(f"the package {package}, a server of {scheme}://, is not installed")
    monkeypatch.setattr(storage_servers, "SLOW_SECONDS", 0.2)
    monkeypatch.setattr(object_store, "FIRST_DELAY_SECONDS", 0.02)
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "host"))
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", "")  # is restored afterwards, and set by the first request
    monkeypatch.delenv("TENSORSTORE_GCS_HTTP_URL")
    with storage_servers.serve(scheme, 0.0, 0, tmp_path) as server:
        for name, value in storage_servers.environment(scheme, server).items():
            monkeypatch.setenv(name, value)
        yield f"{scheme}://{storage_servers.BUCKET}/runs/one", server


def test_conditions_hold(url):
    store = Store(url[0])
    first = store.write("a", b"1", ABSENT)
    with pytest.raises(Conflict):
        store.write("a", b"2", ABSENT)
    second = store.write("a", b"2", first)
    with pytest.raises(Conflict):
        store.write("a", b"3", first)
    assert store.read("a") == (b"2", second) and store.read("a", unless=first) == (b"2", second)
    assert store.read("none") is None and store.list_keys() == ["a"]
    store.delete("a")
    store.delete("a")
    assert store.list_keys() == []
    with pytest.raises(ConfigError, match="expected a folder in a bucket that exists"):
        Store(url[0].replace(storage_servers.BUCKET, "nobucket")).write("a", b"1")


def test_a_checkpoint_may_take_longer_than_an_answer(url, monkeypatch, tmp_path):
    """Of files that come in 1.5 s each, with 0.5 s for an answer; then a server that sends too little of anything."""
    address, server = url
    monkeypatch.setattr(object_store, "REQUEST_SECONDS", 0.5)
    monkeypatch.setattr(object_store, "PART_BYTES", 50_000)
    with storage.TrainingSession(address) as session:
        fake_bucket.write_checkpoint(session.root, "last/1", "state" * 60_000)
        (session.root / "metrics.jsonl").write_text("row" * 100_000)
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "other"))
    storage_servers.control(server, rate=200_000)
    with storage.TrainingSession(address) as session:
        assert fake_bucket.contents(session.root) == {"last/1": "state" * 60_000}
        assert (session.root / "metrics.jsonl").read_text() == "row" * 100_000
    storage_servers.control(server, rate=20_000)
    key = "checkpoints/last/1/state/arrays"
    with pytest.raises(StorageError, match=f"got DEADLINE_EXCEEDED: no answer in time while reading {key}"):
        Store(address, retry_seconds=1.0).read(key, size=300_000)


def test_a_run_moves_to_another_host_while_requests_fail(url, monkeypatch, tmp_path):
    address, server = url
    storage_servers.control(server, faults=FAULTS)
    with storage.TrainingSession(address) as session:
        for step in (1, 2):
            fake_bucket.write_checkpoint(session.root, f"last/{step}", f"state {step}")
            (session.root / "metrics.jsonl").write_text(f"row {step}\n")
            session.flush()
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "other"))
    with storage.TrainingSession(address) as session:
        assert fake_bucket.contents(session.root) == {"last/1": "state 1", "last/2": "state 2"}
        assert (session.root / "metrics.jsonl").read_text() == "row 2\n"
    assert sum(count for kind, count in storage_servers.control(server).items() if kind != "passed") > 0


def test_shards_are_built_and_read_by_processes_while_requests_fail(url, monkeypatch, tmp_path):
    """Two workers build; loader processes give the batches of the folder, resume, and name a damaged shard."""
    address, server = f"{url[0]}/corpus", url[1]
    lines = [f"line {number} " + "abcdefgh" * 20 for number in range(13000)]
    (tmp_path / "train.txt").write_text("\n".join(lines))
    data = {"source": "text", "dir": str(tmp_path), "splits": {"train": ("train.txt",)}}
    config = Config(data=DataConfig(**data, tokenizer=TokenizerConfig(kind="byte")))
    options = Options(shard_mb=1, deduplicate="exact")
    index = build.build(config, tmp_path / "whole", options=options)
    storage_servers.control(server, faults=FAULTS)
    assert build.build(config, address, workers=2, options=options) == index
    assert sum(count for kind, count in storage_servers.control(server).items() if kind != "passed") > 0

    if importlib.util.find_spec("apache_beam"):
        Store(f"{url[0]}/text").write("train.txt", (tmp_path / "train.txt").read_bytes())
        there = dataclasses.replace(config, data=dataclasses.replace(config.data, dir=f"{url[0]}/text"))
        assert build.build(there, f"{address}-beam", options=options, beam="--runner=DirectRunner") == index
        for key in Store(address).list_keys():
            if key.endswith((".array_record", "index.json", "tokenizer.json")):
                assert Store(f"{address}-beam").read(key).value == Store(address).read(key).value, key

    def pipeline(where, workers):
        data = DataConfig(source="shards", dir=str(where), batch=8, length=64, packing="concat", workers=workers,
                          cache=str(tmp_path / "prepared"))  # fmt: skip
        config = Config(model=ModelConfig(decoder=StackConfig()), data=data, task=TaskConfig(name="language_modelling"))
        dataset = sources.build(config.data, ("text",))
        tokenizers = setup.build_or_load_tokenizers(config, dataset, tmp_path / "prepared")
        return Pipeline(config, dataset, tokenizers, tasks.get("language_modelling"))

    def ids(batches, count):
        return [next(batches).target.tokens.tolist() for _ in range(count)]

    with contextlib.closing(pipeline(tmp_path / "whole", 0).train()) as batches:
        expected = ids(batches, 6)
    storage_servers.control(server, faults=0.0)
    loaded = pipeline(address, 2)
    with contextlib.closing(loaded.train()) as batches:
        assert ids(batches, 3) == expected[:3]
        position = loaded.data_state(batches)
    with contextlib.closing(pipeline(address, 0).resume(position)) as batches:
        assert ids(batches, 3) == expected[3:]
    shutil.rmtree(tmp_path / "host" / "data")
    for number in range(1, 3):  # the main process reads an example of the first
        Store(address).write(f"train-0000{number}.array_record", b"damaged")
    with (
        contextlib.closing(pipeline(address, 2).train()) as batches,
        pytest.raises(ConfigError, match=rf"{address}/train-0000\d.array_record: got a damaged shard"),
    ):
        ids(batches, 6)


def test_a_run_of_loader_processes_on_a_small_disk_is_the_run_on_a_folder(url, monkeypatch, tmp_path, programs):
    """Room for one copy of three, which a copy of another corpus has: stopped, and resumed while requests fail."""
    address, server = f"{url[0]}/corpus", url[1]
    builders.one_device(monkeypatch)
    builders.drawn_parameters(monkeypatch)
    builders.share_programs(monkeypatch, programs)
    (tmp_path / "train.txt").write_text("\n".join(f"line {number} " + "abcdefgh" * 20 for number in range(13000)))
    data = {"source": "text", "dir": str(tmp_path), "splits": {"train": ("train.txt",)}}
    config = Config(data=DataConfig(**data, tokenizer=TokenizerConfig(kind="byte")))
    index = build.build(config, tmp_path / "whole", options=Options(shard_mb=1))
    build.build(config, address, options=Options(shard_mb=1))
    sizes = [shard["size"] for shard in index["splits"]["train"]["shards"]]
    folder = tmp_path / "host" / "data" / "shards"

    def run_of(where, **fields):
        data = DataConfig(source="shards", dir=str(where), batch=4, length=8, packing="concat", **fields)
        model = ModelConfig(decoder=builders.stack(embed=EmbedConfig(dropout=0.1), layers=1))
        train = TrainConfig(steps=6, checkpoint_every=2, log_every=1)
        evaluate = EvaluateConfig(decode_examples=0)
        return Config(model=model, data=data, task=TaskConfig("language_modelling"), train=train, evaluate=evaluate)

    assert loop.train(run_of(tmp_path / "whole"), tmp_path / "expected") == 0
    folder.mkdir(parents=True)
    (folder / "other.array_record").write_bytes(bytes(max(sizes)))
    os.utime(folder / "other.array_record", (1, 1))
    limit = int(1.2 * max(sizes))
    small = run_of(address, workers=2, shard_copies_gb=limit / 1e9)
    calls = builders.interrupted(monkeypatch, 3)
    assert loop.train(small, tmp_path / "run") == loop.EXIT_PREEMPTED
    copy, *others = folder.glob("*.array_record")
    assert not (folder / "other.array_record").exists() and not list(folder.glob("*.partial"))
    assert sum(each.stat().st_size for each in (copy, *others)) <= limit < sum(sizes)
    copy.write_bytes(copy.read_bytes()[:-1000])  # and the disk damages it
    storage_servers.control(server, faults=FAULTS)
    assert loop.train(small, tmp_path / "run") == 0
    assert sum(each.stat().st_size for each in folder.glob("*.*[ld]")) <= limit
    found, expected = (checkpoint.load_run(tmp_path / name).params for name in ("run", "expected"))
    chex.assert_trees_all_equal(found, expected)
    assert len(calls) == 6
