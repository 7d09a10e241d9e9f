"""Contents of trackers' stores for a run, read back with their own packages: sorted (step, tag, value)."""

from __future__ import annotations

import json
import struct
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import fault_drills

Points = list[tuple[int, str, float]]


def tensorboard(workdir: Path) -> Points:
    return [point for point in fault_drills.events(workdir / "tensorboard") if not point[1].startswith("config/")]


def trackio(workdir: Path) -> Points:
    from trackio import sqlite_storage

    sqlite_storage.TRACKIO_DIR = workdir / "trackio"
    name, own = "jaxformer", ("step", "timestamp", "log_id", "space_id")
    runs = sqlite_storage.SQLiteStorage.get_run_records(name)
    assert len(runs) == 1
    rows = sqlite_storage.SQLiteStorage.get_logs(name, runs[0]["name"], run_id=runs[0]["id"])
    return sorted((row["step"], tag, value) for row in rows for tag, value in row.items() if tag not in own)


def mlflow(workdir: Path) -> Points:
    run, client = mlflow_run(workdir)
    histories = [client.get_metric_history(run.info.run_id, name) for name in run.data.metrics]
    return sorted((point.step, point.key, point.value) for history in histories for point in history)


def mlflow_run(workdir: Path) -> tuple[Any, Any]:
    """The one run that MLflow shows, and the client."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{workdir / 'mlflow' / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("jaxformer").experiment_id])
    return run, client


def wandb(workdir: Path) -> Points:
    """History and summary of the one folder that can be uploaded."""
    found = []
    for record in wandb_records(workdir):
        if record.HasField("history"):
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            found += [(row["step"], tag, value) for tag, value in row.items() if "/" in tag]
        if record.HasField("summary"):
            found += [(-1, item.key, json.loads(item.value_json)) for item in record.summary.update if "/" in item.key]
    return sorted(found)


def wandb_records(workdir: Path, seconds: float = 20.0) -> list[Any]:
    """All records of the one file that can be uploaded, which another process may still be writing."""
    begun = time.monotonic()
    while True:
        (path,) = (workdir / "wandb").glob("offline-run-*/*.wandb")
        records = _parse(path.read_bytes())
        if records and records[-1].HasField("exit"):
            return records
        assert time.monotonic() - begun < seconds, f"{path} has no end"
        time.sleep(0.02)


def _parse(data: bytes) -> list[Any]:
    """Records of wandb's file: blocks of 32 KiB, each of pieces with a checksum, a length and a type."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, whole, records = 7, b"", []
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4) and at <= len(data):  # a whole record, or the end of one
            records.append(Record.FromString(whole))
            whole = b""
    return records


READERS = {"tensorboard": tensorboard, "trackio": trackio, "mlflow": mlflow, "wandb": wandb}
