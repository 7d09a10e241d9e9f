"""Requests to a bucket: addresses, conditions, what is tried again, and the line for what is not."""

from __future__ import annotations

import re
from pathlib import Path

import fake_bucket
import pytest
import tensorstore as ts

from jaxformer.errors import ConfigError, StorageError
from jaxformer.runtime import object_store
from jaxformer.runtime.object_store import ABSENT, Conflict, Store

URL = "gs://bucket/runs/one"


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    return fake_bucket.install(monkeypatch, tmp_path)


def test_an_address_has_a_bucket_and_a_folder():
    assert object_store.parse("--workdir", "s3://my-bucket/a/b/") == ("s3", "my-bucket", "a/b")
    assert object_store.is_url("gs://b/x") and not object_store.is_url("runs/x") and not object_store.is_url(None)
    assert not object_store.is_url(Path("runs/gs:/x"))
    with pytest.raises(ConfigError, match="which pathlib made of an address"):
        object_store.is_url(Path("gs://b/x"))


NO_ADDRESSES = [
    "gs://b",
    "gs://bucket",
    "gs:///x",
    "s3://bucket/",
    "ftp://bucket/x",
    "gs://bucket//x",
    "gs://bucket/a/../b",
    "s3://bucket/x?y",
    "s3://me:key@bucket/x",
    "gs://bucket/a\nb",
]


@pytest.mark.parametrize("url", NO_ADDRESSES)
def test_an_address_that_is_none_is_one_line(url):
    with pytest.raises(ConfigError, match="--workdir: got .*, expected") as caught:
        object_store.parse("--workdir", url)
    assert "\n" not in str(caught.value)


def test_a_write_may_demand_that_the_object_is_new_or_unchanged(bucket):
    store = Store(URL)
    assert store.read("a") is None
    first = store.write("a", b"1", ABSENT)
    with pytest.raises(Conflict):
        store.write("a", b"2", ABSENT)
    second = store.write("a", b"2", first)
    with pytest.raises(Conflict):
        store.write("a", b"3", first)
    assert store.read("a") == (b"2", second) and store.list_keys() == ["a"]
    store.delete("a")
    store.delete("a")
    assert store.list_keys() == []


def test_the_generation_of_what_is_absent_is_tensorstores():
    assert ts.KvStore.open({"driver": "memory"}).result().read("x").result().stamp.generation == ABSENT


TRANSIENT = [ValueError("ABORTED: All 1 retry attempts failed: Too Many Requests [http_response_code='429']"),
             ValueError("ABORTED: Service Unavailable"), TimeoutError()]  # fmt: skip


@pytest.mark.parametrize("error", TRANSIENT, ids=["429", "503", "no answer"])
def test_what_fails_for_a_moment_is_tried_again(bucket, error):
    store, failures = Store(URL), [error] * 4
    bucket.before = lambda verb, key: failures.pop() if failures else None
    store.write("a", b"1")
    assert store.retries == 4 and store.read("a").value == b"1"


def test_what_keeps_failing_ends_with_one_line(bucket):
    bucket.before = lambda verb, key: TRANSIENT[1]
    store = Store(URL, retry_seconds=0.02)
    words = "got ABORTED: Service Unavailable while writing a, after trying for 0 s"
    with pytest.raises(StorageError, match=f"--workdir {URL}: {words}"):
        store.write("a", b"1")
    assert 2 <= store.retries < 20


def test_pauses_double_up_to_a_limit(bucket, monkeypatch):
    pauses, now = [], [0.0]

    def sleep(seconds):
        pauses.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(object_store.time, "sleep", sleep)
    monkeypatch.setattr(object_store.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(object_store, "FIRST_DELAY_SECONDS", 0.2)
    bucket.before = lambda verb, key: TRANSIENT[0]
    with pytest.raises(StorageError):
        Store(URL).read("a")
    limits = [min(0.2 * 2**n, 20.0) for n in range(len(pauses))]
    assert all(limit / 2 <= pause <= limit for pause, limit in zip(pauses, limits, strict=True))
    assert 250 < now[0] <= 300


@pytest.mark.parametrize(
    ("error", "url", "words"),
    [
        ("PERMISSION_DENIED: Forbidden [http_response_code='403']", URL, "gcloud auth application-default login"),
        ("UNAUTHENTICATED: no token\nfile x", "s3://bucket/run", "set AWS_ACCESS_KEY_ID"),
        ("NOT_FOUND: Not Found", URL, "expected a folder in a bucket that exists"),
    ],
)
def test_what_would_fail_again_is_refused_at_once(bucket, error, url, words):
    bucket.before = lambda verb, key: ValueError(error)
    store = Store(url)
    with pytest.raises(ConfigError, match=f"--workdir: got '{url}'.*{re.escape(words)}") as caught:
        store.read("a")
    assert store.retries == 0 and "\n" not in str(caught.value)


def test_an_answer_that_says_neither_yes_nor_no_is_asked_for_again(bucket, monkeypatch):
    store = Store(URL)
    generation = store.write("a", b"1")
    answers = [store._kvstore.store.read("a", if_not_equal=generation).result()]
    assert answers[0].state == "unspecified"
    real = fake_bucket.Requests.read
    monkeypatch.setattr(
        fake_bucket.Requests, "read", lambda *a: fake_bucket.Answer(answers.pop()) if answers else real(*a)
    )
    assert store.read("a").value == b"1" and store.retries == 1


@pytest.mark.parametrize("size", [5000, 4000, 4001, 999, 0, 20_000], ids=lambda size: f"{size} expected")
def test_a_large_object_may_take_longer_than_an_answer(bucket, monkeypatch, size, tmp_path):
    """Whatever size is expected of an object of 5,000 bytes, of which 1,000 come in the time for an answer."""
    monkeypatch.setattr(object_store, "PART_BYTES", 1000)
    monkeypatch.setattr(object_store, "REQUEST_SECONDS", 10.0)
    store, content = Store(URL, retry_seconds=12.0), bytes(range(250)) * 20
    generation = store.write("a", content)
    bucket.rate = 100.0
    assert store.read("a", size=size) == (content, generation)
    with open(tmp_path / "copy", "w+b") as file:
        file.write(b"before")
        assert store.read_into(file, "a", size) == generation
        assert store.read_into(file, "none", size) is None
    assert (tmp_path / "copy").read_bytes() == b"before" + content
    assert store.read("none", size=size) is None
    for count in (0, 1, 2000):  # a part ends where the object does, or there is none
        bucket.rate = 1e9
        generation = store.write("b", content[:count])
        bucket.rate = 100.0
        assert store.read("b", size=size) == (content[:count], generation)
        assert store.read("b", unless=generation, size=size) == (b"", generation)
    assert store.read_range("a", 4900, 5000).value == content[4900:] and store.read_range("a", 4900, 5001) is None
    bucket.rate = 90.0  # less than a part
    monkeypatch.setattr(store, "retry_seconds", 0.01)
    with pytest.raises(StorageError, match="got DEADLINE_EXCEEDED: no answer in time while reading a"):
        store.read("a", size=size)


def test_writing_a_large_object_may_take_longer_than_retries_do(bucket, monkeypatch):
    monkeypatch.setattr(object_store, "REQUEST_SECONDS", 0.2)
    monkeypatch.setattr(object_store, "MIN_BYTES_PER_SECOND", 100)
    store, bucket.rate = Store(URL, retry_seconds=0.5), 100
    store.write("a", bytes(5000))
    assert store.retries == 0
    bucket.rate = 99
    with pytest.raises(StorageError, match="got DEADLINE_EXCEEDED: no answer in time while writing a"):
        Store(URL, retry_seconds=-50.0).write("a", bytes(5000))


def test_an_object_that_changes_while_its_parts_are_read_is_read_again(bucket, monkeypatch):
    monkeypatch.setattr(object_store, "PART_BYTES", 10)
    store, reads = Store(URL), []
    store.write("a", b"x" * 35)

    def change(verb, key):
        reads.append(key)
        if verb == "read" and (len(reads) == 3 or changing):
            bucket.open(store.address).store.write(key, b"y" * (30 + len(reads))).result()

    changing = False
    bucket.before = change
    assert store.read("a", size=35).value == b"y" * 33
    changing = True
    with pytest.raises(StorageError, match="got a, which changes while it is read"):
        store.read("a", size=35)


def test_errors_in_threads_are_raised(bucket, monkeypatch):
    monkeypatch.setattr(object_store, "PARALLEL_REQUESTS", 2)
    store, seen = Store(URL), []

    def act(item):
        seen.append(item)
        if item == 2:
            raise StorageError("two")

    with pytest.raises(StorageError, match="two"):
        store.for_each(act, [(1, 0), (2, 0), (3, object_store.MAX_PARALLEL_BYTES + 1)])
    assert 3 not in seen


def test_the_servers_of_the_vendors_variables_are_used(monkeypatch):
    for name in ("AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9/")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    spec = object_store.open_kvstore(object_store.parse("w", "s3://bucket/a")).spec().to_json()
    assert (spec["endpoint"], spec["aws_region"], spec["path"]) == ("http://127.0.0.1:9", "us-east-1", "a/")
    assert spec["use_conditional_write"] is True
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "127.0.0.1:9")
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", "")
    monkeypatch.delenv("TENSORSTORE_GCS_HTTP_URL")
    spec = object_store.open_kvstore(object_store.parse("w", "gs://bucket/a")).spec().to_json()
    assert (spec["driver"], spec["bucket"], spec["path"]) == ("gcs", "bucket", "a/")
    assert object_store.os.environ["TENSORSTORE_GCS_HTTP_URL"] == "http://127.0.0.1:9"
