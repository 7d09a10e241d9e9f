"""Terminals: width, colours, and the live line or lines at the foot.

`TERM=dumb` (or none) means a terminal that cannot move its cursor: it is written to like a file. Colours are left out
where `NO_COLOR` is set and not empty (https://no-color.org).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import TextIO

DEFAULT_COLUMNS = 80
"""Width of what is no terminal."""

BLOCKS = "▁▂▃▄▅▆▇█"
"""Signs of a sparkline, from the lowest value to the highest."""

RED, YELLOW, CYAN, DIM = "31", "33", "36", "2"
"""Numbers of escape sequences for `coloured`."""

CLEAR = "\r\x1b[K"
"""Moves the cursor to the start of the line and clears it."""


def is_terminal(stream: TextIO | None) -> bool:
    """True if the stream is an open terminal; a daemon has no stream, or a closed one."""
    return stream is not None and not stream.closed and stream.isatty()


def can_redraw(stream: TextIO | None) -> bool:
    """True if a line of the stream can be redrawn in place."""
    return is_terminal(stream) and os.environ.get("TERM", "") not in ("", "dumb")


def has_colours(stream: TextIO | None) -> bool:
    """True if colours may be written to the stream."""
    return can_redraw(stream) and not os.environ.get("NO_COLOR")


def coloured(text: str, code: str, stream: TextIO | None) -> str:
    """`text` in a colour, by the number of its escape sequence ("31": red), where the stream has colours."""
    return f"\x1b[{code}m{text}\x1b[0m" if has_colours(stream) else text


def columns(stream: TextIO | None = None) -> int:
    """Width of the terminal in characters; 80 if there is none. `COLUMNS` overrides it.

    Args:
      stream: the terminal; None: stdout's. The other streams may lead elsewhere.
    """
    if stream is not None and is_terminal(stream) and not os.environ.get("COLUMNS", "").isdecimal():
        with contextlib.suppress(OSError, ValueError):
            return max(os.get_terminal_size(stream.fileno()).columns, 1)
    return max(shutil.get_terminal_size((DEFAULT_COLUMNS, 24)).columns, 1)


def can_encode(text: str, stream: TextIO | None) -> bool:
    """True if the stream's encoding has all signs of `text`."""
    try:
        text.encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def sparkline(values: list[float]) -> str:
    """A sign for each value, by its height between the smallest and the largest; a blank for one that is not finite."""
    finite = [value for value in values if abs(value) < float("inf")]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((v - low) * scale)] if abs(v) < float("inf") else " " for v in values)


class LiveLine:
    """A line that is redrawn in place on a terminal.

    Other output comes in between: `clear_shown`, which `runtime/streams.py` calls, removes the line before it is
    written, and the next `show` draws the line below it.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def show(self, text: str) -> None:
        """Draws `text` in place of what is shown. It must be narrower than the terminal."""
        global _shown
        _shown = None
        self.stream.write(CLEAR + text)
        self.stream.flush()
        _shown = self

    def clear(self) -> None:
        """Removes the line, if it is shown; the cursor is then at the start of an empty line."""
        global _shown
        if _shown is self:
            _shown = None
            self.stream.write(CLEAR)
            self.stream.flush()

    def end(self) -> None:
        """Leaves the line as it is and moves the cursor below it, if it is shown."""
        global _shown
        if _shown is self:
            _shown = None
            self.stream.write("\n")
            self.stream.flush()


class LiveBlock(LiveLine):
    """Several lines that are redrawn in place, as `LiveLine` does with one."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.widths: list[int] = []

    def show(self, text: str) -> None:
        """Draws the lines of `text` in place of those shown.

        Lines are cut to the terminal's width, and lines that its height does not hold are left out.
        """
        global _shown
        self.clear()
        width = columns(self.stream) - 1
        lines = [line[: max(width, 1)] for line in text.split("\n")][: max(_height(self.stream) - 1, 1)]
        self.widths = [len(line) for line in lines]
        self.stream.write("\n".join(lines))
        self.stream.flush()
        _shown = self

    def clear(self) -> None:
        """Removes the lines, if they are shown; the cursor is then at the start of an empty line."""
        global _shown
        if _shown is self:
            _shown = None
            # A terminal that has become narrower has wrapped the lines.
            above = sum(max(-(-width // columns(self.stream)), 1) for width in self.widths) - 1
            self.stream.write("\r" + (f"\x1b[{above}A" if above else "") + "\x1b[J")
            self.stream.flush()


def _height(stream: TextIO) -> int:
    """Lines of the terminal; 24 if there is none. `LINES` overrides it."""
    if not os.environ.get("LINES", "").isdecimal():
        with contextlib.suppress(OSError, ValueError):
            return max(os.get_terminal_size(stream.fileno()).lines, 1)
    return max(shutil.get_terminal_size((DEFAULT_COLUMNS, 24)).lines, 1)


_shown: LiveLine | None = None
"""The line that is on the terminal now."""


def clear_shown() -> None:
    """Removes the live line, if there is one: other text is about to be written."""
    if _shown is not None:
        _shown.clear()
