"""A TPU slice of Google Cloud, by gcloud: create, wait for, describe, reach and delete it."""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import launch
from launch import source, worker
from launch.programs import Failure, Programs, Result

POLL_SECONDS = 15.0
"""Seconds between two looks at a slice that is being made."""

STUCK_SECONDS = 1200.0
"""A slice that is being made for longer (outside the queue) is deleted and made anew."""

GONE = ("PREEMPTED", "TERMINATED", "FAILED", "SUSPENDED")
"""States of a node or a queued resource that nothing leads out of: it still has its name, and is deleted."""

STUCK = ("CREATING", "REPAIRING", "REIMAGING", "UNKNOWN")
"""States that end by themselves, or never."""

OWNER = "launcher=jaxformer"
"""Label of slices that this launcher has made. Others are never deleted."""

TRANSIENT = re.compile(
    r"no more capacity|not enough|stockout|insufficient|RESOURCE_EXHAUSTED|UNAVAILABLE|INTERNAL|DEADLINE_EXCEEDED"
    r"|per minute|rateLimit|timed out|connection|try again",
    re.IGNORECASE,
)
"""Errors of a creation after which another try may succeed."""

QUOTA = re.compile(r"quota", re.IGNORECASE)

INSTALL = (
    "python3 -m pip install --quiet --user uv",
    "python3 -m uv venv --quiet --clear --python 3.12 .venv",
    "python3 -m uv pip install --quiet --python .venv/bin/python -r requirements.lock",
    "python3 -m uv pip install --quiet --python .venv/bin/python -c requirements.lock 'jax[tpu]'",
    "python3 -m uv pip install --quiet --python .venv/bin/python --no-deps {package}",
)
"""Shell commands that install the versions of the lock file, libtpu and the package."""


class Slice:
    """One slice; with --queued together with the queued resource of the same name.

    Attributes:
      workers: number of its hosts, known when it is ready.
      is_ours: False if the node has not been made by this launcher.
    """

    def __init__(self, flags: argparse.Namespace, programs: Programs) -> None:
        self.flags = flags
        self.programs = programs
        self.workers = 0
        self.is_ours = True

    # --- commands -----------------------------------------------------------------------------------------------------

    def _place(self) -> list[str]:
        return [f"--zone={self.flags.zone}", *([f"--project={self.flags.project}"] if self.flags.project else [])]

    def create_command(self) -> list[str]:
        """Creates the slice, or puts the request into the queue."""
        spot = ["--spot"] if self.flags.spot else []
        kind = [f"--accelerator-type={self.flags.type}"]
        if self.flags.queued:
            version = [f"--node-id={self.flags.name}", f"--runtime-version={self.flags.version}"]
            command = ["gcloud", "compute", "tpus", "queued-resources", "create", self.flags.name]
        else:
            version = [f"--version={self.flags.version}"]
            command = ["gcloud", "compute", "tpus", "tpu-vm", "create", self.flags.name]
        return [*command, *self._place(), *kind, *version, *spot, f"--labels={OWNER}", *self.flags.create, "--quiet"]

    def describe_commands(self) -> list[list[str]]:
        """Describe the queued resource, with --queued, and the node."""
        kinds = ["queued-resources", "tpu-vm"] if self.flags.queued else ["tpu-vm"]
        tpus = ["gcloud", "compute", "tpus"]
        return [[*tpus, kind, "describe", self.flags.name, *self._place(), "--format=json"] for kind in kinds]

    def delete_command(self) -> list[str]:
        """Deletes the slice, and with --queued its request."""
        kind = ["queued-resources", "delete", "--force"] if self.flags.queued else ["tpu-vm", "delete"]
        return ["gcloud", "compute", "tpus", *kind, self.flags.name, *self._place(), "--quiet"]

    def ssh_command(self, which: str, command: str) -> list[str]:
        """Runs a shell command on worker `which`, or on "all"."""
        ssh = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", self.flags.name, *self._place()]
        # A connection that a broken network has cut silently ends after a minute.
        alive = ["--ssh-flag=-oServerAliveInterval=15", "--ssh-flag=-oServerAliveCountMax=4"]
        return [*ssh, f"--worker={which}", "--quiet", *alive, f"--command={command}"]

    def copy_commands(self, archive: str) -> list[list[str]]:
        """Copy the archive, and the wheel, to all workers, and install."""
        files = [archive, *([self.flags.wheel] if self.flags.wheel else [])]
        scp = ["gcloud", "compute", "tpus", "tpu-vm", "scp", *files, f"{self.flags.name}:"]
        package = f"../{Path(self.flags.wheel).name}" if self.flags.wheel else "."
        steps = [self.flags.install] if self.flags.install else [step.format(package=package) for step in INSTALL]
        install = worker.install(Path(archive).name, self.flags.folder, steps)
        return [[*scp, *self._place(), "--worker=all", "--quiet"], self.ssh_command("all", install)]

    # --- the slice ----------------------------------------------------------------------------------------------------

    def state(self) -> str:
        """State of the node or, before there is one, of the request. "ABSENT" without both.

        "UNREACHABLE" if gcloud does not answer, which says nothing about the slice.
        """
        state = "ABSENT"
        for command in self.describe_commands():
            done = self.programs.call(command)
            if done.code:
                return state if re.search(r"NOT_FOUND|not found", done.err) else "UNREACHABLE"
            try:
                facts = json.loads(done.out)
                value = facts["state"]
                is_request = isinstance(value, dict)  # of a queued resource, which holds the node to be
                node = facts["tpu"]["nodeSpec"][0]["node"] if is_request else facts
                state = value["state"] if is_request else value
                name, _, owner = OWNER.partition("=")
                self.is_ours = node.get("labels", {}).get(name) == owner
            except (ValueError, KeyError, TypeError, IndexError):
                return "UNREACHABLE"
            if is_request and state != "ACTIVE":
                return state
            if not is_request:
                self.workers = len(facts.get("networkEndpoints", [])) or 1
        return state

    def ensure(self) -> bool:
        """Returns when the slice is ready; True if it had to be created.

        Raises:
          Failure: gcloud refuses the creation for good, the slice is not ours, or --wait-minutes are over.
        """
        begun = coming_since = self.programs.clock()
        created, last = False, ""
        while True:
            state = self.state()
            now = self.programs.clock()
            if state != last:
                self.programs.say(f"the slice is {state}")
                last, coming_since = state, now
            if state not in ("ABSENT", "UNREACHABLE") and not self.is_ours:
                raise Failure(
                    f"{self.flags.name}: got a slice without the label {OWNER}, expected one that this launcher has "
                    "made; use another --name, or launch.tpu_vm, which deletes nothing"
                )
            if state == "READY":
                return created
            if state == "STOPPED":
                raise Failure(f"{self.flags.name}: got a slice that is STOPPED, expected READY; start or delete it")
            if now - begun > 60.0 * self.flags.wait_minutes:
                raise Failure(
                    f"{self.flags.name}: got no slice within {self.flags.wait_minutes:g} minutes (it is {state}), "
                    "expected READY; the same command waits again",
                    launch.CRASHED,
                )
            is_stuck = state in STUCK and not self.flags.queued and now - coming_since > STUCK_SECONDS
            if state == "ABSENT":
                created = self._create() or created
            elif state in GONE or is_stuck:
                self.delete()
            self.programs.sleep(POLL_SECONDS)

    def _create(self) -> bool:
        """Asks for the slice; False if this failed for the moment.

        Raises:
          Failure: no other try can succeed, as when the quota is used up.
        """
        done = self.programs.call(self.create_command())
        if done.code == 0 or "ALREADY_EXISTS" in done.err:
            return True
        lines = [line for line in done.err.splitlines() if line.strip()] or [f"code {done.code}"]
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1])[:300]
        is_rate = re.search(r"per minute|rateLimit", done.err)
        if QUOTA.search(done.err) and not is_rate:
            raise Failure(f"gcloud: {reason}; ask for quota, or use another --type, --zone or --spot")
        if not TRANSIENT.search(done.err):
            raise Failure(f"gcloud: {reason}")
        self.programs.say(f"not created: {reason}")
        return False

    def delete(self) -> None:
        """Deletes the slice, with several tries; a line says so if all fail."""
        for _ in range(4):
            done = self.programs.call(self.delete_command())
            if done.code == 0 or re.search(r"NOT_FOUND|not found", done.err):
                self.programs.say("the slice is deleted")
                return
            self.programs.sleep(POLL_SECONDS)
        self.programs.say(f"the slice could not be deleted and may cost money: {' '.join(done.err.split())[:300]}")

    # --- workers ------------------------------------------------------------------------------------------------------

    def ssh(self, which: str, command: str) -> Result:
        """Runs a shell command on worker `which`, or on "all"."""
        return self.programs.call(self.ssh_command(which, command))

    def probe(self) -> list[worker.Worker]:
        """States of the workers that answer."""
        return worker.read_states(self.ssh("all", worker.probe(self.flags.folder)).out)

    def follow(self, token: str, offset: int, read: Callable[[bytes], None]) -> None:
        """Passes the log of the first worker to `read`, for a while."""
        self.programs.stream(self.ssh_command("0", worker.follow(self.flags.folder, token, offset)), read)

    def copy_code(self) -> None:
        """Copies the code to all workers and installs it.

        Raises:
          Failure: it cannot be archived or installed.
        """
        left = source.untracked(self.programs)
        if left:
            self.programs.say(f"not copied, because git does not know them: {len(left)} files ({left[0]}, ...)")
        with tempfile.TemporaryDirectory() as folder:
            archive = str(Path(folder) / source.ARCHIVE)
            commit = source.snapshot(self.programs)
            commands = [source.archive_command(commit, archive, self.flags.wheel), *self.copy_commands(archive)]
            for command in commands:
                self._try(command)

    def _try(self, command: list[str]) -> None:
        """Runs a command, twice more if it fails: connections to new machines break.

        Raises:
          Failure: it failed three times.
        """
        for left in (2, 1, 0):
            done = self.programs.call(command)
            if done.code == 0:
                return
            if left:
                self.programs.sleep(POLL_SECONDS)
        raise Failure(
            f"{command[0]}: got code {done.code} ({' '.join(done.err.split())[-300:]}), expected 0", launch.CRASHED
        )
