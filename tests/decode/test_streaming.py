"""Streaming gives the tokens of `generate`, in pieces, and stops where its reader stops."""

import dataclasses

import numpy as np
import pytest
from test_generate import METHODS, VOCABULARY, model

from jaxformer.config import ConfigError, DecodeConfig
from jaxformer.decode import cache_schedule, streaming
from jaxformer.decode.runner import Runner
from jaxformer.decode.streaming import next_steps, stream

PROMPTS = {"decoder": [{"target": [1, 5, 9]}], "toy": [{"target": [1, 5, 9]}]}
"""By model; tests/test_model.py streams those of other families."""


def runner(name):
    return Runner(*model(name), VOCABULARY)


def joined(pieces):
    return np.concatenate(list(pieces)).tolist()


@pytest.mark.parametrize(("name", "method"), [("decoder", "sample"), ("toy", "greedy")])
def test_the_pieces_add_up_to_generate(name, method, monkeypatch):
    """Whatever the number of tokens in a piece, and where the cache grows between two pieces."""
    monkeypatch.setattr(cache_schedule, "INITIAL_NEW_TOKENS", 4 if name == "decoder" else 64)
    options = dataclasses.replace(METHODS[method], seed=3)
    for prompt in PROMPTS[name]:
        (expected,) = runner(name).generate([prompt], options)[0]
        for steps in (1, 3, None):
            pieces = list(stream(runner(name), prompt, options, steps=steps))
            assert joined(pieces) == expected.tokens.tolist()
            assert all(len(piece) for piece in pieces)
            if steps is not None:  # the prefill chooses a token, and each launch chooses as many
                assert len(pieces[0]) == min(1 + steps, len(expected.tokens))
                assert all(len(piece) <= steps for piece in pieces[1:])


def test_nothing_runs_after_the_reader_has_stopped(monkeypatch):
    launches = []
    launch = streaming.ActiveBatch.launch
    monkeypatch.setattr(
        streaming.ActiveBatch, "launch", lambda *arguments: launches.append(arguments[2:]) or launch(*arguments)
    )
    options = dataclasses.replace(METHODS["sample"], seed=3)
    pieces = stream(runner("decoder"), PROMPTS["decoder"][0], options, steps=1)
    assert launches == [], "nothing is computed before the first read"
    next(pieces)
    next(pieces)
    assert launches == [(1,), (1,)]
    pieces.close()
    assert list(pieces) == []
    assert len(launches) == 2


def test_wrong_options_are_refused_before_the_first_token():
    for options, message in (
        (METHODS["beam"], "decode.method: got beam, expected greedy or sample to stream"),
        (DecodeConfig(method="sample", hypotheses=2), "decode.hypotheses: got 2, expected 1 to stream"),
        (DecodeConfig(suppress=(99,)), "got token 99 to force or ban"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            stream(runner("decoder"), {"target": [1]}, options)
        assert "\n" not in str(error.value)


def test_a_launch_takes_as_many_steps_as_fit_into_the_latency():
    latency = streaming.LATENCY_SECONDS
    assert next_steps(4, latency / 10) == 8, "40 fit, and a launch may only double"
    assert next_steps(8, latency) == 8
    assert next_steps(8, 2 * latency) == 4
    assert next_steps(1, 100 * latency) == 1
