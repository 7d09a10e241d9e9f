"""Two or more programs timed by turns: each stays loaded in a process of its own, and only one works at a time.

A program is a Python file that prepares, calls `serve` with a function, and is then asked for one run after another.
What makes a machine slow for a while hits all of them, so that the ratio of two says more than either time.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

MARK = "TURN "


class Program(NamedTuple):
    """A command, the task it reads as the first line of its input, and its environment beside the caller's."""

    command: Sequence[str]
    task: Any
    environment: Mapping[str, str] = {}


def task() -> Any:
    """In a child: what to do."""
    return json.loads(sys.stdin.readline())


def serve(run: Callable[[], Any]) -> None:
    """In a child: one call to warm up, then one for each further line of the input, timed. `run` returns JSON."""

    def answer() -> None:
        begun = time.perf_counter()
        result = run()
        seconds, peak = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(MARK + json.dumps({"seconds": seconds, "result": result, "bytes": 1024 * peak}), flush=True)

    answer()
    for _ in sys.stdin:
        answer()


class Child:
    """A program at work; ready when its first run, the warm-up, is done."""

    def __init__(self, program: Program, environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            program.command,
            env={**environment, **program.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.write(json.dumps(program.task))
        self.read()

    def run(self) -> dict[str, Any]:
        self.write("")
        return self.read()

    def write(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        said = self.process.communicate()[1]
        raise RuntimeError(said[-2000:] or "a program ended without an answer")

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


def take(programs: Mapping[str, Program], rounds: int, environment: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Runs all by turns, in the other order every other round.

    Returns:
      For each program the median of `seconds`, their `spread` (largest less smallest, as a share of the median), the
      `result` of its last run, the most `bytes` it ever held, and `rounds`, all seconds. A program that fails has
      `failed`, the end of what it said.
    """
    children: dict[str, Child] = {}
    found: dict[str, dict[str, Any]] = {}
    try:
        for name, program in programs.items():
            try:
                children[name] = Child(program, environment)
            except RuntimeError as error:
                found[name] = {"failed": str(error)}
        times: dict[str, list[float]] = {name: [] for name in children}
        for turn in range(rounds):
            for name in sorted(children, key=list(children).index, reverse=turn % 2 == 1):
                answer = children[name].run()
                times[name].append(answer["seconds"])
                found[name] = {"result": answer["result"], "bytes": answer["bytes"]}
    finally:
        for child in children.values():
            child.stop()
    for name, seconds in times.items():
        median = statistics.median(seconds)
        found[name] |= {"seconds": median, "spread": (max(seconds) - min(seconds)) / median, "rounds": seconds}
    return found


def ratio(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    """How many times as fast: the median over the rounds of their time by ours."""
    return statistics.median(b / a for a, b in zip(ours["rounds"], theirs["rounds"], strict=True))
