"""Persistent cache of compiled programs: a second start of a run loads what the first one compiled.

JAX_COMPILATION_CACHE_DIR names the cache, if it is set. Otherwise it lies in jaxformer's cache directory, with one
subdirectory per processor model, since a CPU program uses the instructions of one model. Cached programs are executed,
so a directory that other users can write to is refused. JAX_ENABLE_COMPILATION_CACHE=0 turns the cache off.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from jaxformer.errors import ConfigError
from jaxformer.runtime import directories, memory

DIRECTORY_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
ENABLED_VARIABLE = "JAX_ENABLE_COMPILATION_CACHE"
SETTINGS = {
    # The default of JAX is one second. Parameter initialization takes half a second, and a start compiles several such.
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05",
    "JAX_COMPILATION_CACHE_MAX_SIZE": str(2**32),  # bytes; the least recently used programs are deleted first
}
RELOADING_INTEL = r"cpu family\s*: 6 model\s*: 207 "
"""Emerald Rapids, in what `processor_id` says. Tried with jax 0.10.2 and 0.12.0."""

ACCELERATOR_DEVICES = {"/dev/nvidia0": "gpu", "/dev/accel0": "tpu", "/dev/vfio/0": "tpu"}
"""Device files of accelerators, each with the package extra that makes JAX use it."""


READY_COMMANDS = memory.COMMANDS - {"experiment"}
"""Commands that keep programs ready to run (`programs`): an experiment may change how a function is traced."""

ready_directory: Path | None = None
"""The directory below which this process keeps programs ready to run (`programs`); None: it keeps none."""


def enable_cache() -> None:
    """Configures the cache for commands that compute. Must run before JAX is imported."""
    global ready_directory
    if len(sys.argv) > 1 and sys.argv[1] in memory.COMMANDS and "jax" not in sys.modules:
        try:
            configure(os.environ, processor_id(), has_accelerator())
            if os.environ.get(DIRECTORY_VARIABLE, "").startswith(str(directories.cache())):
                remove_partial_programs(Path(os.environ[DIRECTORY_VARIABLE]))
                if sys.argv[1] in READY_COMMANDS and is_enabled(os.environ):
                    ready_directory = Path(os.environ[DIRECTORY_VARIABLE])
        except ConfigError:  # code that needs the cache directory raises the error itself
            os.environ[ENABLED_VARIABLE] = "0"


def configure(environment: MutableMapping[str, str], processor: str, accelerator: bool) -> None:
    """Adds the cache settings to `environment`; variables that are already set are kept.

    Args:
      processor: description of the CPU, from `processor_id`.
      accelerator: a TPU or GPU is present, so programs are compiled for it and not for the CPU.
    """
    if DIRECTORY_VARIABLE in environment or not (accelerator or can_reload_programs(processor)):
        return
    if not is_enabled(environment):
        return
    directory = directories.cache() / "programs" / hashlib.sha256(processor.encode()).hexdigest()[:12]
    with contextlib.suppress(OSError):
        (directories.cache() / "programs").mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
    reason = directories.untrusted_reason(directory)
    if reason:
        environment[ENABLED_VARIABLE] = "0"  # inherited by the restarted process, so the warning is printed once
        warning = f"warning: compiled programs are neither loaded nor kept: {reason}; remove that permission "
        warning += f"(chmod go-w), or set {DIRECTORY_VARIABLE} to a directory that you trust"
        with contextlib.suppress(OSError):
            print(warning, file=sys.stderr)
        return
    environment[DIRECTORY_VARIABLE] = str(directory)
    for name, value in SETTINGS.items():
        environment.setdefault(name, value)


def is_enabled(environment: Mapping[str, str]) -> bool:
    """False if the variable says that programs are not kept."""
    return environment.get(ENABLED_VARIABLE, "").lower() not in ("0", "false", "no", "off")


def remove_partial_programs(directory: Path) -> None:
    """Deletes programs that a killed process left incomplete, unless another process is writing to the cache.

    JAX writes a program and then its access time. It does not detect an incomplete program, and complains at every
    start; a program without an access time makes it store nothing else.
    """
    if not (directory / ".lockfile").exists():
        return
    with contextlib.suppress(OSError), open(directory / ".lockfile", "a") as lock:  # locked, or not writable
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for program in directory.glob("*-cache"):
            if not program.with_name(program.name.removesuffix("-cache") + "-atime").exists():
                program.unlink()


def can_reload_programs(processor: str) -> bool:
    """True if XLA loads CPU programs that it compiled for this processor.

    On many Intel processors it refuses them: it takes two of its own tuning hints ("prefer-no-gather",
    "prefer-no-scatter") for missing instructions (openxla/xla#44565). Those of `RELOADING_INTEL` load them; systems
    other than Linux are untested.
    """
    if not processor.startswith("Linux"):
        return False
    return "GenuineIntel" not in processor or re.search(RELOADING_INTEL, processor) is not None


def processor_id() -> str:
    """System, architecture and, on Linux, maker, model and instruction sets of the processor."""
    return " ".join([platform.system(), platform.machine(), *_cpuinfo_lines(Path("/proc/cpuinfo"))])


def _cpuinfo_lines(path: Path) -> list[str]:
    """Lines of /proc/cpuinfo that identify the first processor; empty without such a file."""
    try:
        first = path.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return []
    names = ("vendor_id", "cpu family", "model", "model name", "flags", "CPU implementer", "CPU part", "Features")
    return [line for line in first.splitlines() if line.partition(":")[0].strip() in names]


def has_accelerator() -> bool:
    """True if the system has the device file of a TPU or GPU."""
    return any(map(os.path.exists, ACCELERATOR_DEVICES))
