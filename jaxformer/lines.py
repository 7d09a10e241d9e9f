"""Text in and out, line by line: one line of input is one line of output, and a file is written whole or not at all."""

from __future__ import annotations

import os
import sys
from typing import Iterator, TextIO

from jaxformer.config import ConfigError


class source:
    """The input of `decode`: a file or stdin as UTF-8, lines ended by newline only."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __enter__(self) -> TextIO:
        if not self.path:
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


class sink:
    """The output of `decode`: stdout, or a file that appears only when it is complete."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __enter__(self) -> TextIO:
        self.file = None
        if not self.path:
            return sys.stdout
        if os.path.isdir(self.path):
            raise ConfigError(f"--output: got {self.path!a} (a folder), expected a file")
        self.temporary = f"{self.path}.{os.getpid()}.tmp"
        try:
            self.file = open(self.temporary, "w", encoding="utf-8", newline="\n")
        except OSError as error:
            raise ConfigError(f"--output: got {self.path!a} ({error.strerror}), expected a writable file") from None
        return self.file

    def __exit__(self, kind: object, *error: object) -> None:
        if self.file is None:
            return
        self.file.close()
        if kind is None:
            os.replace(self.temporary, self.path)
        else:
            os.unlink(self.temporary)


def chunks(source: TextIO, size: int, name: str) -> Iterator[list[str]]:
    """Lines without their ends, `size` at a time."""
    chunk: list[str] = []
    count = 0
    while True:
        try:
            line = source.readline()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{name}: got bytes that are not UTF-8 after line {count} ({error.reason})") from None
        if line:
            count += 1
            chunk.append(line.removesuffix("\n").removesuffix("\r"))
        if chunk and (not line or len(chunk) >= size):
            yield chunk
            chunk = []
        if not line:
            return


def one_line(text: str) -> str:
    """`text` with its line ends spelled out, so that output stays aligned with input."""
    return text.replace("\r", "\\r").replace("\n", "\\n")
