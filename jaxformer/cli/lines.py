"""Text input and output of `decode`: one line of input is one line of output, and output files are atomic."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Generator, Iterator
from typing import Protocol, TextIO

from jaxformer.errors import ConfigError
from jaxformer.runtime import files

MAX_LINE_CHARACTERS = 2**24
"""A longer line has no end, as in /dev/zero, or the text has lost its newlines."""


class Output(Protocol):
    """A text stream that can be written."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


@contextlib.contextmanager
def open_input(path: str) -> Generator[TextIO]:
    """Opens a file, or stdin without a path, as UTF-8 text whose lines end at newlines only.

    Raises:
      ConfigError: the file cannot be opened, or stdin is closed.
    """
    if not path:
        if sys.stdin is None:
            raise ConfigError("--input: got none and a closed stdin, expected text; give --input=FILE")
        if isinstance(sys.stdin, io.TextIOWrapper):
            # Characters such as form feed and U+2028 end no line.
            sys.stdin.reconfigure(encoding="utf-8", errors="strict", newline="\n")
        yield sys.stdin
        return
    try:
        file = open(path, encoding="utf-8", newline="\n")  # noqa: SIM115 (only opening it is a user's error)
    except OSError as error:
        raise ConfigError(f"--input: got {path!a} ({error.strerror}), expected a text file") from None
    with file:
        yield file


@contextlib.contextmanager
def open_output(path: str) -> Generator[Output]:
    """Opens stdout without a path, a device or pipe, or a file that appears only when it is complete.

    Raises:
      ConfigError: the file cannot be created.
      StorageError: it cannot be written to the end.
    """
    if not path:
        yield sys.stdout
        return
    if os.path.isdir(path):
        raise ConfigError(f"--output: got {path!a} (a folder), expected a file")
    output = None
    try:
        with files.open_atomic(path) as file:
            output = _OutputFile(file, path)
            yield output
            output.flush()
    except OSError as error:
        if output is None:
            raise ConfigError(f"--output: got {path!a} ({error.strerror}), expected a writable file") from None
        raise _write_error(path, error) from None


class _OutputFile:
    """A file whose errors name it."""

    def __init__(self, file: TextIO, path: str) -> None:
        self.file, self.path = file, path

    def write(self, text: str, /) -> None:
        try:
            self.file.write(text)
        except OSError as error:
            raise _write_error(self.path, error) from None

    def flush(self) -> None:
        try:
            self.file.flush()
        except OSError as error:
            raise _write_error(self.path, error) from None


def _write_error(path: str, error: OSError) -> Exception:
    return files.OutputClosed() if error.errno == errno.EPIPE else files.write_error(f"--output {path!a}", error)


def read_chunks(source: TextIO, size: int, name: str) -> Iterator[list[str]]:
    """Lists of up to `size` lines without their ends. A text without any newline is split at carriage returns.

    Args:
      name: of the source, for errors.

    Raises:
      ConfigError: the text is not UTF-8, or a line is longer than `MAX_LINE_CHARACTERS`.
    """
    chunk: list[str] = []
    count = 0
    while True:
        try:
            line = source.readline(MAX_LINE_CHARACTERS + 1)
        except UnicodeDecodeError as error:
            raise ConfigError(f"{name}: got bytes that are not UTF-8 after line {count} ({error.reason})") from None
        if len(line) > MAX_LINE_CHARACTERS and not line.endswith("\n"):
            got = f"{name}: got a line of more than {MAX_LINE_CHARACTERS:,} characters after line {count}"
            raise ConfigError(f"{got}, expected a text with newlines")
        if line:
            line = line if count else line.removeprefix("\ufeff")
            has_no_newline = not count and not line.endswith("\n")
            text = line.removesuffix("\r") if has_no_newline else line.removesuffix("\n").removesuffix("\r")
            chunk += text.split("\r") if has_no_newline else [text]
            count += 1
        while chunk and (not line or len(chunk) >= size):
            yield chunk[:size]
            chunk = chunk[size:]
        if not line:
            return


def escape_line_ends(text: str) -> str:
    """`text` with its line ends as escapes, so that each result stays on one line."""
    return text.replace("\r", "\\r").replace("\n", "\\n")
