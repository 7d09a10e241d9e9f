"""The command line: refusals, parsing, the calls of each command, and the program as a process."""

import io
import os
import re
import shlex
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer import cli, doctor
from jaxformer.cli import decode, evaluate, lines
from jaxformer.config import ConfigError, overrides
from jaxformer.hf import workdirs
from jaxformer.train import warm_start

RECIPE = """
from jaxformer.config import overrides
from jaxformer.config import StackConfig
from jaxformer.config.overrides import section

def get_config(variant=""):
    config = overrides.defaults()
    config.model.encoder = section(StackConfig, width=32)
    config.model.decoder = section(StackConfig, width=32)
    return config
"""


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "toy.py").write_text(RECIPE)
    return f"--config={tmp_path}/toy.py"


@pytest.fixture
def run(tmp_path, recipe):
    """A workdir with a config and nothing else."""
    workdir = tmp_path / "run"
    workdir.mkdir()
    (workdir / "config.json").write_text(overrides.to_json(overrides.parse([recipe])))
    return workdir


def stand_in(monkeypatch, name: str, **functions):
    """Puts a module with these functions in the place of `jaxformer.<name>`."""
    module = types.ModuleType(f"jaxformer.{name}")
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, f"jaxformer.{name}", module)
    parent, _, leaf = f"jaxformer.{name}".rpartition(".")
    monkeypatch.setattr(__import__(parent, fromlist=["_"]), leaf, module, raising=False)


def test_input_without_an_end_is_refused(monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_CHARACTERS", 5)
    assert list(lines.read_chunks(io.StringIO("1234\n12345"), 2, "x")) == [["1234", "12345"]]
    with pytest.raises(ConfigError, match=r"^x: got a line of more than 5 characters after line 1, expected"):
        list(lines.read_chunks(io.StringIO("1\n123456"), 2, "x"))


# --- refusals ---------------------------------------------------------------------------------------------------------

REFUSED = [
    (["trian"], "did you mean 'train'?"),
    (["--workdir=x"], "command: got '--workdir=x'"),
    (["train"], "expected --workdir=VALUE"),
    (["train", "--workdir=x"], "--config: got 0 of them"),
    (["train", "--workdri=x"], "did you mean --workdir?"),
    (["train", "--workdir"], "--workdir: got no value"),
    (["train", "--workdir=x", "--workdir=y"], "2 times"),
    (["train", "--workdir=", "--config=x"], "expected --workdir=VALUE"),
    (["train", "--workdir=x", "--config=nothing.py"], "'nothing.py': no such file"),
    (["train", "--workdir=x", "--config=nothing.py", "word"], "got 'word', expected only flags"),
    (["evaluate", "--workdir=nowhere"], "nowhere: got no config.json, expected the workdir of a run"),
    (["evaluate", "--config=x", "--workdir=x"], "got --config, expected --workdir, --split"),
    (
        ["decode", "--workdir=x", "--config.train.steps=3"],
        "got --config.train.steps, which cannot change (it comes with",
    ),
    (
        ["decode", "--workdir=x", "--config.data.tokenizer.lowercase=true"],
        "cannot change (the model was trained on the ids of its own tokenizer), expected data.FIELD",
    ),
    (["chat", "--workdir=x", "--sytem=y"], "got --sytem, expected --workdir, --system, --checkpoint; did you mean"),
    (["chat", "--workdir=x", "--config.model.head.bias=true"], "got --config.model.head.bias, which cannot change"),
    (["chat", "--workdir=nowhere"], "nowhere: got nothing there, expected a workdir, its checkpoints/best"),
    (["decode", "--workdir=x", "--input=nowhere.txt"], "--input: got 'nowhere.txt' (No such file"),
    (["sweep", "--config=x", "--sweep=x", "--workdir=x", "--executor=slrum"], "did you mean 'slurm'?"),
    (["sweep", "--config=x", "--sweep=nothing.py", "--workdir=x"], "'nothing.py': no such file"),
    (["experiment", "--workdir=x"], "got 'nothing', expected NAME"),
    (["experiment", "a", "--workdir=x", "--scale=big"], "expected one of smoke, full"),
    (["report"], "expected --workdir=VALUE"),
    (["report", "--workdir=nowhere"], "nowhere: got no config.json"),
    (["data", "prepare"], "expected prepare NAME"),
    (["data", "prepair", "x", "--dir=y"], "expected prepare"),
    (["import", "--source=x"], "--workdir"),
    (["export"], "--workdir"),
    (["plan"], "--config: got 0 of them"),
    (
        ["train", "--workdir=x", "--config=x", "--data.dir=y"],
        "got --data.dir, expected --workdir, --seeds, --config; write --config.data.dir=VALUE",
    ),
    (
        ["train", "--workdir=x", "--config=x", "config.train.steps=3"],
        "expected flags; write --config.train.steps=VALUE",
    ),
    (["train", "--workdir=x", "--config=x", "data.dir=y"], "expected flags; write --config.data.dir=VALUE"),
    (["train", "--workdir=x", "-config.data.dir", "y"], "expected flags; write --config.data.dir=VALUE"),
    (["train", "-workdir=x", "--config=x"], "expected flags; write --workdir=VALUE"),
    (["report", "--data.dir=y", "--workdir=x"], "got --data.dir, expected --workdir"),
    (["train", "--workdir=x", "--config=x", "--config.data.dir"], "--config.data.dir: got no value"),
    (
        ["train", "--workdir=x", "--config=x", "--config.data.dir", "--config.train.steps=3"],
        "--config.data.dir: got no",
    ),
    (["config"], "--config: got 0 of them"),
    (["config", "--fields", "--config.train.steps=3"], "got --fields and '--config.train.steps=3', expected one"),
    (["config", "--fields", "--json"], "got --fields and '--json', expected one"),
    (["recipes"], "--dir: got 'configs', but there is no such folder here"),
    (["recipes", "--dir=."], "a folder without .py files"),
    (["draw", "--config=x"], "got 'nothing', expected PICTURE"),
    (
        ["draw", "mask", "--config=x"],
        "got 'mask', expected one of positions, masks, model, flops, schedule, embeddings",
    ),
    (["draw", "masks"], "got neither --config nor --workdir"),
    (["draw", "masks", "--config=x", "--workdir=y"], "got both --config and --workdir"),
    (["draw", "masks", "--config=x", "--tokens=a"], "got --tokens, expected it with embeddings only"),
    (["draw", "masks", "--config=x", "--length=0"], "--length: got '0', expected a whole number of at least 1"),
    (["draw", "embeddings", "--config=x"], "got a recipe, expected a run for embeddings"),
    (["draw", "positions", "--config=x", "--checkpoint=best"], "got a recipe, expected a run for --checkpoint"),
    (["draw", "model", "--workdir=nowhere"], "nowhere: got no config.json"),
    (["draw", "embeddings", "--workdir=x", "--config.train.steps=3"], "expected no edits of the run's config"),
]


@pytest.mark.parametrize(("argv", "expected"), REFUSED, ids=[" ".join(argv) for argv, _ in REFUSED])
def test_wrong_input_is_one_line_and_code_2(argv, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert expected in err
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_override_leaves_nothing_behind(recipe, tmp_path, capsys):
    assert cli.main(["train", recipe, f"--workdir={tmp_path}/run", "--config.model.encoder.width=33"]) == 2
    assert "config.model.encoder.width: got 33, expected a multiple" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text(max_size=12) | st.sampled_from(["train", "--workdir=x", "--config", "sweep", "--config.a"])))
def test_no_arguments_crash_the_parser(argv):
    for name, command in cli.COMMANDS.items():
        try:
            cli.parse(name, command, argv)
        except ConfigError as error:
            assert "\n" not in str(error)
        except SystemExit as done:  # -h
            assert done.code == 0


def test_a_workdir_is_a_folder_or_an_address_in_a_bucket():
    parse = lambda name, *words: cli.parse(name, cli.COMMANDS[name], words)  # noqa: E731
    urls = ["runs/one", "gs://bucket/run"]
    assert parse("report", *(f"--workdir={url}" for url in urls)).workdir == urls
    with pytest.raises(ConfigError, match="--workdir: got 'ftp://bucket/run', expected a folder, or an address"):
        parse("report", "--workdir=runs/one", "--workdir=ftp://bucket/run")
    with pytest.raises(ConfigError, match="--workdir: got 'gs://bucket/run', expected a folder: jaxformer experiment"):
        parse("experiment", "x", "--workdir=gs://bucket/run")


def test_values_of_the_config_may_follow_a_blank():
    command = cli.COMMANDS["train"]
    argv = ["--config", "a.py", "--config.data.dir", "with blank", "--config.task.name=x", "--workdir", "w"]
    argv += ["--config.optimizer.clip", "-1", "--config.data.splits.test", ""]
    assert cli.parse("train", command, argv).config == [
        "--config=a.py",
        "--config.data.dir=with blank",
        "--config.task.name=x",
        "--config.optimizer.clip=-1",
        "--config.data.splits.test=",
    ]


def test_config_prints_what_a_run_would_have(recipe, capsys):
    assert cli.main(["config", "--json", recipe, "--config.train.steps", "7"]) == 0
    assert overrides.from_json(capsys.readouterr().out) == overrides.parse([recipe, "--config.train.steps=7"])
    assert cli.main(["config", "--fields"]) == 0
    out = capsys.readouterr().out
    assert "accumulation = 1" in out
    assert "config.model.encoder.attention, config.model.decoder.attention" in out
    assert max(map(len, out.splitlines())) <= 120


def test_help_names_every_command_and_flag(capsys):
    assert cli.main([]) == 0
    everything = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert f"  {name} " in everything
        assert cli.main([name, "--help"]) == 0
        text = capsys.readouterr().out
        assert all(f"--{name}{'' if flag.switch else '='}" in text for name, flag in command.flags.items())
        assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("width", [40, 80, 200])
def test_help_is_one_screen_with_an_example_that_parses(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    screen = 40 if width >= 80 else 100
    assert cli.main(["help"]) == 0
    text = capsys.readouterr().out
    assert text.count("\n") <= screen
    for name, command in cli.COMMANDS.items():
        assert cli.main([name, "--help"]) == 0
        text = capsys.readouterr().out
        assert text.count("\n") <= screen, name
        body, _, example = text.rpartition("example:\n  ")
        assert max(map(len, body.splitlines()[1:])) <= min(width, 100), name  # the usage is one line
        words = shlex.split(example.rpartition("|")[2])
        assert words[:2] == ["jaxformer", name]
        cli.parse(name, command, words[2:])


# --- wiring -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "init"), [(0, ""), (143, "--config.init.directory=bert")])
def test_train_gets_the_config_and_its_code_is_the_exit_code(monkeypatch, recipe, code, init):
    calls, reported = [], []
    stand_in(monkeypatch, "train.loop", train=lambda *arguments: calls.append(arguments) or code)
    stand_in(monkeypatch, "report", write_after_training=reported.append)
    argv = ["train", "--config.train.steps=9", *recipe.split("=", 1), "--workdir=out", "--config.train.seed=4"]
    assert cli.main([*argv, *filter(None, [init])]) == code
    ((config, workdir, init_format),) = calls
    expected = workdirs.ORIGIN if init else warm_start.RUN_FORMAT
    assert init_format is expected, "runs may start from directories of the other library"
    assert (config.train.steps, config.train.seed, workdir) == (9, 4, "out")
    assert reported == (["out"] if code == 0 else []), "a finished run gets its page, a preempted one does not yet"


def test_a_crash_is_not_swallowed(monkeypatch, recipe):
    stand_in(monkeypatch, "train.loop", train=lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["train", recipe, "--workdir=out"])


def test_evaluate_prints_its_values(monkeypatch, run, capsys):
    values = {"split": "test", "loss": 1.25, "examples": 7}
    stand_in(monkeypatch, "evaluation", evaluate=lambda workdir, split, which, edits: values | {"weights": which})
    assert cli.main(["evaluate", f"--workdir={run}", "--checkpoint=last"]) == 0
    out = capsys.readouterr().out
    assert "weights   last" in out
    assert out.splitlines()[:3] == ["split     test", "loss      1.25", "examples  7"]
    assert f"{run}/eval-test.json" in out


def test_report_and_data_prepare(monkeypatch, run, capsys):
    write = lambda workdirs, output, figures: f"page of {len(workdirs)} {output} {figures}"  # noqa: E731
    stand_in(monkeypatch, "report", write=write, expand=lambda workdirs: workdirs)
    assert cli.main(["report", f"--workdir={run}", f"--workdir={run}", "--output=a.html", "--figures=b"]) == 0
    assert capsys.readouterr().out == "written to page of 2 a.html b\n"
    stand_in(monkeypatch, "data.prepare", prepare=lambda name, folder: f"{folder}/{name}")
    assert cli.main(["data", "prepare", "lm1b", "--dir=/data"]) == 0
    assert capsys.readouterr().out == "prepared in /data/lm1b\n"


def test_sweep_prints_its_commands(recipe, tmp_path, capsys):
    (tmp_path / "edits.py").write_text("from jaxformer.sweep import seeds\nSWEEP = seeds(2)\n")
    argv = ["sweep", recipe, f"--sweep={tmp_path}/edits.py", f"--workdir={tmp_path}/out", "--executor=print"]
    assert cli.main(argv) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2
    found = re.fullmatch(
        rf"\S+ -m jaxformer train --config=(\S+) --workdir={tmp_path}/out/train.seed=1-[0-9a-f]{{8}}", rows[1]
    )
    assert found and Path(found[1]).is_relative_to(tmp_path / "out" / "submissions"), rows[1]
    assert cli.main([*argv, "--workers=0"]) == 2


# --- decode -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def reverser(monkeypatch, run):
    """A run whose task turns lines round; the sizes of the chunks and the options it was given are recorded."""
    calls = []

    def predict(predictor, chunk, options):
        calls.append((len(chunk), options))
        return [line[::-1] for line in chunk]

    output_line = lambda result: result.replace("%", "\n")  # noqa: E731
    task = types.SimpleNamespace(predict=predict, output_line=output_line, reads_document=False)
    long = lambda chunk: sum(len(line) > 10 for line in chunk)  # noqa: E731
    model = types.SimpleNamespace(config=overrides.read(run), weights=None, too_long=long, predictor=None)
    stand_in(monkeypatch, "hf.workdirs", load=lambda path, which: model)
    stand_in(monkeypatch, "tasks", get=lambda name: task)
    return calls


def test_decode_is_one_line_out_for_one_line_in(reverser, run, tmp_path, capsys):
    (tmp_path / "in.txt").write_bytes("ab\n\nx\u2028y\x0cz\r\na%b\nlast".encode())
    argv = ["decode", f"--workdir={run}", f"--input={tmp_path}/in.txt", f"--output={tmp_path}/out.txt"]
    assert cli.main(argv) == 0
    assert (tmp_path / "out.txt").read_bytes().decode() == "ba\n\nz\x0cy\u2028x\nb\\na\ntsal\n"
    assert [size for size, _ in reverser] == [5]
    assert "longer than" not in capsys.readouterr().err
    (tmp_path / "in.txt").write_text("more than ten letters\nfew\n")
    assert cli.main(argv) == 0
    assert "warning: 1 lines are longer than data.length (128), their ends not read" in capsys.readouterr().err


def test_decode_streams_in_chunks_with_edited_options(reverser, run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(decode, "BATCHES_PER_CHUNK", 2)
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{i}\n" for i in range(10, 17))))
    argv = ["decode", f"--workdir={run}", "--config.decode.batch=2", "--config.decode.beams=7"]
    assert cli.main(argv) == 0
    assert capsys.readouterr().out.split() == ["01", "11", "21", "31", "41", "51", "61"]
    assert [(size, config.beams) for size, config in reverser] == [(4, 7), (3, 7)]


def test_decode_leaves_no_half_written_file(reverser, run, tmp_path, capsys):
    (tmp_path / "in.txt").write_bytes(b"good\n\xff\xfe\n")
    (tmp_path / "out.txt").write_text("old")
    argv = ["decode", f"--workdir={run}", f"--input={tmp_path}/in.txt", f"--output={tmp_path}/out.txt"]
    assert cli.main(argv) == 2
    assert "not UTF-8" in capsys.readouterr().err
    assert (tmp_path / "out.txt").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.txt", "out.txt", "run", "toy.py"]


def test_decode_refuses_an_output_that_cannot_be(reverser, run, tmp_path, capsys):
    for output in (tmp_path, tmp_path / "no" / "folder"):
        assert cli.main(["decode", f"--workdir={run}", f"--output={output}"]) == 2
        assert "--output: got" in capsys.readouterr().err


def test_chunks_of_nothing_are_none():
    assert list(lines.read_chunks(io.StringIO(""), 3, "x")) == []
    assert list(lines.read_chunks(io.StringIO("\n"), 3, "x")) == [[""]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\ufeffa\n\nb", ["a", "", "b"]),
        ("a\r\n\r\nb\r\n", ["a", "", "b"]),
        ("a\r\rb\rc\r", ["a", "", "b", "c"]),
        ("a\rb\nc\rd", ["a\rb", "c\rd"]),
        ("a\x0bb\u2028c\x85d\n \n", ["a\x0bb\u2028c\x85d", " "]),
        ("a", ["a"]),
    ],
)
def test_edge_lines_of_an_input(text, expected):
    for size in (1, 2, 9):
        found = list(lines.read_chunks(io.StringIO(text, newline="\n"), size, "x"))
        assert [line for chunk in found for line in chunk] == expected
        assert max(map(len, found)) <= size


# --- the program ------------------------------------------------------------------------------------------------------


def test_the_program_exits_with_the_code_and_without_a_traceback(recipe):
    command = [sys.executable, "-m", "jaxformer", "train", recipe, "--workdir=x", "--config.train.steps=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: config.train.steps: got 0, expected at least 1\n"


def test_help_and_refusals_do_not_wait_for_jax(recipe):
    argv = ["train", recipe, "--workdir=x", "--config.task.name=translate"]
    code = (
        f"import sys; from jaxformer import cli; cli.main([]); sys.exit(10 * cli.main({argv}) + ('jax' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 20


def test_no_command_imports_heavy_modules_before_it_runs():
    heavy = {"jax", "flax", "numpy", "orbax", "tensorflow_datasets", "matplotlib"}
    code = f"import sys, jaxformer.cli; sys.exit(' '.join({heavy} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_a_shell_gets_completions(tmp_path):
    pytest.importorskip("argcomplete")
    cases = {
        "jaxformer ev": "evaluate",
        "jaxformer draw s": "schedule",
        "jaxformer chat --config.train.ste": "--config.train.steps",
    }
    for line, expected in cases.items():
        variables = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "IFS": "\n"}
        environment = os.environ | variables | {"_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "completions")}
        subprocess.run([sys.executable, "-m", "jaxformer"], env=environment, check=False, capture_output=True)
        assert {word.strip() for word in (tmp_path / "completions").read_text().split("\x0b")} == {expected}


def test_a_reader_that_leaves_is_no_crash():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "jaxformer"], stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_doctor_says_what_is_there_and_what_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "requirements", lambda: {"ml_collections": "1"})
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "nothing wrong found" in out
    assert f"ml_collections        {metadata.version('ml_collections')} (needs 1)" in out
    monkeypatch.setattr(doctor, "requirements", lambda: {"nothing_of_that_name": ""})
    assert cli.main(["doctor"]) == 1
    assert "FAIL  nothing_of_that_name  not installed; install it" in capsys.readouterr().out


def test_doctor_with_wrong_data_ends_as_wrong_input_does(monkeypatch, recipe, tmp_path, capsys):
    from jaxformer import preflight

    argv = ["doctor", recipe, "--config.data.source=text", "--config.data.splits.train=a.txt"]
    assert cli.main([*argv, f"--config.data.dir={tmp_path}"]) == 2
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert len(failed) == 1 and "a.txt: got no such file, expected a file, which data.splits names" in failed[0]
    broken = preflight.Finding("FAIL", "cache folder", "full")
    monkeypatch.setattr(doctor, "check_directories", lambda: iter([broken]))
    assert cli.main([*argv, f"--config.data.dir={tmp_path}"]) == 1


def test_inspect_refuses_what_is_no_run(tmp_path, capsys):
    assert cli.main(["inspect", f"--workdir={tmp_path}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_values_of_any_kind_are_printed(capsys):
    evaluate.print_table({"a": 1.0, "bc": None, "d": "text", "e": [1, 2]})
    assert capsys.readouterr().out == "a   1\nbc  null\nd   text\ne   [1, 2]\n"
