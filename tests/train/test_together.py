"""Runs of one program: each equal to its own run, stopped and resumed bit for bit, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from test_loop import recipe, rows

from jaxformer import checkpoint
from jaxformer.config import ConfigError
from jaxformer.train import lanes, loop, together
from jaxformer.train.preemption import PreemptionListener

EDITS = {
    "plain": {},
    "other": dict(
        train__seed=1,
        schedule__peak=0.003,
        schedule__warmup=3,
        optimizer__weight_decay=0.1,
        task__label_smoothing=0.1,
        model__encoder__dropout=0.2,
        model__decoder__attention__dropout=0.1,
    ),
    "diverging": dict(train__seed=1, schedule__peak=1e38),
}
"""Three runs: one that diverges, and two that must not notice."""
TOGETHER = dict(mesh__data=8, mesh__fsdp=1, train__skip_limit=3, data__buckets="6,8")


def members(folder, names=tuple(EDITS), **edits):
    return [(recipe(**TOGETHER | EDITS[name] | edits), folder / name) for name in names]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of three runs, the exit code, and what was reported."""
    folder, events = tmp_path_factory.mktemp("together"), []
    code = together.train(members(folder), report=lambda event, workdir, reason: events.append((event, workdir.name)))
    return folder, code, events


def state(workdir, part="last"):
    newest = checkpoint.list_checkpoints(workdir / "checkpoints" / part)[0]
    return int(newest.name), checkpoint.read_weights(newest)


def reported(workdir):
    """Rows of `metrics.jsonl` without times and rates."""
    kept = lambda row: {k: v for k, v in row.items() if k != "wall_time" and not k.endswith("_second")}  # noqa: E731
    return [kept(row) for row in rows(workdir)]


def test_a_run_equals_itself_alone(trained, tmp_path):
    folder, _, _ = trained
    ((config, _),) = members(tmp_path, ["other"])
    assert loop.train(config, tmp_path / "alone") == 0
    alone, lane = reported(tmp_path / "alone"), reported(folder / "other")
    assert [(row["step"], row["split"]) for row in lane] == [(row["step"], row["split"]) for row in alone]
    for one, other in zip(lane, alone):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
    for one, other in zip(jax.tree.leaves(state(folder / "other")), jax.tree.leaves(state(tmp_path / "alone"))):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-5)


def test_a_run_that_diverges_stops_no_other(trained):
    folder, code, events = trained
    assert code == 2
    assert events == [("failed", "diverging"), ("finished", "plain"), ("finished", "other")]
    assert not (folder / "diverging" / "result.json").exists()
    assert "error: train: got 3 steps in a row" in (folder / "diverging" / "log.txt").read_text()
    for name in ("plain", "other"):
        result = json.loads((folder / name / "result.json").read_text())
        assert result["step"] == 12 and result["loss"] == reported(folder / name)[-1]["loss"]
        assert state(folder / name)[0] == 12 and len(checkpoint.list_steps(folder / name / "checkpoints" / "best")) == 1
