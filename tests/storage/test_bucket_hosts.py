"""Processes that share no disk: each keeps, publishes and restores its part of a checkpoint."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import fake_bucket
import jax
import numpy as np
import one_of_two_hosts
import pytest
from jax.errors import JaxRuntimeError
from jax.sharding import NamedSharding, PartitionSpec

from jaxformer import checkpoint, storage
from jaxformer.checkpoint import manifest, own_disks
from jaxformer.checkpoint.own_disks import OwnDisks
from jaxformer.errors import StorageError
from jaxformer.parallel import messages
from jaxformer.runtime import lease, object_store
from jaxformer.runtime.lease import Lease
from jaxformer.runtime.object_store import Store
from jaxformer.storage import processes
from jaxformer.storage.mirror import Mirror
from jaxformer.storage.processes import Follower, Leader
from jaxformer.storage.publishing import Publisher

URL = "s3://bucket/runs/one"


class Coordinator:
    """The key-value store of the coordinator, for threads in the place of processes."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.changed:
            if key in self.values and not allow_overwrite:
                raise JaxRuntimeError("ALREADY_EXISTS")
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, milliseconds):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, milliseconds / 1000):
                raise JaxRuntimeError("DEADLINE_EXCEEDED")
            return self.values[key]

    def key_value_try_get(self, key):
        if key not in self.values:
            raise JaxRuntimeError("NOT_FOUND")
        return self.values[key]

    def key_value_delete(self, key):
        del self.values[key]


@pytest.fixture
def talk(monkeypatch):
    """A function from the index of a process of two to its messages."""
    coordinator = Coordinator()
    monkeypatch.setattr(messages, "POLL_SECONDS", 0.01)

    def make(index, topic="test"):
        state = SimpleNamespace(client=coordinator, num_processes=2, process_id=index)
        monkeypatch.setattr(messages.internal, "global_state", state)
        return messages.Messages(topic)

    make.coordinator = coordinator
    return make


def both(first, second):
    """What two functions return that are called at the same time, or raise."""
    found = {}

    def call():
        try:
            found["second"] = second()
        except Exception as error:
            found["second"] = error

    thread = threading.Thread(target=call)
    thread.start()
    try:
        found["first"] = first()
    except Exception as error:
        found["first"] = error
    thread.join()
    return found["first"], found["second"]


def test_values_are_exchanged_and_forgotten(talk):
    one, two = talk(0), talk(1)
    for value in (1, 2, 3):
        assert both(lambda: one.exchange([value]), lambda: two.exchange({"x": value})) == ([[value], {"x": value}],) * 2  # noqa: B023
    assert len(talk.coordinator.values) == 2  # the last ones only
    assert one.look("none") is None


# --- which files a process needs


@pytest.mark.parametrize(
    ("shape", "spec", "chunks"),
    [
        ((8, 6), PartitionSpec("a", "b"), (2, 3)),
        ((8, 6), PartitionSpec("a"), (3, 4)),
        ((8, 6), PartitionSpec(None, "b"), (8, 6)),
        ((16,), PartitionSpec(("a", "b")), (1,)),
        ((5, 2), PartitionSpec(), (2, 2)),
        ((), PartitionSpec(), ()),
    ],
)
def test_the_chunks_that_overlap_shards_of_this_process(shape, spec, chunks):
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    sharding = NamedSharding(mesh, spec)
    mine = list(sharding.devices_indices_map(shape).items())[2:4]  # those of one process
    here = SimpleNamespace(addressable_devices_indices_map=lambda shape: dict(mine))
    expected = set()
    for _, part in mine:  # by element: where it lies
        covered = np.zeros(shape, bool)
        covered[part] = True
        for index in np.argwhere(covered) if shape else [()]:
            expected.add(".".join(str(i // size) for i, size in zip(index, chunks, strict=True)) or "0")
    assert own_disks.overlapping_chunks(chunks, shape, here) == expected


def test_all_chunks_of_an_array_that_is_not_known_are_needed(tmp_path):
    listed = ["about/metadata", "state/params.x/.zarray", "state/params.x/0.0", "state/params.x/1.0", "state/y/0"]
    assert own_disks.needed_files(tmp_path, listed, {}) == [listed[0], listed[1], *listed[2:]]


# --- saving together


def test_a_save_that_fails_in_one_process_fails_in_all(talk, tmp_path):
    disks = [OwnDisks(lambda *_: None, lambda: None, talk(index)) for index in (0, 1)]
    for folder in ("0", "1"):
        (tmp_path / folder).mkdir()
    (tmp_path / "0" / "file").write_text("first")
    (tmp_path / "1" / "file").write_text("second")
    (tmp_path / "1" / "more").write_text("second")
    both(*(lambda i=i: disks[i].complete(tmp_path / str(i), lambda: None) for i in (0, 1)))
    listed = manifest.read(tmp_path / "0")
    assert listed == manifest.read(tmp_path / "1") and set(listed) == {"file", "more"}
    manifest.check_files(tmp_path / "0", {"file": listed["file"]})  # the first process's
    manifest.check_files(tmp_path / "1", {"more": listed["more"]})

    def fail():
        raise OSError("disk full")

    first, second = both(
        lambda: disks[0].complete(tmp_path / "0", lambda: None), lambda: disks[1].complete(tmp_path / "1", fail)
    )
    assert isinstance(first, StorageError) and "process 1: OSError: disk full" in str(first)
    assert isinstance(second, OSError)
    failing = OwnDisks(lambda *_: None, fail, disks[0].messages)
    first, second = both(lambda: failing.publish(lambda: None), lambda: disks[1].publish(lambda: None))
    assert isinstance(second, StorageError) and "process 0: OSError: disk full" in str(second)


# --- publishing together


@pytest.fixture
def pair(monkeypatch, tmp_path, talk):
    """The publisher of a first process and its follower, each with a mirror."""
    bucket = fake_bucket.install(monkeypatch, tmp_path)
    leader = Leader(talk(0))
    mirrors = [Mirror(Store(URL, retry_seconds=0.01), f"process-{index}") for index in (0, 1)]
    held = Lease(mirrors[0].store, mirrors[0].id, leader.sign)
    held.acquire()
    found = mirrors[0].fetch(owner=True, select=lambda root: ([], 0))
    follower = Follower(mirrors[1], talk(1))
    follower.start()
    publisher = Publisher(mirrors[0], found, held, leader)
    yield SimpleNamespace(bucket=bucket, mirrors=mirrors, publisher=publisher, follower=follower, lease=held)
    leader.end()
    follower.wait()
    held.release()


def write(mirrors, name, contents, common="both"):
    """A checkpoint of a file for each mirror, and one that both have."""
    listed = {}
    for index in (1, 0):
        folder = mirrors[index].root / "checkpoints" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "state").mkdir(exist_ok=True)
        (folder / "about").mkdir(exist_ok=True)
        (folder / "state" / str(index)).write_text(contents[index])
        (folder / "about" / "metadata").write_text(common)
        listed |= {key: value for key, value in manifest.list_files(folder).items() if key != manifest.FILE_NAME}
    for mirror in mirrors:
        manifest.write_list(mirror.root / "checkpoints" / name, listed)


def copy_of(tmp_path, monkeypatch, name):
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / name))
    mirror = Mirror(Store(URL))
    mirror.fetch()
    return mirror.root / "checkpoints"


def test_each_process_publishes_its_files_and_the_first_the_manifest(pair, tmp_path, monkeypatch):
    write(pair.mirrors, "last/1", ("a", "b"))
    (pair.mirrors[1].root / "metrics.jsonl").write_text("not the first's")
    pair.publisher.publish()
    log = pair.bucket.log
    marker = log.index(("write", "checkpoints/last/1/manifest.json"))
    for key in ("state/0", "state/1", "about/metadata"):
        assert log.index(("write", f"checkpoints/last/1/{key}")) < marker
        assert log.count(("write", f"checkpoints/last/1/{key}")) == 1
    assert ("write", "metrics.jsonl") not in log
    write(pair.mirrors, "last/1", ("c", "d"))  # replaced, as after an evaluation that was due
    pair.publisher.publish()
    root = copy_of(tmp_path, monkeypatch, "third")
    assert (root / "last/1/state/0").read_text() == "c" and (root / "last/1/state/1").read_text() == "d"
    manifest.check_files(root / "last/1", manifest.read(root / "last/1"))
    assert not any(key.startswith("checkpoints/saving") for key in Store(URL).list_keys())


@pytest.mark.parametrize("count", range(30))
def test_a_kill_before_any_write_loses_no_checkpoint(pair, tmp_path, monkeypatch, count):
    write(pair.mirrors, "last/1", ("a", "b"))
    pair.publisher.publish()
    writes = [0]

    def kill(verb, key):
        writes[0] += verb != "read" and key != "lock"
        return ValueError("PERMISSION_DENIED: killed") if writes[0] > count and key != "lock" else None

    pair.bucket.before = kill
    write(pair.mirrors, "last/1", ("c", "d"))
    try:
        pair.publisher.publish()
        assert writes[0] <= count
    except Exception:
        assert writes[0] > count
    pair.bucket.before = lambda verb, key: None
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "third"))
    mirror = Mirror(Store(URL), "process-1")
    mirror.fetch(select=lambda root: ([], 0))
    root = mirror.root / "checkpoints"
    listed = manifest.read(root / "last/1")
    mirror.fetch_part("last/1", listed)
    manifest.check_files(root / "last/1", listed)
    assert ((root / "last/1/state/0").read_text(), (root / "last/1/state/1").read_text()) in (("a", "b"), ("c", "d"))


def test_a_file_that_nobody_has_and_one_that_changed_stop_the_publication(pair):
    write(pair.mirrors, "last/1", ("a", "b"))
    (pair.mirrors[1].root / "checkpoints/last/1/state/1").write_text("x")
    with pytest.raises(StorageError, match="process 1: .*got other bytes than were written"):
        pair.publisher.publish()
    (pair.mirrors[1].root / "checkpoints/last/1/state/1").unlink()
    with pytest.raises(StorageError, match="got state/1 on the disk of no process"):
        pair.publisher.publish()
    assert Store(URL).read("checkpoints/last/1/manifest.json") is None


def test_a_follower_waits_for_its_part_of_the_same_save(pair, monkeypatch):
    write(pair.mirrors, "last/1", ("a", "b"))
    other = pair.mirrors[1].root / "checkpoints/last/1/manifest.json"
    text = other.read_bytes()
    other.write_bytes(b"that of an earlier save")
    monkeypatch.setattr(processes, "WAIT_SECONDS", 0.1)
    with pytest.raises(StorageError, match="process 1: .*got no such checkpoint within"):
        pair.publisher.publish()
    monkeypatch.setattr(processes, "WAIT_SECONDS", 60.0)
    threading.Timer(0.2, lambda: other.write_bytes(text)).start()
    pair.publisher.publish()
    assert Store(URL).read("checkpoints/last/1/state/1").value == b"b"


def test_without_the_lease_nothing_is_written(pair, monkeypatch):
    write(pair.mirrors, "last/1", ("a", "b"))
    now = [lease.clock()]
    monkeypatch.setattr(lease, "clock", lambda: now[0])
    pair.follower.check()
    now[0] += lease.LEASE_SECONDS
    monkeypatch.setattr(processes, "WAIT_SECONDS", 0.1)
    with pytest.raises(StorageError, match="got a lease that is lost or was not renewed"):
        pair.follower.check()
    monkeypatch.setattr(processes, "WAIT_SECONDS", 60.0)
    threading.Timer(0.2, pair.lease.renew).start()  # late: it is waited for
    pair.follower.check()
    assert pair.follower.seen[1] == now[0]
    pair.follower.check()
    Store(URL).write("lock", b'{"host": "another"}')
    with pytest.raises(StorageError, match="another run that has taken over"):
        pair.lease.renew()
    with pytest.raises(StorageError, match="got a lease that is lost"):
        pair.follower.check()


def test_a_part_is_fetched_and_only_what_is_missing(pair, tmp_path, monkeypatch):
    write(pair.mirrors, "last/1", ("a", "b"))
    pair.publisher.publish()
    mirror = pair.mirrors[1]
    pair.bucket.log.clear()
    mirror.fetch_part("last/1", ["state/0", "state/1"])
    assert pair.bucket.log == [("read", "checkpoints/last/1/state/0")]
    assert (mirror.root / "checkpoints/last/1/state/0").read_text() == "a"


# --- two real processes


def test_two_processes_save_and_restore_without_a_shared_disk(tmp_path, monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setattr(object_store, "open_kvstore", object_store.open_kvstore)
    monkeypatch.setattr(lease, "GRACE_SECONDS", 0.0)
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "before"))
    one_of_two_hosts.write_first(tmp_path)
    logs = [open(tmp_path / f"log-{index}", "w+") for index in (0, 1)]  # noqa: SIM115
    command = [sys.executable, one_of_two_hosts.__file__, str(tmp_path)]
    started = [
        subprocess.Popen([*command, str(index), str(port)], stdout=log, stderr=log) for index, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(300) for process in started]
    finally:
        for process, log in zip(started, logs, strict=True):
            process.kill()
            log.close()
    assert codes == [0, 0], "\n".join((tmp_path / f"log-{index}").read_text()[-3000:] for index in (0, 1))
    first, second = (json.loads((tmp_path / f"seen-{index}.json").read_text()) for index in (0, 1))
    assert first.pop("data")["processes"] == [{"position": 33}, {"position": 33}]
    for seen, chunk in ((first, "0.0"), (second, "1.0")):
        assert {Path(path).name for path in seen.pop("own")} == {chunk}  # each wrote its shard only
        assert seen.pop("fetched") == [".zarray", chunk]  # and fetched it only
        assert seen.pop("begun") == [0, *one_of_two_hosts.values(0, (4, 3))[0 if chunk == "0.0" else 2]]
        assert seen == {"kept": [2, 3], "step": 2, "position": 2, "equal": True, "damaged": ["last-3"]}
    # One host that has nothing else reads it all, with the checkpoint that was damaged.
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "third"))
    with storage.TrainingSession(one_of_two_hosts.URL) as session:
        parts = {part: checkpoint.list_steps(session.root / "checkpoints" / part) for part in ("last", "best")}
        assert sorted(parts["last"]) == [2, 4] and parts["best"] == [4]
        weights = checkpoint.read_weights(session.root / "checkpoints/best/4").params
        np.testing.assert_array_equal(weights["divided"], one_of_two_hosts.values(4, (4, 3)))
        np.testing.assert_array_equal(weights["whole"], one_of_two_hosts.values(4, (5,)))
        np.testing.assert_array_equal(weights["zeros"], np.zeros((2, 2)))
    kept = tmp_path / "bucket/runs/one/checkpoints/damaged/last-3/state/params.divided"
    assert sorted(path.name for path in kept.iterdir()) == [".zarray", "0.0", "1.0"]
    assert not (tmp_path / "bucket/runs/one/checkpoints/last/3").exists() or not any(
        path.is_file() for path in (tmp_path / "bucket/runs/one/checkpoints/last/3").rglob("*")
    )
