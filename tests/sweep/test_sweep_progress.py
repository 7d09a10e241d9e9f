"""The live table of a sweep: counts, rows from the runs' own metrics, terminals and files."""

import dataclasses
import io
import json
import os
import re
import time

import pytest

from jaxformer.config import Config, ModelConfig, StackConfig, overrides
from jaxformer.sweep import progress, watching
from jaxformer.sweep.executors import together
from jaxformer.sweep.planning import Plan, Run
from jaxformer.train import results
from jaxformer.train import together as train_together


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def runs(tmp_path):
    config = Config(model=ModelConfig(encoder=StackConfig(), decoder=StackConfig()))
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=100))
    return [Run({}, config, tmp_path / name, ()) for name in ("first", "second", "third")]


@pytest.fixture
def table(runs, monkeypatch):
    for name, value in {"TERM": "xterm", "COLUMNS": "70", "LINES": "20"}.items():
        monkeypatch.setenv(name, value)
    return progress.Table(runs, runs[0].config.checkpoint, 2, Terminal())


def write(run, *rows):
    run.workdir.mkdir(exist_ok=True)
    text = "".join(json.dumps({"step": s, "split": split, "loss": loss}) + "\n" for s, split, loss in rows)
    (run.workdir / "metrics.jsonl").write_text(text + '{"step": 99, "spl')


def test_a_resumed_run_is_shown_at_its_last_row_and_once(table, runs):
    write(runs[0], (40, "train", 2.0), (50, "validation", 1.5), (20, "train", 3.0), (20, "validation", 2.5))
    assert progress.newest(runs[0].workdir, "loss") == (20, 2.5)
    assert progress.newest(runs[1].workdir, "loss") == (0, None)
    table.start(runs[0])
    table.end(runs[0], "stopped")
    table.start(runs[0])
    table.draw()
    shown = table.stream.getvalue()
    assert shown.count("20/100") == 1
    assert shown.startswith("0 of 3 done, 1 running")


def test_the_table_is_redrawn_in_place_and_cut_to_the_terminal(table, runs, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "24")
    table.start(runs[0])
    table.start(runs[1])
    table.draw()
    lines = table.stream.getvalue().split("\n")
    assert len(lines) == 3
    assert max(map(len, lines)) == 23
    table.draw()  # too early
    assert table.stream.getvalue() == "\n".join(lines)
    table.close()
    assert table.stream.getvalue().endswith("\r\x1b[2A\x1b[J")
    assert capsys.readouterr().out == "started   first\nstarted   second\n"


def test_plain_lines_elsewhere_and_no_colour(runs, monkeypatch, capsys):
    monkeypatch.setenv("NO_COLOR", "1")
    stream = io.StringIO()
    table = progress.Table(runs, runs[0].config.checkpoint, 1, stream)
    monkeypatch.setattr(progress.sys, "stdout", out := Terminal())
    table.start(runs[0])
    table.draw()
    table.end(runs[0], "failed", "(code 1): why")
    assert stream.getvalue() == ""
    assert not re.search("\x1b", out.getvalue())
    assert out.getvalue().endswith("failed    first (code 1): why\n0 of 3 done, 0 running, 1 failed, 2 left\n")


def test_failed_is_red_on_a_terminal_with_colours(table, runs, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(progress.sys, "stdout", out := Terminal())
    table.start(runs[0])
    table.end(runs[0], "failed")
    assert "\x1b[31mfailed" in out.getvalue()


# --- runs that other processes train ----------------------------------------------------------------------------------


def test_one_program_of_all_runs_shows_its_table_while_it_trains(runs, monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress.sys, "stderr", terminal)
    monkeypatch.setattr(progress, "DRAW_SECONDS", 0.005)

    def train(given, init_format, tell):
        assert [folder for _, folder in given] == [run.workdir for run in runs]
        write(runs[0], (40, "train", 2.0), (50, "validation", 1.5))
        end = time.monotonic() + 60
        while "50/100" not in terminal.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
        tell("failed", runs[1].workdir, "it diverged")
        tell("stopped", runs[0].workdir, "")
        while "1 running, 1 failed, 1 stopped" not in terminal.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
        return 2

    monkeypatch.setattr(train_together, "train", train)
    plan = Plan(runs[0].workdir.parent, tuple(runs))
    assert together.execute(plan, 1) == 2
    shown = terminal.getvalue()
    assert "0 of 3 done, 3 running, 0 left" in shown and "50%" in shown
    assert "1 running, 1 failed, 1 stopped" in shown and " to go" not in shown
    out = capsys.readouterr().out
    assert "3 runs: 0 finished, one program for all\n" in out and "failed    second (it diverged)\n" in out
    before = len(shown)
    time.sleep(0.05)
    assert len(terminal.getvalue()) == before  # nothing is drawn afterwards


def test_runs_are_shown_from_their_files(runs, tmp_path, monkeypatch):
    running, silent, stopped = runs
    for run in runs:
        write(run, (20, "train", 3.0), (40, "train", 2.0), (40, "validation", 1.5))
        (run.workdir / "lock").write_text("" if run is stopped else '{"pid": 1}')
    os.utime(silent.workdir / "lock", (0, 0))
    done, waiting = (Run({}, silent.config, tmp_path / name, ()) for name in ("fourth", "fifth"))
    done.workdir.mkdir()
    (done.workdir / "config.json").write_text(overrides.to_json(done.config))
    (done.workdir / "result.json").write_text(json.dumps(results.to_record(100, done.config, {"loss": 1.0})))
    table = watching.Watch([done, waiting, stopped, silent, running], running.config.checkpoint)
    lines = table.text().splitlines()
    assert lines[0] == "1 of 5 done, 1 running, 1 silent, 1 stopped, 1 waiting"
    assert [line.split()[0] + " " + line.split()[-1] for line in lines[2:]] == [
        "running first", "silent second", "stopped third", "waiting fifth", "done fourth",
    ]  # fmt: skip
    assert lines[2].split() == ["running", "40/100", "2", "1.5", "first"] and lines[5].split()[1] == "0/100"
    assert not table.is_over


def test_watching_redraws_on_a_terminal_until_all_is_done(runs, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    write(runs[0], (40, "train", 2.0))
    (runs[0].workdir / "metrics.jsonl").write_text(
        '{"step": 40, "split": "train", "loss": null, "steps_per_second": 7.5}\n'
    )

    def sleep(seconds):
        assert not (runs[0].workdir / "result.json").exists(), "goes on after the end"
        (runs[0].workdir / "config.json").write_text(overrides.to_json(runs[0].config))
        record = results.to_record(100, runs[0].config, {"loss": 1.0})
        (runs[0].workdir / "result.json").write_text(json.dumps(record))

    monkeypatch.setattr(watching.time, "sleep", sleep)
    stream = Terminal()
    assert watching.watch(runs[:1], runs[0].config.checkpoint, stream) == 0
    assert stream.getvalue().startswith("0 of 1 done, 1 stopped") and stream.getvalue().count("1 of 1 done") == 2
    assert "40/100                             7.5  first" in stream.getvalue()
    plain = io.StringIO()
    monkeypatch.setattr(watching.time, "sleep", lambda seconds: pytest.fail("waits where nothing is redrawn"))
    watching.watch(runs, runs[0].config.checkpoint, plain)
    assert plain.getvalue().startswith("1 of 3 done, 2 waiting\n") and plain.getvalue().count("\n") == 5
