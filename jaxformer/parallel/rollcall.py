"""Who is there: the processes of a run report to the first one, before JAX connects them.

JAX's own connection ends a process with a stack trace of C++ when a partner does not come, and does not say which. The
roll is called on the address that JAX's coordinator will have, and over before it is needed: every process sends a line
of JSON, and when all have, or time is up, each gets the answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from typing import Any

from jaxformer.config import ConfigError


def call(address: str, count: int, index: int, seconds: float) -> None:
    """Returns when all `count` processes have reported, this one as number `index`.

    Args:
      address: host:port of process 0.
      seconds: to wait for the last of them.

    Raises:
      ConfigError: some did not come (says which), two say the same number, or they were told different counts.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + seconds
    own = {"index": index, "count": count, "host": socket.gethostname(), "pid": os.getpid()}
    problem = _serve(int(port), own, deadline) if index == 0 else _report(host.strip("[]"), int(port), own, deadline)
    if problem:
        raise ConfigError(f"processes at {address}: {problem} (this is number {index} of {count}, {own['host']})")


def _serve(port: int, own: dict[str, Any], deadline: float) -> str:
    """Hears all the others, then tells each what is wrong, "" if nothing is."""
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
            except (OSError, ValueError, KeyError):  # nobody came, or a stranger: no line, or another kind of line
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
            with contextlib.suppress(OSError):  # it left: whoever ended it knows why
                connection.sendall((json.dumps({"problem": problem}) + "\n").encode())
                connection.recv(1)  # the other side closes first, so that the port is free at once
            connection.close()
    return problem


def _listener(port: int, backlog: int) -> socket.socket:
    """On every address of this machine, of both families where it has both."""
    try:
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    except (OSError, ValueError):
        return socket.create_server(("", port), backlog=backlog)


def _report(host: str, port: int, own: dict[str, Any], deadline: float) -> str:
    """Reports to the first process and waits for its answer."""
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


def _list(numbers: list[int], most: int = 8) -> str:
    shown = ", ".join(map(str, numbers[:most]))
    return shown + (f" and {len(numbers) - most} more" if len(numbers) > most else "")
