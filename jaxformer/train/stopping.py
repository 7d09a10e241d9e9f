"""When a run ends early: a signal or a deadline, agreed between processes; and when it hangs.

    SIGTERM, SIGINT, SIGHUP, SIGUSR2, deadline   the step in progress ends, all is saved, exit code 143
    a second signal                              the process ends at once, with the shell's code for that signal
    no step for `config.train.watchdog`          the stacks of all threads are written down, exit code 75

SIGHUP (the terminal is gone) is left alone where it is ignored: under nohup. In an interactive session, a notebook or a
prompt, a second Ctrl-C raises KeyboardInterrupt, which ends the run and not the session.

The launchers start a run again that ended with 143 or 75.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

PREEMPTED = 143
STALLED = 75

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)

AGREE = 5.0
"""Seconds between two questions whether a process was asked to stop, where there are several."""


class Stop:
    """Listens for signals while it is entered, on the main thread: Python gives other threads none.

    A signal may reach one process of several, and each sees it at its own step. So the processes ask each other, at
    steps that they have agreed on before, about every `AGREE` seconds by the clock of the first.

    Args:
      deadline: minutes from now; None: none.
    """

    def __init__(self, deadline: float | None) -> None:
        self.end = time.monotonic() + 60.0 * deadline if deadline is not None else float("inf")
        self.signal = 0
        self.step, self.time = 0, time.monotonic()
        self.next = -1
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if not self.deaf:
            heard = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
            self.previous = {number: signal.signal(number, self._note) for number in heard}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.previous.items():
            # None: a handler that was not installed from Python, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @property
    def deaf(self) -> bool:
        """True off the main thread, where no signal can be heard."""
        return threading.current_thread() is not threading.main_thread()

    def _note(self, number: int, frame: Any) -> None:
        if self.signal and number == signal.SIGINT and _is_interactive():
            raise KeyboardInterrupt
        if self.signal:
            os._exit(128 + number)  # not sys.exit, which would wait for what is being saved
        self.signal = number

    def agreed(self, step: int) -> bool:
        """Whether to stop after `step`, with the same answer on every process. All of them call it at every step."""
        asked = bool(self.signal) or time.monotonic() > self.end
        if jax.process_count() == 1:
            return asked
        if step < self.next:
            return False
        seconds = (time.monotonic() - self.time) / max(step - self.step, 1)
        self.step, self.time = step, time.monotonic()
        pause = min(max(int(AGREE / max(seconds, 1e-3)), 1), 1000) if self.next >= 0 else 1
        told = multihost_utils.process_allgather(np.array([asked, pause], np.int32))
        self.next = step + int(told[0, 1])
        return bool(told[:, 0].any())


def _is_interactive() -> bool:
    """True in a notebook's kernel or at a prompt, which must outlive the run."""
    shell = sys.modules.get("IPython")
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or (shell is not None and shell.get_ipython() is not None)


class Watchdog:
    """Ends the process when nothing has happened for too long: a collective whose partner is gone, a hung disk.

    Args:
      minutes: without a `beat`; longer than the longest compilation, evaluation batch and decoding. None: no watching.
      folder: gets `stalled.txt`, the stacks of all threads, which go to stderr too.
    """

    def __init__(self, minutes: float | None, folder: Path) -> None:
        self.limit = 60.0 * minutes if minutes is not None else float("inf")
        self.path = folder / "stalled.txt"
        self.last = time.monotonic()
        self.ended = threading.Event()

    def __enter__(self) -> Watchdog:
        self.last = time.monotonic()
        if self.limit < float("inf"):
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.ended.set()

    def beat(self) -> None:
        """Something has happened."""
        self.last = time.monotonic()

    def _watch(self) -> None:
        while not self.ended.wait(min(self.limit / 4, 5.0)):
            if time.monotonic() - self.last > self.limit:
                try:
                    with contextlib.suppress(OSError, ValueError, RuntimeError):  # a stderr that is closed or full
                        print(f"\nno progress for {self.limit / 60:g} minutes; stacks in {self.path}", file=sys.stderr)
                        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
                    with self.path.open("w") as file:
                        faulthandler.dump_traceback(file=file, all_threads=True)
                finally:
                    os._exit(STALLED)
