"""The front `python -m launch --on=...`, restarts on this machine, and SLURM jobs with containers and logs a rank."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from fault_script import launch_faults  # noqa: E402

from launch import __main__ as front  # noqa: E402
from launch import local, restarts, slurm  # noqa: E402

TRAIN = ["--config=configs/quickstart.py", "--workdir=/shared/run"]
NEEDED = {
    "local": [],
    "slurm": [],
    "tpu": ["--name=pod", "--zone=z", "--type=v5litepod-8", "--version=v2"],
    "gke": ["--name=pod", "--image=i", "--volume=/shared=claim"],
    "sky": ["--name=pod", "--volume=/shared=disk"],
}
"""Flags that each engine needs."""


def dry(*argv: str) -> int:
    return front.main([*argv, "--dry-run", "--", *TRAIN])


# --- the front --------------------------------------------------------------------------------------------------------


def test_the_front_knows_every_engine_and_each_prints_what_it_would_do(capsys, monkeypatch, tmp_path):
    assert set(front.ENGINES) == set(NEEDED)
    monkeypatch.setattr("launch.source.git", lambda programs, *words: "" if "--show-prefix" in words else "x")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a dry run runs nothing"))
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a dry run runs nothing"))
    monkeypatch.chdir(tmp_path)
    for engine, needed in NEEDED.items():
        assert dry(f"--on={engine}", *needed) == 0
        assert "jaxformer train --config=configs/quickstart.py --workdir=/shared/run" in capsys.readouterr().out, engine
        assert front.main([f"--on={engine}", *needed, "--dry-run", "--doctor", "--", TRAIN[0]]) == 0
        out = capsys.readouterr().out
        assert f"jaxformer doctor {TRAIN[0]}" in out, engine
        assert "jaxformer train" not in out, engine
    assert not list(tmp_path.iterdir())  # and writes nothing


@pytest.mark.parametrize("argv", [["--on=k8s"], [], ["--on=local", "--on=slurm"], ["--", "--on=local"], ["--on"]])
def test_another_engine_is_refused_in_one_line(argv, capsys):
    assert front.main(argv) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "expected one of --on=local|slurm|tpu|gke|sky" in err


def test_the_engine_may_stand_as_a_word_of_its_own_and_help_is_its(capsys):
    assert front.main(["--help"]) == 0
    assert "--on=sky" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        front.main(["--on", "gke", "--help"])
    assert end.value.code == 0
    assert "usage: python -m launch --on=gke" in capsys.readouterr().out


# --- here -------------------------------------------------------------------------------------------------------------


def test_restarts_are_bounded_and_wait_longer_each_time():
    counter = restarts.Restarts(8)
    assert [counter.next_delay() for _ in range(7)] == [10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]
    assert counter.next_delay(lasted=restarts.STEADY_SECONDS) == 10.0  # it had run for long
    assert counter.next_delay() is None
    assert restarts.Restarts(0).next_delay() is None


@pytest.mark.parametrize(
    ("codes", "limit", "code", "waits"),
    [
        ((143, 75, 0), 5, 0, [10.0, 20.0]),
        ((143, 143, 143), 2, 143, [10.0, 20.0]),
        ((75, 1), 5, 1, [10.0]),
        ((2,), 5, 2, []),
        ((143,), 0, 143, []),
    ],
)
def test_a_run_here_is_restarted_after_preemptions_and_hangs_only(codes, limit, code, waits):
    left, slept = list(codes), []
    assert local.supervise_with_restarts(lambda stops: left.pop(0), limit, slept.append, lambda: 0.0) == code
    assert (slept, left) == (waits, [])


def test_a_run_here_that_the_user_stops_is_not_restarted():
    def attempt(stops: list[int]) -> int:
        stops.append(15)
        return 143

    assert local.supervise_with_restarts(attempt, 5, lambda _: pytest.fail("waited")) == 143

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    assert local.supervise_with_restarts(lambda stops: 75, 5, interrupt) == 75


def test_a_signal_to_the_launcher_reaches_all_processes_and_its_supervisor(monkeypatch):
    stops: list[int] = []
    start = subprocess.Popen

    def signalled(*arguments, **keywords):
        process = start(*arguments, **keywords)
        os.kill(os.getpid(), signal.SIGTERM)  # to the launcher, while it starts its processes
        return process

    monkeypatch.setattr(local.subprocess, "Popen", signalled)
    code = local.supervise(["sleep", "9"], [{}, {}], stops)
    assert (code, stops) == (143, [15, 15])


def test_a_process_that_saves_is_not_signalled_again_when_another_has_saved(monkeypatch, tmp_path):
    """The first that ends with 143 has not failed for the others: each of them got the signal, too."""
    body = (
        'trap "echo >> $WHO; n=1" TERM; touch ready-$WHO; until [ -n "$n" ]; do sleep 0.02; done; sleep $LONG; exit 143'
    )
    monkeypatch.chdir(tmp_path)
    waited = []

    def look(seconds: float) -> None:
        if not waited and (tmp_path / "ready-a").exists() and (tmp_path / "ready-b").exists():
            waited.append(seconds)
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.02)

    monkeypatch.setattr(local, "time", SimpleNamespace(monotonic=time.monotonic, sleep=look))
    extras = [{"WHO": "a", "LONG": "0"}, {"WHO": "b", "LONG": "0.3"}]
    assert local.supervise(["bash", "-c", body], extras) == 143
    assert ((tmp_path / "a").read_text(), (tmp_path / "b").read_text()) == ("\n", "\n")


# --- SLURM ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", launch_faults.SLURM_FAULTS, ids=lambda fault: fault.name)
def test_faults_of_slurm_jobs(fault, tmp_path):
    outcome = launch_faults.inject_slurm(fault, tmp_path)
    assert (outcome.code, outcome.attempts) == (fault.code, fault.attempts), outcome.lines
    assert fault.line in outcome.lines
    assert outcome.lines.count("requeue 42") == outcome.attempts - 1


def batch_script(capsys, *argv: str, folder: str = "/shared/code") -> str:
    assert slurm.main([f"--folder={folder}", *argv, "--dry-run", "--", *TRAIN]) == 0
    return capsys.readouterr().out


def srun(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("srun "))


def test_containers_see_the_folder_and_the_mounts(capsys):
    with_gpus = srun(batch_script(capsys, "--gpus-per-node=8", "--container=image.sif", "--mount=/shared"))
    assert with_gpus.startswith(
        "srun --kill-on-bad-exit=1 apptainer exec --nv --bind=/shared/code:/shared/code --bind=/shared:/shared "
        "--pwd=/shared/code image.sif python -m jaxformer train"
    )
    assert "--nv" not in srun(batch_script(capsys, "--container=image.sif", "--mount=/shared"))
    pyxis = srun(batch_script(capsys, "--container=a/b", "--container-engine=pyxis", "--mount=/disk:/shared"))
    assert "--container-image=a/b --container-mounts=/shared/code:/shared/code,/disk:/shared " in pyxis
    assert "--container-workdir=/shared/code python -m jaxformer train" in pyxis


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--container=i", "--mount=/data"], "--workdir: got /shared/run, which the container does not see"),
        (["--container=i", "--mount=/sha"], "which the container does not see"),
        (["--container=i", "--mount=data"], "--mount: got data, expected an absolute path"),
        (["--mount=/data"], "got no --container"),
        (["--container-engine=pyxis"], "got no --container"),
        (["--rank-logs=logs/%t"], "--rank-logs: got logs/%t, expected no pattern but %j"),
        (["--max-restarts=-1"], "--max-restarts: got -1, expected at least 0"),
        (["--container=i\nj", "--mount=/shared"], "expected values on one line"),
    ],
)
def test_what_a_job_cannot_honour_is_refused(argv, word, capsys):
    with pytest.raises(SystemExit) as end:
        slurm.main(["--folder=/code", *argv, "--dry-run", "--", *TRAIN])
    assert end.value.code == 2
    assert word in capsys.readouterr().err


def test_each_rank_has_a_log_in_a_folder_that_the_job_makes(capsys, tmp_path):
    odd = f"{tmp_path}/it's $HOME %j"
    text = batch_script(capsys, f"--rank-logs={odd}", folder=str(tmp_path))
    for name, body in {"srun": 'printf "%s\\n" "$@"; ls -d "${1#--output=}" 2>&1; exit 0', "scontrol": ""}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash", "-s"], input=text, env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    folder = tmp_path / "it's $HOME 7"
    assert done.stdout.splitlines()[:2] == [f"--output={folder}/rank-%t.txt", "--open-mode=append"]
    assert folder.is_dir()


def test_the_front_writes_a_log_a_rank_and_the_old_program_one_log(capsys):
    assert dry("--on=slurm") == 0
    assert (
        'logs=slurm-"$SLURM_JOB_ID"\nmkdir -p "$logs" || exit 1\nsrun --output="$logs"/rank-%t.txt'
        in capsys.readouterr().out
    )
    assert dry("--on=slurm", "--rank-logs=") == 0
    assert "rank-%t" not in capsys.readouterr().out
    assert "rank-%t" not in batch_script(capsys)


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="needs shellcheck")
def test_the_batch_script_passes_shellcheck(capsys):
    text = batch_script(capsys, "--rank-logs=a b%j", "--setup=module load x", "--container=i", "--mount=/shared")
    done = subprocess.run(["shellcheck", "-"], input=text, capture_output=True, text=True, check=False)
    assert done.stdout == ""


def test_a_container_sees_a_workdir_in_a_bucket(capsys):
    flags = ["--on=slurm", "--container=image.sif", "--dry-run", "--", "--config=configs/quickstart.py"]
    assert front.main([*flags, "--workdir=gs://bucket/run"]) == 0
    assert "--workdir=gs://bucket/run" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        front.main([*flags, "--workdir=/elsewhere/run"])
