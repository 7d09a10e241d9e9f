"""Models that translate or classify lines behind HTTP, and models that are not served."""

import threading

import pytest
from serving_client import Client, curls, together
from test_model import model

from jaxformer.errors import ConfigError
from jaxformer.serving import Limits, Server
from jaxformer.serving.worker import Worker


def classifier():
    return model("classification")


def same(results, expected):
    """Equal labels, and probabilities equal to rounding: a line alone is computed by another program."""
    assert [result["label"] for result in results] == [result["label"] for result in expected]
    for result, wanted in zip(results, expected, strict=True):
        assert result["probabilities"] == pytest.approx(wanted["probabilities"], rel=1e-5)
        assert result["probability"] == pytest.approx(wanted["probability"], rel=1e-5)


def test_classes_are_those_of_the_model():
    with Server(classifier(), "classes") as server:
        client = Client(server)
        expected = classifier().classify(["ab", "x"])
        status, answer = client.post("/v1/classify", {"input": ["ab", "x"], "model": "classes"})
        assert (status, answer) == (200, {"object": "list", "model": "classes", "results": expected})
        one, two = together(*[lambda text=text: client.post("/v1/classify", {"input": text}) for text in ("ab", "x")])
        same(one[1]["results"], expected[:1])
        same(two[1]["results"], expected[1:])
        assert client.post("/v1/classify", dict(curls())["/v1/classify"])[0] == 200
        for body, message in (
            ({}, "input: got none, expected a text"),
            ({"input": "a", "beams": 2}, "beams: got an unknown field"),
            ({"input": ["a", "x" * 60]}, "input: got text 2 with 38 tokens more than the model reads"),
            ({"input": ["a"] * 257}, "input: got 257 strings, expected at most 256"),
        ):
            status, answer = client.post("/v1/classify", body)
            assert status == 400 and answer["error"]["message"].startswith(message), answer
        assert client.post("/v1/completions", {"prompt": "a"})[0] == 404


def test_translations_are_those_of_the_model():
    with Server(model("translation"), "german") as server:
        for body in (dict(curls())["/v1/translate"], {"input": [""]}):
            status, answer = Client(server).post("/v1/translate", body)
            assert (status, answer["results"]) == (200, model("translation").translate(body["input"]))


def test_a_model_without_a_route_is_refused():
    with pytest.raises(ConfigError, match="serve: got a run of the task masked_lm, expected one that generates"):
        Server(model("masked_lm"), "x")


def test_lines_that_wait_are_run_together_and_each_gets_its_own_error():
    """While the first call runs, three arrive; they run as one, and then one by one, since a line of one is wrong."""
    runs, may_go = [], threading.Event()

    def function(lines):
        runs.append(list(lines))
        may_go.wait(20)
        if "bad" in lines:
            raise ConfigError("line: got bad")
        return [line.upper() for line in lines]

    worker = Worker(None, 3)
    worker.start()
    first = worker.call(function, ["a"])
    while not runs:
        pass
    others = [worker.call(function, lines) for lines in (["b"], ["bad"], ["c", "d"])]
    may_go.set()
    assert first.result(20) == ["A"]
    assert [others[0].result(20), others[2].result(20)] == [["B"], ["C", "D"]]
    with pytest.raises(ConfigError, match="got bad"):
        others[1].result(20)
    assert runs == [["a"], ["b", "bad", "c", "d"], ["b"], ["bad"], ["c", "d"]]
    worker.stop(1.0)


def test_limits_are_checked():
    with pytest.raises(ConfigError, match="--max-tokens: got 0, expected at least 1"):
        Limits(max_tokens=0)
    with pytest.raises(ConfigError, match="--request-timeout: got -1"):
        Limits(request_timeout=-1)
