"""The load test of benchmarks/serving.py, against a server in this process."""

import importlib.util
import sys
from pathlib import Path

import pytest
from serving_client import SMALL, language_model

from jaxformer.serving import Server

FILE = Path(__file__).parents[2] / "benchmarks" / "serving.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("serving_load", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_cases_are_measured_and_answers_compared(script):
    """With more clients than rows; every answer is the model's own text, and a server of another model is noticed."""
    assert [request.tokens for request in script.requests_of(["ab", "c"], 7, 12)] == [3, 6, 12, 3, 6, 12, 3]
    model, requests = language_model(), [script.Request(prompt, 6) for prompt in ("ab", "c", "ab", "x", "y", "z", "zz")]
    with Server(model, "bytes", limits=SMALL) as server:
        port = server.server_address[1]
        cases = [
            ("alone", lambda request: script.from_model(model, request), 1),
            ("server", lambda request: script.from_server(port, request), 6),
        ]
        rows, different = script.measure(cases, requests, 1)
        assert different == 0
        assert [(row["by"], row["clients"], row["requests"]) for row in rows] == [("alone", 1, 7), ("server", 6, 7)]
        for row in rows:
            assert 0 < row["first_p50"] <= row["first_p99"] <= row["whole_p99"]
            assert 0 < row["whole_p50"] <= row["whole_p99"]
            assert row["tokens_per_second"] > 0
        assert script.lines_of(rows)[2].startswith("| alone | 1 | ")
        other = ("other", lambda request: script.Answer("?", 1, 0.1, 0.1), 1)
        assert script.measure([cases[0], other], requests, 1)[1] == 7
        with pytest.raises(RuntimeError, match="a request failed: status 400"):
            script.load(lambda request: script.from_server(port, request._replace(tokens=99)), requests, 2)


def test_percentiles_are_values_that_were_measured(script):
    assert [script.percentile([3.0, 1.0, 2.0, 4.0], percent) for percent in (25, 50, 99)] == [1.0, 2.0, 4.0]
    assert script.percentile([5.0], 1) == 5.0
