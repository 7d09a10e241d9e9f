"""Kills runs of several processes, each with a mirror of its own, for `object_storage.py --hosts=2`.

After a kill of one process the others are killed, too, as a launcher does. Sometimes one gets SIGTERM instead: then all
have to save and end with 143. After about half of the kills the mirror of a process is deleted, as of a host that was
replaced. The state at the end must equal in bits that of an uninterrupted run in a local folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fault_processes as processes
import storage_servers
import tiny_runs

RUN = "packed"
PREEMPTED = 143
STOP_SECONDS = 120.0


def config(folder: Path, hosts: int) -> Any:
    """A run whose parameters and optimizer state are divided between the processes."""
    found = tiny_runs.config(RUN, folder / "files", mesh__fsdp=hosts)
    return dataclasses.replace(found, data=dataclasses.replace(found.data, cache=""))


def training(config: Any, workdir: str | Path, cache: Path, prepare: Callable[[], None]) -> Callable[[], int]:
    """Trains with a cache of its own, and writes the checksum of every array of the final state into the workdir."""

    def act() -> int:
        os.environ["JAXFORMER_CACHE"] = str(cache)
        from jaxformer.parallel import distributed

        distributed.join()
        from jaxformer.train import loop

        prepare()
        end = loop.training_loop

        def ending(run: Any, stop: Any) -> int:
            import jax
            from jax.experimental import multihost_utils

            from jaxformer.checkpoint import trees

            code = end(run, stop)
            if code == 0:
                arrays = jax.tree.map(trees.unwrap_key, run.state)
                state = processes._digests(multihost_utils.process_allgather(arrays, tiled=True))
                if jax.process_index() == 0:
                    (run.workdir / processes.FINAL).write_text(json.dumps(state))
                    modules = [name for name in sys.modules if name != "__main__"]
                    (run.workdir / processes.MODULES).write_text(json.dumps(modules))
            return code

        loop.training_loop = ending
        return loop.train(config, workdir)

    return act


def start(config: Any, workdir: str | Path, caches: list[Path], logs: Path, prepare: Callable[[], None]) -> list[int]:
    """Ids of the processes of one attempt at a run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    count = len(caches)
    return [
        processes.spawn(
            training(config, workdir, cache, prepare),
            logs / f"host-{index}.log",
            distributed=f"127.0.0.1:{port}/{count}/{index}",
        )
        for index, cache in enumerate(caches)
    ]


def wait(pids: list[int], seconds: float = 300.0) -> list[int]:
    """Exit codes of the processes. When one has failed, the others are killed after a moment."""
    codes: dict[int, int] = {}
    end = time.monotonic() + seconds
    while len(codes) < len(pids) and time.monotonic() < end:
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        if any(code not in (0, PREEMPTED) for code in codes.values()):
            end = min(end, time.monotonic() + 1.0)
        time.sleep(0.01)
    for pid in pids:
        if pid not in codes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return [codes[pid] for pid in pids]


class Drill:
    """Kills of runs of several processes in the buckets of one scheme."""

    def __init__(
        self, scheme: str, hosts: int, folder: Path, rng: random.Random, prepare: Callable[[], None],
        check: Callable[[str, int], list[str]],
    ) -> None:  # fmt: skip
        self.scheme, self.hosts, self.folder, self.rng = scheme, hosts, folder, rng
        self.prepare, self.check = prepare, check
        self.counts = {"kills": 0, "stops": 0, "finished": 0, "other_host": 0, "attempts": 0}
        self.wrong: list[str] = []
        self.seconds = 0.0
        self.caches = [folder / f"{scheme}-cache-{index}" for index in range(hosts)]

    def attempt(self, workdir: str, act: Callable[[list[int]], None]) -> list[int]:
        self.counts["attempts"] += 1
        pids = start(config(self.folder, self.hosts), workdir, self.caches, self.folder, self.prepare)
        act(pids)
        return wait(pids)

    def disturb(self, pids: list[int]) -> None:
        """Kills or stops one process after a while."""
        time.sleep(self.rng.uniform(0.3, 1.0) * self.seconds)
        is_kill = self.rng.random() < 0.8
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.rng.choice(pids), signal.SIGKILL if is_kill else signal.SIGTERM)

    def run(self, number: int, disturbances: int) -> None:
        """One run, disturbed up to so many times and then left alone."""
        workdir = f"{self.scheme}://{storage_servers.BUCKET}/runs/{self.hosts}-{number}"
        left = disturbances
        while True:
            codes = self.attempt(workdir, self.disturb if left else lambda pids: None)
            print(f"{workdir}: {codes}", flush=True)
            if set(codes) == {0}:
                break
            if set(codes) == {PREEMPTED}:
                self.counts["stops"] += 1
            elif -signal.SIGKILL in codes and left:
                self.counts["kills"] += 1
            else:
                self.wrong.append(f"{workdir}: exit codes {codes}, see host-*.log")
                return
            left -= 1
            if self.rng.random() < 0.5:
                shutil.rmtree(self.rng.choice(self.caches), ignore_errors=True)
                self.counts["other_host"] += 1
        self.counts["finished"] += 1
        self.wrong += self.check(workdir, number)


def drill(
    scheme: str, hosts: int, kills: int, share: float, seed: int, folder: Path, prepare: Callable[[], None],
    check: Callable[[str, int], list[str]],
) -> dict[str, Any]:  # fmt: skip
    """All kills in the buckets of one scheme, as a row of the table."""
    with storage_servers.serve(scheme, 0.0, seed, folder) as url:
        os.environ |= storage_servers.environment(scheme, url)
        mine = Drill(scheme, hosts, folder, random.Random(seed), prepare, check)
        begun = time.monotonic()
        mine.run(0, 0)  # undisturbed; how long one takes
        mine.seconds = time.monotonic() - begun
        storage_servers.control(url, faults=share)
        number = 0
        while mine.counts["kills"] < kills and not mine.wrong:
            number += 1
            mine.run(number, min(mine.rng.randrange(2, 6), kills - mine.counts["kills"]))
        injected = storage_servers.control(url)
    requests = injected.pop("passed")
    words = ", ".join(f"{count} {kind}" for kind, count in sorted(injected.items()))
    row = {"scheme": scheme, "hosts": hosts, **mine.counts, "requests": requests + sum(injected.values())}
    return row | {"words": words, "good": not mine.wrong, "wrong": mine.wrong, "seconds": round(mine.seconds, 1)}
