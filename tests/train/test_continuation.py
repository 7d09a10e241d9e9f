"""Tiny runs of the ways from data to batches: losses as committed, and stopped or broken anywhere, the same run."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "goldens")]

import fault_drills  # noqa: E402
import tiny_runs  # noqa: E402
import write  # noqa: E402

from jaxformer import cli  # noqa: E402
from jaxformer.config import ConfigError, MeshConfig  # noqa: E402
from jaxformer.parallel import mesh as meshes  # noqa: E402
from jaxformer.train import evaluate as evaluation  # noqa: E402
from jaxformer.train import loop, skip_guard  # noqa: E402
from jaxformer.train.metric_window import MetricWindow  # noqa: E402

RATES = ("tokens_per_second", "steps_per_second", "wall_time")
NAMES = ("packed", "masked", "classes")


@pytest.fixture(autouse=True)
def one_device(monkeypatch, shared_programs):
    make = meshes.make
    monkeypatch.setattr(loop.meshes, "make", lambda config, devices=None: make(MeshConfig(data=1), jax.devices()[:1]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("continuation")
    tiny_runs.files(place / "files")
    return place


def whole(name: str, folder: Path) -> Path:
    """The uninterrupted run, trained once."""
    workdir = folder / name
    if not (workdir / "result.json").exists():
        assert loop.train(tiny_runs.config(name, folder / "files"), workdir) == 0
    return workdir


def outcome(workdir: Path) -> dict:
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    parts = {part: sorted(os.listdir(workdir / "checkpoints" / part)) for part in ("last", "best")}
    result = json.loads((workdir / "result.json").read_text())
    rows = [{key: value for key, value in row.items() if key not in RATES} for row in rows]
    return {"rows": rows, "events": fault_drills.events(workdir / "tensorboard"), "parts": parts, "result": result}


OTHER_PROCESSOR = 1e-5
"""Relative difference allowed where losses of the instruction set are kept of other kinds of processors only: 80
times what was seen between two, and far below what a changed formula makes."""


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_the_committed_ones(name, folder):
    info = write.cpu_info()
    flags = write.cpu_flags(info)
    own, level = (
        write.processor(info, write.instruction_set(flags)),
        write.instruction_set(flags, os.environ["XLA_FLAGS"]),
    )
    path = write.losses_file(jax.__version__, level)
    kept = json.loads(path.read_text()) if path.exists() else {}
    if os.environ.get("GOLDEN_LOSSES") == "write":  # python tests/goldens/write.py losses
        kept.setdefault(own, {})[name] = write.losses(whole(name, folder))
        path.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    if not kept:
        pytest.skip(f"no losses of jax {jax.__version__} with {level}: python tests/goldens/write.py losses")
    got = write.losses(whole(name, folder))
    if own in kept:
        assert got == kept[own][name]
    else:
        assert got == pytest.approx(next(iter(kept.values()))[name], rel=OTHER_PROCESSOR)


def stopped(monkeypatch, at: int) -> None:
    """SIGTERM in the middle of a step."""
    add, calls = MetricWindow.add, []

    def interrupt(self, sums, batch):
        calls.append(None)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGTERM)
        add(self, sums, batch)

    monkeypatch.setattr(MetricWindow, "add", interrupt)


def test_stopped_and_broken_again_and_again_it_is_the_uninterrupted_run(folder, tmp_path, monkeypatch):
    config = tiny_runs.config("masked", folder / "files")
    with monkeypatch.context() as patch:
        stopped(patch, 7)  # between two reports, inside the second epoch
        assert loop.train(config, tmp_path) == loop.EXIT_PREEMPTED
    with monkeypatch.context() as patch:
        stopped(patch, 1)  # step 8, where an evaluation is due, which has to wait
        assert loop.train(config, tmp_path) == loop.EXIT_PREEMPTED
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 3, 6]
    with monkeypatch.context() as patch:
        patch.setattr(
            evaluation, "evaluate_batches", broken(evaluation.evaluate_batches, at=2)
        )  # step 16, not the one owed
        with pytest.raises(RuntimeError, match="plug"):
            loop.train(config, tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 17, "split": "tra')  # what a kill leaves
    assert loop.train(config, tmp_path) == 0
    assert outcome(tmp_path) == outcome(whole("masked", folder))


def test_a_mixture_stopped_inside_an_epoch_is_the_uninterrupted_run(folder, tmp_path, monkeypatch):
    config = tiny_runs.config("mixed", folder / "files")
    with monkeypatch.context() as patch:
        stopped(patch, 7)
        assert loop.train(config, tmp_path) == loop.EXIT_PREEMPTED
    assert loop.train(config, tmp_path) == 0
    assert outcome(tmp_path) == outcome(whole("mixed", folder))


def test_a_mixture_reports_and_evaluates_every_component(folder, capsys):
    workdir, sizes = whole("mixed", folder), {"judge": 44, "copy": 20}
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if row["split"] == "train"][-1]
    assert last["loss"] == pytest.approx(sum(last[f"loss/{name}"] * last[f"share/{name}"] for name in sizes), rel=1e-5)
    assert 24 * 8 - 4 <= sum(last[f"examples/{name}"] for name in sizes) <= 24 * 8  # a block may end in an empty row
    shares = {name: size**0.5 / (44**0.5 + 20**0.5) for name, size in sizes.items()}
    for name, size in sizes.items():
        assert last[f"examples/{name}"] == pytest.approx(24 * 8 * shares[name], abs=8)  # a part of a block
        assert last[f"epochs/{name}"] == last[f"examples/{name}"] / size
    measured = [row for row in rows if row["split"] == "validation"][-1]
    assert {"loss", "loss/judge", "loss/copy", "loss/unseen", "perplexity/unseen"} <= measured.keys()
    assert (
        min(measured["loss/judge"], measured["loss/copy"])
        < measured["loss"]
        < max(measured["loss/judge"], measured["loss/copy"])
    )

    arguments = [f"--workdir={workdir}", "--config.evaluate.examples=5", "--config.decode.max_length=3"]
    assert cli.main(["evaluate", *arguments, "--split=test"]) == 0, capsys.readouterr().err
    found = json.loads((workdir / "eval-test.json").read_text())
    assert {found["examples/judge"], found["examples/unseen"]} == {5} and found["examples"] == 10
    assert found["split_examples/judge"] == 12 and "loss/copy" not in found
    assert found["loss"] == found["loss/judge"]  # the only one with this split that is trained on
    assert {0 <= found[f"exact_match/{name}"] <= 1 for name in ("judge", "unseen")} == {True}
    records = json.loads((workdir / "samples" / "test.json").read_text())
    assert [record["component"] for record in records] == ["judge"] * 5 + ["unseen"] * 5
    assert records[0]["input"].startswith("size: ") and records[5]["input"].endswith(" is")
    assert {record["output"] for record in records[5:]} <= {"a lot", "short"}
    assert cli.main(["evaluate", *arguments, "--split=tset"]) == 2
    assert "split: got 'tset', expected one of" in capsys.readouterr().err


def broken(measure, at: int):
    """An evaluation that does not return, the time `at` that one is asked for."""
    calls = []

    def act(*arguments):
        calls.append(None)
        values = measure(*arguments)
        if len(calls) == at:
            raise RuntimeError("pulled the plug")
        return values

    return act


def test_too_many_bad_steps_end_the_run_and_name_the_last_good_checkpoint(folder, tmp_path):
    config = tiny_runs.config(
        "packed", folder / "files", train__skip_limit=3, schedule__peak=1e38, optimizer__name="sgd"
    )
    with pytest.raises(ConfigError, match=r"got 3 steps in a row .*batch \d.*last good checkpoint is (none|/)"):
        loop.train(config, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    bad = [row for row in rows if row["split"] == "skipped"]
    assert [row["in_a_row"] for row in bad] == [1, 2, 3]
    assert {"epoch", "block", "batch"} <= bad[0].keys()


def test_a_run_leaves_out_spikes_and_counts_them(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(skip_guard, "is_spike", lambda state, norm, sigma: (state[0].count >= 1) & (norm > sigma))
    config = tiny_runs.config("packed", folder / "files", optimizer__spike=1e-6, train__skip_limit=2)
    with pytest.raises(ConfigError, match="got 2 steps in a row .* or a spike"):
        loop.train(config, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["spike"]) for row in rows if row["split"] == "skipped"] == [(2, 1), (3, 1)]
    reports = [row for row in rows if row["split"] == "train"]
    assert [(row["step"], row["skipped"], row["spiked"]) for row in reports] == [(1, 0.0, 0.0), (3, 2.0, 2.0)]
