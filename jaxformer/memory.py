"""How the C library hands out memory on Linux: worth a third of a training step on a CPU.

XLA allocates the large arrays of a step anew each time. glibc maps every large block from the kernel and gives it back
when it is freed, so each step faults all of its pages in again, 4 KiB at a time. Kept blocks on huge pages end that.
The settings are read when a process starts and only then, hence the second start.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping

VARIABLE = "GLIBC_TUNABLES"
SETTINGS = {
    "glibc.malloc.hugetlb": "1",  # huge pages where the kernel offers them (madvise)
    "glibc.malloc.mmap_threshold": str(2**35),  # large blocks come from the heap ...
    "glibc.malloc.trim_threshold": str(2**35),  # ... and stay in it
    # One heap: others are of 64 MiB, and what is larger is mapped for them and given back each time.
    "glibc.malloc.arena_max": "1",
}
MARKER = "jaxformer_restarted"
"""The option `-X` of the interpreter that says that this is the second start."""
COMMANDS = frozenset({"train", "evaluate", "decode", "experiment"})
"""The commands that compute enough to be started again."""


def tunables(environment: Mapping[str, str]) -> str:
    """The value of `VARIABLE` with `SETTINGS` added; what is set already is kept."""
    given = [entry for entry in environment.get(VARIABLE, "").split(":") if entry]
    names = {entry.partition("=")[0] for entry in given}
    return ":".join(given + [f"{name}={value}" for name, value in SETTINGS.items() if name not in names])


def keep_pages() -> None:
    """Replaces this process by the same command with `SETTINGS`, once, and only on Linux.

    Nothing has been done yet, so nothing is lost; process id, arguments, streams and environment stay. The second start
    is told by an interpreter option, since `VARIABLE` may not arrive there: some containers and programs with the
    rights of another user take it out of the environment. Then, and where no program may be started, the command goes
    on without the settings.
    """
    if not sys.platform.startswith("linux") or len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        return
    wanted = tunables(os.environ)
    if os.environ.get(VARIABLE) != wanted and sys.executable and MARKER not in sys._xoptions:
        command = [sys.executable, "-X", MARKER, *sys.orig_argv[1:]]
        with contextlib.suppress(OSError):
            os.execve(sys.executable, command, {**os.environ, VARIABLE: wanted})
