"""Early stopping: what counts as better, what is kept, and which results are those of a finished run."""

import dataclasses

import numpy as np
import pytest
from test_loop import recipe

from jaxformer.config import CheckpointConfig, ConfigError, overrides
from jaxformer.train import results
from jaxformer.train.patience import Patience


@pytest.mark.parametrize(
    ("mode", "values", "waited"),
    [
        ("min", [3.0, 2.0, 2.0, 2.5], [0, 0, 1, 2]),
        ("max", [3.0, 2.0, 4.0, 4.0], [0, 1, 0, 1]),
        ("min", [np.nan, np.inf, 5.0, -np.inf, 4.0], [1, 2, 0, 1, 0]),
    ],
)
def test_only_a_better_finite_value_ends_the_wait(mode, values, waited):
    config, state, found = CheckpointConfig(metric="f1", mode=mode), None, []
    for value in values:
        patience = Patience(2, config, state)  # resumed before every evaluation
        patience.add({"f1": value, "loss": 0.0})
        state = patience.state()
        found.append(patience.waited)
        assert patience.is_exhausted == (patience.waited >= 2)
    assert found == waited


def test_without_a_limit_it_never_ends_and_needs_no_measure():
    patience = Patience(None, CheckpointConfig(metric="bleu"))
    patience.add({"loss": 1.0})
    assert not patience.is_exhausted
    with pytest.raises(ConfigError, match=r"metric: got 'bleu', expected a measure .*\(loss\) for train.patience"):
        Patience(3, CheckpointConfig(metric="bleu")).add({"loss": 1.0})


def test_a_result_of_an_early_stop_is_one_of_a_run_that_has_patience():
    config = recipe(train__patience=2)
    record = results.to_record(6, config, {"loss": 1.0})
    assert record["stopped_early"] is True and results.mismatch(record, config) == ""
    assert "stopped_early" not in results.to_record(12, config, {})
    assert "of step 6" in results.mismatch({**record, "stopped_early": False}, config)
    other = dataclasses.replace(config, train=dataclasses.replace(config.train, patience=None))
    assert "of step 6" in results.mismatch(record, other)
    assert "of step 13" in results.mismatch({**record, "step": 13}, config)
    assert overrides.resume_conflicts(other, config) == []


def test_patience_without_evaluations_is_refused():
    with pytest.raises(ConfigError, match="config.train.patience: got 3, expected None with train.evaluate_every 0"):
        recipe(train__patience=3, train__evaluate_every=0)
