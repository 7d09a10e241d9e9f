"""Checks that all processes of the job have started, before JAX connects them.

If a process is missing, JAX ends the others with a C++ stack trace that does not name it. This check uses the
address of JAX's coordinator and is over before JAX needs it. Every process sends one line of JSON to process 0. When
all have reported, or the time is up, process 0 answers each with the problem that it found, or "".
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from typing import Any

from jaxformer.errors import ConfigError


def wait_for_processes(address: str, count: int, index: int, seconds: float) -> None:
    """Waits until all `count` processes have reported; this one is number `index`.

    Args:
      address: host:port of process 0.
      count: number of processes.
      index: number of this process.
      seconds: time limit for waiting for the last process.

    Raises:
      ConfigError: some processes are missing (names them), two have the same number, or their counts differ.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + seconds
    report = {"index": index, "count": count, "host": socket.gethostname(), "pid": os.getpid()}
    problem = (
        _collect_reports(int(port), report, deadline)
        if index == 0
        else _report_to_first(host.strip("[]"), int(port), report, deadline)
    )
    if problem:
        raise ConfigError(f"processes at {address}: {problem} (this is number {index} of {count}, {report['host']})")


def _collect_reports(port: int, own: dict[str, Any], deadline: float) -> str:
    """Process 0: collects the reports of all others, then sends each the problem, or "" if there is none."""
    try:
        listener = _listener(port, own["count"])
    except OSError as error:
        return f"got no port {port} ({error.strerror}), expected it free on the first process; choose another"
    present, problem = {0: own}, ""
    connections: list[socket.socket] = []
    with listener:
        while len(present) < own["count"] and not problem and time.monotonic() < deadline:
            listener.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                connection, _ = listener.accept()
                connection.settimeout(5.0)
                other = json.loads(connection.makefile("r", encoding="utf-8").readline())
                number = other["index"]
            except (OSError, ValueError, KeyError):  # a timeout, or a connection that is not a report of a process
                continue
            connections.append(connection)
            if other["count"] != own["count"]:
                problem = (
                    f"number {number} on {other['host']} expects {other['count']} of them; start all with one count"
                )
            elif number in present:
                hosts = f"{present[number]['host']} and {other['host']}"
                problem = f"two are number {number}, on {hosts}; give each its own"
            present[number] = other
        missing = [number for number in range(own["count"]) if number not in present]
        if missing and not problem:
            problem = f"got {len(present)}, expected {own['count']}; number {_list(missing)} did not come"
        for connection in connections:
            with contextlib.suppress(OSError):  # that process has ended
                connection.sendall((json.dumps({"problem": problem}) + "\n").encode())
                connection.recv(1)  # the other side closes first, so that the port is free at once
            connection.close()
    return problem


def _listener(port: int, backlog: int) -> socket.socket:
    """A socket that listens on all addresses of this machine, IPv6 and IPv4 where it has both."""
    try:
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    except (OSError, ValueError):
        return socket.create_server(("", port), backlog=backlog)


def _report_to_first(host: str, port: int, own: dict[str, Any], deadline: float) -> str:
    """Any other process: reports to process 0 and returns its answer, a problem or ""."""
    while True:
        try:
            with socket.create_connection((host, port), timeout=max(deadline - time.monotonic(), 0.1)) as connection:
                connection.sendall((json.dumps(own) + "\n").encode())
                # A little longer than the first process waits, so that its answer still arrives.
                connection.settimeout(max(deadline - time.monotonic(), 0.1) + 10.0)
                line = connection.makefile("r", encoding="utf-8").readline()
            return json.loads(line)["problem"]
        except (OSError, ValueError, KeyError) as error:
            if time.monotonic() > deadline:
                reason = getattr(error, "strerror", None) or "no answer"
                return f"got no connection to number 0 ({reason}), expected one; is it running, and its port open?"
            time.sleep(0.2)


def _list(numbers: list[int], limit: int = 8) -> str:
    shown = ", ".join(map(str, numbers[:limit]))
    return shown + (f" and {len(numbers) - limit} more" if len(numbers) > limit else "")
