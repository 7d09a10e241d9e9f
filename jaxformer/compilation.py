"""Compiled programs outlive the process: a second start of the same run loads what the first one compiled.

JAX keeps them where JAX_COMPILATION_CACHE_DIR says. Whoever sets that has chosen; otherwise they are kept beside the
prepared data, apart for every kind of processor, since a program for a CPU is made of one kind's instructions, and only
in a folder that nobody else can write to: what lies there is run. JAX_ENABLE_COMPILATION_CACHE=0 turns it off.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import sys
from collections.abc import MutableMapping
from pathlib import Path

from jaxformer import memory, places
from jaxformer.config import ConfigError

FOLDER = "JAX_COMPILATION_CACHE_DIR"
SWITCH = "JAX_ENABLE_COMPILATION_CACHE"
SETTINGS = {
    # JAX keeps what took a second to compile. Drawing parameters takes half of one, and a start compiles several such.
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05",
    "JAX_COMPILATION_CACHE_MAX_SIZE": str(2**32),  # bytes: what has not been used for longest goes first
}
ACCELERATORS = {"/dev/nvidia0": "gpu", "/dev/accel0": "tpu", "/dev/vfio/0": "tpu"}
"""Device files by which a system shows an accelerator, and the extra that makes JAX use it."""


def keep_programs() -> None:
    """Says to JAX, which must not have been imported yet, where to keep programs; for commands that compute."""
    if len(sys.argv) > 1 and sys.argv[1] in memory.COMMANDS and "jax" not in sys.modules:
        try:
            add(os.environ, processor(), accelerated())
            if os.environ.get(FOLDER, "").startswith(str(places.cache())):
                mend(Path(os.environ[FOLDER]))
        except ConfigError:  # whoever needs the prepared data says it
            os.environ[SWITCH] = "0"


def add(environment: MutableMapping[str, str], kind: str, accelerated: bool) -> None:
    """Adds to `environment` what it does not say itself.

    Args:
      kind: of processor, as `processor` describes it.
      accelerated: a TPU or GPU is there, whose programs are the ones that count.
    """
    if FOLDER in environment or not (accelerated or takes_back(kind)):
        return
    if environment.get(SWITCH, "").lower() in ("0", "false", "no", "off"):
        return
    folder = places.cache() / "programs" / hashlib.sha256(kind.encode()).hexdigest()[:12]
    with contextlib.suppress(OSError):
        (places.cache() / "programs").mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    problem = places.distrust(folder)
    if problem:
        environment[SWITCH] = "0"  # also for the process that takes this one's place: it is said once
        refused = f"warning: compiled programs are neither loaded nor kept: {problem}"
        with contextlib.suppress(OSError):
            print(f"{refused}; close it (chmod go-w), or set {FOLDER} to a folder that you vouch for", file=sys.stderr)
        return
    environment[FOLDER] = str(folder)
    for name, value in SETTINGS.items():
        environment.setdefault(name, value)


def mend(folder: Path) -> None:
    """Removes what processes that were killed have half written, unless another one is writing right now.

    JAX writes a program, then when it was used last. It would take half a program for a whole one that cannot be read,
    leave it there and complain at every start; one without a time keeps it from storing any other.
    """
    if not (folder / ".lockfile").exists():
        return
    with contextlib.suppress(OSError), open(folder / ".lockfile", "a") as lock:  # in use, or not ours to write
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for program in folder.glob("*-cache"):
            if not program.with_name(program.name.removesuffix("-cache") + "-atime").exists():
                program.unlink()


def takes_back(kind: str) -> bool:
    """Whether XLA loads what it compiled for this processor itself.

    On Intel's it refuses with a page of complaints, since it takes two hints of its own ("prefer-no-gather") for
    instructions that are missing (openxla/xla#44565); with other systems than Linux there is no experience here.
    """
    return kind.startswith("Linux") and "GenuineIntel" not in kind


def processor() -> str:
    """System, architecture, and what Linux says of the processor's maker and instructions."""
    return " ".join([platform.system(), platform.machine(), *described(Path("/proc/cpuinfo"))])


def described(path: Path) -> list[str]:
    """Of the first processor, the lines of /proc/cpuinfo that decide what code runs; none without such a file."""
    try:
        first = path.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return []
    names = ("vendor_id", "model name", "flags", "CPU implementer", "CPU part", "Features")
    return [line for line in first.splitlines() if line.partition(":")[0].strip() in names]


def accelerated() -> bool:
    """Whether the system shows one."""
    return any(map(os.path.exists, ACCELERATORS))
