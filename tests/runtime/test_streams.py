"""Standard streams that are closed, full or without a reader: logs are dropped, lost output is an error."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxformer import cli
from jaxformer.cli import lines
from jaxformer.config import ConfigError, StorageError
from jaxformer.runtime import files, streams

ROOT = Path(__file__).resolve().parents[2]

# The program with two commands of the tests: `log` makes a file and talks of it, `say` prints its result.
PROGRAM = """
import sys, warnings
from jaxformer import cli
from jaxformer.cli.arguments import Command

def log(arguments):
    for i in range(3):
        print("out", i, flush=True)
        print("err", i, "https://me:sesame@host", file=sys.stderr, flush=True)
    open("done", "w").write("done")
    return 7

def say(arguments):
    for i in range(20_000):
        print("line", i)
    return 0

def crash(arguments):
    raise ValueError("cannot reach https://me:sesame@host/x")

cli.COMMANDS.update({name: Command("", act, {}, prints=act is say) for name, act in
                     (("log", log), ("say", say), ("crash", crash))})
cli.console()
"""


def program(name: str, shell: str, folder: Path) -> subprocess.CompletedProcess:
    """The command under a shell that does with its streams what `shell` says; $P is the command."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "P": PROGRAM}
    command = f'set -o pipefail; "{sys.executable}" -c "$P" {name} {shell}'
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize(
    "shell", [">&- 2>&-", ">/dev/full 2>/dev/full", "<&- >&- 2>&-", "2>&1 | true", "2>/dev/full", ">&-"]
)
def test_a_command_whose_result_is_files_goes_on_without_readers(shell, tmp_path):
    done = program("log", shell, tmp_path)
    assert (tmp_path / "done").read_text() == "done", "a log was written into the file"
    assert done.returncode == 7
    assert "Traceback" not in done.stderr


def test_a_command_whose_result_is_lost_says_so_unless_the_reader_left(tmp_path):
    full, closed, left = (program("say", shell, tmp_path) for shell in (">/dev/full", ">&-", "| head -1"))
    assert (full.returncode, closed.returncode, left.returncode) == (1, 1, 0)
    assert full.stderr == (
        "error: stdout: got No space left on device, expected to write the output there; make room for it\n"
    )
    assert closed.stderr.startswith("error: stdout: got a closed stream")
    assert closed.stderr.count("\n") == 1
    assert (left.stdout, left.stderr) == ("line 0\n", "")


def test_what_a_log_and_a_traceback_say_has_no_secrets(tmp_path):
    logged, crashed = program("log", "", tmp_path), program("crash", "", tmp_path)
    assert "err 2 https://***@host" in logged.stderr
    assert crashed.returncode == 1
    assert "ValueError: cannot reach https://***@host/x" in crashed.stderr
    assert "sesame" not in logged.stderr + crashed.stderr


@pytest.mark.parametrize(
    ("argv", "result"),
    [
        ("train", False), ("evaluate", False), ("experiment x", False), ("report", False), ("import", False),
        ("export", False), ("data prepare", False), ("sweep", False), ("sweep --executor=print", True),
        ("sweep --executor print", True), ("decode", True), ("decode --output=x", False), ("decode --output x", False),
        ("inspect", True), ("plan", True), ("doctor", True), ("train --help", True), ("", True), ("trian", True),
    ],
)  # fmt: skip
def test_which_commands_print_their_result(argv, result):
    assert cli.prints(argv.split()) == result


def test_every_command_says_whether_it_prints_its_result():
    printing = {name for name, command in cli.COMMANDS.items() if command.prints}
    assert printing == {"chat", "config", "recipes", "decode", "inspect", "plan", "doctor"}


def test_a_full_disk_loses_lines_and_gets_the_later_ones(tmp_path, monkeypatch):
    (tmp_path / "log").touch()
    handle = os.open(tmp_path / "log", os.O_WRONLY)
    full, log = os.open("/dev/full", os.O_WRONLY), streams._Descriptor(handle, False)
    kept = os.dup(handle)
    os.dup2(full, handle)
    assert log.write(b"lost\n") == 5
    os.dup2(kept, handle)
    assert log.write(b"kept\n") == 5
    assert (tmp_path / "log").read_text() == "kept\n"
    for each in (handle, full, kept):
        os.close(each)


# --- the output of decode ---------------------------------------------------------------------------------------------


def test_a_closed_stdin_is_said(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ConfigError, match="closed stdin, expected text; give --input=FILE"), lines.open_input(""):
        pass


def test_an_output_that_fills_up_is_one_error_and_a_reader_that_leaves_is_none(tmp_path):
    with (
        pytest.raises(StorageError, match="--output '/dev/full': got No space left"),
        lines.open_output("/dev/full") as sink,
    ):
        sink.write("x" * 100_000)
    with pytest.raises(StorageError, match="No space left"), lines.open_output("/dev/full") as sink:
        sink.write("short, so that only the end writes it")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)

    def write_on():
        with lines.open_output(str(tmp_path / "pipe")) as sink:
            sink.write("line\n")
            sink.flush()
            assert os.read(reader, 100) == b"line\n"
            os.close(reader)
            sink.write("another\n")
            sink.flush()

    with pytest.raises(files.OutputClosed):
        write_on()


def test_an_error_of_the_body_is_its_own(tmp_path):

    def break_off():
        with lines.open_output(str(tmp_path / "out")) as sink:
            sink.write("half")
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        break_off()
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_of_the_disk_is_one_line_and_other_errors_are_crashes(monkeypatch, capsys, tmp_path):
    def act(error):
        def run(arguments):
            raise error

        return run

    full = OSError(28, "No space left on device", "runs/eval-test.json")
    for error, code in ((full, 1), (StorageError("gone"), 1), (ConfigError("https://me:sesame@host is wrong"), 2)):
        monkeypatch.setitem(cli.COMMANDS, "log", cli.Command("", act(error), {}))
        assert cli.main(["log"]) == code
        err = capsys.readouterr().err
        assert err.startswith("error: ") and err.count("\n") == 1 and "sesame" not in err
    monkeypatch.setitem(cli.COMMANDS, "log", cli.Command("", act(ConnectionResetError(104, "reset")), {}))
    with pytest.raises(ConnectionResetError):
        cli.main(["log"])


def test_text_streams_count_what_they_were_given():
    stream = streams._RedactedText(io.BytesIO(), "utf-8", newline="\n")
    assert stream.write("password=sesame") == len("password=sesame")
    stream.flush()
    assert stream.buffer.getvalue() == b"password=***"
