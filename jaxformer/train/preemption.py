"""Early ends of a run: by a signal or a deadline, agreed between processes, or by the watchdog.

    SIGTERM, SIGINT, SIGHUP, SIGUSR2, deadline   the current step ends, the state is saved, exit code 143
    a second signal                              the process ends at once, with the shell's code for that signal
    no step for `config.train.watchdog`          the stacks of all threads are written, exit code 75

SIGHUP (the terminal is gone) is left alone if it is ignored, as under nohup. In an interactive session, a notebook or a
prompt, a second Ctrl-C raises KeyboardInterrupt, which ends the run and not the session.

The launchers restart a run that ended with 143 or 75.
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

from jaxformer.runtime import exit_codes

EXIT_PREEMPTED = exit_codes.PREEMPTED
EXIT_STALLED = exit_codes.STALLED

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)

AGREEMENT_SECONDS = 5.0
"""Seconds between two agreements on stopping, if there are several processes."""
MAX_AGREEMENT_STEPS = 1000
"""Steps between two agreements are at most so many."""


class PreemptionListener:
    """Listens for signals and the deadline; tells all processes at the same step to stop.

    It handles signals while it is entered, on the main thread: Python delivers them to no other thread.

    A signal may reach one process of several, and each sees it at its own step. So the processes exchange what they
    have seen, at steps agreed on before, about every `AGREEMENT_SECONDS` by the clock of the first process.

    Args:
      deadline: minutes from now; None: no deadline.
    """

    def __init__(self, deadline: float | None) -> None:
        self.deadline = time.monotonic() + 60.0 * deadline if deadline is not None else float("inf")
        self.signal = 0
        self.agreed_step, self.agreed_time = 0, time.monotonic()
        self.next_step = -1
        self.previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> PreemptionListener:
        if not self.is_off_main_thread:
            handled = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
            self.previous_handlers = {number: signal.signal(number, self._on_signal) for number in handled}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.previous_handlers.items():
            # None: a handler that was not installed from Python, which Python cannot restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @property
    def is_off_main_thread(self) -> bool:
        """True on a thread that gets no signals."""
        return threading.current_thread() is not threading.main_thread()

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.signal and number == signal.SIGINT and _is_interactive():
            raise KeyboardInterrupt
        if self.signal:
            os._exit(128 + number)  # not sys.exit, which would wait for a save in progress
        self.signal = number

    def should_stop(self, step: int) -> bool:
        """True if the run has to stop after `step`; the same on every process. All of them call it at every step."""
        requested = bool(self.signal) or time.monotonic() > self.deadline
        if jax.process_count() == 1:
            return requested
        if step < self.next_step:
            return False
        seconds = (time.monotonic() - self.agreed_time) / max(step - self.agreed_step, 1)
        self.agreed_step, self.agreed_time = step, time.monotonic()
        interval = min(max(int(AGREEMENT_SECONDS / max(seconds, 1e-3)), 1), MAX_AGREEMENT_STEPS)
        interval = interval if self.next_step >= 0 else 1
        gathered = multihost_utils.process_allgather(np.array([requested, interval], np.int32))
        self.next_step = step + int(gathered[0, 1])
        return bool(gathered[:, 0].any())


def _is_interactive() -> bool:
    """True in a notebook's kernel or at a prompt, which must outlive the run."""
    shell = sys.modules.get("IPython")
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or (shell is not None and shell.get_ipython() is not None)


class Watchdog:
    """Ends the process if there is no heartbeat for too long, as when a collective waits for a lost process.

    Args:
      minutes: longest time without a heartbeat. It must exceed the longest compilation, evaluation batch and decoding.
        None: no limit.
      directory: gets `stalled.txt` with the stacks of all threads. They go to stderr too.
    """

    def __init__(self, minutes: float | None, directory: Path) -> None:
        self.limit = 60.0 * minutes if minutes is not None else float("inf")
        self.path = directory / "stalled.txt"
        self.last = time.monotonic()
        self.ended = threading.Event()

    def __enter__(self) -> Watchdog:
        self.last = time.monotonic()
        if self.limit < float("inf"):
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.ended.set()

    def heartbeat(self) -> None:
        """Records that the run makes progress."""
        self.last = time.monotonic()

    def _watch(self) -> None:
        while not self.ended.wait(min(self.limit / 4, 5.0)):
            if time.monotonic() - self.last > self.limit:
                try:
                    # stderr may be absent, closed or on a full disk
                    with contextlib.suppress(OSError, ValueError, RuntimeError):
                        print(f"\nno progress for {self.limit / 60:g} minutes; stacks in {self.path}", file=sys.stderr)
                        if sys.__stderr__ is not None:
                            faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
                    with self.path.open("w") as file:
                        faulthandler.dump_traceback(file=file, all_threads=True)
                finally:
                    os._exit(EXIT_STALLED)
