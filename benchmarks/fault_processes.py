"""Training processes for `faults.py`: forked, so that importing costs once, watched, and killed.

The process that forks must not have touched a device: every child starts jax anew, with devices of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
import zlib
from pathlib import Path
from typing import Any, Callable

from jaxformer.config import Config, ConfigError, StorageError

BATCHES = "batches.jsonl"
"""In a workdir: [step, crc of every row of the training batch of that step], a line a step and process."""


FINAL = "final.json"
"""In a finished workdir: the checksum of every array of the state."""


MODULES = "modules.json"


def spawn(act: Callable[[], int], log: Path, devices: int = 1, distributed: str = "") -> int:
    """Forks a process that runs `act` and exits with what it returns; its id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
        os.environ["JAXFORMER_DISTRIBUTED"] = distributed
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        code = act()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except StorageError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1
    except BaseException:
        traceback.print_exc()
        code = 99
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def training(config: Config, workdir: Path, before: Callable[[], None] | None = None) -> Callable[[], int]:
    """Trains, writing down which rows every step saw."""

    def act() -> int:
        from jaxformer.parallel import distributed

        distributed.join()
        from jaxformer.train import loop
        from jaxformer.train.metric_window import MetricWindow

        if before is not None:
            before()
        add = MetricWindow.add
        begun = None

        def note(window: Any, sums: Any, batch: Any) -> None:
            nonlocal begun
            import jax

            stream = batch.target if batch.target is not None else batch.source
            rows = [zlib.crc32(row.tobytes()) for row in stream.tokens]
            if begun is None:
                begun = _counted(workdir)
            begun += 1
            with (workdir / BATCHES).open("a") as file:
                file.write(json.dumps([begun, jax.process_index(), rows]) + "\n")
            add(window, sums, batch)

        MetricWindow.add = note
        end = loop.training_loop

        def ending(run: Any, stop: Any) -> int:
            code = end(run, stop)
            if code == 0:
                (workdir / FINAL).write_text(json.dumps(_digests(run.state)))
                (workdir / MODULES).write_text(json.dumps([name for name in sys.modules if name != "__main__"]))
            return code

        loop.training_loop = ending
        return loop.train(config, workdir)

    return act


def preload(workdir: Path) -> None:
    """Imports what a finished run had imported, so that forked processes need not."""
    for name in json.loads((workdir / MODULES).read_text()):
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _digests(state: Any) -> dict[str, str]:
    """A checksum of every array of a training state."""
    import jax
    import numpy as np

    from jaxformer.checkpoint import trees
    from jaxformer.types import leaf_path

    found = {}
    for keys, value in jax.tree_util.tree_leaves_with_path(state):
        array = np.asarray(trees.unwrap_key(value))
        found["/".join(leaf_path(keys))] = hashlib.sha256(array.tobytes()).hexdigest()
    return found


def _counted(workdir: Path) -> int:
    """The step that the run starts from, as its checkpoints say."""
    found = [int(each.name) for part in ("last", "best") for each in (workdir / "checkpoints" / part).glob("[0-9]*")]
    return max(found, default=0)


def sequence(workdir: Path) -> dict[int, list[int]]:
    """Rows of every step, of all processes in their order. Raises if two tries at a step saw different rows."""
    found: dict[int, dict[int, list[int]]] = {}
    for line in (workdir / BATCHES).read_text().splitlines():
        with contextlib.suppress(ValueError):  # torn by a kill
            step, process, rows = json.loads(line)
            found.setdefault(step, {})[process] = rows
    return {step: [row for _, rows in sorted(parts.items()) for row in rows] for step, parts in sorted(found.items())}


def tries(workdir: Path) -> dict[int, set[tuple]]:
    """Rows of every step, of every try at it, of runs of one process."""
    found: dict[int, set[tuple]] = {}
    for line in (workdir / BATCHES).read_text().splitlines():
        with contextlib.suppress(ValueError):
            step, _, rows = json.loads(line)
            found.setdefault(step, set()).add(tuple(rows))
    return found


def wait(pid: int, seconds: float = 300.0) -> int:
    """The exit code of a process, negative for a signal; killed when it takes too long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise TimeoutError(f"process {pid} ran longer than {seconds:g} s")


def at_step(workdir: Path, step: int, seconds: float = 300.0) -> None:
    """Returns when the run has begun a step."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError, ValueError, IndexError):
            if json.loads((workdir / BATCHES).read_text().splitlines()[-1])[0] >= step:
                return
        time.sleep(0.01)
    raise TimeoutError(f"{workdir} did not reach step {step} in {seconds:g} s")


def kill_after(pid: int, delay: float) -> int:
    """SIGKILL after `delay` seconds, unless the process ends before; its exit code."""
    end = time.monotonic() + delay
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_in_save(pid: int, workdir: Path, skip: int, delay: float) -> int:
    """SIGKILL `delay` seconds after the next save but `skip` begins, unless the process ends before; its exit code."""
    saving, seen, was = workdir / "checkpoints" / "saving", 0, ""
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        now = next((each for each in names(saving) if each.isdecimal()), "")
        seen += bool(now) and now != was
        was = now or was
        if now and seen > skip:
            return kill_after(pid, delay)
        time.sleep(0.0005)


def names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
