"""Token shards built into a bucket, and read from there: what is promised of a folder holds, on any host."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import fcntl
import gzip
import hashlib
import json
import os
import pickle
import threading
import time

import builders
import chex
import fake_bucket
import pytest
import test_docs

from jaxformer import checkpoint, cli
from jaxformer.config import (
    ComponentConfig,
    Config,
    DataConfig,
    EmbedConfig,
    EvaluateConfig,
    MixtureConfig,
    ModelConfig,
    StackConfig,
    TaskConfig,
    TokenizerConfig,
    TrainConfig,
    overrides,
)
from jaxformer.data import build, record_ranges, shard_copies, sources, token_shards
from jaxformer.data.build import Options, beam, pieces, targets
from jaxformer.data.pipeline import Pipeline
from jaxformer.errors import ConfigError, StorageError
from jaxformer.runtime import bucket_folders
from jaxformer.runtime import lease as leases
from jaxformer.runtime.object_store import Store
from jaxformer.tasks import get as get_task
from jaxformer.train import loop, setup

URL, TEXT = "gs://bucket/corpus", "s3://texts/all"
LINES = [f"line {number} " + "ä€😀x"[number % 4] * (number * 7 % 23) for number in range(60)]
OPTIONS = Options(deduplicate="exact", held_out=0.2)


class Killed(BaseException):
    """Stands for SIGKILL."""


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    """The bucket, and shards of a few hundred bytes of text."""
    monkeypatch.setattr(pieces, "MIN_SHARD_BYTES", 300)
    monkeypatch.setattr(pieces, "USUAL_SHARDS", 10**6)
    monkeypatch.setattr(token_shards, "RECORD_TOKENS", 16)
    monkeypatch.setattr(leases, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(bucket_folders, "_fetch", bucket_folders._fetch.__wrapped__)  # each call is a new process
    monkeypatch.setattr(bucket_folders, "local_file", bucket_folders.local_file.__wrapped__)
    return fake_bucket.install(monkeypatch, tmp_path)


def config_of(folder, **fields):
    splits = {"train": ("train.txt",)}
    tokenizer = TokenizerConfig(kind="character")
    return Config(data=DataConfig(source="text", dir=str(folder), splits=splits, tokenizer=tokenizer, **fields))


@pytest.fixture
def config(tmp_path):
    (tmp_path / "train.txt").write_text("".join(f"{line}\n" for line in [*LINES, *LINES[20:25]]))
    return config_of(tmp_path)


def objects(url=URL):
    """Content of the objects that are of the corpus; manifests without generations, which no folder has."""
    store, found = Store(url), {}
    for key in store.list_keys():
        if not key.startswith(targets.WORK):
            found[key] = store.read(key).value
            if key.startswith(("train-", "validation-")) and key.endswith(".json"):
                manifest = json.loads(found[key])
                assert manifest.pop("generations").keys() == {s["file"] for s in manifest["shards"].values() if s}
                found[key] = (json.dumps(manifest, indent=1, ensure_ascii=False) + "\n").encode()
    return found


def written(bucket):
    return [key for verb, key in bucket.log if verb == "write"]


def in_folder(config, folder, **arguments):
    index = build.build(config, folder, **arguments)
    return index, {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_the_objects_are_the_files_of_a_folder_whatever_is_killed(bucket, config, tmp_path):
    index, expected = in_folder(config, tmp_path / "whole", options=OPTIONS)
    bucket.after = lambda verb, key: (  # every fifth answer is lost
        OSError("UNAVAILABLE: lost") if verb == "write" and len(bucket.log) % 5 == 0 else None
    )
    assert build.build(config, URL, options=OPTIONS) == index and objects() == expected
    assert not list((tmp_path / "host" / "builds").rglob("*.array_record")), "partial files are gone"
    assert not list((tmp_path / "host" / "builds").rglob("*.partial"))
    bucket.reset()
    build.build(config, URL, options=OPTIONS)
    changes = [key for verb, key in bucket.log if verb != "read"]
    count, (_, second, *_) = len(changes), [i for i, key in enumerate(changes) if key.endswith("survivors.npy")]
    assert len(expected) > 10 and count > 40
    for number in (1, 5, second, count // 2, count - 6, count - 2):  # the last request releases the lease
        bucket.reset()
        left = [number]

        def kill(verb, key, left=left):
            left[0] -= verb != "read"
            if left[0] < 0:
                raise Killed

        bucket.before = kill
        with pytest.raises(Killed):
            build.build(config, URL, options=OPTIONS)
        bucket.before = lambda verb, key: None
        assert Store(URL).read(token_shards.INDEX) is None, number
        done = {key for key in written(bucket) if key.startswith("train-") and key.endswith(".json")}
        bucket.log.clear()
        assert build.build(config, URL, options=OPTIONS) == index
        assert objects() == expected, number
        assert not done & set(written(bucket)), "finished shards are kept"
    assert done


def test_what_is_damaged_is_made_again_and_nothing_else(bucket, config, tmp_path):
    index, store = build.build(config, URL, options=OPTIONS), Store(URL)
    expected = objects()
    keys = [f"train-0000{number}" for number in range(5)]
    raw = store.read(f"{keys[0]}.array_record").value
    store.write(f"{keys[0]}.array_record", raw[:70000] + bytes([raw[70000] ^ 1]) + raw[70001:])
    store.delete(f"{keys[1]}.array_record")
    store.write(f"{keys[2]}.json", b"{")
    store.write(f"{keys[3]}.json", store.read(f"{keys[4]}.json").value)  # of another shard
    store.write(f"{keys[4]}.array_record", store.read(f"{keys[4]}.array_record").value)  # the same bytes
    bucket.log.clear()
    assert build.build(config, URL, options=OPTIONS) == index and objects() == expected
    made = {key.partition(".")[0] for key in written(bucket) if key.endswith(".array_record")}
    assert made - {key.replace("train", "validation") for key in keys} == set(keys[:4])
    bucket.log.clear()
    build.build(config, URL, options=OPTIONS)
    read = [key for verb, key in bucket.log if verb == "read"]
    assert f"{keys[0]}.json" in read and not [key for key in written(bucket) if key.endswith(".array_record")]
    store.write(targets.PLAN, b"{")  # then arrays without a checksum may be of another plan
    survivors = targets.Bucket(URL).copy(f"{targets.WORK}/{keys[0]}.survivors.npy")
    store.write(f"{targets.WORK}/{keys[0]}.survivors.npy", survivors.read_bytes().replace(b"\x01", b"\x00"))
    for key in (f"{keys[0]}.json", f"{targets.WORK}/sample.json"):
        store.delete(key)
    assert build.build(config, URL, options=OPTIONS) == index and objects() == expected


def test_one_build_at_a_time(bucket, config, monkeypatch, capsys):
    monkeypatch.setattr(leases, "LEASE_SECONDS", 0.05)
    other = leases.Lease(Store(URL), "another host", key=f"{targets.WORK}/lock")
    other.acquire()
    bucket.before = lambda verb, key: other.renew() if (verb, key) == ("read", f"{targets.WORK}/lock") and not (
        other.mutex.locked()
    ) else None  # fmt: skip
    with pytest.raises(ConfigError, match=rf"target {URL}: got a build that writes to it \(process .*another --target"):
        build.build(config, URL)
    bucket.before = lambda verb, key: None
    assert not written(bucket)[1:-1] or set(written(bucket)) == {f"{targets.WORK}/lock"}
    build.build(config, URL)  # once the other lease has expired
    assert "has its lock; waiting" in capsys.readouterr().err
    with pytest.raises(StorageError, match="another run that has taken over its lock"):
        other.renew()
    for number in (1, 3):
        Store(URL).delete(f"train-0000{number}.json")

    def take_over(verb, key):
        if (verb, key) == ("write", "train-00001.json"):
            monkeypatch.setattr(leases, "LEASE_SECONDS", 0.0)  # a renewal is due
            Store(URL).write(f"{targets.WORK}/lock", b'{"token": "of another host"}')

    bucket.before = take_over
    with pytest.raises(StorageError, match=f"target {URL}: got another run that has taken over its lock"):
        build.build(config, URL)
    assert Store(URL).read("train-00001.json") is not None and Store(URL).read("train-00003.json") is None


def test_what_cannot_be_honoured_is_one_line(bucket, config, monkeypatch, capsys):
    with pytest.raises(ConfigError, match="--shard-mb: got 2048 with a --target in a bucket, expected at most 1024"):
        build.build(config, URL, options=Options(shard_mb=2048))
    build.build(config, URL)
    with pytest.raises(ConfigError, match=f"--target: got '{URL}', which holds shards of other input, settings or opt"):
        build.build(config, URL, options=Options(min_length=3))
    Store("s3://bucket/other").write("thesis.tex", b"")
    with pytest.raises(ConfigError, match="'s3://bucket/other', which holds other files, expected a new or empty fol"):
        build.build(config, "s3://bucket/other")
    assert Store("s3://bucket/other").list_keys() == ["thesis.tex"]
    bucket.before = lambda verb, key: OSError("PERMISSION_DENIED: no")
    flags = ["--config=configs/wikitext2.py", "--config.data.dir=nothing-there", "--target=s3://bucket/new"]
    assert cli.main(["data", "build", *flags]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--target: got 's3://bucket/new', which S3 refuses" in error, error
    assert "set AWS_ACCESS_KEY_ID" in error
    bucket.before = lambda verb, key: OSError("UNAVAILABLE: down") if key.endswith(".array_record") else None
    monkeypatch.setattr(Store.__init__, "__defaults__", ("--workdir", 0.0))
    with pytest.raises(
        StorageError, match=r"got UNAVAILABLE: down while writing train-0000.*what is there is complete"
    ):
        build.build(config, "gs://bucket/down")


def test_text_in_a_bucket_is_the_same_input_on_every_host_and_for_beam(bucket, config, monkeypatch, tmp_path):
    index, expected = in_folder(config, tmp_path / "whole", options=OPTIONS)
    Store(TEXT).write("train.txt", (tmp_path / "train.txt").read_bytes())
    config = config_of(TEXT)
    assert build.build(config, URL, options=OPTIONS) == index
    first = objects()
    shards = {key: value for key, value in expected.items() if key.endswith(".array_record")}
    assert shards and shards.items() <= first.items(), "manifests name their input"
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "second"))
    monkeypatch.setattr(leases, "LEASE_SECONDS", 0.0)
    bucket.log.clear()
    assert build.build(config, URL, options=OPTIONS) == index, "the plan is that of the first host"
    assert not [key for key in written(bucket) if key.endswith(".array_record")]

    def pipeline(work, calls, flags):
        """On other machines, which share nothing."""
        targets._opened.cache_clear()
        for number, call in enumerate(calls):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("JAXFORMER_CACHE", str(tmp_path / f"machine-{number % 2}"))
                beam._call(pickle.loads(pickle.dumps(call)), work)

    monkeypatch.setattr(beam, "run", pipeline)
    monkeypatch.setattr(beam, "check", lambda flags: None)
    assert build.build(config, f"{URL}-2", options=OPTIONS, beam="--runner=X") == index
    assert objects(f"{URL}-2") == first
    assert (tmp_path / "machine-1" / "data").is_dir()
    Store(TEXT).write("train.txt", b"other text\n")
    with pytest.raises(ConfigError, match="holds shards of other input"):
        build.build(config, URL, options=OPTIONS)


def test_a_mixture_is_a_folder_for_each_component(bucket, config, tmp_path):
    parts = {
        name: ComponentConfig(source="text", dir=str(tmp_path), splits={"train": (f"train.txt[{part}]",)})
        for name, part in (("one", ":40"), ("two", "40:"))
    }
    tokenizer, cache = TokenizerConfig(kind="character"), str(tmp_path / "prepared")
    mixed = Config(data=DataConfig(mixture=MixtureConfig(components=parts), tokenizer=tokenizer, cache=cache))
    index = build.build(mixed, tmp_path / "whole")
    assert build.build(mixed, URL) == index and build.build(mixed, URL) == index
    for name in parts:
        (documents,) = sources.build(DataConfig(source="shards", dir=f"{URL}/{name}")).splits.values()
        (expected,) = sources.build(DataConfig(source="shards", dir=str(tmp_path / "whole" / name))).splits.values()
        indices = range(len(expected))
        assert sources.examples_at(documents, indices) == sources.examples_at(expected, indices) != []
    with pytest.raises(ConfigError, match=rf"got '{URL}', the shards of a mixture, expected those of one of its compo"):
        sources.build(DataConfig(source="shards", dir=URL))


# --- reading ----------------------------------------------------------------------------------------------------------


def pipeline_of(where, tmp_path, **fields):
    data = DataConfig(source="shards", dir=str(where), batch=4, length=8, cache=str(tmp_path / "prepared"), **fields)
    config = Config(
        model=ModelConfig(decoder=StackConfig()),
        data=data,
        task=TaskConfig("language_modelling"),
        train=TrainConfig(seed=3),
    )
    dataset = sources.build(config.data, ("text",))
    tokenizers = setup.build_or_load_tokenizers(config, dataset, tmp_path / "prepared")
    return Pipeline(config, dataset, tokenizers, get_task("language_modelling"))


def first_batches(pipe, count=12):
    batches = pipe.train()
    try:
        return [next(batches).target.tokens.tolist() for _ in range(count)]
    finally:
        batches.close()


@pytest.mark.parametrize("packing", ["concat", "none"])
def test_training_reads_the_shards_that_it_needs_and_mends_copies(bucket, config, tmp_path, packing):
    build.build(config, tmp_path / "whole")
    build.build(config, URL)
    bucket.log.clear()
    pipe = pipeline_of(URL, tmp_path, packing=packing)
    start = ["index.json", "jaxformer_tokenizer.json", "train-00000.array_record"]
    assert [key for _, key in bucket.log] == start, "an example shows what the features are"
    expected = first_batches(pipeline_of(tmp_path / "whole", tmp_path, packing=packing))
    assert first_batches(pipe) == expected
    read = [key for _, key in bucket.log if key.endswith(".array_record")]
    assert len(read) == len(set(read)) > 3, "each once"
    bucket.log.clear()
    for number, path in enumerate((tmp_path / "host" / "data" / "shards").glob("*.array_record")):
        raw = path.read_bytes()  # bytes of the first record, or cut
        path.write_bytes(raw.replace(raw[100:140], b"\xff" * 40, 1) if number else raw[:-1000])
    assert first_batches(pipeline_of(URL, tmp_path, packing=packing)) == expected
    assert len([key for _, key in bucket.log if key.endswith(".array_record")]) > 3


def copies(tmp_path):
    """Bytes of the copies in the cache, by name."""
    return {path.name: path.stat().st_size for path in (tmp_path / "host" / "data" / "shards").glob("*.*[ld]")}


@pytest.mark.parametrize("packing", ["concat", "none", "first_fit"])
def test_shards_without_room_are_read_record_by_record(bucket, config, tmp_path, packing, caplog):
    """No copy at all, two at most, and then copies that another run deletes: always the batches of a folder."""
    build.build(config, tmp_path / "whole")
    index = build.build(config, URL)
    sizes = sorted(shard["size"] for shard in index["splits"]["train"]["shards"])
    expected = first_batches(pipeline_of(tmp_path / "whole", tmp_path, packing=packing))
    for limit in (0, 2 * sizes[-1]):
        caplog.clear()
        pipe = pipeline_of(URL, tmp_path, packing=packing, shard_copies_gb=limit / 1e9)
        assert first_batches(pipe) == expected
        assert "of the other shards records are read one by one" in caplog.text
        assert len(copies(tmp_path)) == limit // sizes[-1] and sum(copies(tmp_path).values()) <= limit
    bucket.log.clear()
    pipe = pipeline_of(URL, tmp_path, packing=packing)
    batches = pipe.train()
    with contextlib.closing(batches):
        found = [next(batches).target.tokens.tolist() for _ in range(4)]
        assert len(copies(tmp_path)) > 2
        for path in (tmp_path / "host" / "data" / "shards").glob("*.array_record"):
            assert not shard_copies.delete_unused(path) or path.name not in copies(tmp_path)
        found += [next(batches).target.tokens.tolist() for _ in range(8)]
    assert found == expected


def test_large_shards_are_copied_while_their_records_are_read(bucket, config, tmp_path, monkeypatch):
    monkeypatch.setattr(token_shards, "MAX_AWAITED_BYTES", 0)
    build.build(config, tmp_path / "whole")
    index, gate = build.build(config, URL), threading.Event()
    expected = first_batches(pipeline_of(tmp_path / "whole", tmp_path, packing="concat"))
    real = Store.read_into
    monkeypatch.setattr(Store, "read_into", lambda *given: gate.wait(60) and real(*given))
    pipe = pipeline_of(URL, tmp_path, packing="concat")
    with contextlib.closing(pipe.train()) as batches:
        found = [next(batches).target.tokens.tolist() for _ in range(6)]
        assert not [name for name in copies(tmp_path) if name.endswith("record")], "no batch waits for a copy"
        gate.set()
        shard_files = pipe.dataset.splits["train"].files
        for each in (shard_files, pipe.train_examples.tokens.files):
            for _ in range(1000):
                if each._copier is None:
                    break
                time.sleep(0.01)
            assert each._copier is None and not each._without_copy
        assert len(copies(tmp_path)) > 3
        requests = len(bucket.log)
        found += [next(batches).target.tokens.tolist() for _ in range(6)]
    assert found == expected and len(bucket.log) <= requests + 2 * len(index["splits"]["train"]["shards"])
    store = Store(URL)
    for path in (tmp_path / "host" / "data" / "shards").glob("*.array_record"):
        path.unlink()
    raw = store.read("train-00001.array_record").value
    store.write("train-00001.array_record", raw[:-1] + b"\xff")  # its records are whole
    documents = sources.build(DataConfig(source="shards", dir=URL)).splits["train"]
    count = index["splits"]["train"]["shards"][0]["documents"]
    assert str(documents[count]["text"]) in LINES
    for _ in range(1000):
        if documents.files._failure is not None:
            break
        time.sleep(0.01)
    with pytest.raises(ConfigError, match=f"{URL}/train-00001.array_record: got a damaged shard .it differs from its"):
        documents[count]


def test_damaged_records_are_refused_by_name(bucket, config, tmp_path, monkeypatch):
    index = build.build(config, URL)
    store, shards = Store(URL), index["splits"]["train"]["shards"]
    raw = store.read(shards[1]["file"]).value
    documents = sources.build(DataConfig(source="shards", dir=URL, shard_copies_gb=0)).splits["train"]
    texts = [str(each["text"]) for each in sources.examples_at(documents, range(len(documents)))]
    assert texts == [*LINES, *LINES[20:25]] and not copies(tmp_path)
    requests = len(bucket.log)
    assert str(documents[0]["text"]) == LINES[0] and len(bucket.log) == requests, "records are kept"
    monkeypatch.setattr(record_ranges, "MAX_KEPT_RECORDS", 0)
    first = shards[0]["documents"]
    answers = [raw[:110] + b"\xff\xff" + raw[112:], raw[:110] + b"\xff\xff" + raw[112:], raw]

    def torn(verb, key, real=fake_bucket.Requests.read):
        """The first two answers of a new process are damaged on their way."""
        if key == shards[1]["file"] and answers:
            bucket.open(store.address).store.write(key, answers.pop(0)).result()

    bucket.before = torn
    documents = pickle.loads(pickle.dumps(documents))
    with pytest.raises(ConfigError, match=f"{URL}/train-00001.array_record: got a damaged shard .it was written again"):
        documents[first]
    bucket.before = lambda verb, key: None
    for content, reason in (
        (raw[:110] + b"\xff\xff" + raw[112:], "Corrupted Riegeli/records file: chunk data hash"),
        (raw[:90], "it is missing or too short"),
        (None, "it is missing or too short"),
    ):
        store.delete(shards[1]["file"]) if content is None else store.write(shards[1]["file"], content)
        documents = pickle.loads(pickle.dumps(documents))
        bucket.log.clear()
        with pytest.raises(
            ConfigError, match=f"{URL}/train-00001.array_record: got a damaged shard .{reason}"
        ) as caught:
            documents[first]
        assert "\n" not in str(caught.value) and len(bucket.log) <= record_ranges.DOWNLOADS + 1
    assert str(documents[0]["text"]) == LINES[0], "others are read"


@pytest.fixture
def room(bucket, monkeypatch, tmp_path):
    """Four objects of 1,000 bytes and a larger one, with a function that fetches one of them at a time of its own."""
    store, now = Store(URL), [1000.0]
    contents = {f"{name}.array_record": name.encode() * 1000 for name in "abcd"} | {"e.array_record": b"e" * 3001}
    for key, content in contents.items():
        store.write(key, content)
    monkeypatch.setattr(shard_copies.time, "time", lambda: now[0])

    def fetch(name, limit=3000, since=None):
        now[0] += 10
        content = contents[f"{name}.array_record"]
        room = shard_copies.Room(limit, now[0] if since is None else since)
        return room.fetch(store, f"{name}.array_record", len(content), hashlib.sha256(content).hexdigest())

    def path(name):
        content = contents[f"{name}.array_record"]
        return shard_copies.copy_path(f"{name}.array_record", hashlib.sha256(content).hexdigest())

    fetch.path, fetch.there = path, lambda: "".join(name for name in "abcd" if path(name).exists())
    return fetch


def test_the_copies_used_least_recently_make_room(room, tmp_path):
    assert [room(name) for name in "abc"] == [True] * 3
    assert room("a") and room.there() == "abc"  # so "b" is the oldest
    assert room("d") and room.there() == "acd"
    assert room("c")
    reader = shard_copies.open_locked(room.path("a"))  # a process reads it; it is the oldest again
    os.utime(room.path("a"), (0, 0))
    assert room("b") and room.there() == "abc"
    assert not room("e") and room.there() == "abc", "nothing is deleted in vain"
    assert not room("d", since=0) and room.there() == "abc", "copies of this run stay"
    assert room("d", limit=1000) is False and room.there() == "a", "what is open stays"
    assert reader.read() == b"a" * 1000
    reader.close()
    dead = room.path("d").with_suffix(".partial")
    dead.write_bytes(bytes(2000))
    assert room("d", limit=2000, since=0) and room.there() == "ad" and not dead.exists(), "a killed process's"
    with open(dead, "wb") as file:  # another process fetches
        file.write(bytes(1000))
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        assert not room("b", limit=2500, since=0) and room.there() == "ad" and dead.exists()
        assert room("b", limit=2500) and room.there() == "b"
    assert set(copies(tmp_path)) == {room.path("b").name, dead.name}


def test_a_full_disk_leaves_no_part_of_a_copy(room, monkeypatch, tmp_path):
    assert room("a", limit=None)
    real, usage = os.posix_fallocate, collections.namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", lambda *given: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        assert not room("b", limit=None) and set(copies(tmp_path)) == {room.path("a").name}
    for error in (OSError(errno.ENOSPC, "full"), Killed()):  # something else has filled it meanwhile
        with monkeypatch.context() as patch:

            def read_into(self, file, key, size, error=error):
                file.write(b"half")
                raise error

            patch.setattr(Store, "read_into", read_into)
            with contextlib.suppress(Killed):
                assert not room("b", limit=None)
        assert set(copies(tmp_path)) == {room.path("a").name}
    assert real is os.posix_fallocate
    monkeypatch.setattr(shard_copies, "FREE_FRACTION", 0.1)
    free = [10_000 + 999]
    monkeypatch.setattr(shard_copies.shutil, "disk_usage", lambda path: usage(100_000, 0, free[0]))
    assert shard_copies.Room().available() == 1999 and shard_copies.Room(500).available() == 500
    assert not room("b", limit=None, since=0) and room.there() == "a"
    assert room("b", limit=1000) and room.there() == "b", "a limit of the user's own may fill the disk"
    free[0] += 1
    assert room("c", limit=None) and room.there() == "bc"


def test_a_run_on_a_bucket_is_the_run_on_a_folder(bucket, config, tmp_path, monkeypatch, programs):
    """Stopped and resumed, first without copies, then with a few: parameters and losses have the same bits."""
    builders.one_device(monkeypatch)
    builders.drawn_parameters(monkeypatch)
    builders.share_programs(monkeypatch, programs)
    build.build(config, tmp_path / "whole")
    index = build.build(config, URL)
    size = max(shard["size"] for shard in index["splits"]["train"]["shards"])

    def run_of(where, **fields):
        data = DataConfig(source="shards", dir=str(where), batch=4, length=8, packing="concat", **fields)
        return Config(
            model=ModelConfig(decoder=builders.stack(embed=EmbedConfig(dropout=0.1), layers=1)),
            data=data,
            task=TaskConfig("language_modelling"),
            train=TrainConfig(steps=5, checkpoint_every=2, log_every=1),
            evaluate=EvaluateConfig(decode_examples=0),
        )

    def losses(workdir):
        rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
        return [(row["step"], row["loss"]) for row in rows]

    assert loop.train(run_of(tmp_path / "whole"), tmp_path / "expected") == 0
    calls = builders.interrupted(monkeypatch, 3)
    assert loop.train(run_of(URL, shard_copies_gb=0), tmp_path / "run") == loop.EXIT_PREEMPTED
    assert not copies(tmp_path)
    restore, fill, filled = checkpoint.Checkpoints.restore, Pipeline.fill, threading.Event()
    monkeypatch.setattr(checkpoint.Checkpoints, "restore", lambda *given: filled.wait(60) and restore(*given))
    monkeypatch.setattr(Pipeline, "fill", lambda *given: filled.set() or fill(*given))
    (tmp_path / "run" / "checkpoints" / "last" / "3" / "about" / "metadata").write_text("{}")  # back to step 2
    assert loop.train(run_of(URL, shard_copies_gb=2 * size / 1e9), tmp_path / "run") == 0
    assert filled.is_set(), "batches are filled while the checkpoint is restored"
    assert len(copies(tmp_path)) == 2 and len(calls) == 6
    assert losses(tmp_path / "run") == losses(tmp_path / "expected")
    found, expected = (checkpoint.load_run(tmp_path / name).params for name in ("run", "expected"))
    chex.assert_trees_all_equal(found, expected)


def test_damage_is_refused_by_name(bucket, config, tmp_path):
    build.build(config, URL)
    store = Store(URL)
    index = json.loads(store.read("index.json").value)
    (documents,) = sources.build(DataConfig(source="shards", dir=URL)).splits.values()
    raw = store.read("train-00001.array_record").value
    store.write("train-00001.array_record", raw[:-1] + b"\xff")
    store.delete("train-00002.array_record")
    documents = pickle.loads(pickle.dumps(documents))  # as loader processes get it
    assert str(documents[0]["text"]) == LINES[0]
    count = index["splits"]["train"]["shards"][0]["documents"]
    bucket.log.clear()
    with pytest.raises(ConfigError, match=f"{URL}/train-00001.array_record: got a damaged shard .it differs from its"):
        documents[count]
    assert len(bucket.log) == shard_copies.DOWNLOADS
    count += index["splits"]["train"]["shards"][1]["documents"]
    with pytest.raises(ConfigError, match=f"{URL}/train-00002.array_record: got no shard, expected the one that the"):
        documents[count]
    build.build(config, URL)
    (documents,) = sources.build(DataConfig(source="shards", dir=URL)).splits.values()
    assert [str(each["text"]) for each in sources.examples_at(documents, range(60))] == LINES
    for content, line in ((None, f"data.dir: got '{URL}' without index.json"), (b"{", f"{URL}/index.json: got no ind")):
        store.delete("index.json") if content is None else store.write("index.json", content)
        with pytest.raises(ConfigError, match=line):
            sources.build(DataConfig(source="shards", dir=URL))
    store.write("index.json", json.dumps(dataclasses.asdict(OPTIONS) | index).encode())
    store.delete("jaxformer_tokenizer.json")
    with pytest.raises(ConfigError, match=f"{URL}/jaxformer_tokenizer.json: got none, expected the tokenizer"):
        sources.build(DataConfig(source="shards", dir=URL))


def test_the_commands_of_the_guide_build_and_find_the_shards(bucket, config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(test_docs.ROOT)
    mine = [words for page, words in test_docs.commands() if page == "data.md" and "gs://my-bucket" in " ".join(words)]
    assert [words[:2] for words in mine] == [["data", "build"], ["train", "--config=configs/wikitext2.py"]]
    (source,) = [word.partition("=")[2] for word in mine[0] if word.startswith("--config.data.dir=")]
    words = [word for word in mine[0] if not word.startswith("--workers=")]  # processes have no bucket in memory
    files = overrides.parse([words[2]]).data.splits
    for name in {name for names in files.values() for name in names}:
        raw = (tmp_path / "train.txt").read_bytes()
        Store(source).write(name, gzip.compress(raw) if name.endswith(".gz") else raw)
    assert cli.main([*words, "--config.data.tokenizer.kind=byte"]) == 0, capsys.readouterr().err
    assert "built in gs://my-bucket/corpus" in capsys.readouterr().out
    name, command, rest = cli.find(mine[1])
    trained = overrides.parse([*cli.parse(name, command, rest).config, "--config.data.tokenizer.kind=byte"])
    assert sources.build(trained.data, ("text",)).splits.keys() == files.keys()
