"""The long run of `faults.py`: one command for hours, whose memory, file handles and threads are counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fault_drills import newest, row

Sample = tuple[float, float, int, int]
"""Hours since the start, MB in memory, file handles, threads."""
WINDOWS = 24


def soak(folder: Path, minutes: float) -> list[dict[str, Any]]:
    """The command itself, training with evaluation, decoding and checkpoints for so long; what grows is a leak."""
    workdir, path = folder / "soak", folder / "soak.py"
    edits = dict(
        train__steps=10**7, train__evaluate_every=200, train__checkpoint_every=500, evaluate__decode_examples=8
    )
    edits |= dict(train__log_every=20, decode__max_length=8)
    path.write_text(
        f"import pathlib, sys\nsys.path.append({str(Path(__file__).parent)!r})\nimport tiny_runs\n\n\n"
        "def get_config():\n"
        f"    return tiny_runs.recipe('bucketed', pathlib.Path({str(folder / 'files')!r}), **{edits})\n"
    )
    command = [sys.executable, "-m", "jaxformer", "train", f"--config={path}", f"--workdir={workdir}"]
    with (folder / "soak.log").open("w") as log:
        run = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=Path(__file__).parents[1])
    pid, begun = run.pid, time.monotonic()
    samples: list[Sample] = []
    while time.monotonic() - begun < 60 * minutes:
        time.sleep(2.0)
        if run.poll() is not None:
            raise RuntimeError(f"the long run ended with {run.returncode}; see {folder / 'soak.log'}")
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
        )
        handles = len(os.listdir(f"/proc/{pid}/fd"))
        memory = int(status["VmRSS"].split()[0]) / 1024
        samples.append(((time.monotonic() - begun) / 3600, memory, handles, int(status["Threads"])))
    run.terminate()
    code = run.wait()
    (folder / "soak.jsonl").write_text("".join(json.dumps(each) + "\n" for each in samples))
    wrong = [] if code == 143 else [f"exit code {code}"]
    return [judged(samples, minutes, int(newest(workdir).name), wrong)]


def judged(samples: list[Sample], minutes: float, steps: int, wrong: list[str]) -> dict[str, Any]:
    """The row: what grows after the first third, which is warm-up.

    Memory is taken at every sample. Of handles and threads it is the least number in each of `WINDOWS` parts of the
    run: pools of threads come and go with every save, and what leaks never goes.
    """
    warm, window = samples[len(samples) // 3 :], samples[-1][0] / WINDOWS
    hours = [each[0] for each in warm]
    slopes = [_slope(hours, [each[1] for each in warm])]
    for which in (2, 3):
        windows: dict[int, list[int]] = {}
        for each in warm:
            windows.setdefault(min(int(each[0] / window), WINDOWS - 1), []).append(each[which])
        slopes.append(_slope([window * number for number in windows], [min(each) for each in windows.values()]))
    if slopes[0] > 30.0 or max(slopes[1:]) > 1.0:
        wrong = [*wrong, "that is not flat"]
    memory, handles, threads = ([each[i] for each in warm] for i in (1, 2, 3))
    grow = [f"{round(slope, 1) + 0.0:.1f}" for slope in slopes]  # + 0.0: no -0.0
    words = (
        f"{minutes:g} minutes, {steps:,} steps; after the first third {min(memory):.0f} to {max(memory):.0f} MB, "
        f"at least {min(handles)} file handles and {min(threads)} threads, growing by {grow[0]} MB, {grow[1]} and "
        f"{grow[2]} an hour"
    )
    return row("soak", "a long run with evaluation, decoding, checkpoints", words, wrong, slopes=slopes)


def _slope(x: list[float], y: list[float]) -> float:
    """Of the line of least squares."""
    middle = sum(x) / len(x)
    return sum((a - middle) * b for a, b in zip(x, y, strict=True)) / sum((a - middle) ** 2 for a in x)
