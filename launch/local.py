"""Launches on this machine: one process, or several that form one run (one per GPU, or simulated hosts on a CPU).

    python -m launch.local --processes=8 --gpus -- --config=configs/NAME.py --workdir=runs/NAME

When one process fails, the others are stopped: they would wait for it forever. With --max-restarts a run that was
preempted (143) or hung (75) is started again; one that this launcher was asked to stop is not.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType

import launch
from launch import restarts

GRACE_SECONDS = 60.0
"""Time for the other processes to save and exit after one has failed; then they are killed."""

POLL_SECONDS = 0.05


def free_port() -> int:
    """A TCP port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environments(processes: int, gpus: bool, port: int) -> list[dict[str, str]]:
    """Environment variables of each process, in addition to the inherited ones; none for a single process."""
    if processes == 1:
        return [{}]
    address = f"127.0.0.1:{port}/{processes}"
    return [
        {launch.DISTRIBUTED: f"{address}/{index}"} | ({"CUDA_VISIBLE_DEVICES": str(index)} if gpus else {})
        for index in range(processes)
    ]


def supervise(command: Sequence[str], extras: Sequence[dict[str, str]], stops: list[int] | None = None) -> int:
    """Runs the processes to their end and returns the first exit code other than 0.

    Args:
      command: the command of every process.
      extras: environment variables of each process, in addition to the inherited ones.
      stops: gets the signals that asked this launcher to stop.
    """
    processes: list[subprocess.Popen[bytes]] = []
    stops = [] if stops is None else stops

    told: set[int] = set()

    def stop(those: Sequence[subprocess.Popen[bytes]]) -> None:
        for process in those:
            told.add(process.pid)
            process.send_signal(signal.SIGTERM)

    def forward(number: int, frame: FrameType | None) -> None:
        stops.append(number)
        stop(processes)

    previous = {s: signal.signal(s, forward) for s in (signal.SIGTERM, signal.SIGINT)}
    first_failure, deadline = 0, float("inf")
    try:
        for extra in extras:
            processes.append(subprocess.Popen(command, env={**os.environ, **extra}))
            if stops:  # a signal came while they were started
                stop([process for process in processes if process.pid not in told])
        while None in [process.poll() for process in processes]:  # a list, so that every process is polled
            failures = [p.returncode for p in processes if p.returncode]
            if failures and not first_failure:
                first_failure, deadline = failures[0], time.monotonic() + GRACE_SECONDS
                # Not those that save already: a second signal would end them at once.
                stop([process for process in processes if process.pid not in told])
            if time.monotonic() > deadline:
                for process in processes:
                    process.kill()
            time.sleep(POLL_SECONDS)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    code = first_failure or next((p.returncode for p in processes if p.returncode), 0)
    return 128 - code if code < 0 else code


def supervise_with_restarts(
    attempt: Callable[[list[int]], int],
    limit: int,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Calls `attempt` until it ends with another code than 143 and 75, was asked to stop, or no restart is left.

    Args:
      attempt: runs the processes once. It gets a list for the signals that asked it to stop, and returns the exit code.
      limit: restarts in all.
      sleep: waits for so many seconds.
      clock: the time in seconds.
    """
    counter = restarts.Restarts(limit)
    while True:
        stops: list[int] = []
        begun = clock()
        code = attempt(stops)
        delay = None if stops or code not in launch.RESTARTABLE else counter.next_delay(clock() - begun)
        if delay is None:
            return code
        print(f"launch: the run ended with code {code}; restart {counter.used} of {limit} in {delay:.0f} s", flush=True)
        try:
            sleep(delay)
        except KeyboardInterrupt:
            return code


def main(argv: Sequence[str] | None = None, program: str | None = None) -> int:
    """Runs the launcher and returns the exit code."""
    parser = launch.make_parser(__doc__, program)
    parser.add_argument("--processes", type=int, default=1, help="processes that form the run [1]")
    parser.add_argument("--gpus", action="store_true", help="process i sees GPU i only")
    restarts.add_flag(parser, 0)
    flags = launch.parse(parser, argv)
    launch.at_least(parser, flags, "processes", 1)
    launch.at_least(parser, flags, "max-restarts", 0)
    command = launch.train_command(flags, sys.executable)

    def prepare() -> list[dict[str, str]]:
        return environments(flags.processes, flags.gpus, free_port())  # the port of an earlier attempt may be in use

    if flags.dry_run:
        for extra in prepare():
            print(shlex.join([*(["env"] if extra else []), *(f"{k}={v}" for k, v in extra.items()), *command]))
        return 0
    return supervise_with_restarts(lambda stops: supervise(command, prepare(), stops), flags.max_restarts)


if __name__ == "__main__":
    sys.exit(main())
