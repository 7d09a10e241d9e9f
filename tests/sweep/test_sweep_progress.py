"""The live table of a sweep: counts, rows from the runs' own metrics, terminals and files."""

import dataclasses
import io
import json
import re

import pytest

from jaxformer.config import Config
from jaxformer.sweep import progress
from jaxformer.sweep.planning import Run


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def runs(tmp_path):
    config = Config()
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
