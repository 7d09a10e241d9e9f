"""Curves: the points of a run's files, thinned without losing a peak; seeds as one curve; every chart a valid one."""

import dataclasses
import json

import altair
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.config import CheckpointConfig, Config, EvaluateConfig, ModelConfig, StackConfig, TrainConfig, overrides
from jaxformer.report import charts, curves, intervals, page, runs, sample_tables, sections, sweeps

CONFIG = Config(model=ModelConfig(encoder=StackConfig(), decoder=StackConfig()), train=TrainConfig(steps=100))


def train_row(step, **values):
    rates = {"steps_per_second": 2.0, "tokens_per_second": 50.0, "padding": 0.25, "skipped": 0.0}
    return {"step": step, "wall_time": 1e9, "split": "train", **rates, **values}


def put(folder, rows, config=CONFIG, **files):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(overrides.to_json(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, value in files.items():
        path = folder / (name.replace("__", "/") + ".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(value))
    return folder


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(4, 60))
def test_thinning_keeps_the_ends_and_the_extremes(values, limit):
    values = np.array(values)
    kept = curves.thin(values, limit)
    assert len(kept) <= max(limit, 1) and np.all(np.diff(kept) > 0)
    assert {0, len(values) - 1} <= set(kept.tolist())
    assert values[kept].min() == values.min() and values[kept].max() == values.max()
    assert len(values) > limit or len(kept) == len(values)


def test_thinning_keeps_a_peak_and_a_dip_of_one_step():
    values = np.sin(np.arange(2000.0))
    values[[700, 1200]] = 9.0, -9.0
    kept = curves.thin(values, 20).tolist()
    assert len(kept) <= 20 and {700, 1200} <= set(kept)


def test_a_chart_has_the_points_of_the_file_against_steps_tokens_and_hours(tmp_path):
    rows = [train_row(10, loss=8.0), train_row(30, loss=None), train_row(40, loss=2.0)]
    rows += [{"step": 20, "wall_time": 1e9, "split": "validation", "loss": 3.0, "bleu": 1.0}]
    (run,) = runs.read([put(tmp_path / "run", rows)])
    loss, *others = curves.all_charts([run])
    points = charts.rows(loss.data["loss"])
    assert [(p["series"], p["step"], p["value"]) for p in points] == [
        ("train", 10, 8), ("train", 40, 2), ("validation", 20, 3),
    ]  # fmt: skip
    # 2 steps and 50 tokens a second: 25 tokens and 0.5 seconds a step.
    assert [p["tokens"] for p in points] == [250, 1000, 500]
    np.testing.assert_allclose([p["hours"] * 3600 for p in points], [5, 20, 10], rtol=1e-3)
    assert [chart.name for chart in others] == ["validation-bleu", "train-tokens-per-second", "train-padding"]
    assert "from 8 at step 10 to 2 at step 40" in loss.description
    assert loss.table.rows[0] == ("train", "2", "8", "2", "2 at step 40", "8 at step 10")


def test_seeds_are_one_curve_with_a_band_over_the_steps_of_all(tmp_path):
    folders = [
        put(
            tmp_path / "seeds" / f"seed-{seed}",
            [train_row(step, loss=float(step + seed)) for step in (10, 20, 30)[: 3 - seed // 2]],
            dataclasses.replace(CONFIG, train=TrainConfig(steps=100, seed=seed)),
        )
        for seed in (0, 2)
    ]
    chart = curves.all_charts(runs.read(folders))[0]
    points = charts.rows(chart.data["loss"])
    assert [(p["group"], p["step"], p["low"], p["value"], p["high"]) for p in points] == [
        ("seeds, 2 seeds", 10, 10, 11, 12), ("seeds, 2 seeds", 20, 20, 21, 22),
    ]  # fmt: skip


def test_measures_whose_names_differ_in_signs_only_have_charts_of_their_own(tmp_path):
    rows = [{"step": 5, "split": "validation", "loss": 1.0, "loss/a b": 2.0, "loss/a-b": 3.0}]
    shown = curves.all_charts(runs.read([put(tmp_path / "run", rows)]))
    assert [chart.name for chart in shown] == ["loss", "validation-loss-a-b", "validation-loss-a-b-2"]
    assert [next(iter(chart.data.values()))["value"] for chart in shown] == [[1], [2], [3]]


def test_a_skipped_step_is_listed_and_none_is_said(tmp_path):
    rows = [train_row(10, loss=1.0)]
    quiet, noisy = put(tmp_path / "a", rows), put(tmp_path / "b", [*rows, {"step": 7, "split": "skipped", "spike": 1}])
    assert "No step was skipped." in str(sections.curve_blocks(runs.read([quiet])))
    (run,) = runs.read([noisy])
    (listed,) = [b for b in sections.curve_blocks([run]) if "skipped steps" in getattr(b, "summary", "")]
    assert listed.body.rows == (("b", "7", "spike"),)


# --- every chart of a rich comparison ---------------------------------------------------------------------------------

DIAGNOSIS = {
    "confusion": {"classes": ["a", "b"], "counts": [[5, 1], [2, 4]]},
    "calibration": {
        "error": 0.1, "bins": [{"low": 0.5, "high": 0.6, "count": 9, "confidence": 0.55, "accuracy": 0.75}],
    },
    "entities": [{"type": "per", "true": 3, "predicted": 2, "correct": 1, "wrong_type": 1, "missed": 1, "spurious": 0}],
}  # fmt: skip


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Three runs that differ in two settings, with evaluations and samples; the last has hostile names and values."""
    root = tmp_path_factory.mktemp("compared")
    folders = []
    for number, peak in enumerate((1e-4, 1e-3, 1e-2)):
        config = dataclasses.replace(
            CONFIG,
            schedule=dataclasses.replace(CONFIG.schedule, peak=peak, kind="linear" if number else "cosine"),
            checkpoint=CheckpointConfig(metric="bleu", mode="max"),
        )
        rows = [train_row(step, loss=9.0 / step, gradient_norm=1.0) for step in range(10, 101, 10)]
        rows += [{"step": s, "split": "validation", "loss": 9.5 / s, "bleu": s / 10 + number} for s in (50, 100)]
        by_length = [{"tokens": "1-5", "examples": 6, "bleu": 9.0}, {"tokens": "6-", "examples": 6, "bleu": 7.0}]
        evaluation = {"split": "test", "examples": 12, "bleu": 30.0, "diagnosis": DIAGNOSIS, "by_length": by_length}
        samples = {
            f"samples__step-{s}": [{"input": f"i{n}", "output": f"o{s}", "reference": "o100"} for n in range(2)]
            for s in (50, 100)
        }
        name = f"run {number}" if number < 2 else "<img src=x onerror=alert(1)>"
        folders.append(put(root / name, rows, config, **{"eval-test": evaluation}, **samples))
    return runs.read(folders)


def test_every_chart_follows_the_schema_of_vega_lite(compared):
    shown = page.all_charts(page.content(compared))
    names = [chart.name for chart in shown]
    assert len(set(names)) == len(names)
    for stem in ("loss", "validation-bleu", "sweep", "response-1", "confusion-test-run3", "calibration-test-run1",
                 "entities-test-run2", "length-test-run1", "samples-over-training-run1"):  # fmt: skip
        assert stem in names
    for chart in {name.split("-run")[0]: chart for name, chart in zip(names, shown, strict=True)}.values():
        spec = {**chart.spec, "config": charts.theme("black")}
        spec["config"]["legend"].pop("layout")  # Vega's own, which Vega-Lite hands on
        if chart.curve:  # the one thing that the schema does not know: a window of as many points as a signal says
            transforms = [{k: v for k, v in each.items() if k != "frame"} for each in spec["transform"]]
            assert [each["frame"] for each in spec["transform"] if "frame" in each] == [{"signal": "[-smooth, smooth]"}]
            spec["transform"] = transforms
        altair.Chart.from_dict(spec)
        assert chart.description.endswith(".")


def test_the_settings_of_runs_are_shown_with_their_results(compared):
    chart, *responses = sweeps.all_charts(compared)
    lines = charts.rows(chart.data["sweep"])
    assert {row["axis"] for row in lines} == {"schedule.peak", "schedule.kind", "bleu"}
    assert [row["place"] for row in lines if row["axis"] == "schedule.peak"] == [0, 0.5, 1]  # by its logarithm
    assert [row["value"] for row in lines if row["axis"] == "bleu"] == ["10", "11", "12"]
    assert responses[0].data["response-0"]["setting"] == [1e-4, 1e-3, 1e-2]
    assert sweeps.all_charts(compared[:2]) == []


def test_the_samples_of_a_run_worst_and_best_and_over_training(tmp_path):
    records = [{"input": str(n), "output": "abcdef"[:n] + "zz", "reference": "abcdef"} for n in range(6)]
    (run,) = runs.read([put(tmp_path / "run", [train_row(1, loss=1.0)], samples__test=records)])
    worst, best, whole = sample_tables.samples(run)
    assert worst.summary == "test: the 3 worst of 6 by chrF (0 to 100)"
    assert [row[0] for row in worst.body.rows] == ["1", "2", "3"] and [r[0] for r in best.body.rows] == ["6", "5", "4"]
    assert len(whole.body.rows) == 6
    label = [{"output": f"{a}\t0.9", "reference": "x"} for a in "xy"]
    assert sample_tables.scores("classification", label) == [0.9, -0.9]
    assert sample_tables.scores("tagging", [{"output": "O B-a", "reference": "O O"}]) == [0.5]
    assert sample_tables.scores("regression", [{"output": "1.5", "reference": "2"}, {"output": "?", "reference": "2"}])[
        0
    ] == -0.5  # fmt: skip


def test_intervals(tmp_path):
    # Wilson's interval of 8 of 10: Agresti and Coull (1998) have (0.490, 0.943).
    found = intervals.wilson(0.8, 10)
    assert (round(found.low, 3), round(found.high, 3)) == (0.490, 0.943)
    texts = ["a b c d e f", "a b c d e g", "one two three four five", "one two three four six"] * 5
    records = [{"output": text, "reference": texts[0] if "a" in text else texts[2]} for text in texts]
    score, bounds = intervals.bootstrap("bleu", records)
    evaluation = {"split": "test", "examples": 20, "bleu": score, "exact_match": 0.5, "accuracy": 0.5}
    files = {"eval-test": evaluation, "samples__test": records}
    config = dataclasses.replace(CONFIG, evaluate=EvaluateConfig(headline="exact_match"))
    (run,) = runs.read([put(tmp_path / "run", [], config, **files)])
    assert bounds.low < score < bounds.high and intervals.interval(run, "test", "bleu") == bounds
    assert intervals.interval(run, "test", "accuracy") is None  # of tokens, which depend on each other
    run.evaluations["test"]["bleu"] = score + 1  # the samples are of another evaluation
    assert intervals.interval(run, "test", "bleu") is None
    chinese = [{"output": "猫坐在垫子上", "reference": text} for text in ("猫坐在垫子上", "猫坐在椅子上")] * 5
    evaluation = {"split": "test", "examples": 10, "bleu": intervals.bootstrap("bleu", chinese, "zh")[0]}
    task = dataclasses.replace(CONFIG.task, language="zh")
    files = {"eval-test": evaluation, "samples__test": chinese}
    (other,) = runs.read([put(tmp_path / "zh", [], dataclasses.replace(CONFIG, task=task), **files)])
    assert intervals.interval(other, "test", "bleu").low > 10.0  # by characters; by blanks its BLEU is 0
    cards, _ = sections.results([run])
    assert cards.cards[0].value == "0.5" and "exact matches" in cards.cards[0].title
    assert cards.cards[0].details[0].startswith("95 %: 0.2993 to 0.7007 (Wilson interval of 20 examples)")
