"""What `inspect` and `doctor` say, against workdirs and machines made for it."""

import dataclasses
import json
import os
import shutil
import sys
import tomllib
import types
from collections import namedtuple
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxformer import checkpoint, inspection, overrides
from jaxformer.checkpoint import Checkpoints
from jaxformer.config import (
    AttentionConfig,
    CheckpointConfig,
    Config,
    ConfigError,
    DataConfig,
    EmbedConfig,
    FeedForwardConfig,
    HeadConfig,
    ModelConfig,
    RecurrentConfig,
    StackConfig,
    TrainConfig,
)
from jaxformer.types import TrainState

CONFIG = Config(
    model=ModelConfig(
        encoder=StackConfig(layers=3, width=16, embed=EmbedConfig(vocab=40), ffn=FeedForwardConfig(width=24)),
        decoder=StackConfig(layers=2, width=16, embed=EmbedConfig(vocab=40), attention=AttentionConfig(kv_heads=2)),
    ),
    data=DataConfig(name="fr", tokens=512),
    train=TrainConfig(steps=400),
    checkpoint=CheckpointConfig(keep_last=2, average=2),
)


def workdir(path, config=CONFIG):
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(overrides.to_json(config))
    return path


def line(text, start):
    """The words of the one line that begins with `start`."""
    (found,) = [line for line in text.splitlines() if line.strip().startswith(start)]
    return found.split()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with two checkpoints of two parameters, the first of them the best."""
    path = workdir(tmp_path_factory.mktemp("runs") / "trained")
    checkpoints = Checkpoints(path, CONFIG.checkpoint)
    for step, loss in ((200, 0.5), (300, 1.25)):
        params = {"encoder": {"blocks": {"kernel": jnp.ones((3, 4))}}, "table": jnp.ones(8)}
        state = TrainState(jnp.int32(step), params, {"mu": jnp.ones(250_000)}, jax.random.key(0), {})
        checkpoints.save(state, {}, {"loss": loss})
    checkpoints.close()
    rows = [{"step": 310, "split": "train", "loss": 0.75}, {"step": 310, "split": "validation", "loss": 9.0}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 32')
    (path / "eval-test.json").write_text(
        json.dumps({"split": "test", "bleu": 31.4159265, "lines": 1000, "signatures": {}})
    )
    return path


# --- a run ------------------------------------------------------------------------------------------------------------


def test_a_result_of_an_earlier_end_does_not_make_an_extended_run_finished(tmp_path):
    run = workdir(tmp_path / "run")
    for steps, said, ended in (
        (400, "loss 2.5", "400, finished"),
        (300, "out of date: it is of step 300", "not finished"),
    ):
        (run / "result.json").write_text(json.dumps({"step": steps, "loss": 2.5}))
        text = inspection.describe(run)
        assert said in text and ended in text


def test_a_run_in_words_without_loading_it(trained, monkeypatch):
    monkeypatch.setattr(checkpoint.reading, "_arrays", lambda *_: pytest.fail("an array was loaded"))
    text = inspection.describe(trained)
    assert "layers 3, width 16, heads 4, feed-forward 24 gelu, sinusoidal positions, pre layer norm" in text
    assert "layers 2, width 16, heads 4 (2 for keys and values), feed-forward 64 gelu" in text
    assert line(text, "data")[1:3] == ["numerals", "fr;"]
    assert "batches of 512 tokens" in text
    assert line(text, "step  ")[1:] == ["310", "of", "400,", "not", "finished,", "train", "loss", "0.75"]
    assert line(text, "last") == ["last", "step", "300", "loss", "1.25"]
    assert line(text, "step 200") == ["step", "200", "loss", "0.5"]
    assert line(text, "best (least loss)") == ["best", "(least", "loss)", "step", "200", "loss", "0.5"]
    assert "with the mean of the last 2" in text
    assert "in best/200: parameters 0.0 MB, optimizer 1.0 MB" in text
    assert line(text, "eval-test.json") == ["eval-test.json", "bleu", "31.416", "lines", "1,000"]
    assert line(text, "total") == ["total", "20"]
    assert line(text, "table") == ["table", "8", "8", "40.0%"]
    assert line(text, "blocks/kernel") == ["blocks/kernel", "3", "x", "4", "12"]
    assert "60.0%" in text
    assert max(map(len, text.splitlines())) < 200


@pytest.mark.parametrize(("below", "source"), [("last", "last/300"), ("last/200", "last/200"), ("best", "best/200")])
def test_a_checkpoint_is_described_by_its_place(trained, below, source):
    text = inspection.describe(trained / "checkpoints" / below)
    assert f"in {source}:" in text
    assert line(text, "total") == ["total", "20"]


def test_a_damaged_checkpoint_is_said(trained, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    (copy / "checkpoints" / "best" / "200" / "state" / "_METADATA").unlink()
    (copy / "parameters.txt").write_text("parameter  shape  decay\nother  2 x 3  -\n")
    text = inspection.describe(copy)
    assert "best/200 cannot be read" in text
    assert line(text, "total") == ["total", "6"]


def test_a_run_that_has_just_begun(tmp_path):
    path = workdir(tmp_path / "run")
    text = inspection.describe(path)
    assert line(text, "step  ")[1:] == ["0", "of", "400,", "not", "finished"]
    assert line(text, "last") == ["last", "none"]
    assert "not known: neither a checkpoint nor parameters.txt says" in text
    (path / "parameters.txt").write_text(
        "parameter       shape     decay\nencoder/kernel  3 x 4     0.1\nencoder/scale   scalar    -\n"
        "table           10        -\n12 of 23 entries decay\n"
    )
    text = inspection.describe(path)
    assert line(text, "total") == ["total", "23"]
    assert line(text, "kernel") == ["kernel", "3", "x", "4", "12"]
    assert line(text, "scale") == ["scale", "scalar", "1"]
    assert "56.5%" in text  # 13 of 23


def test_a_finished_run_with_broken_results(tmp_path):
    path = workdir(tmp_path)
    (path / "result.json").write_text("{")
    text = inspection.describe(path)
    assert "0 of 400, not finished" in text
    assert "result.json  cannot be read" in text


def test_recurrent_models_and_classes(tmp_path):
    model = ModelConfig(
        recurrent_encoder=RecurrentConfig(embed=EmbedConfig(vocab=9), bidirectional=True, cell="gru"),
        head=HeadConfig(kind="classes", classes=3),
    )
    rows = dict(inspection._model(dataclasses.replace(CONFIG, model=model)))
    assert rows["recurrent encoder"] == "layers 1, width 256, gru in both directions, vocabulary 9"
    assert rows["head"] == "one of 3 classes"


def test_what_is_no_run_is_refused(tmp_path, trained):
    for path in (tmp_path, tmp_path / "nowhere", trained / "checkpoints" / "last" / "7"):
        with pytest.raises(ConfigError, match="got .*, expected") as caught:
            inspection.describe(path)
        assert "\n" not in str(caught.value)


# --- this machine -----------------------------------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch):
    """The doctor looks at two packages only; importing all would take seconds."""
    monkeypatch.setattr(inspection, "requirements", lambda: {"numpy": "2", "orbax-checkpoint": ""})


def doctor(capsys):
    code = inspection.doctor()
    lines = capsys.readouterr().out.splitlines()
    return code, {line.split()[1]: line for line in lines[:-1]}, lines[-1]


def test_a_healthy_machine(few, capsys):
    code, lines, last = doctor(capsys)
    assert code == 0
    assert last == "nothing wrong found"
    assert lines["numpy"].startswith("ok    numpy")
    assert f"{jax.device_count()} x cpu (backend cpu)" in lines["devices"]
    assert "compiled and computed" in lines["matrix"]
    assert "1, this is number 0" in lines["processes"]
    assert os.environ["JAXFORMER_CACHE"] in lines["cache"]


@pytest.mark.parametrize(
    ("name", "least", "words"),
    [("nothing-of-that-name", "", "not installed"), ("numpy", "99.1", "expected at least 99.1")],
)
def test_packages_that_are_missing_or_old(name, least, words):
    found = inspection._package(name, least)
    assert found.level == "FAIL"
    assert words in found.words
    assert "; install it with: pip install" in found.words


def test_a_package_that_does_not_import(few, monkeypatch, capsys):
    def broken(name):
        raise RuntimeError("libfoo.so:\nno such file")

    monkeypatch.setattr(inspection.importlib, "import_module", broken)
    code, lines, last = doctor(capsys)
    assert code == 1
    assert last == "2 of these must be put right"
    assert "FAIL  numpy" in lines["numpy"]
    assert "RuntimeError: libfoo.so: no such file" in lines["numpy"]


def test_a_backend_that_computes_wrongly_or_not_at_all(monkeypatch):
    monkeypatch.setattr(jax, "jit", lambda f: lambda x: f(x) + 1)
    assert ("FAIL", "matrix product") in [found[:2] for found in inspection._devices()]

    def none():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "default_backend", none)
    (found,) = inspection._devices()
    assert found.level == "FAIL"
    assert "Unable to initialize backend" in found.words
    assert "JAX_PLATFORMS" in found.words


def test_an_accelerator_that_jax_does_not_use(monkeypatch):
    monkeypatch.setattr(inspection.os.path, "exists", lambda path: path == "/dev/nvidia0")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert "install jaxformer[gpu]" in inspection._idle_accelerator("cpu").words
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert "unset JAX_PLATFORMS" in inspection._idle_accelerator("cpu").words
    assert inspection._idle_accelerator("gpu").level == "ok"


def test_folders_that_cannot_be_written_or_are_full(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "file"))
    cache, here = inspection._folders()
    assert cache.level == "FAIL"
    assert "is not writable" in cache.words
    assert here.name == "current folder"
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "new" / "cache"))
    usage = namedtuple("usage", "free")
    for free, level in ((1e8, "FAIL"), (1e9, "warn"), (1e12, "ok")):
        monkeypatch.setattr(inspection.shutil, "disk_usage", lambda path, free=free: usage(free))
        assert [found.level for found in inspection._folders()] == [level, level]
    assert not (tmp_path / "new").exists()


def test_other_frameworks_are_noticed(monkeypatch):
    assert inspection._other_frameworks().level == "ok"
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert inspection._other_frameworks()[:2] == ("warn", "frameworks")


def test_requirements_are_those_of_the_project():
    path = Path(inspection.__file__).parents[1] / "pyproject.toml"
    declared = tomllib.loads(path.read_text())["project"]["dependencies"]
    found = inspection.requirements()
    assert len(found) == len(declared)
    assert found["jax"] == "0.10"
    assert found["importlib_resources"] == ""
    assert not {"pytest", "tensorflow", "torch"} & set(found)


@pytest.mark.parametrize(
    ("older", "newer"), [("0.9.4", "0.10"), ("1.0", "1.0.1"), ("2", "2.0.1rc1"), ("", "0.1"), ("0.10", "0.10.0.dev3")]
)
def test_versions_are_compared_by_their_numbers(older, newer):
    assert inspection._release(older) <= inspection._release(newer)
    assert (inspection._release(older) == inspection._release(newer)) == (older == "0.10")
