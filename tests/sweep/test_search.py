"""Adaptive searches: settings, the stream of trials after kills, pruning, refusals, and the ranking.

Runs are simulated in this process: each poll of a run's process is one validation.
"""

import dataclasses
import fcntl
import json
import os
import re
import signal
import socket
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from jaxformer import cli, sweep
from jaxformer.config import overrides
from jaxformer.runtime import code_version
from jaxformer.runtime.code_version import CodeVersion
from jaxformer.sweep import planning, searching, study
from jaxformer.sweep.executors import local
from jaxformer.train import results

RECIPE = """
from jaxformer.config import overrides
from jaxformer.config import StackConfig
from jaxformer.config.overrides import section

def get_config():
    config = overrides.defaults()
    config.task.name = "language_modelling"
    config.model.decoder = section(StackConfig, width=32)
    config.train.steps, config.train.evaluate_every = 80, 20
    return config
"""
ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.filterwarnings("error::UserWarning")  # Optuna warns of a step that is reported twice
AXES = (
    "{'schedule.peak': log_uniform(1e-4, 1.0), 'data.batch': integers(1, 64), "
    "'schedule.kind': choice('cosine', 'constant')}"
)


def search_text(trials=8, pruner="median(startup=2)", more="startup=3"):
    return f"SWEEP = search({trials}, 7, {AXES}, pruner={pruner}, {more})"


class Killed(BaseException):
    """Stands in for kill -9: nothing of the program handles it."""


class Simulation:
    """A run's process. Its loss falls to a level that depends on the values, and each poll is one validation."""

    started: ClassVar[list[str]] = []
    code = staticmethod(lambda run, step: None)
    """Exit code with which a run ends at a step; None: it goes on."""
    measure = "loss"

    def __init__(self, run, index):
        Simulation.started.append(run.workdir.name)
        self.run, self.returncode = run, None
        run.workdir.mkdir(parents=True, exist_ok=True)
        self.rows = run.workdir / "metrics.jsonl"
        (run.workdir / "log.txt").write_text("error: a bad number\n")
        (run.workdir / "config.json").write_text(overrides.to_json(run.config))
        kept = self.rows.read_text().splitlines() if self.rows.exists() else []
        self.step = json.loads(kept[-1])["step"] if kept else 0

    def poll(self):
        if self.returncode is None:
            config = self.run.config
            self.step += config.train.evaluate_every
            self.returncode = self.code(self.run, self.step)
            if self.returncode is None:
                level = abs(config.schedule.peak - 0.01) + config.data.batch / 100
                loss = level + 5 / self.step * (1 + config.data.batch % 3)
                row = {"step": self.step, "wall_time": 1.0, "split": "validation", self.measure: loss}
                with self.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                if self.step == config.train.steps:
                    record = results.to_record(self.step, config, {self.measure: loss})
                    (self.run.workdir / "result.json").write_text(json.dumps(record))
                    self.returncode = 0
        return self.returncode

    def terminate(self):
        self.returncode = 143

    def kill(self):
        pass


@pytest.fixture
def optuna():
    return pytest.importorskip("optuna", reason="searches need Optuna (the extra `search`)")


@pytest.fixture
def command(tmp_path, monkeypatch, capfd):
    """A function that runs `jaxformer sweep` in the folder `out`, and returns the exit code, stdout and stderr."""
    monkeypatch.setattr(code_version, "current", lambda: CodeVersion("0.2.0", "a" * 40))
    monkeypatch.setattr(local, "start", Simulation)
    monkeypatch.setattr(local, "POLL_SECONDS", 0)
    monkeypatch.setattr(Simulation, "started", [])
    (tmp_path / "toy.py").write_text(RECIPE)

    def run(text=None, *more, out="out"):
        (tmp_path / "space.py").write_text("from jaxformer.sweep import *\n" + (text or search_text()))
        flags = [f"--config={tmp_path}/toy.py", f"--sweep={tmp_path}/space.py", f"--workdir={tmp_path}/{out}"]
        code = cli.main(["sweep", *flags, *more])
        return code, *capfd.readouterr()

    return run


def stream(folder):
    """The trials of a search: number, values, end and step of each."""
    trials = json.loads((folder / "ranking.json").read_text())["trials"]
    return [tuple(trial[key] for key in ("number", "run", "state", "step", "value")) for trial in trials]


# --- settings, without Optuna -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("search(0, 0, {'a': uniform(0, 1)})", "trials: got 0, expected a whole number of 1 or more"),
        ("search(1, 0, {})", "got axes {}"),
        ("search(1, 0, {'a': [1, 2]})", "axis 'a': got [1, 2], expected uniform, log_uniform, integers or choice"),
        ("search(1, 0, {'a': uniform(1, 1)})", "got bounds 1 and 1, expected numbers, low < high"),
        ("search(1, 0, {'a': log_uniform(0, 1)})", "0 < low < high"),
        ("search(1, 0, {'a': integers(0.5, 2)})", "expected whole numbers"),
        ("search(1, 0, {'a': choice(1, 2, 1)})", "got choices 1, 2, 1, expected two or more, each once"),
        ("search(1, 0, {'a': uniform(0, 1)}, sampler='grid')", "got sampler 'grid', expected one of tpe, random"),
        ("search(1, 0, {'a': uniform(0, 1)}, pruner='median')", "got pruner 'median', expected median()"),
        ("search(1, 0, {'a': uniform(0, 1)}, mode='maximize')", "got mode 'maximize', expected one of min, max"),
        ("search(1, 0, {'a': uniform(0, 1)}, pruner=halving(0))", "halving: first: got 0"),
        ("cross(search(1, 0, {'a': uniform(0, 1)}), seeds(3))", "cross: got Search, expected lists of edits"),
    ],
)
def test_wrong_settings_are_one_line(command, text, expected):
    code, out, err = command(f"SWEEP = {text}")
    assert (code, out, err.count("\n")) == (2, "", 1) and expected in err


def test_without_optuna_one_line_says_what_to_install(command, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "optuna", None)
    for more in ((), ("--report",)):
        code, out, err = command(None, *more)
        assert (code, out, err.count("\n")) == (2, "", 1) and "pip install 'jaxformer[search]'" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("executor", ["together", "slurm", "submitit", "print"])
def test_executors_that_cannot_search_are_refused(command, tmp_path, executor):
    code, out, err = command(None, f"--executor={executor}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"got {executor} for a search, expected local: " in err and not (tmp_path / "out").exists()


def test_draws_are_those_of_earlier_versions():
    axes = {
        "a": sweep.uniform(0, 1),
        "b": sweep.log_uniform(1e-4, 1),
        "c": sweep.integers(1, 9),
        "d": sweep.choice(1, 2),
    }
    assert sweep.random(1, 0, axes) == [DRAWN]


DRAWN = {"a": 0.4906, "b": 0.03081, "c": 5, "d": 2}


# --- with it ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "edits", "expected"),
    [
        ("search(4, 0, {'schedule.peek': uniform(0, 1)})", (), "did you mean 'peak'"),
        ("search(4, 0, {'data.batch': uniform(1, 2)})", (), "config.data.batch: got '1.0'"),
        ("search(4, 0, {'schedule.peak': uniform(-2, -1)})", (), "config.schedule.peak: got -2"),
        ("search(4, 0, {'schedule.peak': uniform(0.1, 1)}, pruner=median())", ("--config.train.evaluate_every=0",),
         "got pruner median and config.train.evaluate_every 0, expected validations before the last step, 80"),
        ("search(4, 0, {'schedule.peak': uniform(0.1, 1)}, pruner=halving(80))", (), "begins at step 80"),
        ("search(4, 0, {'train.steps': integers(20, 80)}, pruner=median())", (), "a pruner and the axis train.steps"),
    ],
)  # fmt: skip
def test_a_search_is_checked_before_it_starts(optuna, command, tmp_path, text, edits, expected):
    code, out, err = command(f"SWEEP = {text}", *edits)
    assert (code, out, err.count("\n")) == (2, "", 1) and expected in err
    assert not (tmp_path / "out").exists()


def test_trials_are_runs_of_a_frozen_config_and_the_best_is_a_recipe(optuna, command, tmp_path):
    """With the example of docs/search.md."""
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/search.md").read_text(encoding="utf-8"), re.S)
    code, out, err = command(example)
    assert (code, err) == (0, "")
    ranking = json.loads((tmp_path / "out/ranking.json").read_text())
    done = [trial for trial in ranking["trials"] if trial["state"] == "complete"]
    pruned = [trial for trial in ranking["trials"] if trial["state"] == "pruned"]
    assert len(done) + len(pruned) == 12 and len(done) >= 3 and len(pruned) >= 2
    assert [row["mean"] for row in ranking["rows"]] == sorted(trial["value"] for trial in done)
    best = overrides.parse([f"--config={tmp_path}/out/best.py"])
    assert planning.format_value(best.schedule.peak) == ranking["rows"][0]["edits"]["schedule.peak"]
    assert len(set(Simulation.started)) == 12
    for trial in (done[-1], pruned[0]):
        folder = tmp_path / "out" / trial["run"]
        assert folder.name.startswith("schedule.peak=") and overrides.parse(
            [f"--config={tmp_path}/out/submissions/0001/recipe.py:{base_name(tmp_path)}"]
            + [f"--config.{path}={text}" for path, text in trial["edits"].items()]
        ) == overrides.read(folder)
        assert (folder / "result.json").exists() == (trial["state"] == "complete")
        assert f"pruned    {folder.name} (step {trial['step']}: loss" in out or trial["state"] == "complete"
        assert trial["trained"] == (80 if trial["state"] == "complete" else trial["step"])
    assert f"| {pruned[0]['number']} | pruned | {pruned[0]['step']} |" in out
    assert f"{len(done)} of 12 done, 0 running, {len(pruned)} pruned, 0 left; best loss" in out
    before = (tmp_path / "out/search.journal").read_bytes(), (tmp_path / "out/ranking.md").read_text()
    assert command(example, "--report")[0] == 0 and command(example)[0] == 0
    assert before == ((tmp_path / "out/search.journal").read_bytes(), (tmp_path / "out/ranking.md").read_text())


def base_name(tmp_path):
    (run,) = json.loads((tmp_path / "out/submissions/0001/submission.json").read_text())["runs"]
    return run["folder"]


TORN, KILLED_AFTER = (1, 3, 7, 12, 24), (4, 9, 15, 30)
"""Numbers of the journal's lines at which a search is killed."""


@pytest.mark.parametrize("pruner", ["median(startup=2)", "hyperband(10)"])
def test_the_stream_of_trials_after_any_kill_is_the_same(optuna, command, tmp_path, monkeypatch, pruner):
    text = search_text(6, pruner, "startup=1")
    assert command(text, out="whole")[0] == 0
    backend = optuna.storages.journal.JournalFileBackend
    append, polled = backend.append_logs, Simulation.poll
    count = polls = kills = 0

    def torn(self, logs):
        """Appends lines, until a kill leaves a part of one and the lock, or comes right after."""
        nonlocal count
        count += 1
        if count in TORN:
            with open(self._file_path, "ab") as file:
                file.write(json.dumps(logs[0]).encode()[:25])
            open(f"{self._file_path}.lock", "w").close()
            raise Killed
        append(self, logs)
        if count in KILLED_AFTER:
            raise Killed

    def poll(self):
        nonlocal polls
        polls += 1
        code = polled(self)
        if polls % 6 == 0:  # after the row is written, and before it is judged
            raise Killed
        return code

    monkeypatch.setattr(backend, "append_logs", torn)
    monkeypatch.setattr(Simulation, "poll", poll)
    search = planning.read_sweep(f"{tmp_path}/space.py")
    plan = searching.make_plan("space.py", search, [f"--config={tmp_path}/toy.py"], tmp_path / "out").frozen([], False)
    trials = 3
    while trials <= 6:  # growing, so that a process also begins with a suggestion, and not with an open trial
        grown = dataclasses.replace(plan, search=dataclasses.replace(search, trials=trials))
        try:
            assert searching.execute(grown, 1) == 0
            trials += 1
        except Killed:
            kills += 1
            assert kills < 40
    assert count > max(KILLED_AFTER) and kills > len(TORN) + len(KILLED_AFTER)
    assert stream(tmp_path / "out") == stream(tmp_path / "whole")
    assert "pruned" in {row[2] for row in stream(tmp_path / "out")}


def test_a_search_that_grows_goes_on_and_another_one_is_refused(optuna, command, tmp_path, monkeypatch):
    command(search_text(4))
    first = stream(tmp_path / "out")
    assert command(search_text(6))[0] == 0 and stream(tmp_path / "out")[:4] == first
    assert len(Simulation.started) == len(stream(tmp_path / "out")) == 6
    for text, more, expected in (
        (search_text(6, "None"), ("--changed",), "other values of pruner"),
        (search_text(6).replace("1e-4", "1e-3"), ("--report",), "other values of axes"),
        (search_text(6), ("--config.train.seed=3", "--changed"), "other values of train.seed"),
        ("SWEEP = grid({'schedule.peak': [0.1, 0.2]})", ("--changed",), "got a list of runs, expected a search"),
    ):
        code, out, err = command(text, *more)
        assert (code, out, err.count("\n")) == (2, "", 1) and expected in err
    monkeypatch.setattr(optuna, "__version__", "99")
    code, _, err = command(search_text(6))
    assert code == 2 and "there, 99 here" in err and "--changed" in err
    assert command(search_text(6), "--changed")[0] == 0
    assert command("SWEEP = grid({'schedule.peak': [0.1, 0.2]})", "--executor=print", out="grid")[0] == 0
    assert "got a search, expected a list of runs" in command(out="grid")[2]


def test_dead_processes_are_resumed_and_failures_tried_again(optuna, command, tmp_path, monkeypatch):
    ended = []

    def code(run, step):
        name = run.workdir.name
        if step == 40 and Simulation.started[0] == name and ended.count("killed") < 2:
            ended.append("killed")
            return -signal.SIGKILL
        return 2 if step == 20 and len(Simulation.started) > 3 and "again" not in ended else None

    monkeypatch.setattr(Simulation, "code", staticmethod(code))
    exit_code, out, _ = command(search_text(3, "None"))
    first, second, failed = Simulation.started[0], *Simulation.started[3:]
    assert exit_code == 1 and Simulation.started == [first, first, first, second, failed]
    assert out.count(f"again     {first}") == 2 and f"failed    {failed} (code 2): error: a bad number" in out
    assert [row[2] for row in stream(tmp_path / "out")] == ["complete", "failed", "failed"]
    ended.append("again")
    assert command(search_text(3, "None"))[0] == 0
    assert [row[2] for row in stream(tmp_path / "out")] == ["complete"] * 3
    assert Simulation.started[5:] == [second, failed]


def test_a_search_that_cannot_work_stops(optuna, command, monkeypatch):
    monkeypatch.setattr(Simulation, "code", staticmethod(lambda run, step: 2))
    code, out, _ = command()
    assert code == 1 and len(Simulation.started) == 3 and "the first 3 trials failed" in out
    monkeypatch.setattr(Simulation, "code", staticmethod(lambda run, step: None))
    code, _, err = command(search_text(more="metric='blue'"), out="other")
    assert (code, err.count("\n")) == (
        2,
        1,
    ) and "got metric 'blue', expected a measure of the validation split (loss)" in err


def test_a_stop_leaves_the_trial_to_be_resumed(optuna, command, tmp_path, monkeypatch):
    whole = command(search_text(2), out="whole") and stream(tmp_path / "whole")

    def code(run, step):
        if step == 40 and Simulation.started.count(run.workdir.name) == 2:  # once in "whole", once here
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Simulation, "code", staticmethod(code))
    exit_code, out, _ = command(search_text(2))
    assert exit_code == 143 and "stopped after 1 of 2 trials" in out
    assert [row[2] for row in stream(tmp_path / "out")] == ["open"]
    monkeypatch.setattr(Simulation, "code", staticmethod(lambda run, step: None))
    assert command(search_text(2))[0] == 0 and stream(tmp_path / "out") == whole


def test_a_process_that_outlived_its_search_is_waited_for(optuna, command, tmp_path, monkeypatch):
    assert command(search_text(1), out="whole")[0] == 0
    (name,) = Simulation.started
    plan_folder = tmp_path / "out" / name
    plan_folder.mkdir(parents=True)
    owner = {"host": socket.gethostname(), "pid": 4321}
    (plan_folder / "lock").write_text(json.dumps(owner))
    handle = os.open(plan_folder / "lock", os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert searching.owner_pid(plan_folder) == 4321
    asked, polls = [], []

    def poll(orphan):
        polls.append(orphan.pid)
        if len(polls) == 3:
            os.close(handle)
        return real(orphan)

    real = searching.Orphan.poll
    monkeypatch.setattr(searching.Orphan, "poll", poll)
    monkeypatch.setattr(searching.os, "kill", lambda pid, number: asked.append(pid))
    assert command(search_text(1))[0] == 0
    assert polls[:3] == [4321] * 3 and Simulation.started == [name, name] and not asked
    assert stream(tmp_path / "out") == stream(tmp_path / "whole")


def test_several_workers_end_every_trial_and_equal_trials_share_a_run(optuna, command, tmp_path):
    # The pruner begins after step 70, and the validation at the end, 80, is not judged.
    assert command(search_text(4, "median(startup=1, warmup=70)"), "--workers=3")[0] == 0
    assert [row[2] for row in stream(tmp_path / "out")] == ["complete"] * 4
    Simulation.started.clear()
    text = "SWEEP = search(5, 0, {'schedule.kind': choice('cosine', 'constant')}, sampler='random')"
    assert command(text, "--workers=3", out="equal")[0] == 0  # two of the first three are equal
    assert len(Simulation.started) == 2 and [row[2] for row in stream(tmp_path / "equal")] == ["complete"] * 5
    assert len(json.loads((tmp_path / "equal/ranking.json").read_text())["rows"]) == 2


def test_a_measure_to_maximise(optuna, command, tmp_path, monkeypatch):
    monkeypatch.setattr(Simulation, "measure", "accuracy")
    assert command(search_text(5, more="metric='accuracy', mode='max'"))[0] == 0
    ranking = json.loads((tmp_path / "out/ranking.json").read_text())
    values = [row["mean"] for row in ranking["rows"]]
    assert ranking["metric"] == "accuracy" and values == sorted(values, reverse=True) and len(values) >= 2
    for trial in ranking["trials"]:  # worse than the median of earlier ones there, so than the best one's last value
        assert trial["state"] == "complete" or trial["value"] < 1.5


def test_a_damaged_journal_is_one_line(optuna, command, tmp_path):
    command(search_text(2))
    path = tmp_path / "out/search.journal"
    path.write_bytes(path.read_bytes().replace(b'"op_code":4', b'"op_code":', 1))
    code, _, err = command(search_text(2))
    assert (code, err.count("\n")) == (2, 1) and f"{path}: got a damaged journal" in err


def test_hyperband_has_its_brackets_before_the_first_suggestion(optuna):
    """Optuna makes them at the first judgement, and a version whose samplers see brackets would suggest by them."""
    assert len(study.make_pruner(optuna, sweep.hyperband(10), 80)._pruners) == 2
