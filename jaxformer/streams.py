"""Standard streams that may be closed, full, or read by nobody.

A log that nobody reads stops nothing: what cannot be written to it is dropped. Output is another matter: a command
whose result is its stdout fails if that cannot be written, except where the reader has seen enough and left (`head`).
"""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from typing import Any

from jaxformer import redaction
from jaxformer.files import ReaderLeft, write_error


class _Descriptor(io.FileIO):
    """A standard stream's descriptor; `is_output` says whether what it cannot write is an error or is dropped."""

    def __init__(self, number: int, is_output: bool) -> None:
        super().__init__(number, "w", closefd=False)
        self.is_output = is_output
        self.failed = False

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if self.failed:
            return size
        try:
            written = super().write(data)
        except OSError as error:
            if not self.is_output:
                if error.errno != errno.ENOSPC:  # a full disk may get room again; the rest does not come back
                    self.failed = True
                return size
            self.failed = True  # what is left in buffers is dropped, now and when the process ends
            if error.errno == errno.EPIPE:
                raise ReaderLeft from None
            raise write_error("stdout", error) from None
        return size if written is None and not self.is_output else written


class _Text(io.TextIOWrapper):
    """A stream for people: without secrets."""

    def write(self, text: str) -> int:
        super().write(redaction.text(text))
        return len(text)


def fill_closed() -> None:
    """Opens /dev/null in place of standard descriptors that are closed: else the next file to be opened gets the
    number, and is written to by whatever logs."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)
            if null != number:
                os.dup2(null, number)
                os.close(null)


def install(output: bool) -> None:
    """Sets `sys.stdout` and `sys.stderr` to streams that fail as this module says.

    Args:
      output: what goes to stdout is the result of the command, not a log of it.
    """
    closed = sys.stdout is None
    fill_closed()
    for name, number, kind in (("stdout", 1, io.TextIOWrapper), ("stderr", 2, _Text)):
        old = getattr(sys, name)
        encoding = "utf-8" if old is None else old.encoding
        errors = "backslashreplace" if old is None or name == "stderr" else old.errors
        descriptor = _Descriptor(number, output and number == 1)
        lines = number == 2 or descriptor.isatty()
        setattr(sys, name, kind(io.BufferedWriter(descriptor), encoding, errors, "\n", line_buffering=lines))
    sys.excepthook = _report
    if closed and output:
        raise write_error("stdout", OSError(errno.EBADF, "a closed stream"))


def _report(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """The traceback of a crash, in one piece: a secret that is split between writes would not be seen."""
    sys.stderr.write("".join(traceback.format_exception(kind, error, trace)))
    sys.stderr.flush()
