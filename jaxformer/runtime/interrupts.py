"""Ctrl-C that is never lost.

Python raises `KeyboardInterrupt` wherever the main thread happens to be. In a finaliser or a garbage collection
callback, such as the one that jax registers, exceptions are printed and dropped, and the process would go on as if
nothing had been pressed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

RETRY_SECONDS = 0.05
"""Seconds after which an interrupt that was dropped is delivered again."""


def install() -> None:
    """Makes SIGINT raise `KeyboardInterrupt` until it is not dropped. A run that saves first has its own handler."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    report = sys.unraisablehook

    def deliver_again(dropped: UnraisableHookArgs) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            report(dropped)
            return
        again = threading.Timer(RETRY_SECONDS, os.kill, (os.getpid(), signal.SIGINT))
        again.daemon = True
        again.start()

    sys.unraisablehook = deliver_again
