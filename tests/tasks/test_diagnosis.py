"""Diagnosis of evaluations: confusion, calibration, errors with entities, worked out by hand."""

import pytest

from jaxformer.config import Config, HeadConfig, ModelConfig, StackConfig, TaskConfig
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
    # Tasks made of classification whose results are others have no diagnosis of classes.
    for task in (multi_label, regression, series_classification):
        assert task.TASK.diagnose is None
