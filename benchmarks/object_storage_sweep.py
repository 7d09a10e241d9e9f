"""Two machines that share no disk work on one sweep in a bucket, and one of them dies.

    python benchmarks/object_storage_sweep.py [--scheme=gs] [--runs=4] [--keep=FOLDER]

Each machine is a process of `jaxformer sweep` with a cache of its own. Once the first has published a checkpoint of a
run, it is killed with all of its processes; the second takes its claim over when it has expired, and resumes the run.
The ranking must equal that of a local sweep, and every run must have been begun once, but for the one that moved. Exits
1 if anything differs. Needs the packages of `object_storage.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import storage_servers  # noqa: E402
import tiny_runs  # noqa: E402

HURRY = """
import os
if "DRILL" in os.environ:
    from jaxformer.runtime import lease
    from jaxformer.storage import publishing
    lease.LEASE_SECONDS, lease.RENEW_SECONDS, lease.MARGIN_SECONDS, lease.POLL_SECONDS = 20.0, 3.0, 5.0, 0.2
    publishing.SCAN_SECONDS = 0.1
"""
"""A module that Python imports at each start: leases shorter than in earnest."""

RECIPE = """
import pathlib, sys
sys.path.insert(0, {benchmarks!r})
import tiny_runs

def get_config():
    return tiny_runs.recipe("packed", pathlib.Path({files!r}))
"""


def sweep(folder: Path, workdir: str, cache: str) -> subprocess.Popen[bytes]:
    """Starts a machine. Its output goes to `<cache>.txt`."""
    environment = os.environ | {
        "JAXFORMER_CACHE": str(folder / cache),
        "PYTHONPATH": f"{folder / 'site'}{os.pathsep}{ROOT}",
        "DRILL": "1",
    }
    command = [sys.executable, "-m", "jaxformer", "sweep", f"--config={folder / 'recipe.py'}"]
    command += [f"--sweep={folder / 'rates.py'}", f"--workdir={workdir}"]
    with open(folder / f"{cache}.txt", "ab") as log:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)


def descendants(pid: int) -> list[int]:
    """Ids of a process and of all that it started."""
    found = [pid]
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                found += descendants(int(path.parent.name))
    return found


def until(condition: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.1)


def is_amid(store: Any, folder: Path, cache: str) -> bool:
    """True if a machine trains a run that has a checkpoint and is not done, while another machine has a claim, too."""
    keys = store.list_keys()
    claims = {key.partition("/")[2]: store.read(key) for key in keys if key.startswith("claims/")}
    held = {name: json.loads(found.value)["mirror"] for name, found in claims.items() if found and found.value}
    ids = [path.read_text() for path in (folder / cache / "sweeps").glob("*/id")]
    mine = [name for name, mirror in held.items() if mirror in ids]
    return len(held) > len(mine) and any(
        store.read(f"{name}/result.json") is None
        and any(key.startswith(f"{name}/checkpoints/last/") and key.endswith("manifest.json") for key in keys)
        for name in mine
    )


def drill(scheme: str, count: int, folder: Path) -> dict[str, Any]:
    """The drill, as a row: what differed, and how often runs were begun."""
    from jaxformer.runtime.object_store import Store

    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(HURRY)
    tiny_runs.files(folder / "files")
    (folder / "recipe.py").write_text(RECIPE.format(benchmarks=str(ROOT / "benchmarks"), files=str(folder / "files")))
    rates = [round(0.002 * (index + 1), 4) for index in range(count)]
    (folder / "rates.py").write_text(f"SWEEP = [{{'schedule.peak': rate}} for rate in {rates}]\n")
    wrong = []
    if sweep(folder, str(folder / "local"), "alone").wait():
        wrong.append("the local sweep failed")
    with storage_servers.serve(scheme, 0.0, 0, folder) as server:
        os.environ |= storage_servers.environment(scheme, server)
        url = f"{scheme}://{storage_servers.BUCKET}/sweeps/rates"
        store = Store(url)
        first, second = (sweep(folder, url, name) for name in ("first", "second"))
        until(lambda: is_amid(store, folder, "first"), 300)
        for pid in descendants(first.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        first.wait()
        if second.wait():
            wrong.append("the second machine failed")
        keys = store.list_keys()
        found = store.read("ranking.json")
        ranked = json.loads(found.value) if found else None
        if ranked != json.loads((folder / "local" / "ranking.json").read_text()):
            wrong.append("the ranking differs from that of the local sweep")
        if any(store.read(key).value for key in keys if key.startswith("claims/")):
            wrong.append("a claim was not released")
        resumed = sum(b"resumed at step" in store.read(key).value for key in keys if key.startswith("logs/"))
    begun = {name: (folder / f"{name}.txt").read_text().count("started   ") for name in ("first", "second")}
    if sum(begun.values()) != count + 1 or resumed != 1:
        wrong.append(f"{sum(begun.values())} runs were begun and {resumed} resumed, not {count + 1} and 1")
    return {"scheme": scheme, "runs": count, "begun": begun, "resumed": resumed, "wrong": wrong}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scheme", default="gs")
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--keep", default="", help="folder of the runs; default: a temporary one")
    options = parser.parse_args(arguments)
    lacking = storage_servers.missing(options.scheme)
    if lacking:
        print(f"{lacking} is not installed: see object_storage.py --help", file=sys.stderr)
        return 2
    os.environ["JAX_PLATFORMS"] = "cpu"
    with contextlib.ExitStack() as stack:
        folder = Path(options.keep or stack.enter_context(tempfile.TemporaryDirectory()))
        row = drill(options.scheme, options.runs, folder)
    print(json.dumps(row))
    return 1 if row["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
