"""Text in and out, line by line: one line of input is one line of output, and a file is written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import Iterator, TextIO

from jaxformer import files
from jaxformer.config import ConfigError

MAX_LINE = 2**24
"""Characters of a line: what is longer has no end, as /dev/zero, or has lost its newlines."""


class source:
    """The input of `decode`: a file or stdin as UTF-8, lines ended by newline only."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __enter__(self) -> TextIO:
        if not self.path:
            if sys.stdin is None:
                raise ConfigError("--input: got none and a closed stdin, expected text; give --input=FILE")
            # A line that reads like several (form feeds, U+2028) is one: only "\n" ends it.
            if hasattr(sys.stdin, "reconfigure"):
                sys.stdin.reconfigure(encoding="utf-8", errors="strict", newline="\n")
            self.file = None
            return sys.stdin
        try:
            self.file = open(self.path, encoding="utf-8", newline="\n")
        except OSError as error:
            raise ConfigError(f"--input: got {self.path!a} ({error.strerror}), expected a text file") from None
        return self.file

    def __exit__(self, *error: object) -> None:
        if self.file is not None:
            self.file.close()


@contextlib.contextmanager
def sink(path: str) -> Iterator[TextIO]:
    """The output of `decode`: stdout; a file that appears only when it is complete; or a device or pipe.

    Raises:
      ConfigError: there can be no such file.
      StorageError: it cannot be written to the end.
    """
    if not path:
        yield sys.stdout
        return
    if os.path.isdir(path):
        raise ConfigError(f"--output: got {path!a} (a folder), expected a file")
    output = None
    try:
        with files.replacing(path) as file:
            output = _Output(file, path)
            yield output
            output.flush()
    except OSError as error:
        if output is None:
            raise ConfigError(f"--output: got {path!a} ({error.strerror}), expected a writable file") from None
        raise _refusal(path, error) from None


class _Output:
    """A file whose errors name it."""

    def __init__(self, file: TextIO, path: str) -> None:
        self.file, self.path = file, path

    def write(self, text: str) -> None:
        try:
            self.file.write(text)
        except OSError as error:
            raise _refusal(self.path, error) from None

    def flush(self) -> None:
        try:
            self.file.flush()
        except OSError as error:
            raise _refusal(self.path, error) from None


def _refusal(path: str, error: OSError) -> Exception:
    return files.ReaderLeft() if error.errno == errno.EPIPE else files.write_error(f"--output {path!a}", error)


def chunks(source: TextIO, size: int, name: str) -> Iterator[list[str]]:
    """Lines without their ends, `size` at a time. Of a text without any "\\n" they end at "\\r" (old Mac files)."""
    chunk: list[str] = []
    count = 0
    while True:
        try:
            line = source.readline(MAX_LINE + 1)
        except UnicodeDecodeError as error:
            raise ConfigError(f"{name}: got bytes that are not UTF-8 after line {count} ({error.reason})") from None
        if len(line) > MAX_LINE and not line.endswith("\n"):
            what = f"{name}: got a line of more than {MAX_LINE:,} characters after line {count}"
            raise ConfigError(f"{what}, expected a text with newlines")
        if line:
            line = line if count else line.removeprefix("\ufeff")
            only = not count and not line.endswith("\n")
            chunk += line.removesuffix("\r").split("\r") if only else [line.removesuffix("\n").removesuffix("\r")]
            count += 1
        while chunk and (not line or len(chunk) >= size):
            yield chunk[:size]
            chunk = chunk[size:]
        if not line:
            return


def one_line(text: str) -> str:
    """`text` with its line ends spelled out, so that output stays aligned with input."""
    return text.replace("\r", "\\r").replace("\n", "\\n")
