"""Trackers: a broken one stops nothing, a resumed run shows each row once, and nothing secret leaves the process."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import tracker_stores
import wandb_server

from jaxformer import cli, evaluation, registry
from jaxformer.config import Config, ConfigError, TrainConfig, overrides
from jaxformer.train import reporting, trackers
from jaxformer.train.lock import WorkdirLock
from jaxformer.train.timing import Clock
from jaxformer.train.trackers import Row, _delivery, _workdir, trackio
from jaxformer.train.trackers._delivery import Deliveries

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    Row(0, 1, "train", {"loss": 3.0, "padding": 0}, 1000.125),
    Row(1, 4, "train", {"loss": 2.5, "padding": 0.5}, 1001.25),
    Row(2, 3, "skipped", {"epoch": 0, "spike": 1}, 1001.5),  # known later than the step after it
    Row(3, 4, "validation", {"loss": 2.25, "bleu/de@fr": 1.5, "gone": None}, 1002.0),
    Row(4, 8, "train", {"loss": 2.0, "padding": 0.25}, 1003.75),
]
AGAIN = Row(3, 4, "validation", {"loss": 2.125, "bleu/de@fr": 1.75, "gone": None}, 2002.0)
FINAL = Row(0, 4, "final", {"test/loss": 2.5}, 2003.0)


class Fake:
    """Keeps the calls, and does what `at` says when its method is called."""

    made: list[Fake]
    at: dict

    def __init__(self):
        self.calls = []
        type(self).made.append(self)


for _method in trackers.METHODS:

    def call(self, argument, method=_method):
        self.calls.append((method, argument))
        self.at.get(method, lambda: None)()

    setattr(Fake, _method, call)


@pytest.fixture
def fakes(monkeypatch):
    """Makes a kind of fake trackers known by name, each with what its methods do."""
    known, member = {}, registry.member

    def add(name, **at):
        known[name] = type(name, (Fake,), {"made": [], "at": at})
        return known[name]

    monkeypatch.setattr(
        registry, "member", lambda package, name, constant: known.get(name) or member(package, name, constant)
    )
    return add


def given(tracker) -> list[Row]:
    """The rows that a fake tracker has got one by one, or several at once."""
    return [row for method, rows in tracker.calls if method == "scalars" for row in rows]


def config(*names) -> Config:
    return Config(train=TrainConfig(trackers=names))


def fail(kind=RuntimeError, text="no server"):
    def raising():
        raise kind(text)

    return raising


def deliver(tmp_path, names, rows, finished=True, kept=()):
    """Starts trackers as a run does, hands rows over, ends. Returns the lines logged, and the seconds it took."""
    lines, begun = [], time.monotonic()
    deliveries = Deliveries(config(*names), tmp_path, kept, lines.append)
    for row in rows:
        deliveries.add(row)
    handed_over = time.monotonic() - begun
    deliveries.close(finished)
    return lines, handed_over, time.monotonic() - begun


def test_the_hook_is_called_in_order_with_everything(fakes, tmp_path):
    good = fakes("good")
    (tmp_path / "result.json").write_text('{"step": 8, "config": "abc", "loss": 1.5, "note": "text"}')
    lines, *_ = deliver(tmp_path, ["good"], ROWS[2:], kept=ROWS[:2])
    (tracker,) = good.made
    start, settings, rewind, *_, finish = (call[1] for call in tracker.calls)
    names = [call[0] for call in tracker.calls]
    assert names == ["start", "config", "rewind", *["scalars"] * (len(names) - 4), "finish"]
    assert (start.workdir, start.name) == (tmp_path, tmp_path.name)
    assert settings["train"]["trackers"] == ["good"] and rewind == ROWS[:2] and given(tracker) == ROWS[2:]
    assert [(row.step, row.numbers()) for row in finish] == [(8, {"final/validation/loss": 1.5})]
    assert lines == []


BROKEN = {f"raises in {method}": (method, fail()) for method in trackers.METHODS}
BROKEN |= {"exits": ("scalars", fail(SystemExit, "1")), "exits at start": ("start", fail(SystemExit, "1"))}


@pytest.mark.parametrize(("method", "does"), BROKEN.values(), ids=BROKEN)
def test_one_that_raises_is_left_out_with_one_warning(method, does, fakes, tmp_path):
    broken, good = fakes("broken", **{method: does}), fakes("good")
    lines, *_ = deliver(tmp_path, ["broken", "good"], ROWS)
    assert [call[0] for call in broken.made[0].calls].count(method) == 1
    assert given(good.made[0]) == ROWS
    warning, *others = lines
    assert re.match(r"tracker broken: \w+: (no server|1); the run goes on without it$", warning)
    dropped = {"finish": 0}.get(method, 5)
    assert others == ([f"tracker broken: {dropped} rows were dropped; metrics.jsonl has them"] if dropped else [])


def test_one_that_cannot_be_made_is_left_out(fakes, tmp_path, monkeypatch):
    fakes("broken")
    monkeypatch.setattr(Fake, "__init__", lambda self: fail(ImportError, "libX.so: token hf_" + "a" * 30)())
    lines, *_ = deliver(tmp_path, ["broken"], ROWS)
    assert lines[0] == "tracker broken: ImportError: libX.so: token ***; the run goes on without it"


@pytest.mark.parametrize("method", trackers.METHODS)
def test_one_that_hangs_holds_nothing_up(method, fakes, tmp_path, monkeypatch):
    release = threading.Event()
    hanging = fakes("hanging", **{method: release.wait})
    good = fakes("good")
    monkeypatch.setattr(_delivery, "FINISH_SECONDS", 0.3)
    monkeypatch.setattr(_delivery, "MAX_QUEUED_ROWS", 20)
    rows = [ROWS[0]._replace(index=n, step=n) for n in range(15)]
    lines, handed_over, seconds = deliver(tmp_path, ["hanging", "good"], rows)
    assert handed_over < 0.2 and 0.3 <= seconds < 1.5
    assert given(good.made[0]) == rows
    assert lines[0] == "tracker hanging: did not finish in time and is left behind"
    dropped = {"finish": 0}.get(method, 15)
    assert lines[1:] == ([f"tracker hanging: {dropped} rows were dropped; metrics.jsonl has them"] if dropped else [])
    (left,) = [thread for thread in threading.enumerate() if thread.name == "tracker hanging"]
    assert left.daemon  # a script that trains ends, too
    release.set()  # it comes back, and ends
    left.join(5)
    assert not left.is_alive() and hanging.made[0].calls[-1][0] == "finish"


def test_a_hang_is_told_of_while_the_run_goes_on(fakes, tmp_path, monkeypatch):
    release, lines = threading.Event(), []
    fakes("hanging", scalars=release.wait)
    monkeypatch.setattr(_delivery, "HANG_SECONDS", 0.05)
    deliveries = Deliveries(config("hanging"), tmp_path, [], lines.append)
    for row in ROWS[:3]:
        deliveries.add(row)
        time.sleep(0.1)
    assert lines == ["tracker hanging: does not answer for 0 s; the run goes on"]
    release.set()
    deliveries.close(True)
    assert len(lines) == 1


def test_a_slow_one_gets_what_the_queue_holds(fakes, tmp_path, monkeypatch):
    monkeypatch.setattr(_delivery, "MAX_QUEUED_ROWS", 4)
    slow = fakes("slow", scalars=lambda: time.sleep(0.2))
    rows = [ROWS[0]._replace(index=n, step=n) for n in range(30)]
    lines, handed_over, _ = deliver(tmp_path, ["slow"], rows)
    assert handed_over < 0.2
    delivered = [row.step for row in given(slow.made[0])]
    assert 4 <= len(delivered) <= 12 and delivered == sorted(delivered)
    assert lines == [
        "tracker slow: is 4 rows behind; further rows are dropped, and the run goes on",
        f"tracker slow: {30 - len(delivered)} rows were dropped; metrics.jsonl has them",
    ]


def test_a_stopped_run_waits_less(fakes, tmp_path, monkeypatch):
    release = threading.Event()
    hanging = fakes("hanging", start=release.wait)
    monkeypatch.setattr(_delivery, "STOP_SECONDS", 0.1)
    (tmp_path / "result.json").write_text('{"step": 8, "loss": 1.5}')  # of an earlier, shorter run
    *_, seconds = deliver(tmp_path, ["hanging"], ROWS, finished=False)
    release.set()
    assert seconds < 1
    while hanging.made[0].calls[-1][0] != "finish":
        time.sleep(0.01)
    assert hanging.made[0].calls[-1][1] == []


def test_packages_are_imported_one_after_the_other(fakes, tmp_path, monkeypatch):
    """Two threads that parse source at once fail in Python 3.11."""
    folder, inside = tmp_path / "modules", []
    folder.mkdir()
    monkeypatch.setattr(_delivery, "_seen", inside, raising=False)
    code = "import time\nfrom jaxformer.train.trackers._delivery import _seen\n"
    for name in ("slow_one", "slow_two", "slow_three"):
        (folder / f"{name}.py").write_text(code + "_seen.append(1)\ntime.sleep(0.05)\n_seen.append(-1)\n")
        fakes(name).modules = (name,)
    monkeypatch.syspath_prepend(folder)
    assert deliver(tmp_path, ["slow_one", "slow_two", "slow_three"], ROWS)[0] == []
    assert inside == [1, -1] * 3


@pytest.mark.parametrize("hangs", [True, False])
def test_the_process_ends_though_a_package_waits_for_ever(hangs):
    code = """
import atexit, threading
from jaxformer.runtime import threads
ever = threading.Event()
thread = threading.Thread(target=ever.wait, args=({seconds},), daemon=False)
thread.start()
threads.abandon(thread)
if {hangs}:
    atexit.register(ever.wait)
else:
    thread.join()
    atexit.register(print, "handlers run")
print("printed")
threads.exit_process(7)
"""
    code = code.format(hangs=hangs, seconds=None if hangs else 0.01)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=20, capture_output=True, text=True)
    assert done.returncode == 7 and done.stdout == ("printed\n" if hangs else "printed\nhandlers run\n"), done.stderr


# --- names, absent packages, identity, secrets


def test_an_absent_package_is_refused_before_anything_is_written(tmp_path, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else find(name, *rest))
    words = ["--config=configs/quickstart.py", f"--workdir={tmp_path / 'run'}", "--config.train.trackers=wandb"]
    monkeypatch.chdir(ROOT)
    assert cli.main(["train", *words]) == 2
    assert capsys.readouterr().err == (
        "error: config.train.trackers: got 'wandb', but the package wandb is not installed, expected it; pip install "
        "'jaxformer[wandb]', or leave wandb out\n"
    )
    assert not (tmp_path / "run").exists()


REFUSED = {"wnadb": "did you mean 'wandb'", "wandb,wandb": "each tracker once", "no.module": "there is no module no"}


@pytest.mark.parametrize(("text", "words"), REFUSED.items(), ids=REFUSED)
def test_wrong_names_are_refused(text, words):
    with pytest.raises(ConfigError, match=words) as error:
        overrides.parse([f"--config={ROOT}/configs/quickstart.py", f"--config.train.trackers={text}"])
    assert "config.train.trackers" in str(error.value)


def test_what_a_tracker_cannot_do_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: types)
    monkeypatch.setenv("TRACKIO_SPACE_ID", "somebody/space")
    with pytest.raises(ConfigError, match="got 'trackio' with the variable TRACKIO_SPACE_ID, expected it unset"):
        trackers.check_available(["trackio"])
    monkeypatch.setattr(registry, "member", lambda *_: type("Half", (), {"start": print, "config": print}))
    with pytest.raises(ConfigError, match="whose TRACKER has no rewind, scalars, finish, expected a class"):
        trackers.check_available(["mine"])


def test_no_trackers_leave_nothing(tmp_path):
    assert deliver(tmp_path, [], ROWS)[0] == [] and list(tmp_path.iterdir()) == []


def test_every_tracker_has_an_extra_that_installs_what_it_imports():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for name in registry.names(trackers.__name__):
        tracker = registry.member(trackers.__name__, name, "TRACKER")
        extra = re.search(rf"^{name} = \[(.*)\]", text, re.M)
        listed = text if name == "tensorboard" else extra.group(1)
        for module in tracker.modules:
            assert f'"{module}' in listed, f"pyproject.toml: the extra {name} does not install {module}"


def test_the_identity_stays_with_the_workdir(tmp_path):
    lines = []
    first = _workdir.identify(tmp_path, lines.append)
    (tmp_path / "trackers.json").rename(tmp_path.parent / "kept.json")
    moved = tmp_path / "seed-3"
    moved.mkdir()
    (tmp_path.parent / "kept.json").rename(moved / "trackers.json")
    second = _workdir.identify(moved, lines.append)
    assert (second.id, second.name, second.workdir) == (first.id, first.name, moved) and not lines
    (moved / "trackers.json").write_text('{"id": "../x", "name": "n", "group": ""}')
    third = _workdir.identify(moved, lines.append)
    assert third.id != first.id and (third.name, third.group) == (f"{tmp_path.name}/seed-3", tmp_path.name)
    assert len(lines) == 1 and "holds no identity" in lines[0]
    assert _workdir.identify(moved, lines.append) == third
    run = tmp_path / "schedule.peak=0.001,train.seed=0-0123abcd"
    run.mkdir()
    assert _workdir.identify(run, lines.append).group == tmp_path.name


def test_no_secret_reaches_a_tracker(fakes, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "abcdef0123456789")
    good = fakes("good")
    command = ["train", "--config.x.password=hunter22", "https://me:pass-word@host/", "key abcdef0123456789"]
    (tmp_path / "environment.json").write_text(json.dumps({"command": command, "api_key": "geheim", "cpus": 2}))
    own = config("good")
    own = dataclasses.replace(own, data=dataclasses.replace(own.data, dir="/data/abcdef0123456789"))
    lines = []
    Deliveries(own, tmp_path, [], lines.append).close(True)
    text = json.dumps(good.made[0].calls[1][1])
    assert not [word for word in ("hunter22", "pass-word", "abcdef0123456789", "geheim") if word in text], text
    assert good.made[0].calls[1][1]["environment"]["cpus"] == 2 and '"dir": "/data/***"' in text


# --- the reporter and evaluate


def test_only_the_first_process_tracks(fakes, tmp_path, monkeypatch):
    good = fakes("good")
    monkeypatch.setattr(reporting.jax, "process_index", lambda: 1)
    reporter = reporting.Reporter(tmp_path, Clock(TrainConfig()), 0, True, config("good"))
    reporter.write(1, "validation", {"loss": 1.0})
    reporter.close(True)
    assert good.made == [] and list(tmp_path.iterdir()) == []


def test_a_resumed_reporter_rewinds_to_the_rows_of_the_file(fakes, tmp_path):
    good = fakes("good")
    for first_step, evaluated in ((0, True), (4, False)):
        reporter = reporting.Reporter(tmp_path, Clock(TrainConfig()), first_step, evaluated, config("good"))
        for row in ROWS[first_step:] if first_step else ROWS:
            reporter.write(row.step, row.split, {"loss": 1.0, **row.values, "gone": float("nan"), **TRAIN})
        reporter.close(False)
    kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    first, second = good.made
    assert first.calls[2][1] == [] and [row.index for row in given(first)] == [0, 1, 2, 3, 4]
    rewound, later = second.calls[2][1], given(second)
    assert [(row.index, row.split) for row in rewound] == [(0, "train"), (1, "train"), (2, "skipped")]
    assert [row.index for row in later] == [3]
    for row, written in zip([*rewound, *later], kept, strict=True):
        assert Row.from_json(row.index, written) == row


TRAIN = {"learning_rate": 0.1, "gradient_norm": 1.0, "tokens_per_second": 1.0, "spike": 0}


def test_evaluate_adds_its_measures_unless_the_run_is_training(fakes, tmp_path, caplog):
    good = fakes("good")
    values = [{"step": 4, "split": "train", "wall_time": 1.5, "loss": 2.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in values))
    (tmp_path / "eval-test.json").write_text(
        '{"split": "test", "seconds": 3.0, "loss": 2.5, "checkpoint": {"steps": [2, 4]}, "by_length": []}'
    )
    (tmp_path / "result.json").write_text('{"step": 4, "loss": 1.5}')
    evaluation._track(config("good"), tmp_path)
    (tracker,) = good.made
    assert tracker.calls[2] == ("rewind", [Row(0, 4, "train", {"loss": 2.0}, 1.5)])
    measured = [(row.step, row.numbers()) for row in tracker.calls[-1][1]]
    assert measured == [(4, {"final/validation/loss": 1.5}), (4, {"final/test/loss": 2.5})]
    with WorkdirLock(tmp_path):
        evaluation._track(config("good"), tmp_path)
    assert len(good.made) == 1 and "not tracked: workdir" in caplog.text and "training in it" in caplog.text


def test_the_tracker_of_the_guide_is_one(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "CsvTracker" in block]
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "csvtracker.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    edit = "--config.train.trackers=tensorboard,csvtracker"
    own = overrides.parse([f"--config={ROOT}/configs/quickstart.py", edit])
    trackers.check_available(own.train.trackers)
    (tmp_path / "result.json").write_text('{"step": 8, "loss": 1.5}')
    for kept, rows in (([], ROWS), (ROWS[:2], ROWS[4:])):
        lines: list[str] = []
        deliveries = Deliveries(own, tmp_path, kept, lines.append)
        for row in rows:
            deliveries.add(row)
        deliveries.close(True)
        assert lines == []
    assert (tmp_path / "values.csv").read_text().splitlines() == [
        f'step,name,"value, of {own.train.steps} steps"',
        *("1,train/loss,3.0", "1,train/padding,0.0", "4,train/loss,2.5", "4,train/padding,0.5"),
        *("8,train/loss,2.0", "8,train/padding,0.25", "8,final/validation/loss,1.5"),
    ]


# --- what the trackers hold, read back


def points(*rows: Row, clean=str) -> tracker_stores.Points:
    return sorted((row.step, clean(tag), value) for row in rows for tag, value in row.numbers().items())


def track(name, workdir, kept, rows, measures=()):
    """A start of a run, as `_delivery` calls a tracker."""
    tracker = registry.member(trackers.__name__, name, "TRACKER")()
    tracker.start(_workdir.identify(workdir, print))
    tracker.config({"train": {"steps": 8 + len(kept), "trackers": ["a", "b"]}, "environment": {"cpus": 2}})
    tracker.rewind(kept)
    tracker.scalars(rows[:1])
    tracker.scalars(rows[1:])
    tracker.finish(list(measures))
    return tracker


@pytest.fixture
def store(request, tmp_path, monkeypatch):
    """The name of a tracker whose package is here, with nothing of the user's in its way."""
    name = request.param
    for module in registry.member(trackers.__name__, name, "TRACKER").modules:
        pytest.importorskip(module, reason=f"the package {module} is not installed (pip install 'jaxformer[{name}]')")
    for variable in ("TRACKIO_DIR", "MLFLOW_TRACKING_URI", "WANDB_DIR", "WANDB_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    return name


@pytest.mark.parametrize("store", registry.names(trackers.__name__), indirect=True)
def test_each_row_is_there_once_after_a_resume(store, tmp_path):
    """A run that logged beyond its last checkpoint and was killed, resumed, stopped, resumed, finished, evaluated."""
    read, takes_all = tracker_stores.READERS[store], store in ("trackio", "wandb")
    clean = lambda name: name if takes_all else name.replace("@", "_")  # noqa: E731
    first = track(store, tmp_path, [], ROWS)
    assert read(tmp_path) == points(*ROWS, clean=clean)
    track(store, tmp_path, ROWS[:3], [AGAIN])  # at step 4, which was to be evaluated: the row of step 8 goes
    assert read(tmp_path) == points(*ROWS[:3], AGAIN, clean=clean)
    kept = [*ROWS[:3], AGAIN]
    track(store, tmp_path, kept, [ROWS[4]], [FINAL])
    final = FINAL._replace(step=-1) if store == "wandb" else FINAL  # its summary has no steps
    assert read(tmp_path) == points(*kept, ROWS[4], final, clean=clean)
    last = track(store, tmp_path, [*kept, ROWS[4]], [], [FINAL])
    assert read(tmp_path) == points(*kept, ROWS[4], final, clean=clean)
    assert last.run.id == first.run.id if store != "tensorboard" else True
    CHECKS[store](tmp_path)


def test_runs_of_one_process_write_to_trackio_folders_of_their_own(tmp_path, monkeypatch):
    """trackio keeps its folder in its module: runs that train together must not change it under each other."""
    module, calls = types.ModuleType("trackio.sqlite_storage"), []

    def write(project, run, **rest):
        folder = module.TRACKIO_DIR
        time.sleep(0.002)
        calls.append((run, folder, module.TRACKIO_DIR))

    module.TRACKIO_DIR = tmp_path
    module.SQLiteStorage = types.SimpleNamespace(
        validate_project_name=lambda name: None,
        delete_run=lambda project, run, run_id: write(project, run),
        bulk_log=lambda **given: write(**given),
    )
    monkeypatch.setitem(sys.modules, "trackio", types.ModuleType("trackio"))
    monkeypatch.setitem(sys.modules, "trackio.sqlite_storage", module)
    for variable in ("TRACKIO_DIR", "TRACKIO_PROJECT"):
        monkeypatch.delenv(variable, raising=False)
    opened = {}
    for name in ("a", "b"):
        opened[name] = trackio.Trackio()
        opened[name].start(trackers.RunInfo(name, name, "", tmp_path / name))
        opened[name].config({})

    def deliver(tracker):
        tracker.rewind([])
        for step in range(10):
            tracker.scalars([Row(step, step, "train", {"loss": 1.0}, 0.0)])

    threads = [threading.Thread(target=deliver, args=(tracker,)) for tracker in opened.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 22
    assert all(before == after == tmp_path / run / "trackio" for run, before, after in calls)


def check_tensorboard(workdir):
    texts = [path.read_bytes() for path in (workdir / "tensorboard").iterdir()]
    assert len(texts) == 1 and b'"steps": 13' in texts[0]


def check_trackio(workdir):
    from trackio import sqlite_storage

    storage = sqlite_storage.SQLiteStorage
    run = storage.get_run_records("jaxformer")[0]
    settings = storage.get_run_config("jaxformer", run["name"], run_id=run["id"])
    assert settings["train"]["steps"] == 13 and run["name"] == workdir.name
    logs = storage.get_logs("jaxformer", run["name"], run_id=run["id"])
    assert logs[0]["timestamp"].startswith("1970-01-01T00:16:40.125")


def check_mlflow(workdir):
    run, client = tracker_stores.mlflow_run(workdir)
    assert run.info.run_name == workdir.name and run.info.status == "FINISHED"
    # The second start replaced a run, the later ones went on in it.
    assert run.data.params["train.steps"] == "11" and run.data.tags["now.train.steps"] == "13"
    assert run.data.params["train.trackers"] == '["a", "b"]'
    replaced = client.get_run(run.data.tags["jaxformer.replaces"])
    assert replaced.info.lifecycle_stage == "deleted"


def check_wandb(workdir):
    records = tracker_stores.wandb_records(workdir)
    (run,) = [record.run for record in records if record.HasField("run")]
    identity = json.loads((workdir / "trackers.json").read_text())
    assert (run.run_id, run.display_name, run.project) == (identity["id"], identity["name"], "jaxformer")
    settings = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert settings["train"]["steps"] == 13 and settings["environment"] == {"cpus": 2}
    history = [record.history for record in records if record.HasField("history")]
    assert [record.step.num for record in history] == [0, 1, 2, 3, 4]
    assert not [record for record in records if record.HasField("environment")]


CHECKS = {
    "tensorboard": check_tensorboard, "trackio": check_trackio, "mlflow": check_mlflow, "wandb": check_wandb,
}  # fmt: skip


@pytest.mark.parametrize("store", ["wandb"], indirect=True)
def test_a_run_that_was_uploaded_is_not_uploaded_over(store, tmp_path):
    """`wandb sync` leaves a file beside what it has uploaded."""
    track("wandb", tmp_path, [], ROWS)
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    (folder / f"{next(folder.glob('*.wandb')).name}.synced").touch()
    track("wandb", tmp_path, ROWS[:3], [AGAIN])
    own = json.loads((tmp_path / "trackers.json").read_text())["id"]
    names = sorted(path.name.split("-", 3)[3] for path in (tmp_path / "wandb").glob("offline-run-*"))
    assert names == [own, f"{own}-2"]
    track("wandb", tmp_path, ROWS[:3], [AGAIN])  # not uploaded yet: written anew
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 2


# --- wandb online, against a stand-in for its server


class Server(types.SimpleNamespace):
    """Histories of runs by id, and `init` as the package has it."""

    def __init__(self, rewinds=True):
        super().__init__(histories={}, opened=[], rewinds=rewinds, Settings=lambda **settings: settings)

    def init(self, id, resume=None, resume_from=None, **arguments):
        self.opened.append((id, resume, resume_from))
        history = self.histories.setdefault(id, {})
        if resume_from is not None:
            name, step = resume_from.split("?_step=")
            if not self.rewinds:
                raise RuntimeError("rewind is not enabled")
            assert name == id
            self.histories[id] = history = {n: row for n, row in history.items() if n <= int(step)}
        elif resume != "allow":
            assert not history, "an id is used twice"
        begun = max(history, default=-1) + 1

        def log(row, step):
            assert step >= begun, "wandb drops rows of earlier steps"
            history[step] = row

        return types.SimpleNamespace(
            starting_step=begun, log=log, define_metric=lambda *_, **__: None, finish=lambda **_: None, summary={}
        )  # fmt: skip


@pytest.mark.parametrize("rewinds", [True, False])
def test_online_the_server_keeps_what_the_file_keeps(rewinds, tmp_path, monkeypatch):
    server = Server(rewinds)
    monkeypatch.setitem(sys.modules, "wandb", server)
    monkeypatch.setenv("WANDB_MODE", "online")
    own = _workdir.identify(tmp_path, print).id
    track("wandb", tmp_path, [], ROWS)
    track("wandb", tmp_path, ROWS[:3], [AGAIN])
    name = own if rewinds else f"{own}-2"
    assert server.opened[-1] == (name, None, f"{own}?_step=2" if rewinds else None)
    kept = [*ROWS[:3], AGAIN]
    shown = [(row["step"], row["_timestamp"]) for row in server.histories[name].values()]
    assert shown == [(row.step, row.wall_time) for row in kept]
    del server.histories[name][3]  # the process was killed before it was sent
    track("wandb", tmp_path, kept, [ROWS[4]])
    assert server.opened[-1] == (name, "allow", None) and list(server.histories[name]) == [0, 1, 2, 3, 4]
    track("wandb", tmp_path, [], ROWS[:1])  # from the start: no step is left to rewind to
    assert server.opened[-1][0] == (f"{own}-2" if rewinds else f"{own}-3")


@pytest.mark.parametrize("rewinds", [True, False])
@pytest.mark.parametrize("store", ["wandb"], indirect=True)
def test_the_package_uploads_to_a_server_on_this_machine_what_the_file_keeps(store, rewinds, tmp_path, monkeypatch):
    """The package itself, with its own process and requests, and a stand-in for its server."""
    server = wandb_server.Server(rewinds)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    wandb = sys.modules["wandb"]
    wandb.teardown()  # it reads the variables once a process
    assert wandb.setup().settings.base_url == server.url
    own = _workdir.identify(tmp_path, print).id
    try:
        track(store, tmp_path, [], ROWS)
        assert [row["_step"] for row in server.runs[own]] == [0, 1, 2, 3, 4]
        track(store, tmp_path, ROWS[:3], [AGAIN])  # killed after its checkpoint of step 4
        kept, name = [*ROWS[:3], AGAIN], own if rewinds else f"{own}-2"
        assert "RewindRun" in server.asked and set(server.runs) == {own, name}
        track(store, tmp_path, kept, [ROWS[4]])  # stopped by a signal: nothing to take back
        found = [(row["_step"], row["step"], row["_timestamp"]) for row in server.runs[name]]
        assert found == [(n, row.step, row.wall_time) for n, row in enumerate([*kept, ROWS[4]])]
        assert server.runs[name][3]["validation/loss"] == 2.125
    finally:
        wandb.teardown()
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(("key", "mode"), [("abcdef0123456789", "online"), ("", "offline")])
def test_without_a_key_wandb_is_offline(key, mode, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", Server())
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    assert track("wandb", tmp_path, [], ROWS).mode == mode
