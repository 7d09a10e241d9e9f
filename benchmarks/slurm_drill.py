"""A real SLURM of two nodes on this machine runs a job of `launch.slurm`, preempts it, requeues and finishes it.

    apt-get install slurm-wlm
    python benchmarks/slurm_drill.py

Needs root, slurmctld and slurmd (Debian's slurm-wlm). Both nodes are this machine, on ports of its own; authentication,
accounting and cgroups are off. A job of high priority takes the nodes from the run, which saves and is requeued. The
same config is trained once more without SLURM on two processes, and the measures have to be equal. Prints a line for
each thing that happened, with seconds since the submission, and the table of docs/measurements/launching.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
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
SlurmdTimeout=30
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
    "--config.mesh.data=2",
    "--config.train.log_every=20",
    "--config.train.evaluate_every=0",
    "--config.train.checkpoint_every=0",
    "--config.evaluate.examples=24",
    "--config.evaluate.decode_examples=0",
    *(f"--config.model.{part}.{edit}" for part in ("encoder", "decoder") for edit in ("layers=1", "width=32")),
)


@contextlib.contextmanager
def cluster(folder: Path, port: int) -> Iterator[None]:
    """Runs slurmctld and two slurmd with everything they write in `folder`."""
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
    inside = ["unshare", "--mount", "bash", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(hosts)]
    daemons = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in NODES)]
    running = []
    try:
        for command in daemons:
            running.append(subprocess.Popen([*inside, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            time.sleep(1.0)
        yield
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
    """What scontrol shows of a job."""
    return dict(re.findall(r"(\w+)=(\S*)", output("scontrol", "show", "job", job)))


def found(path: Path, pattern: str) -> str:
    """The last place of a text file that matches; "nothing" without one."""
    return (re.findall(pattern, path.read_text(encoding="utf-8")) or ["nothing"])[-1]


def measures(workdir: Path) -> dict[tuple[int, str, str], float]:
    """Every measure of the run, by step, split and name, without times."""
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    own = ("step", "split", "wall_time", "tokens_per_second", "steps_per_second", "padding")
    return {(row["step"], row["split"], name): value for row in rows for name, value in row.items() if name not in own}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the drill; 1 if the measures differ from those of the uninterrupted run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--port", type=int, default=17600, help="first of three free ports")
    flags = parser.parse_args(argv)
    missing = [name for name in ("slurmctld", "slurmd", "sbatch", "srun") if not shutil.which(name)]
    if missing or os.geteuid():
        sys.exit(
            f"error: got no {', '.join(missing) or 'root'}, expected both SLURM and root; apt-get install slurm-wlm"
        )
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    events: list[tuple[float, str]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workdir = folder / "run"
        arguments = [*TRAIN, f"--config.train.steps={flags.steps}"]
        begun = time.monotonic()

        def note(text: str) -> None:
            events.append((time.monotonic() - begun, text))
            print(f"{events[-1][0]:7.1f} s  {text}", flush=True)

        with cluster(folder, flags.port):
            wait_until(
                "both nodes idle", lambda: output("sinfo", "-h", "-p", "low", "-o", "%D %T").strip() == "2 idle", 60
            )
            begun = time.monotonic()
            command = [
                sys.executable,
                "-m",
                "launch",
                "--on=slurm",
                "--nodes=2",
                "--partition=low",
                f"--log={folder}/job.txt",
            ]
            command += [f"--rank-logs={folder}/ranks", f"--python={sys.executable}", f"--folder={ROOT}"]
            job = output(*command, "--", f"--workdir={workdir}", *arguments).split()[-1]
            note("submitted, two nodes")
            metrics = workdir / "metrics.jsonl"
            wait_until("the run trains", lambda: metrics.exists() and metrics.read_text().count("\n") > 2, 240)
            note(f"the run trains: {len(metrics.read_text().splitlines())} rows of metrics")
            output("sbatch", "--partition=high", "--nodes=2", f"--output={folder}/high.txt", "--wrap=srun sleep 5")
            note("a job of higher priority is submitted")
            wait_until("the run leaves its nodes", lambda: job_facts(job)["JobState"] in ("PENDING", "REQUEUED"), 120)
            rank = folder / "ranks" / "rank-0.txt"
            note(f"the run says: {found(rank, 'stopped at.*saved')}; the job waits in the queue")
            wait_until("the run is back", lambda: job_facts(job)["JobState"] == "RUNNING", 400)
            note(f"the job runs again, restarts: {job_facts(job)['Restarts']}")
            wait_until("the run ends", lambda: job_facts(job)["JobState"] not in ("RUNNING", "COMPLETING"), 400)
            facts = job_facts(job)
            note(f"the run said: {found(rank, 'resumed at step [0-9]+')}")
            note(f"the job has ended: {facts['JobState']}, exit code {facts['ExitCode']}, restarts {facts['Restarts']}")
            ranks = sorted(path.name for path in (folder / "ranks").iterdir())
        alone = folder / "alone"
        command = [
            sys.executable,
            "-m",
            "launch",
            "--on=local",
            "--processes=2",
            "--",
            f"--workdir={alone}",
            *arguments,
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"the uninterrupted run: code {done.returncode}\n{done.stderr[-2000:]}")
        here, there = measures(workdir), measures(alone)
        is_equal = here == there
        note(
            f"{len(there)} measures of a run without SLURM: {'the same' if is_equal else 'others'}; {', '.join(ranks)}"
        )
    print("\n| seconds | event |\n|---|---|")
    for seconds, text in events:
        print(f"| {seconds:.0f} | {text} |")
    return 0 if is_equal and facts["JobState"] == "COMPLETED" else 1


if __name__ == "__main__":
    sys.exit(main())
