"""Exit codes of the program. The launchers, which import nothing of the package, repeat PREEMPTED and STALLED."""

from __future__ import annotations

DONE = 0
CRASHED = 1
"""A crash, or the disk refused."""

WRONG_INPUT = 2
"""The user's config or input is wrong."""

STALLED = 75
"""A run hung and was ended by its watchdog; the same command continues from its last checkpoint."""

INTERRUPTED = 130
"""Ctrl-C in a command that saves nothing."""

PREEMPTED = 143
"""A run was asked to stop and has saved; the same command continues."""
