"""Diagnosis of evaluations: confusion, calibration, errors with entities, worked out by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxformer.config import Config, DataConfig, HeadConfig, ModelConfig, SeriesConfig, StackConfig, TaskConfig
from jaxformer.tasks import _diagnosis, classification, multi_label, regression, series_classification, tagging


def test_confusion_has_true_classes_as_rows_and_leaves_out_what_does_not_occur():
    found = _diagnosis.confusion("abcd", list("aabc"), list("abbb"))
    assert found == {"classes": ["a", "b", "c"], "counts": [[1, 1, 0], [0, 1, 0], [0, 1, 0]]}
    many = [str(n) for n in range(101)]
    assert _diagnosis.confusion(many, many, many) == {} == _diagnosis.confusion("ab", [], [])


def test_calibration_compares_probability_and_accuracy_in_each_interval():
    found = _diagnosis.calibration([0.95, 1.0, 0.61, 0.7, 0.65], [True, True, False, True, False])
    low, high = found["bins"]
    assert (low["low"], low["high"], low["count"]) == (0.6, 0.7, 3)
    assert low["confidence"] == pytest.approx(1.96 / 3) and low["accuracy"] == pytest.approx(1 / 3)
    assert (high["count"], high["accuracy"]) == (2, 1.0)
    assert found["error"] == pytest.approx(0.6 * (1.96 - 1) / 3 + 0.4 * (1 - 0.975))
    assert _diagnosis.calibration([0.0], [False])["bins"][0]["low"] == 0.0
    assert _diagnosis.calibration([], []) == {}


def test_entity_errors_say_what_became_of_each_entity():
    true = [["B-per", "I-per", "O", "B-loc", "O", "B-org", "O"], ["B-per", "O"]]
    predicted = [["B-per", "O", "O", "B-org", "O", "B-org", "B-loc"], ["O", "O"]]
    found = {row["type"]: row for row in _diagnosis.entity_errors(true, predicted)}
    zero = dict.fromkeys(("true", "predicted", "correct", "wrong_type", "wrong_bounds", "missed", "spurious"), 0)
    assert found["per"] == zero | {"type": "per", "true": 2, "predicted": 1, "wrong_bounds": 1, "missed": 1}
    assert found["loc"] == zero | {"type": "loc", "true": 1, "predicted": 1, "wrong_type": 1, "spurious": 1}
    assert found["org"] == zero | {"type": "org", "true": 1, "predicted": 2, "correct": 1}
    low, high = _diagnosis.entity_interval(true * 20, predicted * 20)
    assert 0 < low < 2 / 8 < high < 0.5  # F1: 2 x 1 correct of 4 true and 4 predicted
    assert _diagnosis.entity_interval([["O"]], [["O"]]) == []


def test_tasks_diagnose_their_own_results():
    model = ModelConfig(encoder=StackConfig(), head=HeadConfig(kind="classes", classes=2))
    config = Config(model=model, task=TaskConfig(name="classification", classes=("no", "yes")))
    results = [{"label": "yes", "probability": 0.9}, {"label": "yes", "probability": 0.9}]
    found = classification.diagnose(config, results, [{"label": 0}, {"label": 1}])
    assert found["confusion"] == {"classes": ["no", "yes"], "counts": [[0, 1], [0, 1]]}
    assert found["calibration"]["error"] == pytest.approx(0.4)
    config = Config(model=model, task=TaskConfig(name="tagging", classes=("O", "B-x")))
    words = [{"label": "B-x", "probability": 0.5}, {"label": "O", "probability": 1.0}]
    found = tagging.diagnose(config, [words], [{"tags": [1, 1]}])
    assert found["confusion"]["counts"] == [[0, 0], [1, 1]] and found["entities"][0]["missed"] == 1


def test_sets_are_counted_by_class_and_all_decisions_are_calibrated():
    config = Config(task=TaskConfig(name="multi_label", classes=("a", "b", "c", "d")))
    results = [
        {"labels": ["a", "b"], "probabilities": {"a": 0.9, "b": 0.8, "c": 0.1, "d": 0.0}},
        {"labels": ["b"], "probabilities": {"a": 0.2, "b": 0.6, "c": 0.3, "d": 0.0}},
    ]
    found = multi_label.diagnose(config, results, [{"labels": (0,)}, {"labels": (1, 0)}])
    assert found["sets"] == [
        {"label": "a", "true": 2, "predicted": 1, "correct": 1},
        {"label": "b", "true": 1, "predicted": 2, "correct": 1},
    ]
    assert sum(each["count"] for each in found["calibration"]["bins"]) == 8
    (low,) = [each for each in found["calibration"]["bins"] if each["high"] == pytest.approx(0.8)]
    assert (low["count"], low["confidence"], low["accuracy"]) == (2, pytest.approx(0.8), 0.0)  # b is in, a is not
    sample = multi_label.TASK.sample(config, None, {"text": "x", "labels": (2, 0)}, None)
    assert sample.reference == "a,c"


def test_numbers_are_compared_in_units_and_in_groups_of_similar_predictions():
    config = Config(data=DataConfig(score_range=(0.0, 10.0)), task=TaskConfig(name="regression"))
    found = regression.diagnose(config, [2.0, 8.0, 4.0], [{"score": 0.1}, {"score": 0.6}, {"score": 0.5}])["numbers"]
    assert found["points"] == [[1.0, 2.0], [6.0, 8.0], [5.0, 4.0]] and found["examples"] == 3
    assert found["error"] == pytest.approx(2**0.5) and found["bias"] == pytest.approx(2 / 3)
    assert [group["predicted"] for group in found["groups"]] == [2.0, 4.0, 8.0]
    many = _diagnosis.number_errors(range(1000), [float(n // 100) for n in range(1000)])
    assert len(many["points"]) == 500 and many["points"] == sorted(many["points"])
    third = many["groups"][2]
    assert (third["count"], third["predicted"], third["true"]) == (100, 2.0, 249.5)
    assert third["deviation"] == pytest.approx(np.std(range(100)))
    assert _diagnosis.number_errors([], []) == {}


def test_errors_of_forecasts_are_means_by_step_and_by_channel_whatever_the_blocks():
    rng = np.random.default_rng(0)
    forecast, future, last = rng.normal(size=(5, 3, 2)), rng.normal(size=(5, 3, 2)), rng.normal(size=(5, 2))
    scale = np.array([2.0, 4.0])
    errors = _diagnosis.ForecastErrors(scale)
    for part in (slice(0, 2), slice(2, 5)):
        errors.add(forecast[part], future[part], last[part])
    found = errors.values(("x", "y"))
    error = (forecast - future) / scale
    np.testing.assert_allclose(found["steps"]["mse"], np.square(error).mean((0, 2)))
    np.testing.assert_allclose(found["steps"]["mae"], np.abs(error).mean((0, 2)))
    np.testing.assert_allclose(found["channels"]["mse"], np.square(error).mean((0, 1)))
    naive = np.square((last[:, None] - future) / scale)
    np.testing.assert_allclose(found["channels"]["naive_mse"], naive.mean((0, 1)))
    assert found["steps"]["step"] == [1, 2, 3] and found["channels"]["channel"] == ["x", "y"]
    long = _diagnosis.ForecastErrors(np.ones(1))
    long.add(np.zeros((1, 720, 1)), np.arange(720.0)[None, :, None], np.zeros((1, 1)))
    steps = long.values(("x",))["steps"]
    assert len(steps["step"]) == 100 and (steps["step"][0], steps["step"][-1]) == (1, 720)
    assert steps["mse"][-1] == 719.0**2
    assert _diagnosis.ForecastErrors(np.ones(1)).values(("x",)) == {}


def test_series_are_diagnosed_as_their_classes():
    model = ModelConfig(
        encoder=StackConfig(), series=SeriesConfig(channels=1), head=HeadConfig(kind="classes", classes=2)
    )
    config = Config(model=model, task=TaskConfig(name="series_classification", classes=("no", "yes")))
    given = []

    def forward(prompts, finish):
        given.extend(prompts)
        yield np.array([1, 0]), None, np.array([[0.2, 0.8], [0.7, 0.3]])

    predictor = SimpleNamespace(config=config, runner=SimpleNamespace(forward=forward))
    examples = [{"values": np.ones((2, 1)), "label": 0}, {"values": np.zeros((2, 1)), "label": 0}]
    found = series_classification.TASK.diagnose_series(predictor, examples)
    assert found["confusion"] == {"classes": ["no", "yes"], "counts": [[1, 1], [0, 0]]}
    assert found["calibration"]["error"] == pytest.approx(0.5 * 0.3 + 0.5 * 0.8)
    assert [len(prompt["source"]) for prompt in given] == [2, 2]
    assert series_classification.TASK.diagnose is None  # of lines of text
