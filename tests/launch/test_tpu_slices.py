"""TPU slices against a stand-in for gcloud that keeps state, and the workers' scripts against a real bash."""

import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from fault_script import launch_faults  # noqa: E402

from launch import source, tpu, tpu_slice, worker  # noqa: E402
from launch.programs import Programs  # noqa: E402

TRAIN = launch_faults.TRAIN


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", launch_faults.TPU_FAULTS, ids=lambda fault: fault.name)
def test_faults_of_slices(fault, tmp_path):
    outcome, cloud = launch_faults.inject_tpu(fault, tmp_path)
    assert (outcome.code, outcome.attempts, outcome.is_kept) == (fault.code, fault.attempts, fault.is_kept), (
        outcome.lines
    )
    assert fault.line in outcome.lines
    assert not cloud.events or not isinstance(cloud.events[0][0], str), "the fault has not happened"
    if outcome.code == 0:
        attempts = [sorted(path.name for path in folder.iterdir()) for folder in tmp_path.iterdir()]
        assert ["worker-0.txt", "worker-1.txt"] in attempts


def cloud_of(name: str, tmp_path: Path):
    (fault,) = (fault for fault in launch_faults.TPU_FAULTS if fault.name == name)
    return launch_faults.inject_tpu(fault, tmp_path)


def test_the_log_is_shown_once_although_connections_break(tmp_path):
    _, cloud = cloud_of("three connections break in the run", tmp_path)
    assert cloud.dropping == 0
    assert cloud.shown == b"attempt 1\nstep 1\nend\n"


def test_every_new_slice_gets_the_code_and_a_kept_one_does_not_get_it_again(tmp_path):
    def copies(name: str) -> int:
        return sum("scp" in command for command in cloud_of(name, tmp_path)[1].commands)

    assert copies("preempted in the run") == 2
    assert copies("the run hangs (75), then goes on") == 1


def test_a_run_is_not_deleted_while_the_launcher_is_without_a_network(tmp_path):
    _, cloud = cloud_of("the launcher's network is gone for ten minutes", tmp_path)
    assert [command[4] for command in cloud.commands if command[0] == "gcloud"].count("delete") == 1  # at the end


def test_ctrl_c_lets_the_run_save(tmp_path):
    _, cloud = cloud_of("Ctrl-C", tmp_path)
    assert cloud.stops == 2  # workers
    assert {host.run[1] for host in cloud.node.hosts} == {143}


def test_another_launcher_finds_the_run_and_does_not_start_it_again(tmp_path):
    cloud = launch_faults.FakeCloud([((0, 0), (500.0, 500.0))], events=[(60.0, launch_faults.interrupt)])
    job = [*launch_faults.VM, f"--logs={tmp_path}"]
    cloud.stops = -99

    def forget(command):  # as when the first launcher is killed
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tpu.Job, "stop", forget)
        assert tpu.main([*job, "--", *TRAIN], programs=cloud) == 130
    assert cloud.node.hosts[0].run[0] > cloud.now
    assert tpu.main([*job, "--", TRAIN[0], "--workdir=/shared/other"], programs=cloud) == 2  # another run's slice
    assert tpu.main([*job, "--", *TRAIN], programs=cloud) == 0
    assert (cloud.attempts, cloud.node) == (1, None)
    assert "this run is on the slice already; following it" in cloud.said


def test_a_slice_is_deleted_when_the_user_says_so(tmp_path):
    def end(choice: str, code: int) -> bool:
        cloud = launch_faults.FakeCloud([launch_faults.both(code, 10.0)])
        tpu.main([*launch_faults.VM, f"--logs={tmp_path}", f"--delete={choice}", "--", *TRAIN], programs=cloud)
        return cloud.node is None

    assert [end(choice, code) for choice in tpu.DELETE_CHOICES for code in (0, 1)] == [
        *(True, False),
        *(True, True),
        *(False, False),
    ]


def test_a_kept_slice_runs_the_next_command_and_knows_what_is_done(tmp_path):
    cloud = launch_faults.FakeCloud([launch_faults.both(0, 10.0)])

    def run(workdir: str) -> int:
        job = [*launch_faults.VM, f"--logs={tmp_path}", "--delete=never", "--", TRAIN[0], f"--workdir={workdir}"]
        assert tpu.main(job, programs=cloud) == 0
        return cloud.attempts

    assert [run("/shared/a"), run("/shared/a"), run("/shared/b")] == [1, 1, 2]


def test_the_first_failure_decides():
    states = [
        worker.Worker("a", "exit", 134, 7.5),
        worker.Worker("b", "exit", 75, 6.0),
        worker.Worker("c", "exit", 0, 1.0),
    ]
    assert tpu.first_failure(states) == 75
    assert tpu.first_failure(states[2:]) == 0
    assert tpu.first_failure([worker.Worker("a", "exit", 1, 5.0), worker.Worker("b", "exit", 2, 5.0)]) == 2


# --- commands and refusals --------------------------------------------------------------------------------------------


def flags_of(*argv: str):
    return tpu.launch.parse(tpu.make_parser(None), [*launch_faults.VM, *argv, "--", *TRAIN])


def test_the_ways_to_create_and_delete_a_slice():
    def commands(*argv: str) -> list[str]:
        piece = tpu_slice.Slice(flags_of(*argv), Programs())
        return [shlex.join(piece.create_command()), shlex.join(piece.delete_command())]

    head = "gcloud compute tpus tpu-vm create pod --zone=z --accelerator-type=v5litepod-8 --version=v2-alpha-tpuv5-lite"
    assert commands() == [
        f"{head} --labels=launcher=jaxformer --quiet",
        "gcloud compute tpus tpu-vm delete pod --zone=z --quiet",
    ]
    assert "--spot" in commands("--spot")[0]
    assert commands("--queued", "--spot", "--project=p", "--create=--network=n") == [
        "gcloud compute tpus queued-resources create pod --zone=z --project=p --accelerator-type=v5litepod-8 "
        "--node-id=pod --runtime-version=v2-alpha-tpuv5-lite --spot --labels=launcher=jaxformer --network=n --quiet",
        "gcloud compute tpus queued-resources delete --force pod --zone=z --project=p --quiet",
    ]


def test_a_workdir_may_be_in_a_bucket(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    flags = ["--name=pod", "--zone=z", "--type=v5litepod-8", "--version=v2", "--dry-run"]
    assert tpu.main([*flags, "--", "--config=configs/quickstart.py", "--workdir=gs://bucket/run"]) == 0
    assert "--workdir=gs://bucket/run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "train", "word"),
    [
        (
            [],
            ["--config=configs/quickstart.py", "--workdir=runs/x"],
            "--workdir: got runs/x, expected an absolute path",
        ),
        (["--folder=.."], TRAIN, "--folder: got '..', expected a name"),
        (["--folder=/"], TRAIN, "--folder: got '/', expected a name"),
        (["--create=--labels=a=b"], TRAIN, "--create: got --labels"),
        (["--wheel=none.whl"], TRAIN, "--wheel: got none.whl, which is no file"),
        (["--max-restarts=-1"], TRAIN, "--max-restarts: got -1"),
        (
            [f"--wheel={__file__}"],
            ["--config=other/r.py", "--workdir=/s"],
            "expected a recipe below configs with --wheel",
        ),
    ],
)
def test_what_cannot_be_launched_is_refused(argv, train, word, capsys):
    cloud = launch_faults.FakeCloud()
    with pytest.raises(SystemExit) as end:
        tpu.main([*launch_faults.VM, *argv, "--", *train], programs=cloud)
    assert end.value.code == 2
    assert word in capsys.readouterr().err
    assert not any(command[0] == "gcloud" for command in cloud.commands)


def test_without_gcloud_there_is_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("launch.source.git", lambda programs, *words: "" if "--show-prefix" in words else "x")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tpu.main([*launch_faults.VM, "--", *TRAIN]) == 2
    assert capsys.readouterr().err == "error: gcloud: no such program here; use --dry-run to see the commands\n"


# --- the code that is copied ------------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A git repository with a recipe that has been edited since its commit, and things that must not travel."""
    monkeypatch.chdir(tmp_path)
    for name in (
        "configs/a.py",
        "requirements.lock",
        "pyproject.toml",
        ".venv/lib",
        "runs/x",
        "jaxformer/b.py",
        "new.txt",
    ):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("old")
    Path(".gitignore").write_text(".venv\nruns\n")
    who = "-c user.name=n -c user.email=e"
    names = "configs requirements.lock pyproject.toml jaxformer .gitignore"
    for command in ("init -q", f"add {names}", f"{who} commit -q -m m", "config user.name n", "config user.email e"):
        subprocess.run(["git", *command.split()], check=True)
    Path("configs/a.py").write_text("edited")
    return tmp_path


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_what_git_knows_is_copied_as_it_is_on_disk(repository):
    programs = Programs()
    before = source.git(programs, "status", "--porcelain")
    for wheel, names in (("", {"jaxformer/b.py", ".gitignore"}), ("w.whl", set())):
        programs.call(source.archive_command(source.snapshot(programs), "code.tar.gz", wheel))
        with tarfile.open("code.tar.gz") as archive:
            files = {member.name for member in archive if member.isfile()}
            assert files == {"configs/a.py", "requirements.lock", "pyproject.toml", *names}
            assert archive.extractfile("configs/a.py").read() == b"edited"
    Path("code.tar.gz").unlink()
    assert source.git(programs, "status", "--porcelain") == before
    assert source.untracked(programs) == ["new.txt"]
    parser, flags = tpu.make_parser(None), flags_of()
    for recipe in ("configs/none.py", ".venv/lib"):
        flags.train = [f"--config={recipe}:variant"]
        with pytest.raises(SystemExit):
            source.check(parser, flags, programs)
    flags.train = ["--config=configs/a.py:variant"]
    source.check(parser, flags, programs)


# --- on a worker ------------------------------------------------------------------------------------------------------


@pytest.fixture
def sh(tmp_path):
    """A home folder of a worker: a function that runs a command there and returns its output."""
    (tmp_path / "code").mkdir()

    def run(command: str, code: int = 0) -> str:
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        return done.stdout

    return run


def state(sh) -> worker.Worker:
    (found,) = worker.read_states(sh(worker.probe("code")))
    return found


def until(sh, wanted: str) -> worker.Worker:
    end = time.monotonic() + 20
    while (found := state(sh)).state != wanted and time.monotonic() < end:
        time.sleep(0.02)
    assert found.state == wanted
    return found


def test_a_run_on_a_worker_from_start_to_exit_code(sh):
    (empty,) = worker.read_states(sh(worker.probe("no folder")))
    assert (empty.state, state(sh).state) == ("idle", "idle")
    command = "trap 'echo stopping; exit 143' TERM; echo \"it's begun\"; while :; do sleep 0.02; done"
    begin = worker.start("code", "abc-1", command)
    sh(begin)
    running = until(sh, "running")
    assert running.token == "abc-1"
    sh(worker.start("code", "abc-2", "exit 9"))  # another attempt does not disturb it
    assert state(sh) == running
    sh(worker.stop("code"))
    ended = until(sh, "exit")
    assert (ended.code, ended.token) == (143, "abc-1")
    assert abs(ended.time - time.time()) < 60
    sh(begin)  # a repeated command does not begin anew what has ended
    assert state(sh) == ended
    assert sh(worker.read_log("code", "abc-1")) == "it's begun\nstopping\n"
    assert sh(worker.follow("code", "abc-1", 11)) == f"{worker.MARK} log 11\nstopping\n"
    sh(worker.start("code", "abc-2", "exit 9"))
    assert (until(sh, "exit").code, state(sh).token) == (9, "abc-2")
    sh(worker.follow("code", "none", 0), code=1)


def test_a_worker_runs_the_exact_command_after_the_setup(sh, tmp_path):
    (tmp_path / "python").write_text('#!/bin/bash\nprintf "%s\\n" "$JAXFORMER_DISTRIBUTED" "$READY" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    odd = '--config.data.dir=it\'s $HOME; a "folder"'
    flags = tpu.launch.parse(
        tpu.make_parser(None),
        [*launch_faults.VM, "--python=../python", "--setup=export READY='a b'; true", "--", *TRAIN, odd],
    )
    sh(worker.start("code", "abc-1", tpu.training_command(flags)))
    assert until(sh, "exit").code == 0
    assert sh(worker.read_log("code", "abc-1")).splitlines() == [
        *("auto", "a b", "-m", "jaxformer", "train", *TRAIN, odd),
    ]
    flags.setup = "false"
    sh(worker.start("code", "abc-2", tpu.training_command(flags)))
    assert (until(sh, "exit").code, sh(worker.read_log("code", "abc-2"))) == (1, "")


def test_a_run_that_left_no_exit_code_has_died(sh, tmp_path):
    sh(worker.start("code", "abc-1", "exec sleep 20"))
    until(sh, "running")
    pid = int((tmp_path / "code/.launch/pid").read_text())
    subprocess.run(["bash", "-c", f"kill -KILL -- -{pid}"], check=True)  # as a restart of the machine does
    until(sh, "died")
    assert state(sh).has_failed


def test_what_ignores_the_request_is_killed_and_counts_as_failed(sh, monkeypatch):
    monkeypatch.setattr(worker, "GRACE_SECONDS", 0)
    sh(worker.start("code", "abc-1", "trap '' TERM; while :; do sleep 0.05; done"))
    until(sh, "running")
    sh(worker.stop("code"))
    assert (state(sh).state, state(sh).code) == ("exit", 137)


def test_installation_makes_the_folder_anew_and_stops_at_a_failure(sh, tmp_path):
    (tmp_path / "code" / "old").touch()
    sh("touch new && tar -czf code.tar.gz new")
    sh(worker.install("code.tar.gz", "code", ["echo one > done", "false", "echo two > done"]), code=1)
    assert sorted(path.name for path in (tmp_path / "code").iterdir()) == ["done", "new"]
    assert (tmp_path / "code" / "done").read_text() == "one\n"


def test_a_followed_log_is_passed_on_once_in_whole_lines():
    log = worker.LogReader()
    assert log.read(b"@jaxformer log 0\none\ntw") == b"one\n"
    assert log.read(b"o\nth") == b"two\n"
    # The connection breaks within a line, and gcloud gives the same command again.
    assert log.read(b"@jaxformer log 0\none\ntwo\nthree\n\nfo") == b"three\n\n"
    log.restart()
    assert log.offset == 15
    assert log.read(b"@jaxformer log 15\nfour\n") == b"four\n"


def test_states_are_read_among_other_words():
    lines = ("Using ssh batch size of 1.", "@jaxformer a running t-1", "@jaxformer", "@jaxformer b exit t-1 75 12.5")
    text = "\n".join([*lines, "@jaxformer c what\n"])
    assert worker.read_states(text) == [
        worker.Worker("a", "running", token="t-1"),
        worker.Worker("b", "exit", 75, 12.5, "t-1"),
    ]
    assert not worker.read_states("")


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="needs shellcheck")
def test_the_workers_commands_pass_shellcheck():
    commands = [
        worker.start("a b", "t", "it's"), worker.probe("a b"), worker.follow("a b", "t", 3), worker.stop("a b"),
        worker.read_log("a b", "t"), worker.install("x", "a b", ["true"]), worker._RUN,
    ]  # fmt: skip
    text = "\n".join(f"part_{i}() {{\n{command}\n}}" for i, command in enumerate(commands))
    lint = ["shellcheck", "--shell=bash", "--exclude=SC2164,SC2329,SC2317", "-"]
    done = subprocess.run(lint, input=text, capture_output=True, text=True, check=False)
    assert done.stdout == ""


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_has_the_table_that_the_script_prints(capsys):
    page = (ROOT / "docs" / "measurements" / "launching.md").read_text(encoding="utf-8")
    assert launch_faults.main([]) == 0
    assert f"<!-- faults: begin -->\n{capsys.readouterr().out}<!-- faults: end -->" in page
