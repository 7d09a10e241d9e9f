"""Files: atomic writes through links and devices, checks of directories, and one-line errors for damaged files."""

import json
import os
import stat
import threading

import pytest

from jaxformer import cli, report
from jaxformer.checkpoint import directories, load_run
from jaxformer.cli import lines
from jaxformer.config import Config, ConfigError, overrides
from jaxformer.data import tokenizer_files, tokenizers
from jaxformer.hf import workdirs
from jaxformer.report import inspection, runs
from jaxformer.runtime import files
from jaxformer.sweep import planning, ranking
from jaxformer.train import lock
from jaxformer.train.reporting import MetricsFile
from jaxformer.train.trackers import Row, RunInfo, tensorboard

WRITERS = {
    "write": lambda path: files.write_atomic(path, "text\n"),
    "write_json": lambda path: files.write_json(path, "text"),
    "tokenizer": lambda path: tokenizer_files.write(path, "text\n"),
}


def stream(path):
    with files.open_atomic(path) as file:
        file.write("text\n")


@pytest.mark.parametrize("write", [*WRITERS.values(), stream], ids=[*WRITERS, "replacing"])
def test_links_stay_and_their_targets_are_replaced(write, tmp_path):
    (tmp_path / "far").mkdir()
    for name in ("there", "new"):
        (tmp_path / name).symlink_to(tmp_path / "far" / name)
    (tmp_path / "far" / "there").write_text("old")
    (tmp_path / "far" / "there").chmod(0o640)
    for name in ("there", "new"):
        write(tmp_path / name)
        assert (tmp_path / name).is_symlink()
        assert "text" in (tmp_path / "far" / name).read_text()
    assert stat.S_IMODE((tmp_path / "far" / "there").stat().st_mode) == 0o640
    assert sorted(os.listdir(tmp_path / "far")) == ["new", "there"]


@pytest.mark.parametrize("write", [*WRITERS.values(), stream], ids=[*WRITERS, "replacing"])
def test_devices_and_pipes_are_written_through(write, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    got = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_text()))
    reader.start()
    write(tmp_path / "pipe")
    reader.join(10)
    assert "text" in got[0]
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    (tmp_path / "null").symlink_to("/dev/null")
    write(tmp_path / "null")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert sorted(os.listdir(tmp_path)) == ["null", "pipe"]


def test_an_open_descriptor_is_appended_to_even_if_it_is_of_a_file(tmp_path):
    with open(tmp_path / "log", "w") as log:
        log.write("before\n")
        log.flush()
        with files.open_atomic(f"/dev/fd/{log.fileno()}") as file:
            file.write("during\n")
        log.write("after\n")
        log.flush()
        assert os.path.samestat(os.fstat(log.fileno()), os.stat(tmp_path / "log"))
    assert (tmp_path / "log").read_text() == "before\nduring\nafter\n", "they share a place in the file"
    assert files.is_special("/dev/stdout") and not files.is_special("/dev/shm/none") and not files.is_special(tmp_path)


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    (tmp_path / "file").write_text("old")

    def break_off():
        with files.open_atomic(tmp_path / "file") as file:
            file.write("half")
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        break_off()
    assert (tmp_path / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]
    longest = "ä" * 120 + ".txt"  # 244 bytes, and 255 is the longest name
    files.write_atomic(tmp_path / longest, "text")
    assert (tmp_path / longest).read_text() == "text"


def test_new_files_have_the_mode_that_any_new_file_gets(tmp_path):
    (tmp_path / "plain").write_text("")
    files.write_atomic(tmp_path / "file", "")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


# --- paths ------------------------------------------------------------------------------------------------------------

PATHS = [
    (f"{command} --{flag}={{}} {rest}", flag)
    for command, flag, rest in (
        ("train", "workdir", "--config=x"), ("evaluate", "workdir", ""), ("decode", "workdir", ""),
        ("sweep", "workdir", "--config=x --sweep=x"), ("experiment x", "workdir", ""), ("report", "workdir", ""),
        ("inspect", "workdir", ""), ("import", "workdir", "--source=."), ("import", "source", "--workdir=new"),
        ("export", "workdir", "--target=new"), ("export", "target", "--workdir=."), ("data prepare x", "dir", ""),
    )
]  # fmt: skip


@pytest.mark.parametrize(("line", "flag"), PATHS, ids=[line for line, _ in PATHS])
def test_what_cannot_be_a_folder_is_one_line_and_code_2(line, flag, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for path in ("file", "file/below", "n" * 300, "a/" * 3000):
        assert cli.main([word.format(path) for word in line.split()]) == 2, path
        err = capsys.readouterr().err
        assert err.startswith(f"error: --{flag}: got '{path[:9]}") and err.count("\n") == 1
        assert err.count(f"--{flag}") == 1, "said once"
    assert sorted(os.listdir(tmp_path)) == ["file"]


def test_a_name_that_is_too_long_is_refused_before_anything_is_written(tmp_path):
    refused = pytest.raises(ConfigError, match="--output: got 'n*' .File name too long., expected a writable file")
    with refused, lines.open_output("n" * 300):
        pytest.fail("the work was begun")
    with pytest.raises(OSError, match="too long"):
        files.write_atomic(tmp_path / ("n" * 300), "")
    assert not os.listdir(tmp_path)


def test_a_folder_that_cannot_be_written_is_refused_where_files_will_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(tmp_path))  # root may write anywhere
    files.check_directory("--workdir", str(tmp_path))
    for options in ({"writable": True}, {"new": True}):
        with pytest.raises(ConfigError, match="--workdir: got .* is not writable, expected a folder to write in"):
            files.check_directory("--workdir", str(tmp_path), **options)
    with pytest.raises(ConfigError, match="is not writable"):
        files.check_directory("--workdir", str(tmp_path / "new" / "run"), new=True)
    files.check_directory("--workdir", str(tmp_path / "nothing"), writable=True)  # for the command to say


# --- reading ----------------------------------------------------------------------------------------------------------

DAMAGE = {
    "a bad byte": b'{"a": "\xff"}',
    "deep": b"[" * 100_000,
    "a long number": b'{"step": ' + b"9" * 400 + b"}",
    "a longer number": b'{"step": ' + b"9" * 10_000 + b"}",
    "a list": b"[1]",
    "nothing": b"",
    "half": b'{"a": ',
}
READERS = {
    "config.json": lambda folder: overrides.read(folder),
    "tokenizer.json": lambda folder: tokenizers.Tokenizers.load(folder),
    "huggingface.json": lambda folder: workdirs._read_settings(folder / "huggingface.json"),
    "result.json": lambda folder: files.read_json(folder / "result.json"),
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(overrides.to_json(Config()))
    return tmp_path


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_one_line_that_names_it(name, damage, folder):
    (folder / name).write_bytes(damage)
    with pytest.raises(ConfigError) as error:
        READERS[name](folder)
    assert name in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 400


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_page_and_an_inspection_name_damaged_files_and_leave_them_out(damage, folder):
    names = ("result.json", "environment.json", "eval-test.json")
    for name in names:
        (folder / name).write_bytes(damage)
    (folder / "metrics.jsonl").write_bytes(damage)
    (run,) = runs.read([folder])
    assert all(any(note.startswith(f"{name} cannot be read") for note in run.notes) for name in names)
    report.write([folder])
    results = dict(inspection._results(folder, Config()))
    assert all("cannot be read" in results[name] for name in ("result.json", "eval-test.json"))
    assert inspection._last_report(folder / "metrics.jsonl")[0] == 0


EDITED = [
    {"step": 1, "split": "train", "wall_time": "noon"}, {"step": 10**30, "split": "train"},
    {"step": -1, "split": "train"}, {"step": True, "split": "train"}, {"step": 1, "split": 3},
    {"step": 1, "split": "train", "wall_time": 1e300},
]  # fmt: skip


@pytest.mark.parametrize("row", EDITED, ids=map(str, EDITED))
def test_edited_rows_of_metrics_are_left_out_and_named(row, tmp_path, caplog):
    good = {"step": 2, "split": "train", "wall_time": 1.0, "loss": 3.0, "note": "text", "big": 2**63}
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{json.dumps(good)}\n{json.dumps(row)}\n{json.dumps(good)}\n")
    file = MetricsFile(path, 5)
    file.close()
    assert file.rows == [good, good]
    assert "1 lines cannot be read, left out; the first is line 2" in caplog.text
    tracker = tensorboard.TRACKER()
    tracker.start(RunInfo("a", "a", "", tmp_path))
    tracker.config({})
    tracker.rewind([Row.from_json(index, row) for index, row in enumerate(file.rows)])
    tracker.finish([])
    (run,) = runs.read([tmp_path])
    assert run.rows["train"] == [good]


def test_a_metrics_file_behind_a_link_stays_there(tmp_path):
    (tmp_path / "far").write_text('{"step": 9, "split": "train", "wall_time": 1.0}\n')
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "far")
    MetricsFile(tmp_path / "metrics.jsonl", 5).close()
    assert (tmp_path / "metrics.jsonl").is_symlink() and (tmp_path / "far").read_text() == ""


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_lock_that_somebody_edited_is_somebodys(damage, tmp_path):
    (tmp_path / "lock").write_bytes(damage)
    handle = os.open(tmp_path / "lock", os.O_RDONLY)
    assert isinstance(lock._read_owner(handle), dict)
    os.close(handle)


def test_loading_a_run_reads_its_config_as_every_other_command_does(folder, monkeypatch):
    (folder / "config.json").write_bytes(b'{"a": "\xff"}')
    monkeypatch.setattr(directories, "list_steps", lambda directory: [1])
    with pytest.raises(ConfigError, match="config.json: got an unreadable file"):
        load_run(folder)


def test_a_run_with_a_damaged_result_is_not_done_and_not_ranked(folder):
    """A sweep then starts it again, which writes the result anew."""
    (folder / "result.json").write_text("[")
    run = planning.Run({}, Config(), folder, ())
    assert not run.is_finished
    assert ranking.write_ranking(planning.Plan(folder, (run,))) == []
