"""Runs in a bucket from the outside: training and resuming, commands that read, and what is refused."""

from __future__ import annotations

import json
import time
from pathlib import Path

import builders
import chex
import fake_bucket
import jax
import pytest

import jaxformer
from jaxformer import checkpoint, cli, storage
from jaxformer.checkpoint import manifest
from jaxformer.cli import import_checkpoint
from jaxformer.config import StackConfig, overrides
from jaxformer.errors import ConfigError, StorageError
from jaxformer.runtime import object_store
from jaxformer.runtime.lease import Lease
from jaxformer.storage import mirror as mirrors
from jaxformer.storage import sessions
from jaxformer.train import loop

URL = "s3://bucket/runs/one"
STACK = dict(layers=1, width=8, attention=dict(heads=1, bias=False), ffn=dict(width=8, bias=False),
             norm=dict(kind="rms"), unroll=1)  # fmt: skip


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    monkeypatch.setattr(Lease, "_renew_regularly", lambda self: None)
    return fake_bucket.install(monkeypatch, tmp_path)


def recipe(folder=Path("data")):
    config = overrides.defaults()
    config.data.source, config.data.dir, config.data.packing = "text", str(folder), "concat"
    config.data.splits = {"train": ("train.txt",), "validation": ("train.txt",)}
    config.data.tokenizer.kind, config.task.name = "byte", "language_modelling"
    config.data.batch, config.data.length = 4, 8
    config.model.decoder = overrides.section(StackConfig, **STACK)
    config.train.steps, config.train.log_every, config.train.checkpoint_every = 4, 1, 2
    config.train.evaluate_every = 4
    return overrides.freeze(config)


def rows(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [(row["step"], row["split"], row["loss"]) for row in map(json.loads, lines)]


def test_a_run_that_moves_to_another_host_is_the_uninterrupted_run(
    bucket, monkeypatch, tmp_path, shared_programs, capsys
):
    builders.one_device(monkeypatch)
    builders.drawn_parameters(monkeypatch)
    (tmp_path / "train.txt").write_text("a few words of text\n" * 8)
    config = recipe(tmp_path)
    assert loop.train(config, tmp_path / "whole") == 0
    builders.interrupted(monkeypatch, 3)
    assert loop.train(config, URL) == loop.EXIT_PREEMPTED
    first = object_store.Store(URL)
    keys = first.list_keys()
    assert "checkpoints/last/3/manifest.json" in keys and "result.json" not in keys
    assert first.read("lock").value == b""  # released: the next host does not wait
    # Rows beyond the checkpoint, as a killed process leaves them.
    first.write("metrics.jsonl", first.read("metrics.jsonl").value + b'{"step": 4, "split": "train", "loss": 0}\n{"st')
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "other"))
    array = max((key for key in keys if "last/3/state/" in key), key=lambda key: len(first.read(key).value))
    first.write(array, first.read(array).value[:-1] + b"x")
    assert loop.train(config, URL + "/") == 0
    assert "resumed at step 2" in capsys.readouterr().err
    kept = [key for key in first.list_keys() if key.startswith("checkpoints/damaged/last-3/")]
    assert len(kept) == sum("last/3/" in key for key in keys)
    mine = storage.fetched(URL)
    assert tmp_path / "other" in mine.parents and mine.name == "one"
    assert rows(mine) == rows(tmp_path / "whole")
    one, two = checkpoint.load_run(mine), checkpoint.load_run(tmp_path / "whole")
    chex.assert_trees_all_equal(jax.device_get(one.params), jax.device_get(two.params))
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "third"))
    loaded = jaxformer.load(URL + "/checkpoints/last")
    chex.assert_trees_all_equal(jax.device_get(loaded.params), jax.device_get(two.params))
    assert loaded.weights.kind == "last"


# --- the session of a training run


def session():
    opened = storage.TrainingSession(URL)
    opened.__enter__()
    return opened


def test_one_run_a_workdir_on_this_host_too(bucket):
    with storage.TrainingSession(URL) as first:
        with pytest.raises(ConfigError, match=f"workdir {URL}: got a run that is training in it on this host"):
            session()
        assert first.publisher is not None and not first.publisher.lease.lost
    with storage.TrainingSession(URL):
        pass


def test_leaving_publishes_and_an_error_of_the_run_stays_the_error(bucket):
    with pytest.raises(ZeroDivisionError), storage.TrainingSession(URL) as opened:  # noqa: PT012
        (opened.root / "metrics.jsonl").write_text("x")
        raise ZeroDivisionError
    store = object_store.Store(URL)
    assert store.read("metrics.jsonl").value == b"x" and store.read("lock").value == b""


def test_a_storage_that_stays_away_stops_the_run_with_one_line(bucket, monkeypatch):
    monkeypatch.setattr("jaxformer.runtime.lease.RELEASE_SECONDS", 0.01)
    monkeypatch.setattr("jaxformer.storage.publishing.SCAN_SECONDS", 0.01)
    monkeypatch.setattr(sessions, "Store", lambda url: object_store.Store(url, retry_seconds=0.01))
    words = "expected the storage to answer"
    with pytest.raises(StorageError, match=words), storage.TrainingSession(URL) as opened:  # noqa: PT012
        (opened.root / "metrics.jsonl").write_text("x")
        opened.flush()
        opened.check()
        bucket.before = lambda verb, key: ValueError("ABORTED: Service Unavailable")
        fake_bucket.write_checkpoint(opened.root, "last/2", "state")
        for _ in range(6000):  # as the loop of steps does
            opened.check()
            time.sleep(0.01)


def test_a_checkpoint_is_published_while_the_run_goes_on(bucket, monkeypatch):
    monkeypatch.setattr("jaxformer.storage.publishing.SCAN_SECONDS", 0.01)
    with storage.TrainingSession(URL) as opened:
        fake_bucket.write_checkpoint(opened.root, "last/2", "state")
        for _ in range(6000):
            opened.check()
            if ("write", "published.json") in bucket.log:
                break
            time.sleep(0.01)
        assert ("write", "checkpoints/last/2/manifest.json") in bucket.log


def test_a_process_that_is_not_the_first_reads_its_folder(bucket, monkeypatch):
    with storage.TrainingSession(URL) as first:
        word = (first.root.parent / sessions.SESSION).read_text()
        monkeypatch.setattr(sessions.jax, "process_index", lambda: 1)
        # What all say: their problems, the word, that it is written, what they see of it, their problems.
        said = iter([["", ""], ["", ""], [word] * 2, ["", ""], [word] * 2, ["", ""], ["", ""]])
        monkeypatch.setattr(sessions, "allgather_text", lambda text: next(said))
        with storage.TrainingSession(URL) as second:
            assert second.root == first.root and second.publisher is None and second.disks is None
            second.check()
            second.flush()
        assert next(said, None) is None
        monkeypatch.setattr(sessions.jax, "process_index", lambda: 0)


def test_a_problem_of_one_process_ends_all(bucket, monkeypatch):
    said = iter([["", ""], ["", ""], ["word"] * 2, ["", ""], ["word"] * 2, ["", "StorageError"], ["", "no answer"]])
    monkeypatch.setattr(sessions, "allgather_text", lambda text: next(said))
    with pytest.raises(StorageError, match="no answer"):
        session()
    assert object_store.Store(URL).read("lock").value == b""


# --- commands


@pytest.fixture
def published(bucket):
    with storage.TrainingSession(URL) as opened:
        fake_bucket.write_checkpoint(opened.root, "last/2", "state")
        (opened.root / "config.json").write_text(overrides.to_json(recipe()))
    return bucket


def test_files_that_a_command_writes_are_published(published, capsys):
    with storage.opened(URL) as root:
        (root / "eval-test.json").write_text("{}")
    assert object_store.Store(URL).read("eval-test.json").value == b"{}"
    assert capsys.readouterr().err == f"published {URL}/eval-test.json\n"
    with storage.opened(URL + "/checkpoints/last/2") as root:
        assert (root / "manifest.json").exists()
    assert capsys.readouterr().err == ""


@pytest.fixture
def many(bucket):
    """A run with three checkpoints; the best is that of step 2, then 4, then 3."""
    with storage.TrainingSession(URL) as opened:
        for name, loss in (("last/4", 2.0), ("best/2", 1.0), ("best/4", 2.0), ("best/3", 3.0)):
            fake_bucket.write_checkpoint(opened.root, name, name)
            about = {"format": 2, "values": {"loss": loss}}
            (opened.root / "checkpoints" / name / "about" / "metadata").write_text(json.dumps(about))
            manifest.write(opened.root / "checkpoints" / name)
        (opened.root / "config.json").write_text(overrides.to_json(recipe()))
    return bucket


def arrays_read(bucket):
    return sorted({key.split("/state/")[0] for verb, key in bucket.log if verb == "read" and key.endswith("arrays")})


@pytest.mark.parametrize(
    ("path", "which", "expected"),
    [
        ("", "", ["checkpoints/best/2"]),
        ("", "last", ["checkpoints/last/4"]),
        ("", "3", ["checkpoints/best/3"]),
        ("/checkpoints/best", "", ["checkpoints/best/2"]),
        ("/checkpoints/last/4", "", ["checkpoints/last/4"]),
        ("", storage.NONE, []),
        ("", None, ["checkpoints/best/2", "checkpoints/best/3", "checkpoints/best/4", "checkpoints/last/4"]),
    ],
)
def test_the_checkpoints_that_are_needed_are_fetched(many, monkeypatch, tmp_path, path, which, expected):
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "other"))
    many.log.clear()
    with storage.opened(URL + path, which=which) as copy:
        assert copy.is_dir()
    assert arrays_read(many) == expected
    with storage.opened(URL) as root:
        assert len(fake_bucket.contents(root)) == 4


def test_of_damaged_checkpoints_the_next_is_fetched_as_well(many, monkeypatch, tmp_path):
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "other"))
    object_store.Store(URL).delete("checkpoints/best/2/state/arrays")
    many.log.clear()
    root = storage.fetched(URL)
    assert arrays_read(many) == ["checkpoints/best/2", "checkpoints/best/4"]
    assert (root / "checkpoints/best/4/state/arrays").read_text() == "best/4"
    with pytest.raises(ConfigError, match="--checkpoint: got '7', expected best, last or a step"):
        storage.fetched(URL, which="7")


def test_a_command_that_fails_publishes_nothing(published):
    with pytest.raises(ZeroDivisionError), storage.opened(URL) as root:  # noqa: PT012
        (root / "eval-test.json").write_text("{}")
        raise ZeroDivisionError
    assert object_store.Store(URL).read("eval-test.json") is None


def test_the_folder_of_a_run_that_trains_here_is_read_as_it_is(published, capsys):
    with storage.TrainingSession(URL) as running:
        (running.root / "metrics.jsonl").write_text("not yet published")
        with storage.opened(URL) as root:
            assert root == running.root and (root / "metrics.jsonl").read_text() == "not yet published"
    assert "a run trains in it on this host; its folder is read" in capsys.readouterr().err


def test_commands_get_a_copy(published, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr("jaxformer.report.inspection.describe", lambda workdir: seen.append(workdir) or "described")
    assert cli.main(["inspect", f"--workdir={URL}"]) == 0
    assert Path(seen[0]).is_dir() and Path(seen[0], "config.json").exists()
    assert cli.main(["inspect", "--workdir=s3://bucket/runs/none"]) == 2
    line = capsys.readouterr().err
    assert "--workdir: got 's3://bucket/runs/none', where no run is" in line and line.count("\n") == 1


REFUSED = [
    (["experiment", "score_scaling"], "jaxformer experiment does not use buckets"),
    (["train", "--config=configs/quickstart.py", "--seeds=2"], "with --seeds, expected a folder"),
    (["report", "--serve"], "a copy does not follow the run"),
    (["report", "--workdir=tests"], "expected --output=FILE.html"),
]


@pytest.mark.parametrize(("words", "expected"), REFUSED, ids=lambda part: part[0] if isinstance(part, list) else "")
def test_what_needs_a_folder_says_so(bucket, words, expected, capsys):
    assert cli.main([*words, f"--workdir={URL}"]) == 2
    assert expected in capsys.readouterr().err
    assert bucket.log == []


def test_an_import_writes_to_a_bucket(bucket, monkeypatch):
    def write(arguments, workdir):
        assert list(workdir.iterdir()) == []
        fake_bucket.write_checkpoint(workdir, "last/0", "imported")
        (workdir / "config.json").write_text("{}")
        return 0

    monkeypatch.setattr(import_checkpoint, "_import", write)
    assert cli.main(["import", "--source=tests", f"--workdir={URL}"]) == 0
    keys = object_store.Store(URL).list_keys()
    assert "checkpoints/last/0/manifest.json" in keys and "config.json" in keys


def test_addresses_in_other_places_are_refused(bucket, tmp_path, capsys):
    assert cli.main(["export", f"--workdir={URL}", "--target=gs://bucket/out"]) == 2
    assert "--target: got 'gs://bucket/out', expected a folder" in capsys.readouterr().err
    assert cli.main(["data", "build", "--config=configs/quickstart.py", "--target=hdfs://bucket/out"]) == 2
    assert "begins with gs:// or s3://" in capsys.readouterr().err
    assert cli.main(["inspect", "--workdir=hdfs://bucket/run"]) == 2
    assert "begins with gs:// or s3://" in capsys.readouterr().err


def test_the_index_names_what_is_there(published):
    index = json.loads(object_store.Store(URL).read(mirrors.INDEX).value)
    assert index == {"format": 1, "checkpoints": ["last/2"], "files": ["config.json"]}
