"""Settings of the C library's memory allocator on Linux; they save a third of a training step on a CPU.

XLA allocates the large arrays of a step anew each time. By default glibc maps every large block from the kernel and
unmaps it when it is freed, so each step faults all of its pages in again, 4 KiB at a time. With the settings glibc
reuses freed blocks, on huge pages. It reads them only when a process starts, so the process must be restarted.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Callable, Mapping

VARIABLE = "GLIBC_TUNABLES"
SETTINGS = {
    "glibc.malloc.hugetlb": "1",  # huge pages where the kernel offers them (madvise)
    "glibc.malloc.mmap_threshold": str(2**35),  # large blocks come from the heap ...
    "glibc.malloc.trim_threshold": str(2**35),  # ... and stay in it
    # One heap: additional heaps have 64 MiB, and larger blocks are mapped for them and unmapped each time.
    "glibc.malloc.arena_max": "1",
}
MARKER = "jaxformer_restarted"
"""The option `-X` of the interpreter that marks a restarted process."""
GARBAGE_THRESHOLD = 50_000
"""New objects after which Python looks for reference cycles."""
COMMANDS = frozenset({"train", "evaluate", "decode", "serve", "experiment"})
"""Commands that compute enough to be restarted."""

EARLY_STEPS, GROWTH = 8, 1.25
"""Steps after each of which free pages go back to the kernel; growth of resident memory at which they do later."""


def tunables(environment: Mapping[str, str]) -> str:
    """Value of `VARIABLE` with `SETTINGS` added; settings that it already has are kept."""
    entries = [entry for entry in environment.get(VARIABLE, "").split(":") if entry]
    names = {entry.partition("=")[0] for entry in entries}
    return ":".join(entries + [f"{name}={value}" for name, value in SETTINGS.items() if name not in names])


def restart_with_tunables() -> None:
    """Replaces this process by the same command with `SETTINGS`, once, and only on Linux.

    Call it before any work is done. Process id, arguments, streams and environment stay. An interpreter option marks
    the restarted process, since `VARIABLE` may not arrive there: some containers and setuid programs remove it. Then,
    and if no program may be started, the command continues without the settings.
    """
    if not sys.platform.startswith("linux") or len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        return
    value = tunables(os.environ)
    if os.environ.get(VARIABLE) != value and sys.executable and MARKER not in sys._xoptions:
        command = [sys.executable, "-X", MARKER, *sys.orig_argv[1:]]
        with contextlib.suppress(OSError):
            os.execve(sys.executable, command, {**os.environ, VARIABLE: value})


def collect_garbage_rarely() -> None:
    """Makes Python look for reference cycles after 50,000 new objects, not 700.

    Imports and tracing make millions of objects that stay: looking at them again and again is 8 % of a command's start.
    Arrays are freed without this, when their last reference goes.
    """
    gc.set_threshold(GARBAGE_THRESHOLD, *gc.get_threshold()[1:])


class HeapTrimmer:
    """Gives free pages of the heap back to the kernel after some steps of a training.

    A step's temporary arrays are one large block, aligned to 64 bytes. The C library often cannot put the next step's
    into the same place, so that a heap comes to hold several copies of a step's temporary arrays, all but one of them
    free. Their pages, and what the compiler left, are returned after each of the first steps. Later they are returned
    when resident memory exceeds `GROWTH` times what it was after the first step that followed the last return, when the
    heap held one copy. They are not returned at every step: a page that is used again has to be cleared by the kernel,
    and where it had been idle a virtual machine's host may have to find it again, which takes ten times as long.

    Args:
      platform: that of the devices: accelerators have the temporary arrays in a memory of their own, and nothing is
        returned.
      trim: returns the free pages; None: `malloc_trim` of the C library, and nothing where there is none.
      resident: resident memory of the process in any unit; None: pages, from /proc, and 0 where there is no such file.
    """

    def __init__(
        self, platform: str, trim: Callable[[], object] | None = None, resident: Callable[[], int] | None = None
    ) -> None:
        self.steps, self._on_cpu, self._usual = 0, platform == "cpu", 0
        self._trim, self._resident = trim or _malloc_trim, resident or _resident_pages

    def after_step(self) -> None:
        """Counts a step, and returns free pages where that is due.

        Call it when the step was started, not when it has ended: what it holds then stays.
        """
        self.steps += 1
        if not self._on_cpu:
            return
        if self.steps <= EARLY_STEPS:
            self._trim()
        elif self._usual == 0:
            self._usual = self._resident()
        elif self._resident() > GROWTH * self._usual:
            self._trim()
            self._usual = 0


def _resident_pages() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1])
    except OSError:  # another system than Linux
        return 0


def _malloc_trim() -> None:
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
