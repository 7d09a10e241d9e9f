"""Runs a sweep on this machine, several runs at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxformer.runtime.exit_codes import CRASHED, DONE, PREEMPTED
from jaxformer.sweep import progress, ranking
from jaxformer.sweep.planning import Plan, Run

if TYPE_CHECKING:
    from jaxformer.sweep.bucket import Claims

POLL_SECONDS = 0.05


@dataclass
class _Worker:
    """A running process.

    Attributes:
      signals: how many times the process was asked to stop.
    """

    run: Run
    process: subprocess.Popen[bytes]
    signals: int = 0


def check(plan: Plan, workers: int) -> None:
    """Accepts every plan."""


def execute(plan: Plan, workers: int, claims: Claims | None = None) -> int:
    """Runs the unfinished runs, each as a process with its output in `log.txt`.

    With several GPUs in CUDA_VISIBLE_DEVICES each worker uses one. A failed run does not stop the others. SIGTERM and
    Ctrl-C are forwarded, so that the runs save.

    Args:
      claims: of a sweep in a bucket. Then a run is begun only if no other machine works on it, and the sweep ends when
        all have ended.

    Returns:
      0; 1 if a run failed; 143 if the sweep, or one of its runs, was stopped.
    """
    queue = list(plan.unfinished)
    active: dict[int, _Worker] = {}
    has_failed = False
    table = progress.Table(plan.runs, plan.runs[0].config.checkpoint, workers)
    table.log(f"{len(plan.runs)} runs: {len(plan.runs) - len(queue)} finished, {len(queue)} to go, {workers} at a time")
    stop: list[int] = []
    previous = {s: signal.signal(s, lambda number, frame: stop.append(number)) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        while active or (queue and not stop):
            while queue and len(active) < workers and not stop:
                index = min(set(range(workers)) - set(active))
                run = queue.pop(0) if claims is None else _claim(claims, queue, table)
                if run is None:
                    break
                active[index] = _Worker(run, start(run, index))
                table.start(run)
            for worker in active.values() if stop else ():
                _forward_signals(worker, len(stop))
            time.sleep(POLL_SECONDS)
            for index, worker in list(active.items()):
                if worker.process.poll() is not None:
                    del active[index]
                    if claims is not None:
                        claims.end(worker.run)
                    how, why = _describe_exit(worker.run, worker.process.returncode)
                    table.end(worker.run, how, why)
                    has_failed |= how == "failed"
            table.draw()
    finally:
        table.close()
        for number, handler in previous.items():
            signal.signal(number, handler)
        for worker in active.values():
            worker.process.kill()
    ranking.write_ranking(plan)
    if stop:
        table.log(f"stopped, {len(plan.unfinished)} runs to go; run the same command to go on")
        return PREEMPTED
    return CRASHED if has_failed else PREEMPTED if plan.unfinished else DONE


def start(run: Run, worker_index: int) -> subprocess.Popen[bytes]:
    """Starts the process of a run, on the GPU of that worker."""
    run.workdir.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    devices = [d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
    if len(devices) > 1:
        environment["CUDA_VISIBLE_DEVICES"] = devices[worker_index % len(devices)]
    with open(run.workdir / "log.txt", "ab") as log:
        # In a session of its own, a process does not receive Ctrl-C from the terminal and once more from the sweep.
        return subprocess.Popen(
            run.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )


def _claim(claims: Claims, queue: list[Run], table: progress.Table) -> Run | None:
    """Claims a run of the queue. Counts those that other machines have finished meanwhile."""
    finished: list[Run] = []
    run = claims.take(queue, finished)
    for other in finished:
        table.end(other, "finished", "(on another machine)")
    return run


def _forward_signals(worker: _Worker, received: int) -> None:
    """Asks a run to save and stop, once for each signal that the sweep has received."""
    if worker.signals < received:
        worker.process.terminate()
        worker.signals += 1


def _describe_exit(run: Run, code: int) -> tuple[str, str]:
    """How a run ended: "finished", "stopped" or "failed", and the last line of its output if it failed."""
    if code == 0 and run.is_finished:
        return "finished", ""
    if code in (PREEMPTED, -signal.SIGTERM):
        return "stopped", ""
    return "failed", describe_failure(run, code)


def describe_failure(run: Run, code: int) -> str:
    """The exit code of a run, and the last line of its output."""
    lines = (run.workdir / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    last = next((line for line in reversed(lines) if line.strip()), "no output")
    return f"(code {code}): {last[:200]}; see {run.workdir / 'log.txt'}"
