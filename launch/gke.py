"""Submits a run to Kubernetes on GKE as a JobSet: one pod a host, TPU slices or GPU nodes.

    python -m launch.gke --name=my-run --image=IMAGE --tpu=tpu-v5-lite-podslice:4x4 --chips-per-host=4 --hosts=4 \\
        --volume=/shared=CLAIM -- --config=configs/NAME.py --workdir=/shared/runs/NAME
    python -m launch.gke --name=my-run --image=IMAGE --gpus-per-host=8 --hosts=2 --volume=/shared=CLAIM -- ...

The image has the package and the recipes (launch/docker). When a pod ends with another code than 0, the JobSet starts
all pods anew, at most --max-restarts times, with growing delays; after code 2, which another attempt would repeat, it
fails at once. --wait waits for the end and returns the run's exit code. With --xpk=CLUSTER and --tpu=v5litepod-16 the
command of xpk is run instead, which makes the JobSet itself.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import launch
from launch import manifests, restarts
from launch.programs import Failure, Programs, exit_code_of
from launch.restarts import FIRST_DELAY_SECONDS, MAX_DELAY_SECONDS

MAX_RESTARTS = 20
"""Default of --max-restarts."""

POLL_SECONDS = 30.0
"""Seconds between two looks at a JobSet with --wait."""

GRACE_SECONDS = 90
"""Seconds that a pod has for saving after SIGTERM."""

GROUP = "job"
"""Name of the replicated job; a part of the host names of its pods."""

EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"

DNS_NAME = r"[a-z]([a-z0-9-]*[a-z0-9])?"


def pod_script(flags: argparse.Namespace) -> str:
    """The shell script of a pod. It waits longer after each restart of the JobSet, then becomes the run."""
    first, most = int(FIRST_DELAY_SECONDS), int(MAX_DELAY_SECONDS)
    if flags.tpu:
        value = "auto"
    else:
        address = f"{flags.name}-{GROUP}-0-0.{flags.name}:{launch.PORT}"
        value = f'"{address}/{flags.hosts}/$JOB_COMPLETION_INDEX"'
    return f"""\
# A signal in the delay ends the pod at once: there is nothing to save.
trap 'exit {launch.PREEMPTED}' TERM
if [ "${{RESTART:-0}}" -gt 0 ]; then
  delay=$(({first} << (RESTART < 6 ? RESTART - 1 : 5)))
  sleep $((delay < {most} ? delay : {most})) &
  wait $!
fi
export {launch.DISTRIBUTED}={value}
{flags.setup + chr(10) if flags.setup else ""}exec {shlex.join(launch.train_command(flags, flags.python))}
"""


def resources(flags: argparse.Namespace) -> dict[str, Any]:
    """Devices of a pod, and the labels of nodes that have them."""
    if flags.tpu:
        accelerator, topology = flags.tpu.split(":")
        return {
            "selector": {
                "cloud.google.com/gke-tpu-accelerator": accelerator,
                "cloud.google.com/gke-tpu-topology": topology,
            },
            "limits": {"google.com/tpu": flags.chips_per_host},
        }
    selector = {"cloud.google.com/gke-accelerator": flags.gpu} if flags.gpu else {}
    return {"selector": selector, "limits": {"nvidia.com/gpu": flags.gpus_per_host} if flags.gpus_per_host else {}}


def jobset(flags: argparse.Namespace) -> dict[str, Any]:
    """The JobSet (jobset.x-k8s.io/v1alpha2)."""
    devices = resources(flags)
    selector = {**devices["selector"], **({"cloud.google.com/gke-spot": "true"} if flags.spot else {})}
    volumes = [volume.split("=", 1) for volume in flags.volume]
    attempt = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
    container = {
        "name": "run",
        "image": flags.image,
        "command": ["bash", "-c", pod_script(flags)],
        "env": [{"name": "RESTART", "valueFrom": {"fieldRef": {"fieldPath": attempt}}}],
        **({"ports": [{"containerPort": launch.PORT}]} if not flags.tpu else {}),
        **({"resources": {"limits": devices["limits"]}} if devices["limits"] else {}),
        "volumeMounts": [
            *({"name": f"volume-{i}", "mountPath": path} for i, (path, _) in enumerate(volumes)),
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        **({"nodeSelector": selector} if selector else {}),
        "containers": [container],
        "volumes": [
            *(
                {"name": f"volume-{i}", "persistentVolumeClaim": {"claimName": claim}}
                for i, (_, claim) in enumerate(volumes)
            ),
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    wrong_input = {"containerName": "run", "operator": "In", "values": [launch.WRONG_INPUT]}
    job = {
        "parallelism": flags.hosts,
        "completions": flags.hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": wrong_input}]},
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": flags.name,
            **({"namespace": flags.namespace} if flags.namespace else {}),
            **({"labels": {"kueue.x-k8s.io/queue-name": flags.queue}} if flags.queue else {}),
            # One JobSet for each pool of nodes, which is one slice.
            **({"annotations": {EXCLUSIVE: "cloud.google.com/gke-nodepool"}} if flags.tpu else {}),
        },
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": flags.name},
            "failurePolicy": {
                "maxRestarts": flags.max_restarts,
                "rules": [
                    {"name": "wrong_input", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
                ],
            },
            "replicatedJobs": [{"name": GROUP, "replicas": 1, "template": {"spec": job}}],
        },
    }


def xpk_command(flags: argparse.Namespace) -> list[str]:
    """The command of xpk that submits the run to a cluster that xpk has made."""
    run = f"env {launch.DISTRIBUTED}=auto {shlex.join(launch.train_command(flags, flags.python))}"
    codes = ",".join(map(str, launch.RESTARTABLE))
    return [
        "xpk", "workload", "create", f"--cluster={flags.xpk}", f"--workload={flags.name}",
        f"--docker-image={flags.image}", f"--tpu-type={flags.tpu}", f"--max-restarts={flags.max_restarts}",
        f"--restart-on-exit-codes={codes}", f"--command={f'{flags.setup} && {run}' if flags.setup else run}",
    ]  # fmt: skip


def wait(flags: argparse.Namespace, programs: Programs) -> int:
    """Waits for the end of the JobSet and returns the run's exit code.

    Raises:
      Failure: the JobSet has been deleted.
    """
    place = [f"--namespace={flags.namespace}"] if flags.namespace else []
    shown: tuple[object, ...] = ()
    while True:
        done = programs.call(["kubectl", "get", "jobset", flags.name, *place, "--output=json"])
        if done.code and re.search(r"NotFound|not found", done.err):
            raise Failure(f"{flags.name}: got no such JobSet, expected the one that was submitted", launch.CRASHED)
        status = json.loads(done.out).get("status", {}) if done.code == 0 else {}
        end, number = status.get("terminalState", ""), status.get("restarts", 0)
        if done.code == 0 and (end, number) != shown:
            programs.say(f"{flags.name}: {end or 'running'}, {number} restarts")
            shown = (end, number)
        if end == "Completed":
            return 0
        if end == "Failed":
            return _exit_code(flags, programs, place)
        programs.sleep(POLL_SECONDS)


def _exit_code(flags: argparse.Namespace, programs: Programs, place: list[str]) -> int:
    """Exit code of the pod that failed first; 1 if Kubernetes has not kept it."""
    label = f"--selector=jobset.sigs.k8s.io/jobset-name={flags.name}"
    done = programs.call(["kubectl", "get", "pods", label, *place, "--output=json"])
    ends = []
    for pod in json.loads(done.out).get("items", []) if done.code == 0 else []:
        for container in pod.get("status", {}).get("containerStatuses", []):
            end = container.get("state", {}).get("terminated") or {}
            if end.get("exitCode"):
                ends.append((end.get("finishedAt", ""), end["exitCode"] != launch.WRONG_INPUT, end["exitCode"]))
    return min(ends)[2] if ends else launch.CRASHED


def make_parser(program: str | None) -> argparse.ArgumentParser:
    """The parser of this launcher."""
    parser = launch.make_parser(__doc__, program)
    parser.add_argument("--name", required=True, help="name of the JobSet")
    parser.add_argument("--image", required=True, help="container image with the package and the recipes")
    parser.add_argument("--hosts", type=int, default=1, help="pods that form the run, one a host [1]")
    parser.add_argument(
        "--tpu", default="", metavar="TYPE:TOPOLOGY", help="tpu-v5-lite-podslice:4x4; for xpk v5litepod-16"
    )
    parser.add_argument("--chips-per-host", type=int, default=4, help="TPU chips of a host [4]")
    parser.add_argument("--gpu", default="", help="label of the GPU, as nvidia-h100-80gb")
    parser.add_argument("--gpus-per-host", type=int, default=0)
    parser.add_argument("--spot", action="store_true", help="on nodes that may be preempted")
    parser.add_argument("--volume", action="append", default=[], metavar="PATH=CLAIM", help="a persistent volume claim")
    parser.add_argument("--namespace", default="")
    parser.add_argument("--queue", default="", help="local queue of Kueue")
    parser.add_argument("--python", default="python", help="interpreter in the image")
    parser.add_argument("--setup", default="", help="shell command before the run")
    parser.add_argument("--wait", action="store_true", help="wait for the end, and return the run's exit code")
    parser.add_argument("--xpk", default="", metavar="CLUSTER", help="submit with xpk to this cluster")
    restarts.add_flag(parser, MAX_RESTARTS)
    return parser


def check(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """Exits with code 2 if flags are wrong or contradict each other."""
    launch.at_least(parser, flags, "hosts", 1)
    launch.at_least(parser, flags, "max-restarts", 0)
    launch.refuse_multiline(parser, [*flags.train, flags.setup])
    # Host names of pods are the name with "-job-0-" and the number, and have at most 63 characters.
    if not re.fullmatch(DNS_NAME, flags.name) or len(flags.name) > 50:
        parser.error(f"--name: got {flags.name!r}, expected at most 50 of a-z, 0-9 and -, the first a letter")
    if flags.tpu and (flags.gpu or flags.gpus_per_host):
        parser.error("--tpu: got it with --gpu or --gpus-per-host, expected one kind of devices")
    if flags.xpk and not flags.tpu:
        parser.error("--xpk: got no --tpu, expected the type of a slice, as v5litepod-16; leave --xpk out for GPUs")
    if flags.xpk:
        unused = [
            name for name in ("volume", "namespace", "queue", "spot", "wait", "gpus_per_host") if getattr(flags, name)
        ]
        if unused:
            name = unused[0].replace("_", "-")
            parser.error(f"--{name}: got it with --xpk, expected it without; xpk has its own settings for the cluster")
        return
    if flags.tpu and not re.fullmatch(r"[\w-]+:\d+(x\d+)+", flags.tpu):
        parser.error(f"--tpu: got {flags.tpu}, expected TYPE:TOPOLOGY, as tpu-v5-lite-podslice:4x4")
    if flags.tpu:
        chips = 1
        for size in flags.tpu.split(":")[1].split("x"):
            chips *= int(size)
        if chips != flags.hosts * flags.chips_per_host:
            parser.error(
                f"--tpu: got {chips} chips in {flags.tpu}, expected --hosts times --chips-per-host, which is "
                f"{flags.hosts * flags.chips_per_host}"
            )
    for volume in flags.volume:
        if not re.fullmatch(rf"/[^=]+={DNS_NAME}", volume):
            parser.error(f"--volume: got {volume}, expected PATH=CLAIM with an absolute path")
    workdir = launch.train_argument(flags, "workdir")
    paths = [volume.split("=")[0].rstrip("/") for volume in flags.volume]
    if workdir and not launch.is_in_bucket(workdir) and not any(f"{workdir}/".startswith(f"{path}/") for path in paths):
        parser.error(f"--workdir: got {workdir}, expected a path below a --volume: a pod's own disk ends with it")


def submit(flags: argparse.Namespace, programs: Programs, command: Sequence[str], text: str) -> int:
    """Creates the run with `command`, which reads `text`; with --wait follows it. Returns the exit code.

    Raises:
      Failure: the cluster refuses it.
    """
    done = programs.call(command, text)
    print(done.out, end="")
    if done.code:
        raise Failure(f"{command[0]}: {' '.join(done.err.split())[-300:] or f'code {done.code}'}")
    return wait(flags, programs) if flags.wait else 0


def main(argv: Sequence[str] | None = None, program: str | None = None, programs: Programs | None = None) -> int:
    """Runs the launcher and returns the exit code."""
    parser = make_parser(program)
    flags = launch.parse(parser, argv)
    check(parser, flags)
    text = "" if flags.xpk else manifests.dump(jobset(flags))
    command = xpk_command(flags) if flags.xpk else ["kubectl", "create", "--filename=-"]
    if flags.dry_run:
        print(shlex.join(command) if flags.xpk else f"# {shlex.join(command)}\n{text}", end="\n" if flags.xpk else "")
        return 0
    return exit_code_of(lambda: submit(flags, programs or Programs(), command, text))


if __name__ == "__main__":
    sys.exit(main())
