"""One run on 1, 2 and 4 real processes of this machine: the same losses, measures and outputs, whatever the number.

    python benchmarks/processes.py [--counts=1,2,4] [--steps=6] [--output=FILE.jsonl]

Every run trains a small translator half way, is started again with more steps (so that it resumes from its checkpoint),
validates and decodes. The processes form one mesh, once with data parallelism and once with FSDP. Fails unless every
run's rows equal those of one process to `TOLERANCE` and its decoded samples are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 2e-5
TOY = (
    "--config.data.batch=16",
    "--config.data.examples=400",
    "--config.data.buckets=40",
    "--config.schedule.warmup=2",
    "--config.train.log_every=1",
    "--config.train.evaluate_every=0",
    "--config.train.checkpoint_every=0",
    "--config.evaluate.examples=24",
    "--config.evaluate.decode_examples=4",
    "--config.decode.max_length=8",
    *(f"--config.model.{part}.{edit}" for part in ("encoder", "decoder") for edit in ("layers=1", "width=32")),
)


def run(processes: int, axis: str, steps: int, workdir: Path) -> dict[str, Any]:
    """Trains twice in `workdir`, the second time on from the first. The rows of both, and the samples."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    mesh = [f"--config.mesh.{name}={processes if name == axis else 1}" for name in ("data", "fsdp")]
    begun = time.perf_counter()
    for target in (steps // 2, steps):
        command = [
            sys.executable,
            "-m",
            "launch.local",
            f"--processes={processes}",
            "--",
            "--config=configs/quickstart.py",
        ]
        command += [f"--workdir={workdir}", f"--config.train.steps={target}", *TOY, *mesh]
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{processes} processes, {axis}: exit code {done.returncode}\n{done.stderr}")
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    # Padding is that of the rows which the first process read.
    own = ("step", "split", "wall_time", "tokens_per_second", "steps_per_second", "padding")
    values = {
        (row["step"], row["split"], name): value for row in rows for name, value in row.items() if name not in own
    }
    samples = json.loads((workdir / "samples" / f"step-{steps}.json").read_text())
    return {"values": values, "samples": samples, "seconds": time.perf_counter() - begun}


def difference(run: dict[str, Any], peer: dict[str, Any]) -> float:
    """The largest relative difference of two runs' values; infinite if they measured different things."""
    if run["values"].keys() != peer["values"].keys() or run["samples"] != peer["samples"]:
        return float("inf")
    pairs = ((value, peer["values"][name]) for name, value in run["values"].items())
    return max(abs(a - b) / max(abs(b), 1e-6) for a, b in pairs)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", default="1,2,4")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--output", type=Path)
    flags = parser.parse_args(argv)
    failed = 0
    print("processes  axis  values  largest relative difference  seconds")
    with tempfile.TemporaryDirectory() as folder:
        alone = run(1, "data", flags.steps, Path(folder, "alone"))
        for count in map(int, flags.counts.split(",")):
            for axis in ("data", "fsdp") if count > 1 else ():
                found = run(count, axis, flags.steps, Path(folder, f"{axis}{count}"))
                row = {"processes": count, "axis": axis, "values": len(found["values"])}
                row |= {"difference": difference(found, alone), "seconds": round(found["seconds"], 1)}
                failed += row["difference"] > TOLERANCE
                print(f"{count:9}  {axis:4}  {row['values']:6}  {row['difference']:27.1e}  {row['seconds']:7}")
                if flags.output:
                    with flags.output.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
