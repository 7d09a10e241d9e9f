"""A run with two losses: killed and resumed bit for bit, evaluated, and used from the command line."""

from __future__ import annotations

import dataclasses
import json

import builders
import chex
import jax
import numpy as np
import pytest

import jaxformer
from jaxformer import checkpoint, cli
from jaxformer.config import ConfigError, HeadConfig, StackConfig, overrides
from jaxformer.evaluation import evaluate
from jaxformer.train import loop, metric_window

TINY = dict(
    layers=1,
    width=8,
    attention=dict(heads=2, bias=False),
    ffn=dict(width=8, bias=False),
    norm=dict(kind="rms"),
    encoding=dict(kind="learned", max_length=24),
    unroll=1,
)


class Killed(BaseException):
    """A process that ends between two steps, and saves nothing."""


def recipe():
    config = overrides.defaults()
    config.data.source, config.data.examples = "pylib", 20
    config.data.tokenizer.kind = "byte"
    config.data.length, config.data.batch = 24, 4
    config.task.name, config.task.relation = "masked_lm", "next_sentence"
    config.model.encoder = overrides.section(StackConfig, **TINY, embed=dict(kinds=2))
    config.model.head = overrides.section(HeadConfig, relation=True, width=8)
    config.mesh.data = 1
    config.train.steps, config.train.log_every = 4, 1
    config.train.evaluate_every, config.train.checkpoint_every = 0, 2
    config.evaluate.examples, config.evaluate.batch = 2, 4
    return overrides.freeze(config)


def losses(workdir):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {(line["step"], line["split"]): line["loss"] for line in lines}


def test_a_killed_run_goes_on_bit_for_bit(tmp_path, monkeypatch, capsys):
    """With the feature that no other task has: a label of the row, and the text of another example."""
    builders.one_device(monkeypatch)
    whole, killed, config = tmp_path / "whole", tmp_path / "killed", recipe()
    assert loop.train(config, whole) == 0
    add, steps = metric_window.MetricWindow.add, []

    def kill(self, sums, batch):
        steps.append(None)
        if len(steps) == 3:
            raise Killed
        add(self, sums, batch)

    with monkeypatch.context() as during:
        during.setattr(metric_window.MetricWindow, "add", kill)
        with pytest.raises(Killed):
            loop.train(config, killed)
    assert loop.train(config, killed) == 0
    mine, theirs = checkpoint.load_run(killed), checkpoint.load_run(whole)
    chex.assert_trees_all_equal(jax.device_get(mine.params), jax.device_get(theirs.params))
    assert losses(killed) == losses(whole) and len(losses(whole)) == 5

    values = evaluate(killed, "validation")
    assert values["perplexity"] == pytest.approx(np.exp(values["loss"]))
    assert 0 <= values["relation_accuracy"] <= 1 and values["relation_loss"] > 0
    assert values["loss"] == losses(whole)[4, "validation"]
    (tmp_path / "in.txt").write_text("im<mask>ort\tsys\n")
    arguments = ["decode", f"--workdir={killed}", f"--input={tmp_path}/in.txt", f"--output={tmp_path}/out.txt"]
    assert cli.main(arguments) == 0, capsys.readouterr().err
    assert "mask" not in (tmp_path / "out.txt").read_text()

    model = jaxformer.load(killed)
    changed = dataclasses.replace(config, task=dataclasses.replace(config.task, relation="sentence_order"))
    with pytest.raises(ConfigError, match="export: got a model of task.relation sentence_order"):
        dataclasses.replace(model, config=changed).save_pretrained(tmp_path / "nowhere")
