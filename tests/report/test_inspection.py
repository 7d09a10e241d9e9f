"""The text of `inspect` for runs in several states."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import pytest

from jaxformer import checkpoint
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
    overrides,
)
from jaxformer.report import inspection
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
    assert "in best/200: parameters 80 B, optimizer 976.6 KiB" in text
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
