"""`jaxformer doctor`: checks of this machine, the installation, and the processes of a run."""

from __future__ import annotations

import functools
import importlib
import os
import platform
import re
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from jaxformer import __version__, preflight
from jaxformer.config import Config
from jaxformer.preflight import Finding
from jaxformer.runtime import compilation, directories, units

MODULES = {"orbax-checkpoint": "orbax.checkpoint", "pillow": "PIL", "vl-convert-python": "vl_convert"}
"""Modules of distributions whose module has another name."""

MIN_FREE_BYTES = 2e8
"""Less free disk space than one checkpoint of a small model is a failure."""

LOW_FREE_BYTES = 5e9
"""Less free disk space than a few checkpoints of a small model and its data is a warning."""


def check(config: Config | None = None, devices: int | None = None, seconds: float = 60.0) -> int:
    """Prints a line for each check, and returns the exit code.

    In a run of several processes each checks itself and all compare. The first process prints every line, the others
    print failures only.

    Args:
      config: a run whose devices and data are checked.
      devices: expected number, of all processes.
      seconds: time limit for the processes to wait for each other.

    Returns:
      0; 1 if the machine or the installation fails a check; 2 if only the config or its data does.
    """
    codes: list[int] = []
    index = preflight.process_index()
    for finding in _findings(config, devices, seconds):
        has_failed = finding.level == "FAIL"
        if has_failed or index == 0:
            prefix = f"{index}: " if index else ""
            print(f"{prefix}{finding.level:<4}  {finding.name:<20}  {finding.message}", flush=True)
        codes += [finding.code] if has_failed else []
    if index == 0:
        print(f"{len(codes)} of these must be put right" if codes else "nothing wrong found")
    return min(codes, default=0)


def _findings(config: Config | None, devices: int | None, seconds: float) -> Iterator[Finding]:
    yield Finding("ok", "jaxformer", __version__)
    yield Finding("ok", "python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("ok", "platform", f"{platform.platform()}, {os.cpu_count()} cpus")
    for name, minimum in requirements().items():
        yield check_package(name, minimum)
    yield check_frameworks()
    has_devices = True
    for finding in check_devices():
        has_devices &= finding.name != "devices" or finding.level != "FAIL"
        yield finding
    if has_devices:
        yield from preflight.compare_processes(config, devices, seconds)
    yield from check_directories()


# --- packages ---------------------------------------------------------------------------------------------------------


@functools.cache
def requirements() -> dict[str, str]:
    """Minimum version of each required distribution, "" for any: from the metadata, or from `pyproject.toml`."""
    try:
        lines = [line for line in metadata.requires("jaxformer") or [] if "extra ==" not in line]
    except metadata.PackageNotFoundError:  # run from a checkout without being installed
        path = Path(__file__).parents[1] / "pyproject.toml"
        lines = tomllib.loads(path.read_text(encoding="utf-8"))["project"]["dependencies"] if path.exists() else []
    matches = (re.match(r"([\w.-]+)(?:\[[^]]*])?\s*(?:\(?>=\s*([\d.]+))?", line) for line in lines)
    return {match[1]: match[2] or "" for match in matches if match}


def check_package(name: str, minimum: str) -> Finding:
    """Checks that a distribution is installed in at least version `minimum`, and that it can be imported."""
    remedy = "install it with: pip install -r requirements.lock"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding("FAIL", name, f"not installed; {remedy}")
    if release_numbers(version) < release_numbers(minimum):
        return Finding("FAIL", name, f"got {version}, expected at least {minimum}; {remedy}")
    try:
        importlib.import_module(MODULES.get(name, name.replace("-", "_")))
    except Exception as error:  # a broken package may raise anything, and the user needs the message
        return Finding("FAIL", name, f"{version}, but importing it: {_one_line(error)}; {remedy}")
    return Finding("ok", name, version + (f" (needs {minimum})" if minimum else ""))


def release_numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version without trailing zeros: (1, 10) for "1.10.0rc1"."""
    release = re.match(r"[\d.]*", version)
    numbers = [int(digits) for digits in re.findall(r"\d+", release[0] if release else "")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def check_frameworks() -> Finding:
    """Checks that no package has imported TensorFlow or torch."""
    loaded = [name for name in ("tensorflow", "torch") if name in sys.modules]
    if loaded:
        message = f"{' and '.join(loaded)} got imported, which jaxformer never does; find the package that does"
        return Finding("warn", "frameworks", message)
    return Finding("ok", "frameworks", "neither tensorflow nor torch got imported")


# --- devices ----------------------------------------------------------------------------------------------------------


def check_devices() -> Iterator[Finding]:
    """Lists the devices, compiles a matrix product and compares it with the host's."""
    try:
        import jax
        import numpy as np

        backend, kinds = jax.default_backend(), sorted({device.device_kind for device in jax.devices()})
        yield Finding("ok", "devices", f"{jax.device_count()} x {', '.join(kinds)} (backend {backend})")
        yield check_idle_accelerator(backend)
        # Small whole numbers are exact in every precision that a matrix unit may use.
        x = np.arange(64, dtype=np.float32).reshape(8, 8) % 5
        start = time.monotonic()
        product = np.asarray(jax.jit(lambda x: x @ x)(x))
        seconds = time.monotonic() - start
        if np.array_equal(product, x @ x):
            yield Finding("ok", "matrix product", f"compiled and computed in {seconds:.1f} s")
        else:
            wrong = f"got a wrong product from {backend}, expected the host's; try another jaxlib or driver"
            yield Finding("FAIL", "matrix product", wrong)
    except Exception as error:
        remedy = "see the installation guide of jax, or set JAX_PLATFORMS=cpu"
        yield Finding("FAIL", "devices", f"{_one_line(error)}; {remedy}")


def check_idle_accelerator(backend: str) -> Finding:
    """Warns if the machine has an accelerator that jax does not use."""
    for device, extra in compilation.ACCELERATOR_DEVICES.items():
        if backend == "cpu" and os.path.exists(device):
            remedy = "unset JAX_PLATFORMS" if "JAX_PLATFORMS" in os.environ else f"install jaxformer[{extra}]"
            return Finding("warn", "accelerator", f"{device} exists but jax uses the cpu; {remedy}")
    return Finding("ok", "accelerator", "none idle")


# --- directories ------------------------------------------------------------------------------------------------------


def check_directories() -> Iterator[Finding]:
    """Checks that the cache and the current directory are writable and have free space."""
    for name, directory in (("cache folder", directories.cache()), ("current folder", Path.cwd())):
        existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free
        try:
            with tempfile.TemporaryFile(dir=existing):
                pass
        except OSError as error:
            remedy = "set JAXFORMER_CACHE to another folder" if name == "cache folder" else "go to another folder"
            yield Finding("FAIL", name, f"{existing} is not writable ({error.strerror or error}); {remedy}")
            continue
        level = "FAIL" if free < MIN_FREE_BYTES else "warn" if free < LOW_FREE_BYTES else "ok"
        remedy = "" if level == "ok" else "; checkpoints and data need more: make room"
        yield Finding(level, name, f"{directory}, {units.format_size(free)} free{remedy}")


def _one_line(error: Exception) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:200]}"
