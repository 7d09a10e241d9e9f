"""Two pre-training objectives by the command line: killed and resumed bit for bit, evaluated, used, fine-tuned."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import builders
import chex
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import traverse_util

import jaxformer
from jaxformer import checkpoint, cli
from jaxformer.config import overrides
from jaxformer.hf import workdirs
from jaxformer.train import loop
from jaxformer.train.metric_window import MetricWindow

TEXT = "the cat sat on the mat while a dog ran after some other cats in our garden\n"

RECIPE = """
from jaxformer.config import GeneratorConfig, PermutationConfig, StackConfig
from jaxformer.config.overrides import defaults, section

STACK = dict(layers=1, width=16, attention=dict(heads=2, bias=False), ffn=dict(width=16, bias=False), unroll=1)


def get_config(variant):
    config = defaults()
    config.data.source, config.data.dir = "text", "{folder}"
    config.data.cache, config.data.splits = "{folder}/cache", {{"train": ("train.txt",)}}
    config.data.tokenizer.kind, config.data.packing = "word", "concat"
    config.data.batch, config.data.length = 4, 8
    config.task.name = variant
    if variant == "permutation_lm":
        config.data.shuffle, config.task.recurrence, config.task.predict_every = False, True, 2
        config.model.encoder = section(
            StackConfig, **STACK, dropout=0.1, encoding=dict(kind="transformer_xl"), norm=dict(order="post")
        )
        config.model.permutation = section(PermutationConfig, memory=12)
    else:
        config.model.encoder = section(StackConfig, **STACK, dropout=0.1)
        config.model.encoder.ffn = None
        config.model.generator = section(GeneratorConfig, encoder=dict(STACK, ffn=None), sharing="disentangled")
        config.model.head.kind = "slots"
    config.optimizer.name = "sgd"
    config.schedule.kind, config.schedule.warmup, config.schedule.peak = "constant", 1, 0.1
    config.train.steps, config.train.log_every, config.train.evaluate_every = 4, 4, 0
    config.train.checkpoint_every, config.checkpoint.keep_last = 0, 1
    return config
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("pretraining")
    (place / "train.txt").write_text(TEXT * 12)
    (place / "test.txt").write_text(TEXT)
    (place / "recipe.py").write_text(RECIPE.format(folder=place))
    return place


@pytest.fixture(autouse=True)
def one_device(monkeypatch, shared_programs):
    builders.one_device(monkeypatch)


def train(folder: Path, task: str, name: str) -> int:
    return cli.main(["train", f"--config={folder}/recipe.py:{task}", f"--workdir={folder / name}"])


def arrays(workdir: Path) -> dict:
    """All arrays of the state of a run's last step, and the position of its data."""
    (directory,) = (workdir / "checkpoints" / "last").iterdir()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        state = traverse_util.flatten_dict(reader.restore(directory / "state"))
    return {**state, ("data",): json.loads((directory / "data" / "metadata").read_text())}


@pytest.mark.parametrize("task", ["permutation_lm", "replaced_tokens"])
def test_stopped_and_resumed_it_is_the_same_run(folder, task, monkeypatch):
    finish(folder, task)
    add, calls = MetricWindow.add, []

    def interrupt(self, sums, batch):
        calls.append(None)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        add(self, sums, batch)

    with monkeypatch.context() as patch:
        patch.setattr(MetricWindow, "add", interrupt)
        assert train(folder, task, f"{task}-stopped") == 143
    stopped = folder / f"{task}-stopped"
    assert checkpoint.list_steps(stopped / "checkpoints" / "last") == [2]
    assert train(folder, task, stopped.name) == 0
    whole, again = arrays(folder / task), arrays(stopped)
    assert any(path[1:2] == ("memory",) for path in whole) == (task == "permutation_lm")
    chex.assert_trees_all_equal(again, whole)
    if task == "permutation_lm":
        assert (whole["variables", "memory", "count"] == 12).all()


def finish(folder: Path, task: str) -> None:
    """Trains the run of `task` to its end, unless another test did."""
    if not (folder / task / "result.json").exists():
        assert loop.train(overrides.freeze(overrides.load(f"{folder}/recipe.py:{task}")), folder / task) == 0


def measure(folder: Path, name: str, lines: str, capsys) -> tuple[dict, list[str]]:
    """The result of `evaluate` on the test text, and what `decode` prints for `lines`."""
    finish(folder, name)
    argv = ["evaluate", f"--workdir={folder / name}", "--config.data.splits.test=test.txt"]
    assert cli.main(argv) == 0
    (folder / "lines.txt").write_text(lines)
    argv = ["decode", f"--workdir={folder / name}", f"--input={folder / 'lines.txt'}"]
    capsys.readouterr()
    assert cli.main(argv) == 0
    return json.loads((folder / name / "eval-test.json").read_text()), capsys.readouterr().out.splitlines()


def test_a_permutation_language_model_fills_in_masks(folder, capsys):
    result, lines = measure(folder, "permutation_lm", "the <mask> sat\nthe <mask> sat on <mask>\n", capsys)
    assert result["perplexity"] == pytest.approx(np.exp(result["loss"])) and 0 <= result["accuracy"] <= 1
    assert len(lines) == 2 and not any("<mask>" in line for line in lines)
    model = jaxformer.load(folder / "permutation_lm")
    one, two = model.fill_mask(["the <mask> sat", "the <mask> sat on <mask>"], top=2)
    assert [len(masks) for masks in (one, two)] == [1, 2] and len(two[1]) == 2
    assert sum(c["probability"] for c in model.fill_mask(["a <mask>"], top=1000)[0][0]) == pytest.approx(1.0, rel=1e-5)
    assert lines[0].split()[1] == one[0][0]["token"].strip()


def test_a_detector_says_how_likely_every_token_was_replaced_and_is_fine_tuned_alone(folder, capsys, tmp_path):
    result, lines = measure(folder, "replaced_tokens", "the cat sat\n\n", capsys)
    assert {"generator_loss", "detection_loss", "generator_accuracy", "detection_accuracy", "replaced"} <= set(result)
    model = jaxformer.load(folder / "replaced_tokens")
    (found,) = model.detect(["the cat sat"])
    assert [token["token"].strip() for token in found] == ["the", "cat", "sat"]
    assert lines == [" ".join(f"{t['token'].strip()}/{t['replaced']:.3f}" for t in found), ""]

    (tmp_path / "labels.tsv").write_text("".join(f"{'ab'[i % 2]}\tthe cat sat {i}\n" for i in range(8)))
    config = overrides.defaults()
    config.init.directory, config.init.head = str(folder / "replaced_tokens"), False
    config.data.source, config.data.dir, config.data.cache = "table", str(tmp_path), str(tmp_path / "cache")
    config.data.splits, config.data.columns = {"train": ("labels.tsv",)}, {"label": "#1", "text": "#2"}
    config.data.batch, config.data.length = 4, 8
    config.task.name, config.model.head.kind, config.model.head.pooling = "classification", "classes", "mean"
    config.optimizer.name, config.schedule.kind, config.schedule.peak = "sgd", "constant", 1e-12
    config.schedule.warmup, config.train.steps = 0, 1
    assert loop.train(overrides.freeze(config), tmp_path / "tuned", workdirs.ORIGIN) == 0
    tuned, params = jaxformer.load(tmp_path / "tuned"), model.params
    assert tuned.config.model.generator is None and set(tuned.params) == {"source_embed", "encoder", "head"}
    table = params["generator"]["source_embed"]["table"] + params["source_embed"]["delta"]
    assert (params["source_embed"]["delta"] != 0).any(), "the training moved it"
    np.testing.assert_allclose(tuned.params["source_embed"]["table"], table, atol=1e-7)
    chex.assert_trees_all_close(tuned.params["encoder"], params["encoder"], atol=1e-7)
