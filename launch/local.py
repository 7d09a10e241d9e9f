"""This machine: one process, or several that form one run (one for each GPU, or simulated hosts on a CPU).

    python -m launch.local --processes=8 --gpus -- --config=configs/NAME.py --workdir=runs/NAME

When one process ends with an error the others are stopped: they would wait for it forever.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from types import FrameType
from typing import Sequence

import launch

GRACE = 60.0
"""Seconds that the other processes have to save and leave once one has ended badly."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environments(processes: int, gpus: bool, port: int) -> list[dict[str, str]]:
    """What each process finds in its environment besides this one's; nothing if it is alone."""
    if processes == 1:
        return [{}]
    found = []
    for index in range(processes):
        own = {launch.DISTRIBUTED: f"127.0.0.1:{port}/{processes}/{index}"}
        found.append(own | ({"CUDA_VISIBLE_DEVICES": str(index)} if gpus else {}))
    return found


def supervise(command: Sequence[str], extras: Sequence[dict[str, str]]) -> int:
    """Runs the processes to their end and returns the first exit code other than 0."""
    processes = [subprocess.Popen(command, env={**os.environ, **extra}) for extra in extras]

    def hand_on(number: int, frame: FrameType | None) -> None:
        for process in processes:
            process.send_signal(signal.SIGTERM)

    previous = {s: signal.signal(s, hand_on) for s in (signal.SIGTERM, signal.SIGINT)}
    first, deadline = 0, float("inf")
    try:
        while None in [process.poll() for process in processes]:  # a list: every process is asked
            bad = [p.returncode for p in processes if p.returncode]
            if bad and not first:
                first, deadline = bad[0], time.monotonic() + GRACE
                hand_on(signal.SIGTERM, None)
            if time.monotonic() > deadline:
                for process in processes:
                    process.kill()
            time.sleep(0.05)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    code = first or next((p.returncode for p in processes if p.returncode), 0)
    return 128 - code if code < 0 else code


def main(argv: Sequence[str] | None = None) -> int:
    parser = launch.parser(__doc__)
    parser.add_argument("--processes", type=int, default=1, help="processes that form the run [1]")
    parser.add_argument("--gpus", action="store_true", help="process i sees GPU i only")
    flags = launch.read(parser, argv)
    if flags.processes < 1:
        parser.error(f"--processes: got {flags.processes}, expected at least 1")
    command = launch.train(flags, sys.executable)
    extras = environments(flags.processes, flags.gpus, free_port())
    if flags.dry_run:
        for extra in extras:
            print(launch.shown([*(["env"] if extra else []), *(f"{k}={v}" for k, v in extra.items()), *command]))
        return 0
    return supervise(command, extras)


if __name__ == "__main__":
    sys.exit(main())
