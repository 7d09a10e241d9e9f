"""Runs of one program: each equal to its own run, stopped and resumed bit for bit, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_loop import TINY, rows

from jaxformer import checkpoint, tasks
from jaxformer.config import ConfigError, StackConfig, overrides
from jaxformer.data.sources import _generated
from jaxformer.parallel import mesh as meshes
from jaxformer.train import lanes, loop, together
from jaxformer.train.preemption import PreemptionListener
from jaxformer.types import TrainState

EDITS = {
    "plain": {},
    "other": dict(
        train__seed=1,
        schedule__peak=0.003,
        schedule__warmup=3,
        optimizer__weight_decay=0.1,
        task__label_smoothing=0.1,
        model__decoder__dropout=0.2,
        model__decoder__attention__dropout=0.1,
    ),
    "diverging": dict(train__seed=1, schedule__peak=1e38),
}
"""Three runs: one that diverges, and two that must not notice."""
# Two shapes of batches, so that runs of different seeds wait for each other.
BASE = dict(
    task__name="text_to_text",
    data__source="algorithmic",
    data__name="reverse/3-6",
    data__tokenizer__kind="character",
    data__batch=8,
    data__length=14,
    data__buckets="10,14",
    data__examples=40,
    mesh__data=8,
    mesh__fsdp=1,
    train__steps=6,
    train__log_every=1,
    train__evaluate_every=3,
    train__checkpoint_every=2,
    train__skip_limit=2,
    train__ema=0.9,
    train__trackers="",
    evaluate__examples=16,
)


def recipe(**edits):
    config = overrides.defaults()
    config.model.decoder = overrides.section(StackConfig, **TINY)
    for path, value in (BASE | edits).items():
        overrides.override(config, path.replace("__", "."), str(value))
    return overrides.freeze(config)


def members(folder, names=tuple(EDITS), **edits):
    return [(recipe(**EDITS[name] | edits), folder / name) for name in names]


@pytest.fixture(scope="module", autouse=True)
def one_program():
    """Programs of the same lanes are made once, and few examples: both take longer than all else here."""
    make, made = lanes.LaneStep, {}

    def cached(configs, rates, task, mesh):
        key = (*map(overrides.to_json, configs), *rates)
        if key not in made:
            made[key] = make(configs, rates, task, mesh)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes, "LaneStep", cached)
        patch.setattr(_generated, "MAX_HELD_OUT_EXAMPLES", 16)
        yield


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
        assert one.pop("split") == other.pop("split")
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
    for one, other in zip(jax.tree.leaves(state(folder / "other")), jax.tree.leaves(state(tmp_path / "alone"))):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=5e-5)
    assert len({row["padding"] for row in alone if "padding" in row}) > 1  # both shapes occurred


def test_a_run_that_diverges_stops_no_other(trained):
    folder, code, events = trained
    assert code == 2
    assert sorted(events) == [("failed", "diverging"), ("finished", "other"), ("finished", "plain")]
    assert not (folder / "diverging" / "result.json").exists()
    assert "error: train: got 2 steps in a row" in (folder / "diverging" / "log.txt").read_text()
    for name in ("plain", "other"):
        result = json.loads((folder / name / "result.json").read_text())
        assert result["step"] == 6 and result["loss"] == reported(folder / name)[-1]["loss"]
        assert state(folder / name)[0] == 6 and len(checkpoint.list_steps(folder / name / "checkpoints" / "best")) == 1


def test_stopped_and_resumed_runs_have_the_same_bits(trained, tmp_path, monkeypatch):
    folder, code, events = trained
    names, stopped_events, resumed_events = ["plain", "other"], [], []

    def train(noted):
        note = lambda event, workdir, reason: noted.append((event, workdir.name))  # noqa: E731
        return together.train(members(tmp_path), report=note)

    with monkeypatch.context() as patch:
        patch.setattr(PreemptionListener, "should_stop", lambda self, step: step >= 3)
        assert train(stopped_events) == 143
    assert sorted(stopped_events) == [("failed", "diverging"), ("stopped", "other"), ("stopped", "plain")]
    stopped = {name: state(tmp_path / name)[0] for name in names}
    assert stopped["plain"] < stopped["other"] == 3
    shutil.rmtree(tmp_path / "other" / "checkpoints" / "last" / "3")  # killed before it was saved
    assert train(resumed_events) == code and sorted(resumed_events) == sorted(events)
    for name in names:
        assert reported(tmp_path / name) == reported(folder / name)
        for part in ("last", "best"):
            assert state(tmp_path / name, part)[0] == state(folder / name, part)[0]
            left, right = (jax.tree.leaves(state(parent / name, part)) for parent in (tmp_path, folder))
            assert all(np.array_equal(one, other) for one, other in zip(left, right, strict=True))


def test_runs_that_are_done_stay_as_they_are(trained):
    folder, _, _ = trained
    ((config, workdir),) = members(folder, ["other"])
    assert loop.train(config, workdir) == 0  # the ordinary loop restores what lanes have saved
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert together.train(members(folder, ["plain", "other"])) == 0
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("edits", "field"),
    [
        (dict(optimizer__beta1=0.8), "config.optimizer.beta1: got 0.9 and 0.8"),
        (dict(model__decoder__ffn__width=32), "config.model.decoder.ffn.width: got 16 and 32"),
        (dict(train__steps=20), "config.train.steps: got 6 and 20"),
        (dict(data__batch=16), "config.data.batch"),
        (dict(train__ema="none"), "config.train.ema"),
    ],
)
def test_runs_that_differ_in_more_are_refused(edits, field):
    with pytest.raises(ConfigError) as caught:
        lanes.differing_rates([recipe(), recipe(**edits)])
    assert str(caught.value).startswith(field) and "--executor=local" in str(caught.value)


def test_settings_that_lanes_cannot_honour_are_refused():
    def refused(config, *others):
        with pytest.raises(ConfigError) as caught:
            lanes.differing_rates([config, *others])
        return str(caught.value)

    plain, on_mesh = recipe(), recipe(mesh__data=1, mesh__fsdp=8)
    assert refused(on_mesh).startswith("config.mesh.fsdp: got a mesh")
    assert refused(recipe(mesh__zero1="true")).startswith("config.mesh.zero1")
    recurrent = dataclasses.replace(plain, task=dataclasses.replace(plain.task, recurrence=True))
    assert refused(recurrent).startswith("config.task.recurrence")
    with pytest.raises(ConfigError, match="config.model.decoder.attention.dropout: got several values with the kernel"):
        lanes.check_kernels(("model.decoder.attention.dropout",), {"decoder": ("blockwise", "long rows")})
    lanes.check_kernels(("model.decoder.attention.dropout",), {"decoder": ("dense", ""), "encoder": ("blockwise", "")})
    rates = lanes.differing_rates([recipe(**EDITS[name]) for name in EDITS])
    assert set(rates) == {path.replace("__", ".") for path in EDITS["other"]} - {"train.seed"}


def test_states_of_more_lanes_than_devices_come_back_as_they_were():
    configs = [recipe(train__seed=seed, model__decoder__embed__vocab=16) for seed in range(11)]
    mesh = meshes.make(configs[0].mesh)
    step = lanes.LaneStep(configs, (), tasks.get("text_to_text"), mesh)
    assert step.lanes == 16
    states = [
        TrainState(jnp.int32(lane), {"w": jnp.full((2, 3), lane)}, (), jax.random.key(lane), {}) for lane in range(11)
    ]
    stacked = step.stack(states)
    assert stacked.params["w"].sharding.shard_shape((16, 2, 3)) == (2, 2, 3)
    for lane, state in enumerate(states):
        taken = step.take(stacked, lane)
        assert int(taken.step) == lane and np.array_equal(taken.params["w"], state.params["w"])
        assert jax.random.key_data(taken.key).tolist() == jax.random.key_data(state.key).tolist()
        assert taken.params["w"].sharding.is_fully_replicated
