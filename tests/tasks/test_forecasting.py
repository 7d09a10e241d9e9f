"""Forecasting: sums by hand, the scale of the data, and a run from the command line to a table."""

import json
import re

import builders
import numpy as np
import pytest
from task_toys import config, encoded

from jaxformer import cli, load, tasks
from jaxformer.config import ConfigError
from jaxformer.types import Batch

TASK = tasks.get("forecasting")

RECIPE = """
from jaxformer.config import LinearConfig, SeriesConfig
from jaxformer.config.overrides import defaults, section

def get_config(variant=""):
    config = defaults()
    config.task.name = "forecasting"
    config.data.source = "series"
    config.data.splits = {"train": ("x.csv[:60]",), "validation": ("x.csv[60:80]",), "test": ("x.csv[80:]",)}
    config.data.columns = {"date": "date"}
    config.data.length, config.data.horizon, config.data.batch = 8, 3, 8
    config.model.series = section(SeriesConfig, normalise="last")
    config.model.linear = section(LinearConfig)
    config.model.head.kind = "forecast"
    config.schedule.kind, config.schedule.warmup = "constant", 0
    config.train.steps, config.train.evaluate_every, config.train.checkpoint_every = 8, 4, 4
    return config
"""


def table():
    steps = np.arange(100)
    columns = np.stack([np.sin(steps / 3) * 50 + 200, np.cos(steps / 5)], axis=1)
    noise = np.random.default_rng(0).normal(size=columns.shape) * [1, 0.01]
    return (columns + noise).round(4)


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    builders.one_device(monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.py").write_text(RECIPE)
    rows = [f"h{i},{a},{b}" for i, (a, b) in enumerate(table())]
    (tmp_path / "x.csv").write_text("\n".join(["date,load,oil", *rows]) + "\n")
    return ["--config=recipe.py", f"--config.data.dir={tmp_path}"]


def test_errors_are_averaged_over_windows_steps_and_channels():
    rng = np.random.default_rng(0)
    forecast, labels = (rng.normal(size=(3, 4, 2)).astype(np.float32) for _ in range(2))
    batch = Batch(None, None, labels, np.float32([1, 1, 0]))
    settings = config("forecasting")
    sums = TASK.metrics(settings, forecast, batch)
    errors = (forecast - labels)[:2]
    assert sums["loss"][1] == sums["mae"][1] == 2 * 4 * 2
    np.testing.assert_allclose(sums["loss"][0], np.square(errors).sum(), rtol=1e-6)
    np.testing.assert_allclose(sums["mae"][0], np.abs(errors).sum(), rtol=1e-6)
    np.testing.assert_allclose(TASK.loss(settings, forecast, batch)["loss"], sums["mse"])


def test_windows_and_futures_are_in_one_scale():
    settings = config("forecasting", length=3, means=(10.0, -1.0), deviations=(2.0, 0.5))
    values = np.array([[8.0, 0.0], [12.0, -1.0], [10.0, -2.0], [14.0, -1.5]])
    features = encoded(settings, None, values=values, future=values[:2])
    np.testing.assert_allclose(features["source"], [[1, 0], [0, -2], [2, -1]])
    np.testing.assert_allclose(features["labels"], [[-1, 2], [1, 0]])
    with pytest.raises(ConfigError, match="got 2 time steps, expected at least the look-back, data.length .3."):
        encoded(settings, None, values=values[:2], future=values[:2])
    with pytest.raises(ConfigError, match="got 1 channels, expected 2"):
        encoded(settings, None, values=values[:, :1], future=values[:2])


def test_a_table_is_read_by_the_names_of_its_columns():
    settings = config("forecasting", length=2, channels=("load", "oil"))
    for text in ("oil,load\n2,1\n4,3\n", "1,2\n3,4", "load,oil\n\n9,9\n1,2\n3,4\n"):
        np.testing.assert_array_equal(TASK.prompt(settings, None, text)["source"], [[1, 2], [3, 4]])
    with pytest.raises(ConfigError, match="got the columns load, gas, expected load, oil and the date"):
        TASK.prompt(settings, None, "load,gas\n1,2\n3,4")


def run(capsys, *words):
    code = cli.main(list(words))
    out = capsys.readouterr()
    assert code == 0, out.err
    return out.out


def test_a_run_trains_resumes_measures_all_windows_and_forecasts_tables(recipe, tmp_path, capsys):
    run(capsys, "train", *recipe, "--workdir=whole")
    run(capsys, "train", *recipe, "--workdir=halves", "--config.train.steps=4")
    run(capsys, "train", *recipe, "--workdir=halves")
    whole, halves = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "halves"))
    assert whole == halves
    assert not (tmp_path / "whole" / "jaxformer_tokenizer.json").exists()

    saved = json.loads((tmp_path / "whole" / "config.json").read_text())["task"]
    rows = table()
    np.testing.assert_allclose(saved["means"], rows[:60].mean(axis=0))
    np.testing.assert_allclose(saved["deviations"], rows[:60].std(axis=0))

    run(capsys, "evaluate", "--workdir=whole", "--split=test")
    result = json.loads((tmp_path / "whole" / "eval-test.json").read_text())
    model = load("whole")
    windows = np.stack([rows[now - 8 : now] for now in range(80, 98)])
    future = np.stack([rows[now : now + 3] for now in range(80, 98)])
    errors = (model.forecast(windows) - future) / rows[:60].std(axis=0)
    assert result["examples"] == 18
    assert result["mse"] == pytest.approx(np.square(errors).mean(), rel=1e-4)
    assert result["mae"] == pytest.approx(np.abs(errors).mean(), rel=1e-4)

    diagnosed = result["diagnosis"]["forecast"]
    np.testing.assert_allclose(diagnosed["steps"]["mse"], np.square(errors).mean((0, 2)), rtol=1e-4)
    assert np.mean(diagnosed["channels"]["mse"]) == pytest.approx(result["mse"], rel=1e-4)

    text = "\n".join((tmp_path / "x.csv").read_text().splitlines()[:41])
    (tmp_path / "hours.csv").write_text(text)
    printed = run(capsys, "decode", "--workdir=whole", "--input=hours.csv").splitlines()
    assert printed[0] == "load,oil"
    found = np.array([line.split(",") for line in printed[1:]], float)
    np.testing.assert_allclose(found, model.forecast([rows[:40]])[0], rtol=1e-5)

    assert cli.main(["decode", "--workdir=whole", "--input=recipe.py"]) == 2
    assert cli.main(["evaluate", "--workdir=whole", "--split=test", "--config.data.length=9"]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert "expected the model's (8)" in errors[-1], errors
    for call, message in (
        (lambda: model.forecast([rows[:7]]), "got 7 time steps"),
        (lambda: model.forecast([np.full((8, 2), np.nan)]), "a value that is not finite"),
        (lambda: model.forecast([rows[:8, :1]]), "got 1 channels, expected 2 .load, oil."),
        (lambda: model.embed(["a"]), "got a model of series, expected one that reads text"),
        (lambda: model.classify(["1 2"]), "expected a head of classes"),
        (lambda: model.save_pretrained("out"), "got a model of series, expected one of tokens"),
        (lambda: model(input_ids=[[1]]), "expected a batch: this model reads a series"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"data.horizon": "None"}, "config.data.horizon: got None, expected the time steps to forecast"),
        ({"data.buckets": "4,8"}, "config.data.buckets"),
        ({"data.packing": "first_fit"}, "config.data.packing"),
        ({"model.head.kind": "classes"}, "config.model.linear: got 'a section', expected head.kind forecast"),
        ({"model.series.patch": "4"}, "config.model.series.patch"),
        ({"model.series.affine": "true"}, "config.model.series.affine"),
        ({"model.linear.trend": "4"}, "config.model.linear.trend: got 4, expected an odd number"),
        ({"task.name": "classification"}, "expected classes for the task|config.task.name"),
        ({"mesh.context": "2"}, "1 with a series"),
        ({"task.label_smoothing": "0.1"}, "config.task.label_smoothing"),
        ({"task.means": "1.0"}, "config.task.deviations|config.task.means"),
    ],
)
def test_what_a_forecast_cannot_do_is_refused(recipe, edits, message, capsys):
    words = [f"--config.{path}={value}" for path, value in edits.items()]
    assert cli.main(["train", *recipe, *words, "--workdir=refused"]) == 2
    error = capsys.readouterr().err.strip()
    assert re.search(message, error), error
    assert "\n" not in error
