"""Sweeps through submitit: refusals without the package, and real jobs of its local executor where it is installed."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from jaxformer import cli, report
from jaxformer.sweep.executors import submitit as executor
from jaxformer.train import loop

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import tiny_runs

RECIPE = """
import pathlib, sys
sys.path.insert(0, {benchmarks!r})
import tiny_runs

def get_config():
    return tiny_runs.recipe("packed", pathlib.Path({files!r}), train__steps=2, train__deadline=1e-6)
"""
needs_submitit = pytest.mark.skipif(not executor.is_installed(), reason="the package submitit is not installed")


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """The command of a sweep of one run; `sweep.folder` is its workdir."""
    monkeypatch.setenv(executor.VARIABLE, "cluster=local,timeout_min=30")
    tiny_runs.files(tmp_path / "files")
    benchmarks = str(Path(tiny_runs.__file__).parent)
    (tmp_path / "toy.py").write_text(RECIPE.format(benchmarks=benchmarks, files=str(tmp_path / "files")))
    (tmp_path / "edits.py").write_text("SWEEP = [{'schedule.peak': 0.01}]")

    def run(*flags):
        names = [f"--config={tmp_path}/toy.py", f"--sweep={tmp_path}/edits.py", f"--workdir={tmp_path}/out"]
        return cli.main(["sweep", *names, "--executor=submitit", *flags])

    run.folder = tmp_path / "out"
    return run


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ("", "got no timeout_min"),
        ("timeout_min", "got 'timeout_min', expected NAME=VALUE"),
        ("timeout_min=5,nodes=2", "got nodes=2, expected 1"),
    ],
)
def test_parameters_that_do_not_work_are_refused(sweep, monkeypatch, capsys, parameters, expected):
    monkeypatch.setattr(executor, "is_installed", lambda: True)
    monkeypatch.setenv(executor.VARIABLE, parameters)
    assert sweep() == 2
    line = capsys.readouterr().err
    assert expected in line and line.count("\n") == 1 and not sweep.folder.exists()


def test_without_the_package_one_line_says_how_to_install_it(sweep, monkeypatch, capsys):
    monkeypatch.setattr(executor, "is_installed", lambda: False)
    assert sweep() == 2
    assert "pip install 'jaxformer[submitit]'" in capsys.readouterr().err


def test_a_run_that_was_stopped_is_requeued_and_one_that_failed_is_not(monkeypatch, tmp_path):
    signals, codes, reported = [], iter([143, 2, 0]), []
    monkeypatch.setattr(loop, "train", lambda config, workdir, init_format: next(codes))
    monkeypatch.setattr(report, "write_after_training", reported.append)
    (tmp_path / "toy.py").write_text(RECIPE.format(benchmarks=str(Path(tiny_runs.__file__).parent), files="files"))
    before = signal.signal(signal.SIGUSR2, lambda *_: signals.append("requeued"))
    job = executor.Job(f"--config={tmp_path}/toy.py", tmp_path / "out", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    try:
        for expected in (143, 2):
            with pytest.raises(RuntimeError, match=f"code {expected}"):
                job()
        assert job() == 0 and signals == ["requeued"] and reported == [tmp_path / "out"]
    finally:
        signal.signal(signal.SIGUSR2, before)


@needs_submitit
def test_a_job_at_its_deadline_goes_on_and_the_sweep_is_ranked(sweep, capsys):
    assert sweep() == 0
    assert "finished  schedule.peak=0.01" in capsys.readouterr().out
    ranked = json.loads((sweep.folder / "ranking.json").read_text())
    assert len(ranked["rows"]) == 1 and ranked["missing"] == []
    output = "".join(path.read_text() for path in (sweep.folder / "submitit").glob("*_log.*"))
    assert "stopped at step 1, saved; run the same command to continue" in output and "resumed at step 1" in output
    assert sweep() == 0  # all is done


@needs_submitit
def test_parameters_that_submitit_refuses_are_one_line(sweep, monkeypatch, capsys):
    monkeypatch.setenv(executor.VARIABLE, "cluster=local,timeout_min=5,local_nonsense=1")
    assert sweep() == 2
    line = capsys.readouterr().err
    assert "got parameters that submitit refuses" in line and line.count("\n") == 1
