"""Frozen submissions of a sweep: what is kept, what is refused, and that runs train from it."""

import json
import os
import shlex
import shutil
import subprocess

import pytest

from jaxformer import cli, registry
from jaxformer.config import ConfigError, overrides
from jaxformer.runtime import code_version
from jaxformer.runtime.code_version import CodeVersion
from jaxformer.sweep import planning, submission
from jaxformer.sweep.executors import slurm
from jaxformer.train import results, together

RECIPE = """
from jaxformer.config import overrides
from jaxformer.config import StackConfig
from jaxformer.config.overrides import section

def get_config():
    config = overrides.defaults()
    config.task.name = "language_modelling"
    config.model.decoder = section(StackConfig, width=32)
    return config
"""
TWO = "SWEEP = grid({'schedule.peak': [0.1, 0.2]})"
THREE = "SWEEP = grid({'schedule.peak': [0.1, 0.2, 0.3]})"
CODE = CodeVersion("0.2.0", "a" * 40, b"+token = hf_0123456789abcdefghijklmn\n+\xff\n", "d" * 16)


@pytest.fixture
def code(monkeypatch):
    """A function that sets the state of the code."""

    def use(state):
        monkeypatch.setattr(code_version, "current", lambda: state)

    use(CODE)
    return use


@pytest.fixture
def sweep(tmp_path, code, capfd):
    """A function that runs `jaxformer sweep --executor=print`, and returns the exit code, stdout and stderr."""
    (tmp_path / "toy.py").write_text(RECIPE)

    def run(text=TWO, *more):
        (tmp_path / "edits.py").write_text("from jaxformer.sweep import *\n" + text)
        flags = [f"--config={tmp_path}/toy.py", f"--sweep={tmp_path}/edits.py", f"--workdir={tmp_path}/out"]
        executor = () if any("--executor" in word for word in more) else ("--executor=print",)
        exit_code = cli.main(["sweep", *flags, *executor, *more])
        return exit_code, *capfd.readouterr()

    return run


def kept(tmp_path):
    return sorted(path.name for path in (tmp_path / "out" / "submissions").iterdir())


def finish(config, folder, **values):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(overrides.to_json(config))
    (folder / "result.json").write_text(json.dumps(results.to_record(config.train.steps, config, values)))


def configs_of(out):
    return [overrides.parse([word for word in shlex.split(line) if "--config" in word]) for line in out.splitlines()]


def test_a_run_that_starts_with_other_code_says_so(sweep, code, capfd):
    out = sweep()[1]
    configs_of(out)
    assert capfd.readouterr().err == ""
    code(CodeVersion("0.2.0", "b" * 40))
    configs_of(out.splitlines()[0])
    assert "commit aaaaaaaaaaaa there, bbbbbbbbbbbb here\n" in capfd.readouterr().err


def test_runs_train_from_what_was_submitted(sweep, tmp_path):
    exit_code, out, err = sweep()
    assert (exit_code, err, kept(tmp_path)) == (0, "", ["0001"])
    record = json.loads((tmp_path / "out/submissions/0001/submission.json").read_text())
    assert [record[key] for key in ("version", "commit", "diff")] == ["0.2.0", "a" * 40, "d" * 16]
    assert [run["edits"] for run in record["runs"]] == [{"schedule.peak": 0.1}, {"schedule.peak": 0.2}]
    assert (tmp_path / "out/submissions/0001/code.diff").read_bytes().endswith(b"\n+\xff\n")
    assert b"hf_0123" not in (tmp_path / "out/submissions/0001/code.diff").read_bytes()
    before = configs_of(out)
    (tmp_path / "toy.py").write_text("raise SystemExit")  # edited while the runs wait in a queue
    assert configs_of(out) == before
    assert [config.schedule.peak for config in before] == [0.1, 0.2]


def test_the_same_sweep_goes_on_and_a_larger_one_is_kept_beside_it(sweep, tmp_path):
    first = sweep()[1]
    plan = planning.make_plan(f"{tmp_path}/edits.py", [f"--config={tmp_path}/toy.py"], tmp_path / "out")
    finish(plan.runs[0].config, plan.runs[0].workdir, loss=1.0)
    assert sweep()[1] == first.splitlines(keepends=True)[1]
    assert kept(tmp_path) == ["0001"]
    exit_code, out, err = sweep(THREE)
    assert (exit_code, err, kept(tmp_path), len(out.splitlines())) == (0, "", ["0001", "0002"], 2)
    assert all("submissions/0002/" in line for line in out.splitlines())


@pytest.mark.parametrize(
    ("text", "state", "edits", "expected"),
    [
        (TWO, CODE, ("--config.train.steps=7", "--config.data.batch=8"), "other values of data.batch, train.steps)"),
        (TWO, CODE, ("--config.train.log_every=7",), "other values of train.log_every)"),
        ("SWEEP = [{'schedule.peak': 0.2}]", CODE, (), "no run schedule.peak=0.1)"),
        (TWO, CodeVersion("0.3.0", "a" * 40, b"", "d" * 16), (), "version 0.2.0 there, 0.3.0 here)"),
        (TWO, CodeVersion("0.2.0", "b" * 40), (), "commit aaaaaaaaaaaa there, bbbbbbbbbbbb here)"),
        (
            TWO,
            CodeVersion("0.2.0", "a" * 40, b"+x", "e" * 16),
            (),
            "uncommitted changes dddddddd there, eeeeeeee here)",
        ),
        (THREE, CodeVersion("0.2.0", "a" * 40), (), "uncommitted changes dddddddd there, none here)"),
    ],
)
def test_what_differs_is_refused_in_one_line(sweep, code, tmp_path, text, state, edits, expected):
    sweep()
    code(state)
    exit_code, out, err = sweep(text, *edits)
    assert (exit_code, out, err.count("\n"), kept(tmp_path)) == (2, "", 1, ["0001"])
    assert expected in err and "give --changed to go on" in err
    exit_code, out, err = sweep(text, *edits, "--changed")
    assert (exit_code, kept(tmp_path)) == (0, ["0001", "0002"])
    assert expected[:-1] in err and "submissions/0002/" in out
    assert sweep(text, *edits)[::2] == (0, "")  # the newest submission is what counts


def test_without_git_nothing_fails(sweep, code, tmp_path, monkeypatch):
    code(CodeVersion("0.2.0", None))
    assert sweep()[0] == 0 and not (tmp_path / "out/submissions/0001/code.diff").exists()
    assert sweep()[::2] == (0, "")
    code(CODE)
    exit_code, _, err = sweep()
    assert exit_code == 0 and "no commit is known there" in err
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert code_version.current().commit is None and code_version.git_commit() is None


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_diff_is_of_tracked_files(tmp_path):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a", *words], cwd=tmp_path, check=True)

    git("init", "-q")
    (tmp_path / "a.py").write_text("x = 1\n")
    git("add", "a.py")
    git("commit", "-qm", "first")
    (tmp_path / "new.py").write_text("")
    clean = code_version.current(tmp_path)
    assert len(clean.commit) == 40 and (clean.diff, clean.digest) == (b"", "")
    (tmp_path / "a.py").write_text("x = 2\n")
    dirty = code_version.current(tmp_path)
    assert dirty.commit == clean.commit and b"+x = 2\n" in dirty.diff and len(dirty.digest) == 16


@pytest.mark.parametrize("name", ["submission.json", "code.diff", "recipe.py", "*0.2*.json"])
def test_a_damaged_file_is_one_line(sweep, tmp_path, name):
    out = sweep()[1]
    (path,) = (tmp_path / "out/submissions/0001").glob(name)
    path.write_bytes(path.read_bytes().replace(b"0.2", b"0.3") + b" ")
    for more in ((), ("--changed",), ("--report",)):
        exit_code, _, err = sweep(TWO, *more)
        assert (exit_code, err.count("\n")) == (2, 1) and f"{path}: got a damaged file" in err
    if name.endswith("0.2*.json"):
        with pytest.raises(ConfigError, match="damaged"):
            configs_of(out)


def test_a_kill_while_it_is_written_leaves_nothing_that_counts(sweep, tmp_path, monkeypatch):
    def kill(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(submission.shutil, "rmtree", lambda *_, **__: None)  # as kill -9, which cleans nothing up
        patch.setattr(os, "rename", kill)
        with pytest.raises(KeyboardInterrupt):
            sweep()
    assert [name[:12] for name in kept(tmp_path)] == [submission.TEMPORARY]
    assert sweep()[0] == 0 and kept(tmp_path) == ["0001"]


def test_two_at_once(sweep, tmp_path, monkeypatch):
    with submission.lock(tmp_path / "out"):
        exit_code, _, err = sweep()
    assert (exit_code, err.count("\n")) == (2, 1) and "another process runs or submits there" in err
    assert not (tmp_path / "out/submissions").exists()
    sweep()
    # On a file system without locks the rename decides: the second finds no submission, and then one of its number.
    monkeypatch.setattr(submission, "read_newest", lambda workdir: None)
    exit_code, _, err = sweep(THREE)
    assert exit_code == 2 and "wrote at the same time" in err and kept(tmp_path) == ["0001"]


def test_a_report_is_of_what_was_submitted(sweep, tmp_path):
    sweep()
    plan = planning.make_plan(f"{tmp_path}/edits.py", [f"--config={tmp_path}/toy.py"], tmp_path / "out")
    finish(plan.runs[1].config, plan.runs[1].workdir, loss=3.5)
    (tmp_path / "toy.py").write_text(RECIPE.replace("width=32", "width=64"))
    exit_code, out, err = sweep(TWO, "--report")
    assert exit_code == 0 and "| 1 | 3.5 |" in out and "other values of model.decoder.width" in err
    for flags in (("--report", "--changed"), ("--watch", "--changed"), ("--report", "--watch")):
        exit_code, _, err = sweep(TWO, *flags)
        assert (exit_code, err.count("\n")) == (2, 1) and f"{flags[1]}: got it with {flags[0]}" in err
    exit_code, out, err = sweep(TWO, "--watch")
    assert exit_code == 0 and out.startswith("1 of 2 done, 1 waiting\n") and "/submissions/0001" in err


def test_one_program_and_arrays_train_the_frozen_runs(sweep, tmp_path, monkeypatch):
    exit_code, _, err = sweep("SWEEP = grid({'data.batch': [8, 16]})", "--executor=together")
    assert exit_code == 2 and err.count("\n") == 1 and not (tmp_path / "out").exists()
    asked = []
    monkeypatch.setattr(together, "train", lambda runs, init_format, report: asked.extend(runs) or 0)
    assert sweep(TWO, "--executor=together")[0] == 0
    newest = submission.read_newest(tmp_path / "out")
    assert [config for config, _ in asked] == list(newest.configs.values())
    plan = planning.make_plan(f"{tmp_path}/edits.py", [f"--config={tmp_path}/toy.py"], tmp_path / "out")
    script = slurm.array_script(submission.freeze(plan, [f"--config={tmp_path}/toy.py"]), 1)
    assert script.count("submissions/0001/recipe.py:schedule.peak=") == 2 and "toy.py" not in script


def test_what_slurm_cannot_submit_leaves_nothing(sweep, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    exit_code, _, err = sweep(TWO, "--executor=slurm")
    assert (exit_code, err.count("\n")) == (2, 1) and "sbatch" in err and not (tmp_path / "out").exists()


def test_modules_beside_the_recipe_are_found_from_the_frozen_one(sweep, tmp_path, monkeypatch):
    out = sweep()[1]
    monkeypatch.setattr(registry, "_search_directories", [])  # as in the process of a run
    configs_of(out)
    assert str(tmp_path) in registry._search_directories


def test_edits_of_any_type_are_kept(sweep, tmp_path):
    text = "import numpy as np\nSWEEP = [{'data.batch': np.int64(4), 'data.buckets': (8, 16)}]"
    assert [sweep(text)[0] for _ in range(2)] == [0, 0] and kept(tmp_path) == ["0001"]
    (run,) = submission.read_newest(tmp_path / "out").record["runs"]
    assert run["edits"] == {"data.batch": "4", "data.buckets": [8, 16]}
