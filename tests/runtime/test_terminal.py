"""Output on a terminal: the live line by a small emulation of one, colours, widths, sparklines."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import pty
import struct
import termios

import pytest

from jaxformer.config import TrainConfig
from jaxformer.runtime import streams, terminal
from jaxformer.train.reporting import LIVE_PRIORITY, ProgressLine, fit_parts
from jaxformer.train.timing import Clock


class Screen(io.StringIO):
    """A terminal that knows newlines, carriage returns and clearing to the end of the line."""

    encoding = "utf-8"

    def isatty(self):
        return True

    def lines(self) -> list[str]:
        shown, line, column = [], "", 0
        text = self.getvalue()
        while text:
            if text.startswith("\x1b[K"):
                line, text = line[:column], text[3:]
            elif text[0] == "\x1b":
                text = text.partition("m")[2]
            elif text[0] == "\r":
                column, text = 0, text[1:]
            elif text[0] == "\n":
                shown, line, column, text = [*shown, line], "", 0, text[1:]
            else:
                line, column, text = line[:column] + text[0] + line[column + 1 :], column + 1, text[1:]
        return [*shown, line]


VALUES = {"loss": 2.0, "learning_rate": 1e-3, "gradient_norm": 1.0, "tokens_per_second": 5e3, "padding": 0.25}


@pytest.fixture
def progress(monkeypatch):
    """Progress on a screen of 80 columns."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    progress = ProgressLine(Clock(TrainConfig(steps=100)), Screen())
    yield progress
    progress.close()


def test_the_live_line_is_redrawn_and_other_lines_stay_above_it(progress):
    progress.log("started")
    for step, loss in enumerate([3.0, 2.0, 1.0], 1):
        progress.write(step, "train", VALUES | {"loss": loss})
    assert progress.stream.lines() == [
        "started",
        "step 3/100  loss 1.0000  █▅▁  left ?  5,000 tok/s  lr 1.00e-03  |g| 1.00",
    ]
    progress.write(3, "validation", {"loss": 1.5})
    assert progress.stream.lines()[1] == "step 3  validation loss 1.5"
    assert progress.stream.lines()[2].startswith("step 3/100  loss 1.0000")
    progress.write(4, "skipped", {"spike": 0, "batch": 2})
    progress.close()
    progress.close()
    lines = progress.stream.lines()
    assert lines[2].startswith("step 4  skipped: its loss or gradient is not finite (batch 2)")
    assert lines[3].startswith("step 3/100")
    assert lines[4:] == [""], "the cursor is below the line"


def test_other_output_removes_the_line_first(progress, monkeypatch):
    """A warning of the log on the standard streams, as the program installs them, while the line is shown."""
    screen = progress.stream

    class Raw(io.RawIOBase):
        def writable(self):
            return True

        def write(self, data):
            screen.write(bytes(data).decode())
            return len(data)

    for name, kind in (("stderr", streams._RedactedText), ("stdout", streams._Text)):
        monkeypatch.setattr(f"sys.{name}", kind(io.BufferedWriter(Raw()), "utf-8", line_buffering=True))
    progress.write(1, "train", VALUES)
    logging.StreamHandler().emit(logging.makeLogRecord({"msg": "careful"}))
    print("from stdout")
    progress.write(2, "train", VALUES)
    lines = screen.lines()
    assert [line for line in lines if "step" in line] == [lines[-1]]
    assert lines[:2] == ["careful", "from stdout"]


@pytest.mark.parametrize("width", [10, 20, 40, 60, 200])
def test_a_narrow_terminal_shows_what_matters(width, progress, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    progress.write(7, "validation", {"loss": 1.5})
    progress.write(7, "train", VALUES)
    line = progress.stream.lines()[-1]
    assert 0 < len(line) < width
    assert line.startswith("step 7/10")
    expected = {20: "step 7/100  left ?", 40: "step 7/100  loss 2.0000  ▁  left ?"}
    assert line == expected.get(width, line)
    if width == 200:
        assert line.endswith("padding 25%  [validation loss 1.5]")


def test_parts_fit_in_the_order_of_their_importance():
    parts = {name: "x" * 4 for name in LIVE_PRIORITY}
    for count in range(1, len(parts) + 1):
        assert fit_parts(parts, 6 * count - 2) == "  ".join(["x" * 4] * count)
    assert fit_parts(parts, 3) == "xxx"


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_terminal_that_cannot_redraw_gets_plain_lines(term, monkeypatch):
    monkeypatch.setenv("TERM", term)
    progress = ProgressLine(Clock(TrainConfig(steps=100)), Screen())
    progress.write(1, "train", VALUES)
    progress.write(2, "train", VALUES)
    progress.close()
    text = progress.stream.getvalue()
    assert "\x1b" not in text
    assert "\r" not in text
    assert text.count("\n") == 2
    assert "padding 25%  left ?" in text


def test_no_color_leaves_colours_out(progress, monkeypatch):
    progress.write(1, "train", VALUES)
    assert "\x1b[36m" in progress.stream.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    screen = Screen()
    plain = ProgressLine(Clock(TrainConfig(steps=100)), screen)
    plain.write(1, "train", VALUES)
    plain.write(2, "skipped", {"spike": 1})
    plain.close()
    assert "\x1b[3" not in screen.getvalue()
    assert "▁" in screen.getvalue()
    assert terminal.coloured("x", terminal.RED, screen) == "x"
    monkeypatch.setenv("NO_COLOR", "")
    assert terminal.coloured("x", terminal.RED, screen) == "\x1b[31mx\x1b[0m"
    assert terminal.coloured("x", terminal.RED, io.StringIO()) == "x", "not in a file"


def test_an_ascii_terminal_has_no_sparkline(progress):
    progress.stream.encoding = "ascii"
    progress.write(1, "train", VALUES)
    assert progress.stream.getvalue().isascii()


def test_a_sparkline_goes_from_the_lowest_to_the_highest():
    assert terminal.sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == terminal.BLOCKS
    assert terminal.sparkline([5.0, 5.0]) == "▁▁"
    assert terminal.sparkline([1.0, float("nan"), 2.0]) == "▁ █"
    assert terminal.sparkline([float("inf")]) == ""


def test_a_real_terminal_is_one_and_a_file_or_nothing_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COLUMNS", raising=False)
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 43, 0, 0))
    with open(slave, "w") as stream:
        assert terminal.can_redraw(stream)
        assert terminal.columns(stream) == 43
        monkeypatch.setenv("COLUMNS", "50")
        assert terminal.columns(stream) == 50
    os.close(master)
    assert not terminal.can_redraw(stream), "closed"
    with open(tmp_path / "log", "w") as stream:
        assert not terminal.can_redraw(stream)
    assert not terminal.can_redraw(None)
    assert not terminal.can_encode("▁", io.TextIOWrapper(io.BytesIO(), "latin-1"))
