"""Threads of packages that do not come back: they are left behind, and the process ends without them."""

from __future__ import annotations

import os
import sys
import threading
from typing import NoReturn

_abandoned: list[threading.Thread] = []


def abandon(thread: threading.Thread) -> None:
    """Notes that nobody waits for `thread` any more."""
    _abandoned.append(thread)


def exit_process(code: int) -> NoReturn:
    """Ends the process with `code`: at once if a thread that was abandoned still runs.

    The exit handlers of the package that it runs, and Python's own, might wait for what the thread waits for.
    """
    if not any(thread.is_alive() for thread in _abandoned):
        sys.exit(code)
    distributed = sys.modules.get("jax.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.shutdown()  # the other processes wait for it
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code)
