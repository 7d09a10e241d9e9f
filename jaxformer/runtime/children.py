"""Processes that this one starts to share its work."""

from __future__ import annotations

import multiprocessing
import os
import threading

PARALLELISM = "TOKENIZERS_PARALLELISM"
"""Variable by which the `tokenizers` library uses one thread: there is a process for each core."""


def follow_parent() -> None:
    """Ends this process, one of `multiprocessing`, when its parent has ended, even if that was killed."""
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, name="follows its parent", daemon=True).start()
