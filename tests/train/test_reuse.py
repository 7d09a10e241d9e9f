"""A trained run that is measured and decoded with other settings, on files that it was not trained with."""

from __future__ import annotations

import dataclasses
import json

import builders
import pytest

from jaxformer import checkpoint, cli
from jaxformer.config import ConfigError, StackConfig, overrides, saved_edits
from jaxformer.evaluation import evaluate
from jaxformer.train import loop

WORDS = {"a": "red", "b": "green", "c": "blue"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A classifier that has learned which word means which label, and whose data is gone."""
    folder = tmp_path_factory.mktemp("reuse")
    rows = [f"{label}\tit is {word}{' and more' * n}" for n in range(3) for label, word in WORDS.items()]
    (folder / "all.tsv").write_text("\n".join(rows) + "\n")
    config = overrides.defaults()
    config.data.source, config.data.dir, config.data.cache = "table", str(folder), str(folder / "cache")
    config.data.splits = {"train": ("all.tsv[:6]",), "validation": ("all.tsv[6:]",), "test": ("all.tsv[6:]",)}
    config.data.columns = {"label": "#1", "text": "#2"}
    config.data.tokenizer.kind, config.data.batch, config.data.length = "word", 6, 16
    config.model.encoder = overrides.section(
        StackConfig,
        layers=1,
        width=16,
        attention=dict(heads=2, bias=False),
        ffn=dict(width=16, bias=False),
        norm=dict(kind="rms"),
        encoding=dict(kind="rope"),
    )
    config.model.head.kind, config.model.head.pooling = "classes", "mean"
    config.task.name = "classification"
    config.train.steps, config.train.log_every, config.schedule.warmup, config.schedule.peak = 30, 30, 0, 0.03
    config.train.evaluate_every = config.train.checkpoint_every = 0
    with pytest.MonkeyPatch.context() as patch:
        builders.one_device(patch)
        assert loop.train(overrides.freeze(config), folder / "run") == 0
    (folder / "all.tsv").rename(folder / "moved.tsv")
    return folder / "run"


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    builders.one_device(monkeypatch)


def test_a_new_test_file_is_measured_without_the_training_files(run, tmp_path, capsys):
    (tmp_path / "new.csv").write_text('label,text\nc,"it is blue"\n')
    edits = ["data.dir=" + str(tmp_path), "data.splits.test=new.csv", "data.columns.label=label"]
    edits += ["data.columns.text=text", "evaluate.batch=2"]
    argv = ["evaluate", f"--workdir={run}", *(f"--config.{edit}" for edit in edits)]
    assert cli.main(argv) == 0
    result = json.loads((run / "eval-test.json").read_text())
    assert result["accuracy"] == 1.0, "the only label there is the third of the model"
    changed = ["data.dir", "data.splits.test", "data.columns.label", "data.columns.text", "evaluate.batch"]
    assert list(result["changed"]) == changed
    assert result["changed"]["evaluate.batch"] == {"run": 64, "here": 2}
    assert result["changed"]["data.dir"]["here"] == str(tmp_path)
    assert '"evaluate.batch": {"run": 64, "here": 2}' in capsys.readouterr().out
    (tmp_path / "new.csv").write_text("label,text\nd,it is blue\n")
    assert cli.main(argv) == 2
    assert (
        "data: got the classes 'd' ('d' in example 1 of test), expected those of the model: a, b, c"
        in capsys.readouterr().err
    )


def test_what_was_not_changed_is_not_said(run):
    moved = [f"--config.data.splits.{split}=moved.tsv[6:]" for split in ("validation", "test")]
    assert list(evaluate(run, "test", edits=moved[1:])["changed"]) == ["data.splits.test"]
    (run.parent / "all.tsv").write_bytes((run.parent / "moved.tsv").read_bytes())
    result = evaluate(run, "test", edits=["--config.data.length=16"])
    assert "changed" not in result and result["accuracy"] == 1.0
    (run.parent / "all.tsv").unlink()
    cut = evaluate(run, "test", edits=[moved[1], "--config.data.length=5"])
    assert cut["changed"]["data.length"] == {"run": 16, "here": 5}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ("data.tokenizer.lowercase=true", "which cannot change .the model was trained on the ids of its own tokenizer"),
        ("train.seed=3", "which cannot change .it comes with the run., expected data.FIELD, evaluate.FIELD"),
        ("model.encoder.layers=2", "which cannot change"),
        ("data.lenght=3", "config.data.lenght: got an unknown key.*did you mean .length."),
        ("data.length=0", "config.data.length: got 0, expected at least"),
        ("data.splits.test=", "split: got 'test', expected one of train, validation"),
    ],
)
def test_what_would_change_the_model_is_refused(run, edit, message):
    with pytest.raises(ConfigError, match=message):
        evaluate(run, "test", edits=[f"--config.{edit}"])


def test_decoding_says_what_was_changed(run, tmp_path, capsys):
    (tmp_path / "lines").write_text("more and more and more it is red\n\nit is blue\n")
    argv = ["decode", f"--workdir={run}", f"--input={tmp_path / 'lines'}"]
    assert cli.main([*argv, "--config.decode.batch", "2"]) == 0
    out, err = capsys.readouterr()
    assert [line.split("\t")[0] for line in out.splitlines()][::2] == ["a", "c"]
    assert 'changed: {"decode.batch": {"run": 32, "here": 2}}' in err
    assert cli.main([*argv, "--config.data.length=5"]) == 0
    short, err = capsys.readouterr()
    assert short.splitlines()[0] != out.splitlines()[0], "cut to three words, the line has no colour"
    assert short.splitlines()[2] == out.splitlines()[2] and '"data.length"' in err
    assert cli.main(argv) == 0
    assert "changed" not in capsys.readouterr().err


def test_decoding_names_edits_that_play_no_part_in_it(run, tmp_path, capsys):
    (tmp_path / "lines").write_text("it is blue\n")
    argv = ["decode", f"--workdir={run}", f"--input={tmp_path / 'lines'}"]
    edits = ["data.dir=/nowhere", "evaluate.batch=2", "decode.batch=2", "data.splits.test=x.tsv"]
    assert cli.main([*argv, *(f"--config.{edit}" for edit in edits)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("c\t")
    (line,) = (line for line in err.splitlines() if "without effect" in line)
    assert line == (
        'changed: {"decode.batch": {"run": 32, "here": 2}}; '
        "without effect on decode: config.data.dir, config.evaluate.batch, config.data.splits.test"
    )
    assert cli.main([*argv, "--config.evaluate.batch=0"]) == 2, "a wrong value is wrong where it is not read as well"
    assert "config.evaluate.batch" in capsys.readouterr().err


def test_a_part_of_a_split_is_measured_where_that_is_asked_for_and_the_result_says_so(run, caplog):
    where = "--config.data.splits.test=moved.tsv"
    part = evaluate(run, "test", edits=[where, "--config.evaluate.examples=4", "--config.data.batch=3"])
    assert (part["examples"], part["split_examples"]) == (4, 9)
    assert list(part["changed"]) == ["data.splits.test", "evaluate.examples"]
    assert "without effect on evaluate: config.data.batch (it is of training" in caplog.text
    whole = evaluate(run, "test", edits=[where])
    assert whole["examples"] == 9 and "split_examples" not in whole


def test_rows_may_be_longer_than_the_token_budget_of_training(run):
    config = checkpoint.load_run(run).config
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, tokens=64))
    given = ["--config.data.length=100", "--config.data.skip_long=true"]
    found = saved_edits.apply_edits(config, given, ("data.length",), "x")
    assert found.config.data.length == 100 and found.unused == ("data.skip_long",)
    assert found.changed == {"data.length": {"run": 16, "here": 100}}
    assert found.used == {"data.length"}
