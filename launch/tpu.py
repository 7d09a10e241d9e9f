"""Trains on a TPU slice from its creation to its deletion, with gcloud.

    python -m launch.tpu --name=my-v5e --zone=us-west4-a --type=v5litepod-16 --version=v2-alpha-tpuv5-lite --spot \\
        -- --config=configs/NAME.py --workdir=/shared/runs/NAME

creates the slice (on demand, with --spot, or with --queued from the queue), waits for it, copies the files that git
knows, installs from requirements.lock, starts the run on all workers, shows the log of the first one, and collects the
logs of all. After a preemption the slice is made anew and the run resumes from its workdir, which has to lie on a disk
that outlives the slice. When the run is done the slice is deleted.

The run does not depend on this program or its connection: started again with the same arguments it finds the run.
Ctrl-C and SIGTERM ask the run to save and stop, and keep the slice.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import launch
from launch import restarts, source, worker
from launch.programs import Failure, Programs, exit_code_of
from launch.restarts import Restarts
from launch.tpu_slice import Slice
from launch.worker import LogReader, Worker

MAX_RESTARTS = 20
"""Default of --max-restarts."""

POLL_SECONDS = 10.0
"""Seconds between two looks at workers that have not ended."""

MAX_SILENT_PROBES = 12
"""A slice is made anew after so many looks in a row that did not reach all workers."""

DELETE_CHOICES = ("success", "always", "never")


class Lost(Exception):
    """The slice, or the run on it, is gone: a reason in a few words."""


class Job:
    """A run on a slice, through preemptions.

    Args:
      flags: the arguments of this launcher.
      programs: runs gcloud.
    """

    def __init__(self, flags: argparse.Namespace, programs: Programs) -> None:
        self.flags = flags
        self.programs = programs
        self.slice = Slice(flags, programs)
        self.command = training_command(flags)
        self.name = hashlib.sha256(self.command.encode()).hexdigest()[:8]
        """Begins the tokens of all attempts of this run, so that a later launcher knows them."""
        self.has_code = False
        self.token = ""

    def run(self) -> int:
        """Runs attempts until the run is done, has failed, or no restart is left. Returns the exit code.

        Raises:
          Failure: the launch cannot go on.
        """
        counter = Restarts(self.flags.max_restarts)
        code = launch.CRASHED
        try:
            while True:
                begun = self.programs.clock()
                try:
                    code = self.attempt()
                    reason = f"the run ended with code {code}"
                except Lost as lost:
                    code, reason = launch.PREEMPTED, str(lost)
                    self.slice.delete()
                if code not in launch.RESTARTABLE:
                    return code
                delay = counter.next_delay(self.programs.clock() - begun)
                if delay is None:
                    self.programs.say(f"{reason}: {counter.limit} restarts (--max-restarts) are used up")
                    return code
                self.programs.say(f"{reason}: restart {counter.used} of {counter.limit} in {delay:.0f} s")
                self.programs.sleep(delay)
        except KeyboardInterrupt:
            code = launch.PREEMPTED
            self.programs.say("stopping the run, which saves; the same command continues it")
            self.stop()
            return code
        finally:
            self._finish(code)

    def _finish(self, code: int) -> None:
        """Deletes the slice if --delete says so; else a line says that it is there."""
        if self.slice.state() == "ABSENT" or not self.slice.is_ours:
            return
        if self.flags.delete == "always" or (self.flags.delete == "success" and code == 0):
            self.slice.delete()
        else:
            self.programs.say(f"the slice is kept; to delete it: {shlex.join(self.slice.delete_command())}")

    def attempt(self) -> int:
        """Brings the slice up, starts the run unless it runs already, and returns its exit code.

        Raises:
          Lost: the slice was preempted, or its workers cannot be reached.
          Failure: gcloud refuses in a way that waiting does not mend.
        """
        if self.slice.ensure():
            self.has_code = False
        states = self._reach_all()
        if not self._adopts(states):
            if not self.has_code:
                self._copy_code()
            self._start()
        return self._watch()

    def _copy_code(self) -> None:
        """Copies and installs the code.

        Raises:
          Lost: the slice was preempted meanwhile.
          Failure: it is there, and the code cannot be copied or installed.
        """
        try:
            self.slice.copy_code()
        except Failure:
            self._check_slice()
            raise
        self.has_code = True

    def stop(self) -> None:
        """Asks the run on all workers to save and stop."""
        self.slice.ssh("all", worker.stop(self.flags.folder))

    def _reach_all(self) -> list[Worker]:
        """States of all workers, once all answer: ssh of a new slice needs some time.

        Raises:
          Lost: the slice is gone, or some worker does not answer: the slice is half-made.
        """
        for _ in range(MAX_SILENT_PROBES):
            states = self.slice.probe()
            if len(states) == self.slice.workers:
                return states
            self._check_slice()
            self.programs.sleep(POLL_SECONDS)
        raise Lost(f"{len(states)} of {self.slice.workers} workers answer")

    def _check_slice(self) -> str:
        """State of the slice.

        Raises:
          Lost: it is known to be gone.
        """
        state = self.slice.state()
        if state not in ("READY", "UNREACHABLE"):
            raise Lost(f"the slice is {state}")
        return state

    def _adopts(self, states: list[Worker]) -> bool:
        """True if this run is on all workers already: it runs, or has ended with code 0. Stops an incomplete one.

        Raises:
          Failure: another run is on the slice.
        """
        running = [state for state in states if state.state == "running"]
        other = [state for state in running if not state.token.startswith(self.name)]
        if other:
            raise Failure(
                f"{self.flags.name}: got another run on {other[0].host}, expected none; wait for it, or use "
                "another --name"
            )
        tokens = {
            state.token for state in states if state.state == "running" or (state.state, state.code) == ("exit", 0)
        }
        if len(tokens) == 1 and all(s.token in tokens and not s.has_failed for s in states):
            (token,) = tokens
            if token.startswith(self.name):
                self.token = token
                self.programs.say("this run is on the slice already; following it")
                return True
        if running:
            self.stop()
        return False

    def _start(self) -> None:
        """Starts the run on all workers. A repeated command changes nothing where the run has begun.

        Raises:
          Lost: some worker cannot be reached.
        """
        self.token = f"{self.name}-{self.programs.stamp()}"
        for _ in range(MAX_SILENT_PROBES):
            if self.slice.ssh("all", worker.start(self.flags.folder, self.token, self.command)).code == 0:
                self.programs.say(f"started on {self.slice.workers} workers")
                return
            self._check_slice()
            self.programs.sleep(POLL_SECONDS)
        raise Lost("the run could not be started on all workers")

    def _watch(self) -> int:
        """Follows the run to its end and collects the logs. Returns the exit code of the worker that failed first.

        Raises:
          Lost: the slice was preempted, a worker lost its run, or workers cannot be reached.
        """
        log = LogReader()
        silent = 0
        while True:
            log.restart()
            self.slice.follow(self.token, log.offset, lambda data: self.programs.show(log.read(data)))
            states = self.slice.probe()
            if len(states) < self.slice.workers:
                # While gcloud itself does not answer, as without a network here, the run may well go on.
                silent += self._check_slice() == "READY"
                if silent == MAX_SILENT_PROBES:
                    raise Lost(f"{len(states)} of {self.slice.workers} workers answer")
                self.programs.sleep(POLL_SECONDS)
                continue
            silent = 0
            failed = [state for state in states if state.has_failed]
            running = [state for state in states if state.state == "running"]
            if failed and running:
                self.programs.say(f"{failed[0].host} has failed; stopping the others")
                self.stop()
                continue
            if not running:
                break
            self.programs.sleep(POLL_SECONDS)
        log.restart()
        self.slice.follow(self.token, log.offset, lambda data: self.programs.show(log.read(data)))  # its last lines
        self._collect_logs()
        if failed:
            self._check_slice()  # a preemption ends the runs, too, in any way
        died = [state.host for state in states if state.state in ("died", "idle")]
        if died:
            raise Lost(f"{died[0]} lost the run")
        return first_failure(states)

    def _collect_logs(self) -> None:
        """Writes the log of each worker to a file of its own."""
        folder = Path(self.flags.logs) / self.token
        folder.mkdir(parents=True, exist_ok=True)
        for index in range(self.slice.workers):
            done = self.slice.ssh(str(index), worker.read_log(self.flags.folder, self.token))
            if done.code:
                self.programs.say(f"the log of worker {index} could not be read")
            else:
                (folder / f"worker-{index}.txt").write_text(done.out, encoding="utf-8")
        self.programs.say(f"logs in {folder}")


def first_failure(states: Sequence[Worker]) -> int:
    """Exit code of the worker that failed first: the others often fail because of it. 0 if none failed."""
    failed = sorted((s for s in states if s.has_failed), key=lambda s: (s.time, s.code != launch.WRONG_INPUT))
    return failed[0].code if failed else 0


def training_command(flags: argparse.Namespace) -> str:
    """The shell command of every worker, in the folder of the code."""
    run = f"exec env {launch.DISTRIBUTED}=auto {shlex.join(launch.train_command(flags, flags.python))}"
    return f"{{ {flags.setup}; }} && {run}" if flags.setup else run


def print_plan(flags: argparse.Namespace, programs: Programs) -> None:
    """Prints every command, in order."""
    job = Job(flags, programs)
    piece = job.slice
    print("# 1. Create the slice, unless it exists, and wait for it.")
    for command in piece.describe_commands():
        print(shlex.join(command))
    print(shlex.join(piece.create_command()))
    print("# 2. Copy the code and install it. (The commit is HEAD, or the tracked files as they are.)")
    print(shlex.join(source.archive_command("COMMIT", source.ARCHIVE, flags.wheel)))
    for command in piece.copy_commands(source.ARCHIVE):
        print(shlex.join(command))
    print("# 3. Start the run on all workers, follow the first one's log, look at all of them.")
    for which, command in (
        ("all", worker.start(flags.folder, "TOKEN", job.command)),
        ("0", worker.follow(flags.folder, "TOKEN", 0)),
        ("all", worker.probe(flags.folder)),
    ):
        print(shlex.join(piece.ssh_command(which, command)))
    print(f"# 4. When a worker has failed: stop the others. After a preemption, a hang (75) or a stop (143): up to "
          f"{flags.max_restarts} times, delete the slice if it is gone, and begin again.")  # fmt: skip
    print(shlex.join(piece.ssh_command("all", worker.stop(flags.folder))))
    print(f"# 5. Collect the log of each worker in {flags.logs}/TOKEN/worker-0.txt, ...")
    print(shlex.join(piece.ssh_command("0", worker.read_log(flags.folder, "TOKEN"))))
    print({"success": "# 6. After success, delete the slice.", "always": "# 6. Delete the slice.",
           "never": "# 6. The slice is kept; this would delete it."}[flags.delete])  # fmt: skip
    print(shlex.join(piece.delete_command()))


def make_parser(program: str | None) -> argparse.ArgumentParser:
    """The parser of this launcher."""
    parser = launch.make_parser(__doc__, program)
    parser.add_argument("--name", required=True, help="name of the slice")
    parser.add_argument("--zone", required=True)
    parser.add_argument("--project")
    parser.add_argument("--type", required=True, help="accelerator type, as v5litepod-16")
    parser.add_argument("--version", required=True, help="runtime version, as v2-alpha-tpuv5-lite")
    parser.add_argument("--spot", action="store_true", help="a slice that may be preempted")
    parser.add_argument("--queued", action="store_true", help="ask for it by a queued resource")
    parser.add_argument(
        "--create", action="append", default=[], metavar="OPTION", help="another option of the creation"
    )
    parser.add_argument("--wait-minutes", type=float, default=60.0, help="longest wait for the slice [60]")
    parser.add_argument("--folder", default="jaxformer", help="folder of the code on the workers, made anew")
    parser.add_argument("--wheel", default="", help="install this wheel instead of the package's source")
    parser.add_argument(
        "--install", default="", help="shell command that installs, instead of the one that uses the lock"
    )
    parser.add_argument("--python", default=".venv/bin/python", help="interpreter on the workers, from the folder")
    parser.add_argument("--setup", default="", help="shell command before the run, in the folder: mounts")
    parser.add_argument("--logs", default="tpu-logs", help="folder for the collected logs [tpu-logs]")
    parser.add_argument(
        "--delete", choices=DELETE_CHOICES, default="success", help="when to delete the slice [success]"
    )
    restarts.add_flag(parser, MAX_RESTARTS)
    return parser


def main(argv: Sequence[str] | None = None, program: str | None = None, programs: Programs | None = None) -> int:
    """Runs the launcher and returns the exit code."""
    parser = make_parser(program)
    flags = launch.parse(parser, argv)
    launch.at_least(parser, flags, "max-restarts", 0)
    launch.refuse_multiline(parser, [*flags.train, flags.setup, flags.install, flags.folder])
    workdir = launch.train_argument(flags, "workdir")
    if workdir and not Path(workdir).is_absolute() and not launch.is_in_bucket(workdir):
        parser.error(
            f"--workdir: got {workdir}, expected an absolute path of a disk that outlives the slice, or gs://BUCKET/PATH"
        )
    if not re.fullmatch(r"[\w.-]+", flags.folder) or flags.folder.startswith("."):
        parser.error(f"--folder: got {flags.folder!r}, expected a name: the folder is made anew in the home folder")
    if any(option.startswith("--labels") for option in flags.create):
        parser.error("--create: got --labels, which this launcher sets; add labels later with gcloud")
    programs = programs or Programs()

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        source.check(parser, flags, programs)
        if flags.dry_run:
            print_plan(flags, programs)
            return 0
        return exit_code_of(Job(flags, programs).run)
    finally:
        signal.signal(signal.SIGTERM, previous)


if __name__ == "__main__":
    sys.exit(main())
