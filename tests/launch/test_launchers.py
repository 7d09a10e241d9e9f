"""Launchers with stand-ins for sbatch, srun, scontrol, gcloud and python: exact commands and exit codes."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from launch import local, slurm, tpu_vm  # noqa: E402

ODD = '--config.data.dir=it\'s $HOME; a "folder" & `more`'
TRAIN = ["--config=configs/quickstart.py", "--workdir=runs/x y", ODD]


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Puts stand-ins first on PATH: a function (name, body) that makes one; by default it records its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)

    def make(name: str, body: str = "") -> Path:
        record = tmp_path / f"{name}.argv"
        (folder / name).write_text(
            f'#!/bin/bash\ntouch {record}\nfor a in "$@"; do printf "%s\\0" "$a" >> {record}; done\n{body}\n'
        )
        (folder / name).chmod(0o755)
        return record

    return make


def recorded(path: Path) -> list[str]:
    return path.read_text().split("\0")[:-1]


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert path.exists()


# --- here -------------------------------------------------------------------------------------------------------------


def test_local_alone_is_the_plain_command(capsys):
    assert local.main(["--dry-run", "--", *TRAIN]) == 0
    assert shlex.split(capsys.readouterr().out) == [sys.executable, "-m", "jaxformer", "train", *TRAIN]


def test_local_processes_know_each_other(capsys):
    assert local.main(["--dry-run", "--processes=3", "--gpus", "--", *TRAIN]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["env"] * 3
    assert [line[2] for line in lines] == [f"CUDA_VISIBLE_DEVICES={i}" for i in range(3)]
    address, count, index = lines[1][1].removeprefix("JAXFORMER_DISTRIBUTED=").split("/")
    assert address.startswith("127.0.0.1:")
    assert (count, index) == ("3", "1")
    assert all(line[3:] == [sys.executable, "-m", "jaxformer", "train", *TRAIN] for line in lines)


@pytest.mark.parametrize(
    ("place", "flags"), [(local, ["--processes=2"]), (slurm, []), (tpu_vm, ["--name=a", "--zone=b"])]
)
def test_the_doctor_runs_in_the_places_of_the_training(place, flags, capsys):
    arguments = ["--config=configs/quickstart.py", "--workdir=runs/x", "--devices=16"]
    assert place.main(["--dry-run", *flags, "--doctor", "--", *arguments]) == 0
    out = capsys.readouterr().out
    assert "-m jaxformer doctor --config=configs/quickstart.py --devices=16" in out
    assert "workdir" not in out


def test_local_returns_the_first_failure_and_stops_the_others(programs):
    programs("member", 'trap "exit 143" TERM; [ "$WHO" = good ] || { sleep 0.5; exit 7; }; sleep 20 & wait')
    begun = time.monotonic()
    assert local.supervise(["member"], [{"WHO": "good"}, {"WHO": "bad"}]) == 7
    assert time.monotonic() - begun < 15
    programs("fine", "exit 0")
    assert local.supervise(["fine"], [{}, {}]) == 0


def test_local_hands_a_stop_on(programs, tmp_path):
    programs("member", f'trap "exit 143" TERM; touch {tmp_path}/ready-$WHO; sleep 20 & wait')
    code = "from launch import local; import sys; sys.exit(local.supervise(['member'], [{'WHO': 'a'}, {'WHO': 'b'}]))"
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)})
    wait_for(tmp_path / "ready-a")
    wait_for(tmp_path / "ready-b")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 143


# --- SLURM ------------------------------------------------------------------------------------------------------------

JOB = ["--nodes=2", "--gpus-per-node=8", "--time=1:00:00", "--partition=big", "--sbatch=--account=abc", "--"]


def test_slurm_directives():
    flags = _slurm_flags([*JOB, *TRAIN])
    options = slurm.directives(flags)
    for expected in ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--time=1:00:00", "--account=abc"):
        assert expected in options
    assert "--requeue" in options
    assert "--signal=B:USR1@120" in options
    assert "--ntasks-per-node=8" in slurm.directives(_slurm_flags(["--per-gpu", *JOB, *TRAIN]))


def _slurm_flags(argv):
    captured = []
    original, slurm.script = slurm.script, lambda flags: captured.append(flags) or ""
    try:
        slurm.main(["--dry-run", *argv])
    finally:
        slurm.script = original
    return captured[0]


def test_slurm_submits_by_standard_input_what_dry_run_shows(programs, tmp_path, capsys):
    record = programs("sbatch", f"cat > {tmp_path}/script")
    assert slurm.main([*JOB, *TRAIN]) == 0
    assert recorded(record) == []
    assert slurm.main(["--dry-run", *JOB, *TRAIN]) == 0
    assert capsys.readouterr().out == (tmp_path / "script").read_text()


def run_script(programs, tmp_path, capsys, srun: str) -> subprocess.Popen:
    programs("scontrol")
    programs("srun", srun)
    slurm.main(["--dry-run", "--setup=export READY=yes", "--python=py thon", *JOB, *TRAIN])
    (tmp_path / "job.sh").write_text(capsys.readouterr().out)
    return subprocess.Popen(["bash", "job.sh"], env={**os.environ, "SLURM_JOB_ID": "42"}, cwd=tmp_path)


def test_slurm_script_runs_the_exact_command(programs, tmp_path, capsys):
    process = run_script(programs, tmp_path, capsys, f"echo $JAXFORMER_DISTRIBUTED $READY > {tmp_path}/seen")
    assert process.wait(timeout=20) == 0
    expected = ["--kill-on-bad-exit=1", "py thon", "-m", "jaxformer", "train", *TRAIN]
    assert recorded(tmp_path / "srun.argv") == expected
    assert (tmp_path / "seen").read_text() == "auto yes\n"
    assert not (tmp_path / "scontrol.argv").exists()


def test_slurm_script_saves_and_requeues_on_usr1(programs, tmp_path, capsys):
    body = f'trap "sleep 0.3; exit 143" TERM; touch {tmp_path}/ready; sleep 20 & wait'
    process = run_script(programs, tmp_path, capsys, body)
    wait_for(tmp_path / "ready")
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=20) == 143
    assert recorded(tmp_path / "scontrol.argv") == ["requeue", "42"]


def test_slurm_script_does_not_requeue_a_failure(programs, tmp_path, capsys):
    assert run_script(programs, tmp_path, capsys, "exit 2").wait(timeout=20) == 2
    assert not (tmp_path / "scontrol.argv").exists()


# --- TPU VM -----------------------------------------------------------------------------------------------------------

VM = ["--name=pod", "--zone=us-west4-a", "--folder=my code"]


def test_tpu_vm_runs_the_exact_command_on_all_workers(programs, tmp_path):
    record = programs("gcloud")
    assert tpu_vm.main([*VM, "--project=p", "--", *TRAIN]) == 0
    argv = recorded(record)
    assert argv[:-1] == [
        *("compute", "tpus", "tpu-vm", "ssh", "pod", "--zone=us-west4-a", "--project=p", "--worker=all")
    ]
    # What the worker's shell makes of it.
    seen = programs("python3", f'echo "$JAXFORMER_DISTRIBUTED" "$PWD" > {tmp_path}/seen')
    (tmp_path / "my code").mkdir()
    command = argv[-1].removeprefix("--command=")
    subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path)
    assert recorded(seen) == ["-m", "jaxformer", "train", *TRAIN]
    assert (tmp_path / "seen").read_text() == f"auto {tmp_path}/my code\n"


def test_tpu_vm_detached_goes_on_in_the_background(programs, tmp_path):
    record = programs("gcloud")
    tpu_vm.main([*VM, "--detach", "--setup=touch was-set-up", "--", *TRAIN])
    seen = programs("python3", f"echo words; touch {tmp_path}/done")
    (tmp_path / "my code").mkdir()
    subprocess.run(["bash", "-c", recorded(record)[-1].removeprefix("--command=")], check=True, cwd=tmp_path)
    wait_for(tmp_path / "done")
    assert recorded(seen) == ["-m", "jaxformer", "train", *TRAIN]
    assert (tmp_path / "my code" / "was-set-up").exists()
    assert (tmp_path / "my code" / "jaxformer.log").read_text() == "words\n"


def test_tpu_vm_copies_first_and_stops_at_a_failure(programs):
    record = programs("gcloud", "exit 3")
    assert tpu_vm.main([*VM, "--copy", "--", *TRAIN]) == 3
    assert recorded(record)[3:7] == ["scp", "--recurse", ".", "pod:my code"]


# --- all --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("place", "needed"), [(local, []), (slurm, []), (tpu_vm, VM)])
@pytest.mark.parametrize("train", [[], ["--config=x"], ["--workdir=x"], [*TRAIN, "word"]])
def test_incomplete_commands_are_refused(place, needed, train, capsys):
    with pytest.raises(SystemExit) as caught:
        place.main([*needed, "--dry-run", "--", *train])
    assert caught.value.code == 2
    assert "expected" in capsys.readouterr().err


def test_a_missing_program_is_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm.main(["--", *TRAIN]) == 2
    assert capsys.readouterr().err.startswith("error: sbatch: no such program")


def test_launching_does_not_need_jax():
    code = (
        "import sys; from launch import __main__, gke, local, sky, slurm, tpu, tpu_vm; "
        "sys.exit(bool({'jax', 'jaxformer', 'numpy', 'yaml'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
