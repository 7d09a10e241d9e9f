"""Standard streams that may be closed, full, or without a reader.

A failed write to a log is dropped, so that the command continues. If stdout is the result of the command, a failed
write is an error, except if the reader has closed it (`head`).
"""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from types import TracebackType
from typing import TYPE_CHECKING

from jaxformer.runtime import secrets, terminal
from jaxformer.runtime.files import OutputClosed, write_error

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Descriptor(io.FileIO):
    """A standard stream's descriptor.

    Attributes:
      is_output: a failed write is an error; else its data is dropped.
      failed: later writes are dropped, also those of buffers that are flushed when the process ends.
    """

    def __init__(self, number: int, is_output: bool) -> None:
        super().__init__(number, "w", closefd=False)
        self.is_output = is_output
        self.failed = False

    def write(self, data: ReadableBuffer) -> int:
        size = memoryview(data).nbytes
        if self.failed:
            return size
        try:
            written = super().write(data)
        except OSError as error:
            if not self.is_output:
                if error.errno != errno.ENOSPC:  # a full disk may get space again; other errors are permanent
                    self.failed = True
                return size
            self.failed = True
            if error.errno == errno.EPIPE:
                raise OutputClosed from None
            raise write_error("stdout", error) from None
        # None, although its type says int: a non-blocking pipe is full. The buffer above writes output again.
        return size if written is None and not self.is_output else written


class _Text(io.TextIOWrapper):
    """A text stream before whose text the live line of the terminal goes, so that the two do not mix."""

    def write(self, text: str) -> int:
        terminal.clear_shown()
        return super().write(text)


class _RedactedText(_Text):
    """A text stream for people, without secrets."""

    def write(self, text: str) -> int:
        super().write(secrets.redact(text))
        return len(text)


def open_closed_descriptors() -> None:
    """Opens /dev/null in place of closed standard descriptors.

    Otherwise the next opened file gets that number, and log messages are written into it.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)
            if null != number:
                os.dup2(null, number)
                os.close(null)


def install(is_output: bool) -> None:
    """Replaces `sys.stdout` and `sys.stderr` by streams that handle failed writes as this module says.

    Args:
      is_output: stdout is the result of the command, not its log.
    """
    is_closed = sys.stdout is None
    open_closed_descriptors()
    for name, number, stream_type in (("stdout", 1, _Text), ("stderr", 2, _RedactedText)):
        old = getattr(sys, name)
        encoding = "utf-8" if old is None else old.encoding
        errors = "backslashreplace" if old is None or name == "stderr" else old.errors
        descriptor = _Descriptor(number, is_output and number == 1)
        by_line = number == 2 or descriptor.isatty()
        buffer = io.BufferedWriter(descriptor)
        setattr(sys, name, stream_type(buffer, encoding, errors, "\n", line_buffering=by_line))
    sys.excepthook = _print_traceback
    if is_closed and is_output:
        raise write_error("stdout", OSError(errno.EBADF, "a closed stream"))


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints a crash with a single write: redaction would miss a secret that is split between two."""
    sys.stderr.write("".join(traceback.format_exception(kind, error, trace)))
    sys.stderr.flush()
