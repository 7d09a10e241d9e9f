"""A real SLURM of two nodes on this machine runs jobs of `launch.slurm`, takes their nodes away, and finishes them.

    apt-get install slurm-wlm
    python benchmarks/slurm_drill.py

Needs root, slurmctld and slurmd (Debian's slurm-wlm). Both nodes are this machine, each with a host name and a port of
its own; authentication, accounting and cgroups are off.

Preemption: a job of high priority takes both nodes from a run of two processes, which saves and is requeued. Node
failure: every process of a node is killed, and the run goes on on the other node, where it finds the lock of a dead
host. Each config is trained once more without SLURM, and the measures have to be equal. Prints what happened, with
seconds since the submission, and the tables of docs/measurements/launching.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

NODES = ("drill-1", "drill-2")
"""Names of the nodes. The daemons see a hosts file of their own, in which both mean this machine."""

CONF = """
ClusterName=drill
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdTimeout=10
NodeName={first} NodeHostname={host} NodeAddr=127.0.0.1 Port={port1} CPUs=1
NodeName={second} NodeHostname={host} NodeAddr=127.0.0.1 Port={port2} CPUs=1
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 MaxTime=INFINITE State=UP
PartitionName=high Nodes=ALL PriorityTier=9 PreemptMode=OFF MaxTime=INFINITE State=UP
"""

TRAIN = (
    "--config=configs/quickstart.py",
    "--config.data.batch=16",
    "--config.data.examples=400",
    "--config.data.buckets=40",
    "--config.train.log_every=20",
    "--config.train.evaluate_every=0",
    "--config.evaluate.examples=24",
    "--config.evaluate.decode_examples=0",
    *(f"--config.model.{part}.{edit}" for part in ("encoder", "decoder") for edit in ("layers=1", "width=32")),
)


@contextlib.contextmanager
def cluster(folder: Path, port: int) -> Generator[list[int]]:
    """Runs slurmctld and two slurmd with everything they write in `folder`. Gives the processes of the latter."""
    host = os.uname().nodename
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    conf = folder / "slurm.conf"
    first, second = NODES
    conf.write_text(
        CONF.format(host=host, folder=folder, first=first, second=second, port=port, port1=port + 1, port2=port + 2)
    )
    os.environ["SLURM_CONF"] = str(conf)
    hosts = folder / "hosts"
    hosts.write_text(f"127.0.0.1 localhost {host} {' '.join(NODES)}\n")
    shell = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'
    inside = ["unshare", "--mount", "--uts", "bash", "-c", shell, str(hosts)]
    daemons = [[host, "slurmctld", "-D"], *([node, "slurmd", "-D", "-N", node] for node in NODES)]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in daemons:
            running.append(subprocess.Popen([*inside, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            time.sleep(1.0)
        yield [process.pid for process in running[1:]]
    except SystemExit:
        for log in sorted(folder.glob("*.log")):
            print(f"--- {log.name}\n{log.read_text()[-3000:]}", file=sys.stderr)
        raise
    finally:
        # Steps outlive the daemons; a cancelled one is killed.
        subprocess.run(["scancel", "--user=root"], capture_output=True, check=False)
        time.sleep(3.0)
        subprocess.run(["scancel", "--full", "--signal=KILL", "--user=root"], capture_output=True, check=False)
        time.sleep(1.0)
        for process in reversed(running):
            process.terminate()
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
            process.kill()


def output(*command: str) -> str:
    """Standard output of a command; the program ends with its words if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{shutil.which(command[0])}: code {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def wait_until(what: str, is_true: Callable[[], bool], seconds: float) -> None:
    """Returns once `is_true`; the program ends if that takes longer."""
    end = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > end:
            sys.exit(f"waited {seconds:.0f} s in vain: {what}\n{output('squeue')}")
        time.sleep(0.2)


def job_facts(job: str) -> dict[str, str]:
    """A job, as scontrol shows it."""
    return dict(re.findall(r"(\w+)=(\S*)", output("scontrol", "show", "job", job)))


def found(path: Path, pattern: str) -> str:
    """The last place of a text file that matches; "nothing" without one."""
    return (re.findall(pattern, path.read_text(encoding="utf-8")) or ["nothing"])[-1]


def measures(workdir: Path) -> dict[tuple[int, str, str], float]:
    """Every measure of the run, by step, split and name, without times."""
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    own = ("step", "split", "wall_time", "tokens_per_second", "steps_per_second", "padding")
    return {(row["step"], row["split"], name): value for row in rows for name, value in row.items() if name not in own}


def kill_node(daemon: int) -> int:
    """Kills all processes of a node at once, which are those with its host name; returns how many."""
    name = os.readlink(f"/proc/{daemon}/ns/uts")
    killed = 0
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and os.readlink(entry / "ns" / "uts") == name:
                os.kill(int(entry.name), signal.SIGKILL)
                killed += 1
    return killed


class Drill:
    """A job, and what happens to it."""

    def __init__(self, folder: Path, name: str, nodes: int, arguments: Sequence[str]) -> None:
        self.folder, self.name = folder / name, name
        self.folder.mkdir()
        self.nodes = nodes
        self.arguments = [*TRAIN, *arguments]
        self.events: list[tuple[float, str]] = []
        self.begun = time.monotonic()
        self.job = ""
        self.rank = self.folder / "ranks" / "rank-0.txt"

    def note(self, text: str) -> None:
        """Prints what has happened."""
        self.events.append((time.monotonic() - self.begun, text))
        print(f"{self.events[-1][0]:7.1f} s  {text}", flush=True)

    def submit(self) -> None:
        """Submits the run and waits until it trains."""
        command = [sys.executable, "-m", "launch", "--on=slurm", f"--nodes={self.nodes}", "--partition=low"]
        command += [f"--log={self.folder}/job.txt", f"--rank-logs={self.folder}/ranks", f"--folder={ROOT}"]
        command += [f"--python={sys.executable}", "--", f"--workdir={self.folder}/run", *self.arguments]
        self.job = output(*command).split()[-1]
        self.note(f"submitted, {self.nodes} nodes")
        metrics = self.folder / "run" / "metrics.jsonl"
        wait_until("the run trains", lambda: metrics.exists() and metrics.read_text().count("\n") > 3, 240)
        self.note(f"the run trains on {job_facts(self.job)['NodeList']}")

    def wait_for_state(self, *states: str) -> dict[str, str]:
        """Waits until the job is in one of the states; what scontrol shows of it then."""
        wait_until(f"the job is {' or '.join(states)}", lambda: job_facts(self.job)["JobState"] in states, 500)
        return job_facts(self.job)

    def finish(self) -> bool:
        """Waits for the end and compares with a run without SLURM; True if the measures are equal."""
        facts = self.wait_for_state("RUNNING")
        self.note(f"the job runs again, on {facts['NodeList']}, restarts: {facts['Restarts']}")
        facts = self.wait_for_state("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")
        for pattern in ("renewed its lock.*next time", "resumed at step [0-9]+"):
            if found(self.rank, pattern) != "nothing":
                self.note(f"the run said: {found(self.rank, pattern)}")
        self.note(
            f"the job has ended: {facts['JobState']}, exit code {facts['ExitCode']}, restarts {facts['Restarts']}"
        )
        ranks = ", ".join(sorted(path.name for path in self.rank.parent.iterdir()))
        alone = self.folder / "alone"
        command = [sys.executable, "-m", "launch", "--on=local", f"--processes={self.nodes}", "--"]
        command += [f"--workdir={alone}", *self.arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"the run without SLURM: code {done.returncode}\n{done.stderr[-2000:]}")
        here, there = measures(self.folder / "run"), measures(alone)
        self.note(f"{len(there)} measures of a run without SLURM: {'the same' if here == there else 'others'}; {ranks}")
        return here == there and facts["JobState"] == "COMPLETED"


def preemption(folder: Path, steps: int) -> Drill:
    """A job of higher priority takes the nodes from the run."""
    drill = Drill(folder, "preemption", 2, [f"--config.train.steps={steps}", "--config.mesh.data=2"])
    drill.arguments.append("--config.train.checkpoint_every=0")
    drill.submit()
    output("sbatch", "--partition=high", "--nodes=2", f"--output={drill.folder}/high.txt", "--wrap=srun sleep 5")
    drill.note("a job of higher priority is submitted")
    drill.wait_for_state("PENDING", "REQUEUED")
    drill.note(f"the run says: {found(drill.rank, 'stopped at.*saved')}; the job waits in the queue")
    return drill


def node_failure(folder: Path, steps: int, daemons: Sequence[int]) -> Drill:
    """Every process of the run's node is killed."""
    drill = Drill(folder, "failure", 1, [f"--config.train.steps={steps}", "--config.train.checkpoint_every=50"])
    drill.submit()
    last = drill.folder / "run" / "checkpoints" / "last"
    wait_until("a checkpoint", lambda: last.exists() and any(last.iterdir()), 120)
    node = NODES.index(job_facts(drill.job)["NodeList"])
    owner = json.loads((drill.folder / "run" / "lock").read_text())["host"]
    drill.note(f"all {kill_node(daemons[node])} processes of {NODES[node]} are killed; the lock is of {owner}")
    drill.wait_for_state("PENDING", "REQUEUED")
    drill.note("SLURM has noticed; the job waits in the queue")
    return drill


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the drills; 1 if measures differ from those of the uninterrupted runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--port", type=int, default=17600, help="first of three free ports")
    parser.add_argument("--drills", default="preemption,failure", help="which [preemption,failure]")
    flags = parser.parse_args(argv)
    missing = [name for name in ("slurmctld", "slurmd", "sbatch", "srun") if not shutil.which(name)]
    if missing or os.geteuid():
        sys.exit(f"error: got no {', '.join(missing) or 'root'}, expected SLURM and root; apt-get install slurm-wlm")
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    wrong = 0
    with tempfile.TemporaryDirectory() as name, cluster(Path(name), flags.port) as daemons:
        idle = "2 idle"
        wait_until("both nodes idle", lambda: output("sinfo", "-h", "-p", "low", "-o", "%D %T").strip() == idle, 60)
        for kind in flags.drills.split(","):
            print(kind)
            drill = (
                preemption(Path(name), flags.steps)
                if kind == "preemption"
                else node_failure(Path(name), flags.steps, daemons)
            )
            wrong += not drill.finish()
            print("\n| seconds | event |\n|---|---|")
            for seconds, text in drill.events:
                print(f"| {seconds:.0f} | {text} |")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
