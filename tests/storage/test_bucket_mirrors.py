"""What a run writes is in the bucket whole or not at all, in an order in which a kill at any moment loses nothing."""

from __future__ import annotations

import contextlib
import json
import shutil

import fake_bucket
import pytest

from jaxformer.checkpoint import manifest
from jaxformer.checkpoint.manifest import Damaged
from jaxformer.errors import ConfigError, StorageError
from jaxformer.runtime.lease import Lease
from jaxformer.runtime.object_store import Store
from jaxformer.storage import mirror as mirrors
from jaxformer.storage import publishing
from jaxformer.storage.mirror import INDEX, Mirror
from jaxformer.storage.publishing import Publisher

URL = "gs://bucket/runs/one"


class Killed(BaseException):
    pass


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    monkeypatch.setattr(Lease, "_renew_regularly", lambda self: None)
    return fake_bucket.install(monkeypatch, tmp_path)


def begin():
    """The publisher of a run that starts, as a session begins it."""
    mirror = Mirror(Store(URL, retry_seconds=0.01))
    lease = Lease(mirror.store, mirror.id)
    lease.acquire()
    return Publisher(mirror, mirror.fetch(owner=True), lease)


def on_another_host(monkeypatch, tmp_path, name="other"):
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / name))


def copy(monkeypatch, tmp_path, name):
    """The folder of a host that has fetched the run for the first time."""
    on_another_host(monkeypatch, tmp_path, name)
    mirror = Mirror(Store(URL, retry_seconds=0.01))
    mirror.fetch()
    return mirror.root


def life(root, publish):
    """Changes of a run to its folder, from one publication to the next. Of each step one checkpoint is kept."""
    rows = ""
    for step in (10, 20, 30):
        rows += json.dumps({"step": step}) + "\n"
        (root / "metrics.jsonl").write_text(rows)
        (root / "config.json").write_text("{}")
        fake_bucket.write_checkpoint(root, f"last/{step}", f"state {step}")
        if step == 20:
            fake_bucket.write_checkpoint(root, "best/20", "state 20")
        if step > 10:
            shutil.rmtree(root / "checkpoints" / "last" / str(step - 10))
        publish()
        if step == 20:  # replaced by one of the same step, as after an evaluation that was due
            fake_bucket.write_checkpoint(root, "last/20", "state 20 evaluated")
            publish()
    (root / "result.json").write_text("{}")
    publish()


def test_a_run_appears_on_another_host_as_it_was(bucket, monkeypatch, tmp_path):
    publisher = begin()
    (publisher.mirror.root / "parameters.txt").write_text("few")
    life(publisher.mirror.root, publisher.publish)
    root = copy(monkeypatch, tmp_path, "other")
    assert fake_bucket.contents(root) == {"best/20": "state 20", "last/30": "state 30"}
    mine = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    named = {"config.json", "metrics.jsonl", "parameters.txt", "result.json"}
    parts = ("about/metadata", "state/arrays", "manifest.json")
    assert mine == named | {f"checkpoints/{name}/{part}" for name in ("best/20", "last/30") for part in parts}
    done = len(bucket.log)
    publisher.publish()
    assert bucket.log[done:] == []  # nothing changed


def test_a_kill_before_any_write_loses_nothing(bucket, monkeypatch, tmp_path):
    """Every write and every deletion of a run's life is the last one once. The next host has what was complete."""
    monkeypatch.setattr(mirrors.lease, "LEASE_SECONDS", 0.0)
    monkeypatch.setattr(manifest.os, "fsync", lambda handle: None)
    publisher = begin()
    begun = len(bucket.log)
    life(publisher.mirror.root, publisher.publish)
    count = sum(verb in ("write", "delete") for verb, _ in bucket.log[begun:])
    assert count > 30
    seen = set()
    for last in range(count):
        bucket.reset()
        on_another_host(monkeypatch, tmp_path, f"host-{last}")
        publisher, published = begin(), []
        left = [last]

        def before(verb, key, left=left):
            left[0] -= verb in ("write", "delete")
            if left[0] < 0:
                raise Killed

        def publish(publisher=publisher, published=published):
            publisher.publish()
            published.append(max(fake_bucket.contents(publisher.mirror.root)))

        bucket.before = before
        with pytest.raises(Killed):
            life(publisher.mirror.root, publish)
        bucket.before = lambda verb, key: None
        on_another_host(monkeypatch, tmp_path, f"next-{last}")
        following = begin()
        root = following.mirror.root
        found = fake_bucket.contents(root)  # raises if one is not intact
        newest = max((name for name in found if name.startswith("last/")), default=None)
        # A folder without a checkpoint says that there was one, and the run does not begin anew.
        assert (root / "checkpoints" / "last").is_dir() == (newest is not None), last
        if published:
            assert newest is not None and newest >= published[-1], last
        if newest is not None:
            rows = [json.loads(line)["step"] for line in (root / "metrics.jsonl").read_text().splitlines()]
            assert int(newest.partition("/")[2]) in rows, f"{last}: a checkpoint before its rows"
            assert (root / "config.json").exists()
        seen.add((newest, found.get(newest)))
        # The run goes on there. Nothing is left over of what was incomplete.
        following.publish()
        keys = [key for key in following.store.list_keys() if key.startswith("checkpoints/")]
        assert {key.split("/", 3)[3] for key in keys} <= {"about/metadata", "state/arrays", "manifest.json"}, last
        assert {"/".join(key.split("/")[1:3]) for key in keys} == set(found), last
        assert fake_bucket.contents(copy(monkeypatch, tmp_path, f"last-{last}")) == found
    ends = {(None, None), ("last/10", "state 10"), ("last/20", "state 20"), ("last/20", "state 20 evaluated")}
    assert seen == {*ends, ("last/30", "state 30")}


@pytest.fixture
def published(bucket):
    """A run with two checkpoints, in the bucket."""
    publisher = begin()
    root = publisher.mirror.root
    for step in (10, 20):
        fake_bucket.write_checkpoint(root, f"last/{step}", f"state {step}")
    (root / "metrics.jsonl").write_text('{"step": 20}\n')
    (root / "config.json").write_text("{}")
    publisher.publish()
    return publisher


@pytest.mark.parametrize("listing", [lambda keys: [], lambda keys: [key for key in keys if "last/20" not in key]])
def test_an_old_listing_hides_no_checkpoint(bucket, published, monkeypatch, tmp_path, listing):
    bucket.listing = listing
    root = copy(monkeypatch, tmp_path, "other")
    assert fake_bucket.contents(root) == {"last/10": "state 10", "last/20": "state 20"}
    assert (root / "metrics.jsonl").exists()


def test_what_a_listing_and_the_index_still_name_is_not_there(bucket, published, monkeypatch, tmp_path):
    before = published.store.list_keys()
    shutil.rmtree(published.mirror.root / "checkpoints" / "last" / "10")
    with contextlib.suppress(Killed):  # the index is not renewed
        bucket.before = lambda verb, key: _kill() if key == INDEX and verb == "write" else None
        published.publish()
    bucket.before = lambda verb, key: None
    for key in before:
        if "last/10" in key or key == "metrics.jsonl":
            published.store.delete(key)
    bucket.listing = lambda keys: before
    root = copy(monkeypatch, tmp_path, "other")
    assert fake_bucket.contents(root) == {"last/20": "state 20"} and not (root / "metrics.jsonl").exists()


def _kill():
    raise Killed


def test_a_run_that_lost_its_checkpoints_does_not_begin_anew(bucket, published, monkeypatch, tmp_path):
    for key in published.store.list_keys():
        if key.startswith("checkpoints/"):
            published.store.delete(key)
    root = copy(monkeypatch, tmp_path, "other")
    assert list((root / "checkpoints" / "last").iterdir()) == []  # which `Checkpoints.restore` refuses


@pytest.mark.parametrize("index", [b"torn", b"[]", b'{"checkpoints": 5, "files": []}'])
def test_without_a_readable_index_the_listing_serves(bucket, published, monkeypatch, tmp_path, caplog, index):
    published.store.write(INDEX, index)
    assert len(fake_bucket.contents(copy(monkeypatch, tmp_path, "other"))) == 2
    assert "published.json cannot be read; the listing is used" in caplog.text


ARRAYS = "checkpoints/last/20/state/arrays"


def test_a_torn_download_is_made_again(bucket, published, monkeypatch, tmp_path):
    published.store.write(ARRAYS, b"sta")

    def mend(verb, key):
        if bucket.log.count(("read", ARRAYS)) == 2:
            published.store._kvstore.store.write(ARRAYS, b"state 20").result()

    bucket.before = mend
    assert fake_bucket.contents(copy(monkeypatch, tmp_path, "other"))["last/20"] == "state 20"


@pytest.mark.parametrize("damage", [b"state 21", b"", None, "manifest"], ids=["flip", "empty", "missing", "manifest"])
def test_a_damaged_checkpoint_is_seen_and_moved_in_the_bucket(bucket, published, monkeypatch, tmp_path, damage):
    if damage is None:
        published.store.delete(ARRAYS)
    else:
        key = ARRAYS if damage != "manifest" else "checkpoints/last/20/manifest.json"
        published.store.write(key, b"{}" if damage == "manifest" else damage)
    published.lease.release()
    on_another_host(monkeypatch, tmp_path)
    bucket.log.clear()
    publisher = begin()
    root = publisher.mirror.root
    with pytest.raises(Damaged):
        fake_bucket.contents(root)
    assert bucket.log.count(("read", ARRAYS)) == {None: 1, "manifest": 3}.get(damage, mirrors.DOWNLOADS)
    # As `Checkpoints.restore` does:
    (root / "checkpoints" / "damaged").mkdir()
    (root / "checkpoints" / "last" / "20").rename(root / "checkpoints" / "damaged" / "last-20")
    publisher.publish()
    keys = publisher.store.list_keys()
    assert "checkpoints/damaged/last-20/manifest.json" in keys
    assert ("checkpoints/damaged/last-20/state/arrays" in keys) == (damage is not None)
    publisher.lease.release()
    begin()
    assert not [key for key in publisher.store.list_keys() if key.startswith("checkpoints/last/20/")]
    root = copy(monkeypatch, tmp_path, "third")
    assert fake_bucket.contents(root) == {"last/10": "state 10"}
    assert not (root / "checkpoints" / "damaged").exists()  # kept in the bucket, needed nowhere


def test_what_is_here_already_is_not_fetched_unless_it_is_damaged(bucket, published):
    mirror = published.mirror
    bucket.log.clear()
    mirror.fetch()
    assert ("read", ARRAYS) not in bucket.log
    (mirror.root / ARRAYS).write_text("state 2x")
    mirror.fetch(select=lambda root: ([], 0))
    assert ("read", ARRAYS) not in bucket.log
    mirror.fetch()
    assert bucket.log.count(("read", ARRAYS)) == 1 and fake_bucket.contents(mirror.root)["last/20"] == "state 20"


def test_the_bucket_counts_and_not_what_was_left_here(bucket, published):
    root = published.mirror.root
    fake_bucket.write_checkpoint(root, "last/30", "never published")
    fake_bucket.write_checkpoint(root, "saving/replaced/last/5", "never published")
    (root / "result.json").write_text("{}")
    (root / "metrics.jsonl").write_text("edited")
    published.mirror.fetch(alone=False)
    assert (root / "result.json").exists()  # another process may be about to publish it
    published.mirror.fetch()
    assert not (root / "result.json").exists() and (root / "metrics.jsonl").read_text() == '{"step": 20}\n'
    assert set(fake_bucket.contents(root)) == {"last/10", "last/20"}
    assert not (root / "checkpoints" / "saving").exists()


def test_a_run_killed_before_its_first_publication_begins_anew_on_the_same_host(bucket):
    root = begin().mirror.root
    for name in ("last/10", "best/10"):
        fake_bucket.write_checkpoint(root, name, "never published")
    assert begin().mirror.root == root
    assert not (root / "checkpoints" / "last").exists()  # a folder without one is refused by `Checkpoints.restore`


def test_a_checkpoint_of_format_1_is_refused_and_not_deleted(bucket, published):
    published.store.write("checkpoints/last/5/about/metadata", b'{"format": 1}')
    with pytest.raises(ConfigError, match="checkpoints/last/5: got a checkpoint of format 1, without checksums"):
        published.mirror.fetch(owner=True)
    assert "checkpoints/last/5/about/metadata" in published.store.list_keys()


def test_names_that_leave_the_folder_are_not_fetched(bucket, published, monkeypatch, tmp_path):
    for key in ("../evil", "samples/../../evil", "/evil", "checkpoints/last/20/../../../../evil"):
        published.store.write(key, b"evil")
    copy(monkeypatch, tmp_path, "other")
    assert not list(tmp_path.rglob("*evil*"))


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_published_all_the_same(bucket, published):
    root = published.mirror.root
    fake_bucket.write_checkpoint(root, "last/30", "state 30")
    gone = root / "checkpoints" / "last" / "30"
    bucket.before = lambda verb, key: shutil.rmtree(gone, ignore_errors=True) if "last/30" in key else None
    published.publish()
    assert published.store.read("checkpoints/last/30/manifest.json") is not None
    published.publish()
    assert not [key for key in published.store.list_keys() if "last/30" in key]
    assert not published.snapshots.exists()


def test_a_checkpoint_that_the_disk_damaged_is_not_published(bucket, published):
    root = published.mirror.root
    fake_bucket.write_checkpoint(root, "last/30", "state 30")
    (root / "checkpoints/last/30/state/arrays").write_text("state 3x")
    with pytest.raises(StorageError, match="arrays: got other bytes than were written.*check the disk of the cache"):
        published.publish()
    assert published.store.read("checkpoints/last/30/manifest.json") is None


def test_a_run_that_lost_its_lease_writes_nothing(bucket, published):
    root = published.mirror.root
    other = Lease(published.store, published.mirror.id)
    other.acquire()
    fake_bucket.write_checkpoint(root, "last/30", "state 30")
    published.lease.renewed -= mirrors.lease.LEASE_SECONDS  # as after a long sleep
    bucket.log.clear()
    with pytest.raises(StorageError, match="taken over its lock"):
        published.publish()
    assert not [entry for entry in bucket.log if entry[0] != "read" and entry[1] != "lock"]


def test_a_run_that_does_not_know_yet_is_stopped_at_the_index(bucket, published):
    following = begin()
    (following.mirror.root / "metrics.jsonl").write_text("more")
    following.publish()
    (published.mirror.root / "result.json").write_text("{}")
    with pytest.raises(StorageError, match="taken over its lock"):
        published.publish()


def test_an_index_whose_answer_was_lost_is_ones_own(bucket, published):
    lost = [ValueError("ABORTED: Empty reply")]
    bucket.after = lambda verb, key: lost.pop() if lost and (verb, key) == ("write", INDEX) else None
    (published.mirror.root / "result.json").write_text("{}")
    published.publish()
    (published.mirror.root / "more.json").write_text("{}")
    published.publish()
    assert "more.json" in json.loads(published.store.read(INDEX).value)["files"]


def test_files_being_written_and_locks_stay_here(bucket, published):
    root = published.mirror.root
    for name in (".result.json-1-ab.tmp", "lock", ".lock-17", "samples/step-1.json"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("x")
    (root / "checkpoints" / "saving").mkdir()
    (root / "checkpoints" / "saving" / "part").write_text("x")
    bucket.log.clear()
    published.publish()
    assert [key for verb, key in bucket.log if verb == "write"] == ["samples/step-1.json", INDEX]


def test_a_trackers_file_that_vanished_here_vanishes_there_and_no_other(bucket, published):
    root = published.mirror.root
    (root / "tensorboard").mkdir()
    (root / "tensorboard" / "events").write_text("x")
    published.publish()
    assert "tensorboard/events" in published.store.list_keys()
    (root / "tensorboard" / "events").unlink()
    (root / "config.json").unlink()
    published.publish()
    keys = published.store.list_keys()
    assert "tensorboard/events" not in keys and "config.json" in keys


def test_a_cache_that_somebody_deleted_deletes_nothing_in_the_bucket(bucket, published, monkeypatch):
    monkeypatch.setattr(publishing, "LOOK_SECONDS", 0.0)
    keys = published.store.list_keys()
    shutil.rmtree(published.mirror.folder)
    with pytest.raises(StorageError, match="got no checkpoints any more.*the bucket has them"):
        published.publish()
    assert published.store.list_keys() == keys
