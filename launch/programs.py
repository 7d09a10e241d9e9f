"""Runs other programs, waits and tells the time: what a launcher does to the world, in one place.

Launchers that wait for machines get a `Programs`, so that tests can give them one that runs nothing and never waits.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import launch


class Result(NamedTuple):
    """Exit code and output of a program."""

    code: int
    out: str
    err: str


class Failure(Exception):
    """A launch that cannot go on: one line for the user, and the exit code."""

    def __init__(self, line: str, code: int = launch.WRONG_INPUT) -> None:
        super().__init__(line)
        self.code = code


def exit_code_of(action: Callable[[], int]) -> int:
    """The result of `action`; after a `Failure`, whose line is printed, its code, and after Ctrl-C `INTERRUPTED`."""
    try:
        return action()
    except Failure as failure:
        print(f"error: {failure}", file=sys.stderr)
        return failure.code
    except KeyboardInterrupt:
        return launch.INTERRUPTED


class Programs:
    """Runs programs of this machine."""

    def call(self, command: Sequence[str], standard_input: str | None = None) -> Result:
        """Runs a command and returns its output.

        Raises:
          Failure: there is no such program.
        """
        try:
            done = subprocess.run(
                command, input=standard_input, stdin=None if standard_input is not None else subprocess.DEVNULL,
                capture_output=True, text=True, errors="replace", check=False,
            )  # fmt: skip
        except FileNotFoundError:
            raise Failure(f"{command[0]}: no such program here; use --dry-run to see the commands") from None
        return Result(done.returncode, done.stdout, done.stderr)

    def run(self, command: Sequence[str]) -> int:
        """Runs a command that reads and prints for itself, and returns its exit code.

        Raises:
          Failure: there is no such program.
        """
        try:
            return subprocess.run(command, check=False).returncode
        except FileNotFoundError:
            raise Failure(f"{command[0]}: no such program here; use --dry-run to see the commands") from None

    def stream(self, command: Sequence[str], read: Callable[[bytes], None]) -> int:
        """Runs a command, passes its standard output to `read` as it comes, and returns the exit code."""
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
            if process.stdout is not None:
                while data := os.read(process.stdout.fileno(), 65536):
                    read(data)
        return process.returncode

    def sleep(self, seconds: float) -> None:
        """Waits."""
        time.sleep(seconds)

    def clock(self) -> float:
        """Seconds since an arbitrary moment."""
        return time.monotonic()

    def stamp(self) -> str:
        """The date and time as a word."""
        return time.strftime("%Y%m%d-%H%M%S")

    def say(self, line: str) -> None:
        """Prints a line of the launcher."""
        print(f"launch: {line}", flush=True)

    def show(self, data: bytes) -> None:
        """Prints bytes of the run's log."""
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
