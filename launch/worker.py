"""Shell commands that run on a worker of a TPU slice, over ssh.

Every command may be repeated: gcloud does so when a connection breaks, and so does the launcher. The files of the run
lie in the folder `.launch` of the code: `token` (name of the attempt), `pid`, `TOKEN.log` (its output) and `exit` (its
exit code and the time).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import NamedTuple

from launch import shell

MARK = "@jaxformer"
"""First word of lines that are meant for the launcher."""

FOLLOW_SECONDS = 60
"""Seconds after which a command that follows a log returns, so that the launcher can look at the other workers."""

GRACE_SECONDS = 90
"""Seconds that a run has for saving, after it was asked to stop."""

_ALIVE = """\
alive() {
  pid=$(cat .launch/pid 2>/dev/null) && [ -n "$pid" ] && grep -qsa -- "$(cat .launch/token)" "/proc/$pid/cmdline"
}
"""

_RUN = """\
token=$1
shift
trap '' HUP
"$@" > ".launch/$token.log" 2>&1 < /dev/null &
run=$!
"""
_RUN += shell.wait_for("run")
_RUN += """\
echo "$code $(date +%s.%N)" > .launch/exit.new && mv .launch/exit.new .launch/exit
"""


class Worker(NamedTuple):
    """State of one worker.

    Attributes:
      host: its host name.
      state: "idle", "running", "exit", or "died" (a run that left no exit code).
      code: exit code of a run that has ended.
      time: when it ended, in seconds by the worker's clock.
      token: name of the attempt that is running or has ended.
    """

    host: str
    state: str
    code: int = 0
    time: float = 0.0
    token: str = ""

    @property
    def has_failed(self) -> bool:
        """True if the run has ended otherwise than with code 0."""
        return self.state == "died" or (self.state == "exit" and self.code != 0)


def _in(folder: str, body: str) -> str:
    return f"cd {shlex.quote(folder)} || exit 1\n{body}"


def install(archive: str, folder: str, steps: Sequence[str]) -> str:
    """Unpacks the archive into a new `folder` and runs the steps of the installation there."""
    place = shlex.quote(folder)
    unpack = f"rm -rf {place} && mkdir -p {place} && tar -xzf {shlex.quote(archive)} -C {place} && cd {place}"
    return " && ".join([unpack, *(f"{{ {step}; }}" for step in steps)])


def start(folder: str, token: str, command: str) -> str:
    """Starts the shell `command` in the background, unless this attempt has begun or another one is running."""
    body = f"""mkdir -p .launch
{_ALIVE}\
if alive || [ "$(cat .launch/token 2>/dev/null)" = {token} ]; then exit 0; fi
rm -f .launch/exit .launch/pid
cat > .launch/run.sh << 'END'
{_RUN}END
echo {token} > .launch/token
setsid bash .launch/run.sh {token} bash -c {shlex.quote(command)} > /dev/null 2>&1 < /dev/null &
echo $! > .launch/pid
"""
    return _in(folder, body)


def probe(folder: str) -> str:
    """Prints a line with the state of the worker; of one without the folder, that it is idle."""
    return f"""cd {shlex.quote(folder)} 2>/dev/null || {{ echo "{MARK} $(hostname) idle"; exit 0; }}
{_ALIVE}\
if [ -f .launch/exit ]; then echo "{MARK} $(hostname) exit $(cat .launch/token) $(cat .launch/exit)"
elif alive; then echo "{MARK} $(hostname) running $(cat .launch/token)"
elif [ -f .launch/pid ]; then echo "{MARK} $(hostname) died"
else echo "{MARK} $(hostname) idle"; fi
"""


def follow(folder: str, token: str, offset: int) -> str:
    """Prints the log from byte `offset` on, until the run ends, but no longer than `FOLLOW_SECONDS`.

    A line with the offset comes first: what follows it may be a repetition.
    """
    body = f"""echo "{MARK} log {offset}"
pid=$(cat .launch/pid 2>/dev/null || echo 0)
timeout {FOLLOW_SECONDS} tail -c +{offset + 1} -f --pid="$pid" .launch/{token}.log || [ $? -eq 124 ]
"""
    return _in(folder, body)


def stop(folder: str) -> str:
    """Asks the run to save and stop; kills what is left after `GRACE_SECONDS`."""
    body = f"""{_ALIVE}\
alive || exit 0
kill -TERM "$pid"
for _ in $(seq {GRACE_SECONDS}); do alive || exit 0; sleep 1; done
kill -KILL -- "-$pid"
[ -f .launch/exit ] || echo "137 $(date +%s.%N)" > .launch/exit
"""
    return _in(folder, body)


def read_log(folder: str, token: str) -> str:
    """Prints the log of an attempt."""
    return _in(folder, f"cat .launch/{token}.log")


def read_states(text: str) -> list[Worker]:
    """The states in the output of `probe` on several workers; one for each host, the last that it printed."""
    workers: dict[str, Worker] = {}
    for line in text.splitlines():
        words = line.split()
        if words[:1] != [MARK] or len(words) < 3:
            continue
        host, state, *rest = words[1:]
        if state == "exit" and len(rest) == 3:
            workers[host] = Worker(host, state, int(rest[1]), float(rest[2]), rest[0])
        elif state in ("idle", "running", "died"):
            workers[host] = Worker(host, state, token="".join(rest[:1]))
    return list(workers.values())


class LogReader:
    """Passes on the bytes of a followed log, each once, although a broken connection makes gcloud print some again."""

    def __init__(self) -> None:
        self.offset = 0
        """Bytes of the log that were passed on."""
        self._position = 0
        self._pending = b""

    def read(self, data: bytes) -> bytes:
        """The new bytes of the log in `data`, the next piece of the output of `follow`; whole lines only."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        new = []
        for line in lines:
            _, header, offset = line.partition(f"{MARK} log ".encode())
            if header:  # what stands before it was cut off, and comes again
                self._position = int(offset)
                continue
            self._position += len(line) + 1
            if self._position > self.offset:
                new.append(line + b"\n")
                self.offset = self._position
        return b"".join(new)

    def restart(self) -> None:
        """Forgets an unfinished line: the connection that it came by has ended."""
        self._pending = b""
