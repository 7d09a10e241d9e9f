"""Sweeps in a bucket: submissions, claims of several machines, reports. `train` is replaced by what it publishes."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from jaxformer import cli
from jaxformer.config import ConfigError, overrides
from jaxformer.runtime import lease
from jaxformer.runtime.lease import Lease
from jaxformer.runtime.object_store import ABSENT, Store
from jaxformer.sweep import bucket as buckets
from jaxformer.sweep import planning, submission, watching
from jaxformer.sweep.executors import local

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "storage"))
import fake_bucket

URL = "gs://bucket/sweeps/rates"
RECIPE = """
from jaxformer.config import StackConfig, overrides

def get_config():
    config = overrides.defaults()
    config.task.name = "language_modelling"
    config.model.decoder = overrides.section(StackConfig, width=32)
    return config
"""
SEARCH = 'from jaxformer.sweep import search, uniform\nSWEEP = search(2, 0, {"schedule.peak": uniform(0.1, 1.0)})'


class Process:
    """An ended process of `jaxformer train`."""

    def __init__(self, code: int) -> None:
        self.returncode = code

    def poll(self):
        return self.returncode


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    monkeypatch.setattr(buckets, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(local, "POLL_SECONDS", 0.001)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.py").write_text(RECIPE)
    (tmp_path / "rates.py").write_text('SWEEP = [{"schedule.peak": peak} for peak in (0.3, 0.1, 0.2)]')
    return fake_bucket.install(monkeypatch, tmp_path)


@pytest.fixture
def started(bucket, monkeypatch):
    """Names of the runs that were started, of which each publishes its result."""
    names = []

    def start(run, worker):
        names.append(run.workdir.name)
        address = run.command[-1].removeprefix("--workdir=")
        assert address == f"{URL}/{run.workdir.name}"
        run.workdir.mkdir(parents=True, exist_ok=True)
        with open(run.workdir / "log.txt", "a") as log:
            log.write(f"attempt {len(names)}\n")
        finish(run)
        return Process(0)

    monkeypatch.setattr(local, "start", start)
    return names


def finish(run):
    store = Store(f"{URL}/{run.workdir.name}")
    store.write("config.json", overrides.to_json(run.config).encode())
    result = {"step": run.config.train.steps, "loss": run.edits["schedule.peak"]}
    store.write("result.json", json.dumps(result).encode())


def sweep(*flags, file="rates.py"):
    return cli.main(["sweep", "--config=toy.py", f"--sweep={file}", f"--workdir={URL}", *flags])


def plan():
    remote = buckets.BucketSweep(URL)
    return remote, planning.make_plan("rates.py", ["--config=toy.py"], remote.folder)


def test_a_sweep_runs_and_is_ranked_in_the_bucket(started, monkeypatch, tmp_path, capsys):
    assert sweep() == 0
    keys = Store(URL).list_keys()
    assert len(started) == 3 and {"ranking.json", "ranking.md", "best.py", "submissions/0001.zip"} <= set(keys)
    claims = [key for key in keys if key.startswith("claims/")]
    assert len(claims) == 3 and not any(Store(URL).read(key).value for key in claims)  # all released
    assert sum(key.startswith(f"logs/{started[0]}/") for key in keys) == 1
    ranked = json.loads(Store(URL).read("ranking.json").value)
    assert [row["mean"] for row in ranked["rows"]] == [0.1, 0.2, 0.3] and ranked["missing"] == []
    # Another machine finds all done, and the same ranking.
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "other"))
    capsys.readouterr()
    assert sweep() == 0 and len(started) == 3
    assert "3 finished, 0 to go" in capsys.readouterr().out
    assert sweep("--report") == 0 and sweep("--watch") == 0
    assert "3 of 3 done" in capsys.readouterr().out


def test_a_page_compares_the_runs_of_a_sweep_in_the_bucket(started, monkeypatch, tmp_path, capsys):
    assert sweep() == 0
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "other"))
    Store(URL).write("../config.json", b"{}")  # no run
    assert cli.main(["report", f"--workdir={URL}/"]) == 0
    page = Store(URL).read("comparison.html").value.decode()
    assert all(run in page for run in started) and "published gs://bucket/sweeps/rates/" in capsys.readouterr().err
    arguments = Namespace(workdir=["mine", URL], serve=False, output="mine.html")
    with cli.buckets.local_copies(cli.COMMANDS["report"], arguments):
        assert [Path(path).name for path in arguments.workdir] == ["mine", *sorted(started)]
        assert arguments.output == "mine.html"
    assert cli.main(["report", f"--workdir={URL}/claims"]) == 2
    assert "claims', where no run is" in capsys.readouterr().err
    assert cli.main(["report", f"--workdir={URL}", "--workdir=gs://bucket/other"]) == 2
    assert "without --output" in capsys.readouterr().err


def test_a_run_that_another_machine_claims_is_left_to_it(bucket, started):
    remote, planned = plan()
    name = planned.runs[1].workdir.name
    other = Lease(remote.store, "another machine", key=f"claims/{name}")
    assert other.take(ABSENT)
    with buckets.claiming(remote) as claims:
        queue, finished = list(planned.runs), []
        taken = [claims.take(queue, finished) for _ in range(4)]
        assert taken == [planned.runs[0], planned.runs[2], None, None] and queue == [planned.runs[1]]
        finish(planned.runs[1])
        assert claims.take(queue, finished) is None
        assert finished == [planned.runs[1]] and queue == []
    assert remote.store.read(f"claims/{planned.runs[0].workdir.name}").value == b""


@pytest.mark.parametrize("renews", [False, True])
def test_a_claim_is_taken_over_when_it_was_not_renewed(bucket, monkeypatch, renews):
    now = [0.0]
    monkeypatch.setattr(lease, "clock", lambda: now[0])
    remote, planned = plan()
    other = Lease(remote.store, "another machine", key=f"claims/{planned.runs[0].workdir.name}")
    assert other.take(ABSENT)
    with buckets.claiming(remote) as claims:
        queue = [planned.runs[0]]
        assert claims.take(queue, []) is None
        now[0] += lease.LEASE_SECONDS + 1
        if renews:
            other.renew()
        run = claims.take(queue, [])
        assert (run is None) == renews and len(queue) == int(renews)


def test_a_claim_of_a_dead_process_of_this_folder_is_taken_at_once(bucket):
    remote, planned = plan()
    dead = buckets.Claims(remote)
    assert dead.take([planned.runs[0]], []) is not None
    assert buckets.Claims(remote).take([planned.runs[0]], []) is not None


def test_of_two_machines_that_submit_at_the_same_time_one_wins(bucket, started, monkeypatch, tmp_path, capsys):
    remote, _ = plan()
    original = submission.freeze

    def freeze(*arguments):
        frozen = original(*arguments)
        remote.store.write("submissions/0001.zip", b"that of the other machine", ABSENT)
        return frozen

    monkeypatch.setattr(submission, "freeze", freeze)
    assert sweep() == 2
    assert "another machine wrote at the same time" in capsys.readouterr().err
    assert started == [] and submission.read_newest(remote.folder) is None


def test_another_machine_trains_what_was_submitted(started, monkeypatch, tmp_path, capsys):
    assert sweep() == 0
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "other"))
    (tmp_path / "toy.py").write_text(RECIPE.replace("width=32", "width=64"))
    assert sweep() == 2
    line = capsys.readouterr().err
    assert f"workdir {URL}: got a sweep that differs from {URL}/submissions/0001" in line and len(started) == 3
    assert "model.decoder.width" in line
    (tmp_path / "rates.py").write_text('SWEEP = [{"schedule.peak": peak} for peak in (0.3, 0.1, 0.2, 0.4)]')
    (tmp_path / "toy.py").write_text(RECIPE)
    assert sweep() == 0 and len(started) == 4
    remote, _ = plan()
    remote.fetch_submissions()
    newest = submission.read_newest(remote.folder)
    assert newest.folder.name == "0002" and len(newest.configs) == 4
    # A bucket that was emptied empties the folder.
    Store(URL).delete("submissions/0002.zip")
    remote.fetch_submissions()
    assert submission.read_newest(remote.folder).folder.name == "0001"


def test_a_result_of_another_machine_is_seen_and_a_deleted_one_forgotten(bucket):
    remote, planned = plan()
    run = planned.runs[0]
    store = Store(f"{URL}/{run.workdir.name}")
    store.write("metrics.jsonl", b'{"step": 3, "split": "train", "loss": 2.0}\n')
    store.write("lock", b'{"host": "other"}')
    remote.update(planned.runs)
    assert watching.read_status(run, "loss").state == "running" and watching.read_status(run, "loss").step == 3
    bucket.log.clear()
    store.write("lock", b"")
    remote.update(planned.runs)
    assert watching.read_status(run, "loss").state == "stopped"
    finish(run)
    remote.update(planned.runs)
    assert run.is_finished
    store.delete("result.json")
    buckets.BucketSweep(URL).update(planned.runs)  # of a new process: this one has seen the result
    assert not run.is_finished


def test_a_run_that_fails_is_said_and_tried_once_here(bucket, started, monkeypatch, capsys):
    def start(run, worker):
        run.workdir.mkdir(parents=True, exist_ok=True)
        (run.workdir / "log.txt").write_text("error: an unlucky number\n")
        started.append(run.workdir.name)
        return Process(2)

    monkeypatch.setattr(local, "start", start)
    assert sweep() == 1 and len(started) == 3
    assert "an unlucky number" in capsys.readouterr().out
    logs = [key for key in Store(URL).list_keys() if key.startswith("logs/")]
    assert {Store(URL).read(key).value for key in logs} == {b"error: an unlucky number\n"}


@pytest.mark.parametrize(
    ("flags", "file", "expected"),
    [
        ((), "search.py", "Optuna's journal needs a local or shared disk"),
        (("--executor=slurm",), "rates.py", "--executor: got slurm with --workdir=gs://"),
        (("--executor=together",), "rates.py", "give the same command on each machine"),
    ],
)
def test_what_needs_a_folder_is_refused(bucket, tmp_path, capsys, flags, file, expected):
    (tmp_path / "search.py").write_text(SEARCH)
    assert sweep(*flags, file=file) == 2
    line = capsys.readouterr().err
    assert expected in line and line.count("\n") == 1
    assert bucket.log == []


@pytest.mark.parametrize("content", [b"torn", b""])
def test_a_damaged_submission_is_refused(bucket, content, capsys):
    Store(URL).write("submissions/0001.zip", content)
    assert sweep() == 2
    assert "got" in capsys.readouterr().err


def test_a_submission_cannot_name_files_elsewhere(bucket, tmp_path):
    import io
    import zipfile

    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("../evil", "x")
    with pytest.raises(ConfigError, match="files in folders"):
        buckets._unpack(content.getvalue(), tmp_path / "to", "here")
    assert not (tmp_path / "evil").exists()
