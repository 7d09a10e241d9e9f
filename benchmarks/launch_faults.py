"""Faults of clusters, injected into the launchers, and what they did: the table of docs/measurements/launching.md.

    python benchmarks/launch_faults.py [--write]

gcloud is a stand-in that keeps the state of slices and workers and has a clock of its own, so nothing waits. The SLURM
jobs are the real batch scripts, run by bash, with stand-ins for srun and scontrol. --write renews the page.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import launch  # noqa: E402
from launch import gke, sky, slurm, tpu, worker  # noqa: E402
from launch.programs import Programs, Result  # noqa: E402

PAGE = ROOT / "docs" / "measurements" / "launching.md"
TRAIN = ["--config=configs/quickstart.py", "--workdir=/shared/run"]
VM = ["--name=pod", "--zone=z", "--type=v5litepod-8", "--version=v2-alpha-tpuv5-lite"]


MAX_SECONDS = 1e5
"""A launcher that is not done by then, on the stand-in's clock, never will be."""


# --- a stand-in for gcloud --------------------------------------------------------------------------------------------


@dataclass
class Host:
    """A simulated worker of a slice.

    Attributes:
      run: end (seconds of the stand-in's clock) and exit code of the run; None if none has begun.
      token: name of its attempt.
      has_code: True once the code is installed.
    """

    name: str
    run: tuple[float, int] | None = None
    token: str = ""
    has_code: bool = False
    has_died: bool = False
    log: bytes = b""


@dataclass
class Node:
    """A simulated slice."""

    state: str
    hosts: list[Host]
    labels: dict[str, str] = field(default_factory=dict)


def not_found() -> Result:
    return Result(1, "", "ERROR: (gcloud.compute.tpus.describe) NOT_FOUND: Resource 'pod' was not found")


def both(code: int, seconds: float) -> tuple[tuple[int, int], tuple[float, float]]:
    """An attempt in which both workers end with `code` after `seconds`."""
    return (code, code), (seconds, seconds)


class FakeCloud(Programs):
    """A gcloud that keeps state: one slice of two hosts, and the queued resource of its name.

    Args:
      runs: exit codes of the two workers in each attempt that starts, and the seconds that each runs. The last repeats.
      creations: what each creation meets: "ok", "quota", "capacity", "half" (the slice stays in CREATING, with an
        error), "short" (one of the two hosts never answers), "denied". The last one repeats.
      events: (when, action on this cloud) that happen once, in this order: after so many seconds, or before the first
        command that contains the text.
    """

    def __init__(
        self,
        runs: Sequence[tuple[tuple[int, int], tuple[float, float]]] = (both(0, 100.0),),
        creations: Sequence[str] = ("ok",),
        events: Sequence[tuple[float | str, Callable[[FakeCloud], None]]] = (),
    ) -> None:
        self.runs, self.creations, self.events = list(runs), list(creations), list(events)
        self.now = 0.0
        self.node: Node | None = None
        self.queue: list[str] = []
        self.queue_labels: dict[str, str] = {}
        self.is_offline = False
        self.dropping = 0
        self.stops = 0
        self.bad_installs = 0
        self.said: list[str] = []
        self.shown = b""
        self.commands: list[list[str]] = []
        self.attempts = 0

    # --- Programs -----------------------------------------------------------------------------------------------------

    def sleep(self, seconds: float) -> None:
        self._advance(seconds)

    def clock(self) -> float:
        return self.now

    def stamp(self) -> str:
        return f"{self.now:.0f}"

    def say(self, line: str) -> None:
        self.said.append(line)

    def show(self, data: bytes) -> None:
        self.shown += data

    def stream(self, command: Sequence[str], read: Callable[[bytes], None]) -> int:
        offset = int(re.search(rf"{worker.MARK} log (\d+)", command[-1]).group(1))
        if self._is_unreachable():
            return 255
        host = self.node.hosts[0]
        header = f"{worker.MARK} log {offset}\n".encode()
        if self.dropping:  # gcloud repeats the command, and so what was printed
            self.dropping -= 1
            read(header + host.log[offset : offset + 7])
            read(header + host.log[offset:])
            return 255
        read(header + host.log[offset:])
        self._advance(min(worker.FOLLOW_SECONDS, max(host.run[0] - self.now, 0.0) if host.run else 0.0))
        return 0

    def call(self, command: Sequence[str], standard_input: str | None = None) -> Result:
        self.commands.append(list(command))
        self._advance(1.0)
        text = " ".join(command)
        if self.events and isinstance(self.events[0][0], str) and self.events[0][0] in text:
            self.events.pop(0)[1](self)
        if command[0] == "git":
            answers = {"ls-files": command[-1], "rev-parse": "" if "--show-prefix" in command else "0123abcd"}
            return Result(0, answers.get(command[1], ""), "")
        if self.is_offline:
            return Result(1, "", "ERROR: gcloud crashed (ServerNotFoundError): Unable to find the server")
        kind, verb = command[3], command[4]
        if verb == "create":
            return self._create(command, kind)
        if verb == "describe":
            return self._describe(kind)
        if verb == "delete":
            found = self.node or self.queue
            self.node, self.queue = None, []
            return Result(0, "", "") if found else not_found()
        if self._is_unreachable():
            return Result(255, "", "ssh: connect to host: Connection timed out")
        if self.dropping:
            self.dropping -= 1
            return Result(255, self._ssh("all", command[-1], only=1) if verb == "ssh" else "", "Connection closed")
        if verb == "scp":
            return Result(0, "", "")
        if self.bad_installs and "tar -xzf" in text:
            self.bad_installs -= 1
            return Result(1, "", "error: Failed to fetch: connection reset")
        which = next(word.removeprefix("--worker=") for word in command if word.startswith("--worker="))
        return Result(0, self._ssh(which, command[-1]), "")

    # --- the cloud ----------------------------------------------------------------------------------------------------

    def _advance(self, seconds: float) -> None:
        self.now += seconds
        if self.now > MAX_SECONDS:
            raise AssertionError("the launcher goes on for ever")
        while self.events and isinstance(self.events[0][0], float) and self.events[0][0] <= self.now:
            self.events.pop(0)[1](self)
        if self.queue[1:]:
            self.queue.pop(0)
            if self.queue == ["ACTIVE"]:
                self.node = Node("READY", [Host("t1v-0"), Host("t1v-1")], self.queue_labels)
        for host in self.node.hosts if self.node else ():
            if host.run and host.run[0] <= self.now and not host.log.endswith(b"end\n"):
                host.log += b"end\n"

    def _is_unreachable(self) -> bool:
        return self.is_offline or self.node is None or self.node.state != "READY"

    def _create(self, command: Sequence[str], kind: str) -> Result:
        fate = self.creations.pop(0) if len(self.creations) > 1 else self.creations[0]
        error = {
            "quota": "ERROR: RESOURCE_EXHAUSTED: Quota limit 'TPUV5sLitepodPerZone' has been exceeded. Limit: 8",
            "capacity": "ERROR: RESOURCE_EXHAUSTED: There is no more capacity in the zone; you can try in another zone",
            "denied": "ERROR: PERMISSION_DENIED: Permission 'tpu.nodes.create' denied",
            "half": "ERROR: INTERNAL: an internal error has occurred",
        }.get(fate, "")
        if fate in ("quota", "capacity", "denied"):
            return Result(1, "", error)
        labels = dict(word.removeprefix("--labels=").split("=") for word in command if word.startswith("--labels="))
        if kind == "queued-resources":
            self.queue_labels = labels
            self.queue = ["ACCEPTED", "WAITING_FOR_RESOURCES", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]
            return Result(0, "", "")
        self.node = Node("CREATING" if fate == "half" else "READY", [Host("t1v-0"), Host("t1v-1")], labels)
        if fate == "short":
            self.node.hosts[1].name = ""
        return Result(1 if error else 0, "", error)

    def _describe(self, kind: str) -> Result:
        if kind == "queued-resources":
            request = {"nodeSpec": [{"nodeId": "pod", "node": {"labels": self.queue_labels}}]}
            facts = {"state": {"state": (self.queue or [""])[0]}, "tpu": request}
            return Result(0, json.dumps(facts), "") if self.queue else not_found()
        if self.node is None:
            return not_found()
        ends = [{"ipAddress": f"10.0.0.{i}"} for i in range(len(self.node.hosts))]
        facts = {"state": self.node.state, "networkEndpoints": ends, "labels": self.node.labels}
        return Result(0, json.dumps(facts), "")

    def _ssh(self, which: str, shell: str, only: int = 2) -> str:
        """Output of a command of `worker` on the hosts; with `only=1` the connection reaches the first one alone."""
        hosts = self.node.hosts[:only] if which == "all" else [self.node.hosts[int(which)]]
        begin = re.search(r"^echo (\S+) > .launch/token$", shell, re.M)
        lines = []
        for host in hosts:
            if not host.name:
                continue
            is_running = host.run is not None and host.run[0] > self.now and not host.has_died
            if begin:
                if is_running or host.token == begin[1]:
                    continue
                if host is hosts[0]:
                    self.attempts += 1
                codes, seconds = self.runs[min(self.attempts, len(self.runs)) - 1]
                host.token, host.has_died = begin[1], False
                index = self.node.hosts.index(host)
                host.run = (self.now + seconds[index], codes[index])
                host.log = f"attempt {self.attempts}\nstep 1\n".encode()
            elif "tar -xzf" in shell:
                host.has_code = True
            elif "kill -TERM" in shell:
                self.stops += 1
                if is_running:
                    host.run = (self.now, 143)
            elif shell.rstrip().endswith(".log"):
                lines.append(host.log.decode())
            elif host.has_died:
                lines.append(f"{worker.MARK} {host.name} died\n")
            elif is_running:
                lines.append(f"{worker.MARK} {host.name} running {host.token}\n")
            elif host.run:
                lines.append(f"{worker.MARK} {host.name} exit {host.token} {host.run[1]} {host.run[0]}\n")
            else:
                lines.append(f"{worker.MARK} {host.name} idle\n")
        return "".join(lines)


def preempt(cloud: FakeCloud) -> None:
    """Takes the slice away; its name stays."""
    if cloud.node:
        cloud.node.state = "PREEMPTED"
    if cloud.queue:
        cloud.queue = ["SUSPENDED"]


def crash(cloud: FakeCloud) -> None:
    """The runs crash, as they do when a neighbour is taken away; gcloud says READY for a moment more."""
    for host in cloud.node.hosts if cloud.node else ():
        host.run = (cloud.now, 1)


def break_one_install(cloud: FakeCloud) -> None:
    """An installation breaks off."""
    cloud.bad_installs = 1


def break_installs(cloud: FakeCloud) -> None:
    """No installation succeeds."""
    cloud.bad_installs = 99


def drop_ssh(cloud: FakeCloud) -> None:
    """The next three connections break in the middle."""
    cloud.dropping = 3


def go_offline(cloud: FakeCloud) -> None:
    """The launcher's own machine loses its network for ten minutes."""
    cloud.is_offline = True
    cloud.events.insert(0, (cloud.now + 600.0, lambda c: setattr(c, "is_offline", False)))


def reboot(cloud: FakeCloud) -> None:
    """A host restarts: its run is gone, without an exit code."""
    if cloud.node:
        cloud.node.hosts[1].has_died = True


def foreign(cloud: FakeCloud) -> None:
    """Somebody else has a slice of this name."""
    cloud.node = Node("READY", [Host("t1v-0"), Host("t1v-1")])


def foreign_request(cloud: FakeCloud) -> None:
    """Somebody else has a request of this name, which is over."""
    cloud.queue = ["SUSPENDED"]


def interrupt(cloud: FakeCloud) -> None:
    """The user presses Ctrl-C."""
    raise KeyboardInterrupt


# --- faults of TPU slices ---------------------------------------------------------------------------------------------


class Fault(NamedTuple):
    """A fault and what has to come of it.

    Attributes:
      name: what happens.
      cloud: makes the stand-in that injects it.
      flags: arguments of the launcher, beside those of every fault.
      code: expected exit code.
      attempts: expected number of attempts that have begun.
      is_kept: True if the slice is there at the end.
      line: a part of what the launcher says.
    """

    name: str
    cloud: Callable[[], FakeCloud]
    flags: tuple[str, ...]
    code: int
    attempts: int
    is_kept: bool
    line: str


TPU_FAULTS = (
    Fault("none", FakeCloud, (), 0, 1, False, "deleted"),
    Fault("none, from the queue", FakeCloud, ("--queued", "--spot"), 0, 1, False, "WAITING_FOR_RESOURCES"),
    Fault("quota used up", lambda: FakeCloud(creations=["quota"]), (), 2, 0, False, "ask for quota"),
    Fault("no permission", lambda: FakeCloud(creations=["denied"]), (), 2, 0, False, "PERMISSION_DENIED"),
    Fault(
        "no capacity, three times", lambda: FakeCloud(creations=[*["capacity"] * 3, "ok"]), (), 0, 1, False, "capacity"
    ),
    Fault(
        "no capacity for longer than --wait-minutes", lambda: FakeCloud(creations=["capacity"]), ("--wait-minutes=5",),
        1, 0, False, "within 5 minutes",
    ),
    Fault("creation fails, the slice stays in CREATING", lambda: FakeCloud(creations=["half", "ok"]), (), 0, 1, False,
          "deleted"),
    Fault("a slice of which one host never answers", lambda: FakeCloud(creations=["short", "ok"]), (), 0, 1, False,
          "1 of 2 workers answer"),
    Fault("an installation breaks off once", lambda: FakeCloud(events=[("scp", break_one_install)]), (), 0, 1, False,
          "deleted"),
    Fault("no installation succeeds", lambda: FakeCloud(events=[("scp", break_installs)]), (), 1, 0, True,
          "Failed to fetch"),
    Fault("preempted while the code is copied", lambda: FakeCloud(events=[("scp", preempt)]), ("--spot",), 0, 1, False,
          "PREEMPTED"),
    Fault("preempted in the run", lambda: FakeCloud(events=[(60.0, preempt)]), ("--spot",), 0, 2, False, "PREEMPTED"),
    Fault("preempted, and the runs crash (1) before gcloud knows",
          lambda: FakeCloud(events=[(60.0, crash), ("--worker=1", preempt)]), ("--spot",), 0, 2, False, "PREEMPTED"),
    Fault("preempted in the run, queued", lambda: FakeCloud(events=[(90.0, preempt)]), ("--queued", "--spot"), 0, 2,
          False, "SUSPENDED"),
    Fault(
        "preempted in every attempt",
        lambda: FakeCloud([both(0, 1e9)], events=[(100.0 * 2**i, preempt) for i in range(9)]),
        ("--spot", "--max-restarts=3"), 143, 4, False, "are used up",
    ),
    Fault("three connections break in the run", lambda: FakeCloud(events=[(60.0, drop_ssh)]), (), 0, 1, False,
          "deleted"),
    Fault("connections break, and the start reaches one host only", lambda: FakeCloud(events=[("run.sh", drop_ssh)]),
          (), 0, 1, False, "started"),
    Fault("the launcher's network is gone for ten minutes",
          lambda: FakeCloud([both(0, 900.0)], events=[(60.0, go_offline)]), (), 0, 1, False, "deleted"),
    Fault("a host restarts", lambda: FakeCloud([both(0, 300.0)], events=[(60.0, reboot)]), (), 0, 2, False,
          "t1v-1 lost the run"),
    Fault("one worker crashes (1)", lambda: FakeCloud([((0, 1), (100.0, 100.0))]), (), 1, 1, True, "is kept"),
    Fault("one worker crashes (1), the other waits for it", lambda: FakeCloud([((0, 1), (1e9, 100.0))]), (), 1, 1, True,
          "stopping the others"),
    Fault("one worker refuses the config (2)", lambda: FakeCloud([((2, 0), (20.0, 20.0))]), (), 2, 1, True, "is kept"),
    Fault("the run hangs (75), then goes on", lambda: FakeCloud([both(75, 900.0), both(0, 50.0)]), (), 0, 2, False,
          "code 75: restart 1"),
    Fault("the run is stopped (143), then goes on", lambda: FakeCloud([both(143, 90.0), both(0, 50.0)]), (), 0, 2,
          False, "code 143: restart 1"),
    Fault("a slice of that name is somebody else's", lambda: FakeCloud(events=[("describe", foreign)]), (), 2, 0, True,
          "without the label"),
    Fault("a request of that name is somebody else's", lambda: FakeCloud(events=[("describe", foreign_request)]),
          ("--queued",), 2, 0, False, "without the label"),
    Fault("Ctrl-C", lambda: FakeCloud(events=[(60.0, interrupt)]), (), 143, 1, True, "same command continues"),
)  # fmt: skip


class Outcome(NamedTuple):
    """Outcome of a launcher: exit code, attempts begun, simulated minutes, whether the slice is there, its lines."""

    code: int
    attempts: int
    minutes: float
    is_kept: bool
    lines: str


def inject_tpu(fault: Fault, logs: Path) -> tuple[Outcome, FakeCloud]:
    """Runs the launcher against the stand-in."""
    cloud = fault.cloud()
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        code = tpu.main([*VM, f"--logs={logs}", *fault.flags, "--", *TRAIN], programs=cloud)
    lines = "\n".join([*cloud.said, errors.getvalue().strip()])
    return Outcome(code, cloud.attempts, cloud.now / 60.0, cloud.node is not None, lines), cloud


# --- faults of SLURM jobs ---------------------------------------------------------------------------------------------


class JobFault(NamedTuple):
    """A fault of a SLURM job and what has to come of it.

    Attributes:
      name: what happens.
      codes: exit codes of srun, one for each time that the job runs.
      refusals: how often scontrol refuses before it accepts.
      flags: arguments of the launcher, beside those of every fault.
      code: expected exit code of the last run of the job.
      attempts: expected number of runs.
    """

    name: str
    codes: tuple[int, ...]
    refusals: int
    flags: tuple[str, ...]
    code: int
    attempts: int
    line: str


SLURM_FAULTS = (
    JobFault("none", (0,), 0, (), 0, 1, ""),
    JobFault("preempted twice", (143, 143, 0), 0, (), 0, 3, ""),
    JobFault("the run hangs (75), then goes on", (75, 0), 0, (), 0, 2, ""),
    JobFault("preempted in every run", (143,) * 9, 0, ("--max-restarts=3",), 143, 4, "are used up"),
    JobFault("a worker crashes (1)", (1, 0), 0, (), 1, 1, ""),
    JobFault("a worker refuses the config (2)", (2, 0), 0, (), 2, 1, ""),
    JobFault("the controller refuses the requeue twice", (143, 0), 2, (), 0, 2, "refused"),
    JobFault("the controller refuses the requeue for good", (143, 0), 9, (), 143, 1, "refused"),
)


def inject_slurm(fault: JobFault, folder: Path) -> Outcome:
    """Runs the batch script as a cluster would, with stand-ins that record what they are told.

    srun reads its exit code from a file; scontrol asks for another run. `sleep` returns at once.
    """
    for name, body in {
        "srun": 'read -r code < codes; sed -i 1d codes; exit "$code"',
        "scontrol": 'n=$(cat refusals); [ "$n" -eq 0 ] || { echo $((n - 1)) > refusals; echo refused >&2; exit 1; }; '
        'echo "$*" > requeue',
        "sleep": "",
    }.items():
        program = folder / name
        program.write_text(f"#!/bin/bash\n{body}\n")
        program.chmod(0o755)
    (folder / "codes").write_text("".join(f"{code}\n" for code in fault.codes))
    (folder / "refusals").write_text(f"{fault.refusals}\n")
    script = io.StringIO()
    with contextlib.redirect_stdout(script):
        slurm.main(["--dry-run", f"--folder={folder}", *fault.flags, "--", *TRAIN])
    attempts, lines = 0, []
    while True:
        environment = {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "42",
            "SLURM_RESTART_COUNT": str(attempts),
        }
        done = subprocess.run(
            ["bash", "-s"], input=script.getvalue(), env=environment, capture_output=True, text=True, check=False
        )
        attempts += 1
        lines.append(done.stderr)
        requeue = folder / "requeue"
        if not requeue.exists():
            return Outcome(done.returncode, attempts, 0.0, False, "".join(lines))
        lines.append(requeue.read_text())
        requeue.unlink()


# --- faults of JobSets ------------------------------------------------------------------------------------------------


class FakeCluster(Programs):
    """A kubectl that keeps one JobSet, and treats it as the controllers of jobs and of JobSets do.

    Args:
      attempts: exit codes of the pods at each look, None of those that run; the last one repeats.
      creation: error of `kubectl create`; "" if it succeeds.
      outages: looks that the API server does not answer.
      is_deleted: True if somebody deletes the JobSet.
    """

    def __init__(
        self,
        attempts: Sequence[tuple[int | None, ...]] = ((None, None), (0, 0)),
        creation: str = "",
        outages: int = 0,
        is_deleted: bool = False,
    ) -> None:
        self.attempts, self.creation, self.outages, self.is_deleted = list(attempts), creation, outages, is_deleted
        self.jobset: dict[str, Any] = {}
        self.status: dict[str, Any] = {}
        self.pods: tuple[int | None, ...] = ()
        self.now = 0.0
        self.said: list[str] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def say(self, line: str) -> None:
        self.said.append(line)

    def call(self, command: Sequence[str], standard_input: str | None = None) -> Result:
        verb, kind = command[1], command[2]
        if verb == "create":
            self.jobset = {} if self.creation else yaml.safe_load(standard_input or "")
            return Result(1 if self.creation else 0, "", self.creation)
        if kind == "pods":
            ends = [{"terminated": {"exitCode": code, "finishedAt": f"{i}"}} for i, code in enumerate(self.pods)]
            return Result(
                0, json.dumps({"items": [{"status": {"containerStatuses": [{"state": e}]}} for e in ends]}), ""
            )
        if self.outages:
            self.outages -= 1
            return Result(1, "", "Unable to connect to the server: net/http: TLS handshake timeout")
        if self.is_deleted:
            return Result(1, "", 'Error from server (NotFound): jobsets.jobset.x-k8s.io "run" not found')
        self._reconcile()
        return Result(0, json.dumps({"status": self.status}), "")

    def _reconcile(self) -> None:
        self.pods = self.attempts.pop(0) if len(self.attempts) > 1 else self.attempts[0]
        job = self.jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
        policy = self.jobset["spec"]["failurePolicy"]
        fails_at_once = policy["rules"][0]["action"] == "FailJobSet"
        fatal = job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] if fails_at_once else ()
        failed = [code for code in self.pods if code]
        restarts = self.status.get("restarts", 0)
        if None not in self.pods and not failed:
            self.status["terminalState"] = "Completed"
        elif failed and (set(failed) & set(fatal) or restarts >= policy["maxRestarts"]):
            self.status["terminalState"] = "Failed"
        elif failed:
            self.status["restarts"] = restarts + 1


class SubmittedFault(NamedTuple):
    """A fault of a run that another program supervises, and what has to come of it.

    Attributes:
      name: what happens.
      cluster: makes the stand-in that injects it.
      flags: arguments of the launcher, beside those of every fault.
      code: expected exit code.
      attempts: expected number of attempts.
      line: a part of what is said.
    """

    name: str
    cluster: Callable[[], Any]
    flags: tuple[str, ...]
    code: int
    attempts: int
    line: str


GKE_FAULTS = (
    SubmittedFault("none", FakeCluster, (), 0, 1, "Completed"),
    SubmittedFault(
        "a node is preempted twice", lambda: FakeCluster([(137, None), (143, 1), (0, 0)]), (), 0, 3, "2 restarts"
    ),
    SubmittedFault(
        "a pod fails in every attempt",
        lambda: FakeCluster([(134, 1)]),
        ("--max-restarts=3",),
        134,
        4,
        "Failed, 3 restarts",
    ),
    SubmittedFault("a pod refuses the config (2)", lambda: FakeCluster([(None, 2), (0, 0)]), (), 2, 1, "Failed"),
    SubmittedFault("the API server is away", lambda: FakeCluster(outages=5), (), 0, 1, "Completed"),
    SubmittedFault(
        "the namespace's quota is used up",
        lambda: FakeCluster(creation="Error from server (Forbidden): exceeded quota: chips"),
        (),
        2,
        0,
        "exceeded quota",
    ),
    SubmittedFault("somebody deletes the JobSet", lambda: FakeCluster(is_deleted=True), (), 1, 1, "no such JobSet"),
)


def inject_gke(fault: SubmittedFault) -> Outcome:
    """Submits to the stand-in and waits."""
    cluster = fault.cluster()
    errors = io.StringIO()
    arguments = ["--name=run", "--image=i", "--hosts=2", "--volume=/shared=claim", "--wait", *fault.flags]
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        code = gke.main([*arguments, "--", *TRAIN], programs=cluster)
    attempts = cluster.status.get("restarts", 0) + 1 if cluster.jobset else 0
    return Outcome(code, attempts, cluster.now / 60.0, False, "\n".join([*cluster.said, errors.getvalue()]))


# --- faults of SkyPilot's jobs ----------------------------------------------------------------------------------------


class FakeSky(Programs):
    """A sky that runs the script of a managed job with bash, on one node, and recovers it as SkyPilot does.

    Args:
      codes: what each attempt of the run ends with; "preempted": the machine is taken away.
      breaks: how often the log ends before the job.
    """

    def __init__(self, codes: Sequence[int | str] = (0,), breaks: int = 0) -> None:
        self.codes, self.breaks = list(codes), breaks
        self.folder = Path()
        self.attempts = 0
        self.end = 0
        self.lines = ""

    def sleep(self, seconds: float) -> None:
        pass

    def run(self, command: Sequence[str]) -> int:
        if command[:3] == ["sky", "jobs", "launch"]:
            self._run_job(yaml.safe_load(Path(command[-1]).read_text(encoding="utf-8")))
        if self.breaks:
            self.breaks -= 1
            return 101
        return self.end

    def _run_job(self, task: dict[str, Any]) -> None:
        recovery = task["resources"]["job_recovery"]
        environment = {
            "PATH": f"{self.folder}:{os.environ['PATH']}", "SKYPILOT_NODE_IPS": "10.0.0.1", "SKYPILOT_NUM_NODES": "1",
            "SKYPILOT_NODE_RANK": "0",
        }  # fmt: skip
        while True:
            code = self.codes.pop(0) if len(self.codes) > 1 else self.codes[0]
            self.attempts += 1
            if code == "preempted":
                continue
            done = subprocess.run(
                ["bash", "-c", task["run"]], cwd=self.folder, env=environment | {"CODE": str(code)},
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            self.lines += done.stderr
            if done.returncode not in recovery["recover_on_exit_codes"]:
                self.end = 100 if done.returncode else 0
                return


SKY_FAULTS = (
    SubmittedFault("none", FakeSky, (), 0, 1, ""),
    SubmittedFault("the machine is preempted twice", lambda: FakeSky(["preempted", "preempted", 0]), (), 0, 3, ""),
    SubmittedFault("the run is stopped (143), hangs (75), goes on", lambda: FakeSky([143, 75, 0]), (), 0, 3, ""),
    SubmittedFault(
        "the run hangs (75) in every attempt", lambda: FakeSky([75]), ("--max-restarts=3",), 1, 4, "used up"
    ),
    SubmittedFault("a node refuses the config (2)", lambda: FakeSky([2, 0]), (), 1, 1, ""),
    SubmittedFault("the log breaks off three times", lambda: FakeSky(breaks=3), (), 0, 1, ""),
)


def inject_sky(fault: SubmittedFault, folder: Path) -> Outcome:
    """Submits to the stand-in, whose machines keep their disk in `folder`."""
    cloud = fault.cluster()
    cloud.folder = folder
    for name, body in {"python": 'exit "$CODE"', "sleep": ""}.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    arguments = ["--name=run", f"--volume={folder}=disk", "--python=python", *fault.flags]
    code = sky.main([*arguments, "--", TRAIN[0], f"--workdir={folder}/run"], programs=cloud)
    return Outcome(code, cloud.attempts, 0.0, False, cloud.lines)


# --- the table --------------------------------------------------------------------------------------------------------


def rows() -> list[tuple[str, str, int, int, str, bool]]:
    """Engine, fault, exit code, attempts, what else to know, and whether this is what has to come of it."""
    found = []
    for loss in TPU_FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            outcome, _ = inject_tpu(loss, Path(folder))
        expected = (loss.code, loss.attempts, loss.is_kept)
        is_right = (outcome.code, outcome.attempts, outcome.is_kept) == expected and loss.line in outcome.lines
        end = "slice kept" if outcome.is_kept else "slice deleted" if "is deleted" in outcome.lines else "no slice"
        found.append(("TPU", loss.name, outcome.code, outcome.attempts, f"{end}; {outcome.minutes:.0f} min", is_right))
    for job in SLURM_FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            outcome = inject_slurm(job, Path(folder))
        is_right = (outcome.code, outcome.attempts) == (job.code, job.attempts) and job.line in outcome.lines
        found.append(
            ("SLURM", job.name, outcome.code, outcome.attempts, f"requeued {outcome.attempts - 1} times", is_right)
        )
    for engine, faults in (("GKE", GKE_FAULTS), ("SkyPilot", SKY_FAULTS)):
        for fault in faults:
            with tempfile.TemporaryDirectory() as folder:
                outcome = inject_gke(fault) if engine == "GKE" else inject_sky(fault, Path(folder))
            is_right = (outcome.code, outcome.attempts) == (fault.code, fault.attempts) and fault.line in outcome.lines
            end = {0: "done", launch.WRONG_INPUT: "refused"}.get(outcome.code, "failed")
            found.append((engine, fault.name, outcome.code, outcome.attempts, end, is_right))
    return found


def table(found: Sequence[tuple[str, str, int, int, str, bool]]) -> str:
    """The rows as Markdown."""
    lines = ["| engine | fault | exit code | attempts | at the end |", "|---|---|---|---|---|"]
    lines += [f"| {engine} | {fault} | {code} | {n} | {end} |" for engine, fault, code, n, end, _ in found]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; 1 if a fault had another outcome than it has to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="renew the table in docs/measurements/launching.md")
    flags = parser.parse_args(argv)
    found = rows()
    text = table(found)
    print(text, end="")
    wrong = [fault for _, fault, *_, is_right in found if not is_right]
    for fault in wrong:
        print(f"error: {fault}: another outcome than expected", file=sys.stderr)
    if flags.write:
        page = PAGE.read_text(encoding="utf-8")
        before, _, rest = page.partition("<!-- faults: begin -->\n")
        after = rest.partition("<!-- faults: end -->")[2]
        PAGE.write_text(f"{before}<!-- faults: begin -->\n{text}<!-- faults: end -->{after}", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
