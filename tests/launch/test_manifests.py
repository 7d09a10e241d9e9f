"""Manifests for GKE and SkyPilot: YAML that reads back, fields of the published schemas, scripts that bash takes.

The names of fields and their types are facts of
- the CRD `jobset.x-k8s.io/v1alpha2` (kubernetes-sigs/jobset, config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml),
  whose pods and jobs are those of Kubernetes' batch/v1 and core/v1;
- SkyPilot's task schema (skypilot-org/skypilot, sky/utils/schemas.py: get_task_schema, get_resources_schema).
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from fault_script import launch_faults  # noqa: E402

from launch import gke, manifests, sky  # noqa: E402
from launch.programs import Programs  # noqa: E402

ODD = '--config.data.dir=it\'s $HOME; a "folder" & `more` #x: {y}'
TRAIN = ["--config=configs/quickstart.py", "--workdir=/shared/runs/x y", ODD]
TPU = ["--tpu=tpu-v5-lite-podslice:4x4", "--hosts=4", "--spot", "--namespace=no", "--queue=q"]
GPU = ["--gpu=nvidia-h100-80gb", "--gpus-per-host=8", "--hosts=2", "--setup=export A=b"]


# --- YAML -------------------------------------------------------------------------------------------------------------

TEXT = st.text(st.sampled_from("ab:#-? \n\t\"'\\{}[]&*!|>%@`,0.é\x85\u2028~yn"), max_size=8)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 99)
    | TEXT
    | st.sampled_from(["on", "No", "null", "1e3", "0x1", "2026-01-01", "=", "~"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(VALUES)
def test_what_is_written_reads_back(value):
    assert yaml.safe_load(manifests.dump(value)) == value


def test_manifests_read_as_people_write_them():
    value = {
        "run": "set -e\n\nexec it\n",
        "list": [{"name": "a", "on": "on"}, "b: c", ["x", 1]],
        "none": [],
        "more": {},
    }
    assert manifests.dump(value) == (
        'run: |\n  set -e\n\n  exec it\nlist:\n  - name: a\n    "on": "on"\n  - "b: c"\n  - - x\n    - 1\n'
        "none: []\nmore: {}\n"
    )


# --- the published schemas --------------------------------------------------------------------------------------------

POD = {
    "restartPolicy": str, "terminationGracePeriodSeconds": int, "nodeSelector": {"*": str},
    "containers": [{
        "name": str, "image": str, "command": [str], "ports": [{"containerPort": int}],
        "resources": {"limits": {"*": int}},
        "env": [{"name": str, "valueFrom": {"fieldRef": {"fieldPath": str}}}],
        "volumeMounts": [{"name": str, "mountPath": str}],
    }],
    "volumes": [{"name": str, "persistentVolumeClaim": {"claimName": str}, "emptyDir": {"medium": str}}],
}  # fmt: skip
JOB = {
    "parallelism": int, "completions": int, "completionMode": str, "backoffLimit": int,
    "podFailurePolicy": {"rules": [{
        "action": str, "onExitCodes": {"containerName": str, "operator": str, "values": [int]},
    }]},
    "template": {"spec": POD},
}  # fmt: skip
JOBSET = {
    "apiVersion": str, "kind": str,
    "metadata": {"name": str, "namespace": str, "labels": {"*": str}, "annotations": {"*": str}},
    "spec": {
        "network": {"enableDNSHostnames": bool, "subdomain": str},
        "failurePolicy": {"maxRestarts": int, "rules": [{"name": str, "action": str, "onJobFailureReasons": [str]}]},
        "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": JOB}}],
    },
}  # fmt: skip
TASK = {
    "name": str, "num_nodes": int, "workdir": str, "volumes": {"*": str}, "setup": str, "run": str,
    "resources": {
        "infra": str, "accelerators": str, "image_id": str, "use_spot": bool,
        "job_recovery": {"max_restarts_on_errors": int, "recover_on_exit_codes": [int]},
    },
}  # fmt: skip


def check(value, schema, path="") -> None:
    """Raises AssertionError if a field is unknown or of another type."""
    if isinstance(schema, dict):
        assert isinstance(value, dict), path
        for name, item in value.items():
            assert "*" in schema or name in schema, f"{path}.{name}: no such field"
            check(item, schema.get(name, schema.get("*")), f"{path}.{name}")
    elif isinstance(schema, list):
        assert isinstance(value, list), path
        for item in value:
            check(item, schema[0], f"{path}[]")
    else:
        assert type(value) is schema, f"{path}: {value!r}"


def document(capsys, engine, *argv: str, train=TRAIN):
    """Output of a dry run, read as YAML: the command is a comment in it."""
    assert engine.main(["--name=my-run", *argv, "--dry-run", "--", *train]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def run_of(script: str, folder: Path, **environment: str) -> list[str]:
    """Arguments that the script gives to its program, and JAXFORMER_DISTRIBUTED, by running it with a stand-in."""
    (folder / "python").write_text('#!/bin/bash\nprintf "%s\\0" "$JAXFORMER_DISTRIBUTED" "$@"\n')
    (folder / "sleep").write_text('#!/bin/bash\necho "slept $1" >&2\n')
    for name in ("python", "sleep"):
        (folder / name).chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", script], env={"PATH": f"{folder}:/usr/bin:/bin", **environment}, capture_output=True, text=True,
        check=True, cwd=folder,
    )  # fmt: skip
    return [*done.stdout.split("\0")[:-1], *done.stderr.splitlines()]


@pytest.mark.parametrize("devices", [TPU, GPU, ["--hosts=2"]])
def test_a_jobset_has_the_fields_of_its_schema(devices, capsys):
    found = document(capsys, gke, "--image=i", "--volume=/shared=claim", "--max-restarts=7", *devices)
    check(found, JOBSET)
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    spec = found["spec"]
    assert spec["failurePolicy"]["maxRestarts"] == 7
    (group,) = spec["replicatedJobs"]
    job = group["template"]["spec"]
    hosts = next(int(word.removeprefix("--hosts=")) for word in devices if word.startswith("--hosts="))
    assert job["parallelism"] == job["completions"] == hosts
    assert (job["completionMode"], job["backoffLimit"], job["template"]["spec"]["restartPolicy"]) == (
        "Indexed",
        0,
        "Never",
    )
    # Kubernetes takes 0 for no failure, and refuses it in this list.
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2]


def test_a_slice_has_its_nodes_and_a_pod_its_chips(capsys):
    found = document(capsys, gke, "--image=i", "--volume=/shared=claim", *TPU)
    pod = found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "4x4",
        "cloud.google.com/gke-spot": "true",
    }
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}
    assert found["metadata"]["namespace"] == "no"
    assert found["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "q"}


@pytest.mark.parametrize(("devices", "address"), [(TPU, "auto"), (GPU, "my-run-job-0-0.my-run:7000/2/1")])
def test_a_pod_runs_the_exact_command_and_finds_the_others(devices, address, capsys, tmp_path):
    found = document(capsys, gke, "--image=i", "--volume=/shared=claim", *devices)
    (container,) = found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    assert container["command"][:2] == ["bash", "-c"]
    script = container["command"][2]
    expected = [address, "-m", "jaxformer", "train", *TRAIN]
    assert run_of(script, tmp_path, JOB_COMPLETION_INDEX="1") == expected
    assert run_of(script, tmp_path, JOB_COMPLETION_INDEX="1", RESTART="0") == expected
    delays = [run_of(script, tmp_path, JOB_COMPLETION_INDEX="1", RESTART=str(n))[-1] for n in (1, 2, 5, 6, 60)]
    assert delays == ["slept 10", "slept 20", "slept 160", "slept 300", "slept 300"]


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--name=My"], "--name: got 'My'"),
        (["--name=" + "a" * 51], "at most 50"),
        (["--tpu=v5litepod-16"], "--tpu: got v5litepod-16, expected TYPE:TOPOLOGY"),
        (
            ["--tpu=t:4x4", "--hosts=2"],
            "--tpu: got 16 chips in t:4x4, expected --hosts times --chips-per-host, which is 8",
        ),
        (["--tpu=t:2x2", "--gpu=a"], "expected one kind of devices"),
        (["--volume=shared=c"], "--volume: got shared=c"),
        (["--volume=/share=c"], "--workdir: got /shared/runs/x y, expected a path below a --volume"),
        (["--hosts=0"], "--hosts: got 0, expected at least 1"),
        (["--xpk=c"], "--xpk: got no --tpu"),
        (["--xpk=c", "--tpu=v5litepod-16", "--wait"], "--wait: got it with --xpk"),
        (["--setup=a\nb"], "expected values on one line"),
    ],
)
def test_what_gke_cannot_honour_is_refused(argv, word, capsys):
    base = ["--name=a", "--image=i", *([] if any("volume" in a for a in argv) else ["--volume=/shared=c"])]
    base = [word for word in base if "--xpk=c" not in argv or "volume" not in word]
    with pytest.raises(SystemExit) as end:
        gke.main([*base, *argv, "--dry-run", "--", *TRAIN])
    assert end.value.code == 2
    assert word in capsys.readouterr().err


def test_gke_takes_a_workdir_in_a_bucket_and_sky_does_not(capsys):
    train = [TRAIN[0], "--workdir=s3://bucket/run"]
    assert gke.main(["--name=a", "--image=i", "--dry-run", "--", *train]) == 0
    assert "s3://bucket/run" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        sky.main(["--name=a", "--volume=/shared=disk", "--dry-run", "--", *train])
    assert "--workdir: got s3://bucket/run" in capsys.readouterr().err


def test_xpk_gets_the_same_run(capsys):
    argv = ["--name=a", "--image=i", "--tpu=v5litepod-16", "--xpk=c", "--setup=mount it", "--dry-run"]
    assert gke.main([*argv, "--", TRAIN[0], "--workdir=/w"]) == 0
    assert capsys.readouterr().out == (
        "xpk workload create --cluster=c --workload=a --docker-image=i --tpu-type=v5litepod-16 --max-restarts=20 "
        "--restart-on-exit-codes=143,75 '--command=mount it && env JAXFORMER_DISTRIBUTED=auto python -m jaxformer "
        "train --config=configs/quickstart.py --workdir=/w'\n"
    )


@pytest.mark.parametrize("fault", launch_faults.GKE_FAULTS, ids=lambda fault: fault.name)
def test_faults_of_jobsets(fault):
    outcome = launch_faults.inject_gke(fault)
    assert (outcome.code, outcome.attempts) == (fault.code, fault.attempts), outcome.lines
    assert fault.line in outcome.lines


def test_without_waiting_the_jobset_is_submitted_only(capsys):
    cluster = launch_faults.FakeCluster([(1, 1)])
    assert gke.main(["--name=a", "--image=i", "--volume=/shared=c", "--", *TRAIN], programs=cluster) == 0
    assert (cluster.jobset["metadata"]["name"], cluster.status) == ("a", {})


# --- SkyPilot ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "extra"),
    [
        (["--nodes=2", "--accelerators=A100:8", "--spot", "--infra=k8s", "--image=i"], "'jax[cuda12]'"),
        (["--accelerators=tpu-v5litepod-8"], "'jax[tpu]'"),
        ([], "jax"),
    ],
)
def test_a_task_has_the_fields_of_its_schema(argv, extra, capsys):
    found = document(capsys, sky, "--volume=/shared=disk", *argv)
    check(found, TASK)
    assert found["volumes"] == {"/shared": "disk"}
    assert found["resources"]["job_recovery"] == {"max_restarts_on_errors": 0, "recover_on_exit_codes": [143, 75]}
    assert f"-c requirements.lock {extra}\n" in found["setup"]
    assert ("image_id" in found["resources"]) == ("--image=i" in argv)
    assert document(capsys, sky, "--volume=/shared=disk", "--setup=true")["setup"] == "true\n"


@pytest.mark.parametrize(("accelerators", "address"), [("A100:8", "10.0.0.1:7000/2/1"), ("tpu-v5litepod-8", "auto")])
def test_a_node_runs_the_exact_command_and_finds_the_others(accelerators, address, capsys, tmp_path):
    train = [TRAIN[0], f"--workdir={tmp_path}/x y", ODD]
    argv = [f"--volume={tmp_path}=disk", "--python=python", f"--accelerators={accelerators}"]
    script = document(capsys, sky, *argv, train=train)["run"]
    nodes = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    assert run_of(script, tmp_path, **nodes) == [address, "-m", "jaxformer", "train", *train]


@pytest.mark.parametrize("fault", launch_faults.SKY_FAULTS, ids=lambda fault: fault.name)
def test_faults_of_managed_jobs(fault, tmp_path):
    outcome = launch_faults.inject_sky(fault, tmp_path)
    assert (outcome.code, outcome.attempts) == (fault.code, fault.attempts), outcome.lines
    assert fault.line in outcome.lines


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--name=a b"], "--name: got 'a b'"),
        (["--volume=disk"], "--volume: got disk"),
        ([], "--workdir: got /shared/runs/x y, expected a path below a --volume"),
        (["--nodes=0"], "--nodes: got 0"),
        (
            ["--", "--config=x.py", "--workdir=gs://b/run"],
            "got gs://b/run, expected a path below a --volume: the count of restarts is",
        ),
    ],
)
def test_what_sky_cannot_honour_is_refused(argv, word, capsys):
    with pytest.raises(SystemExit) as end:
        sky.main(["--name=a", "--dry-run", *argv, *([] if "--" in argv else ["--", *TRAIN])])
    assert end.value.code == 2
    assert word in capsys.readouterr().err


@pytest.mark.parametrize(("engine", "program"), [(gke, "kubectl"), (sky, "sky")])
def test_a_program_that_is_missing_is_one_line(engine, program, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    argv = ["--name=a", "--volume=/shared=c", *(["--image=i"] if engine is gke else []), "--", *TRAIN]
    assert engine.main(argv) == 2
    assert capsys.readouterr().err == f"error: {program}: no such program here; use --dry-run to see the commands\n"


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="needs shellcheck")
def test_the_scripts_in_manifests_pass_shellcheck(capsys):
    pod = document(capsys, gke, "--image=i", "--volume=/shared=claim", *GPU)
    container = pod["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    task = document(capsys, sky, "--volume=/shared=disk", "--accelerators=A100:8")
    for script in (container["command"][2], task["run"], task["setup"]):
        done = subprocess.run(
            ["shellcheck", "--shell=bash", "--exclude=SC2016", "-"],
            input=script,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout == ""


def test_programs_pass_output_on_as_it_comes(capfdbinary):
    pieces: list[bytes] = []
    programs = Programs()
    assert programs.stream(["bash", "-c", "echo one; sleep 0.1; echo two; exit 3"], pieces.append) == 3
    assert (pieces[0], b"".join(pieces)) == (b"one\n", b"one\ntwo\n")
    assert programs.call(["cat"], "text") == (0, "text", "")
    assert programs.run(["bash", "-c", "echo seen; exit 4"]) == 4
    programs.show(b"log\n")
    assert capfdbinary.readouterr().out == b"seen\nlog\n"


# --- images -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "extra"), [("cpu", ""), ("cuda", "jax[cuda12]"), ("tpu", "jax[tpu]")])
def test_images_install_the_lock_and_nothing_that_git_does_not_know(kind, extra):
    folder = ROOT / "launch" / "docker"
    steps = [
        line.split(" ", 1)
        for line in (folder / f"{kind}.Dockerfile").read_text().splitlines()
        if line[:1] not in ("#", "")
    ]
    assert steps[0] == ["FROM", "python:3.12-slim-bookworm"]
    runs = [text for word, text in steps if word == "RUN"]
    assert runs[1] == "uv pip install --system --no-cache -r requirements.lock"
    assert [f'"{extra}"' in text for text in runs].count(True) == (1 if extra else 0)
    assert all("-c requirements.lock" in text for text in runs if "jax[" in text)
    assert runs[-1].endswith("--no-deps .")
    ignored = (folder / f"{kind}.Dockerfile.dockerignore").read_text().splitlines()
    kept = [line[1:] for line in ignored if line.startswith("!")]
    assert "*" in ignored
    assert all((ROOT / name).exists() for name in kept)
    assert {"jaxformer", "configs", "pyproject.toml", "requirements.lock", "README.md", "LICENSE"} <= set(kept)
    assert not {".git", ".venv", "runs", "build"} & set(kept)
