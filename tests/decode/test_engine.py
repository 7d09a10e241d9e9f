"""Jobs that arrive at any time get the tokens that each gets alone, whatever else is decoded with it."""

import dataclasses

import numpy as np
import pytest
from test_generate import METHODS, VOCABULARY, make_prompts, model

from jaxformer.config import ConfigError, DecodeConfig
from jaxformer.decode import engine as engines
from jaxformer.decode.engine import Engine, Sampling
from jaxformer.decode.runner import Runner

SETTINGS = [
    Sampling(),
    Sampling(temperature=0.7, seed=5),
    Sampling(temperature=1.5, top_k=3, seed=2**32 - 1),
    Sampling(temperature=1.0, top_p=0.6, seed=7, draw=1),
    Sampling(temperature=1.0, min_p=0.2, top_k=4, top_p=0.9, seed=8),
    Sampling(top_k=1, top_p=0.1, seed=3),
]
MAX_NEW = 8


def runner(name, **fields):
    return Runner(*model(name), VOCABULARY, **fields)


def alone(name, prompt, sampling, options=None, max_new=MAX_NEW, **fields):
    """Tokens and score of `generate` with the same settings."""
    greedy = sampling.temperature == 0
    own = {} if greedy else {key: value for key, value in sampling._asdict().items() if key not in ("draw", "seed")}
    options = dataclasses.replace(
        options or DecodeConfig(),
        method="greedy" if greedy else "sample",
        hypotheses=1 if greedy else sampling.draw + 1,
        max_length=max_new,
        seed=sampling.seed,
        **own,
    )
    best = runner(name, **fields).generate([prompt], options)[0][0 if greedy else sampling.draw]
    return best.tokens.tolist(), best.score


class Output:
    """The pieces of a job, put together."""

    def __init__(self):
        self.tokens, self.score, self.finished, self.pieces = [], 0.0, False, 0

    def __call__(self, piece):
        assert not self.finished
        self.tokens += piece.tokens.tolist()
        self.score += float(piece.log_probs.sum())
        self.finished, self.pieces = piece.finished, self.pieces + 1


def run(engine, prompts, settings, arrivals=None, max_new=None):
    """The outputs of jobs that arrive before steps `arrivals`."""
    outputs = [Output() for _ in prompts]
    arrivals, step = arrivals or [0] * len(prompts), 0
    while step <= max(arrivals) or engine.has_jobs:
        for index, arrival in enumerate(arrivals):
            if arrival == step:
                engine.submit(engine.job(prompts[index], settings[index], max_new, outputs[index]))
        engine.step()
        step += 1
        assert step < 500
    assert all(output.finished for output in outputs)
    return outputs


@pytest.fixture(scope="module", autouse=True)
def _one_token_a_launch():
    """So that jobs arrive in the middle of others, however fast the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "next_steps", lambda steps, seconds: 1)
        yield


@pytest.fixture(scope="module")
def decoder():
    return Engine(runner("decoder"), DecodeConfig(), MAX_NEW, max_rows=4)


def test_jobs_with_other_settings_and_arrivals_do_not_change_each_other(decoder):
    """Seven jobs on up to four rows, some of which arrive when others are decoded: as `generate` of each alone."""
    prompts = make_prompts("decoder")
    outputs = run(decoder, prompts, SETTINGS, [0, 2, 0, 3, 5, 3])
    for prompt, sampling, output in zip(prompts, SETTINGS, outputs, strict=True):
        tokens, score = alone("decoder", prompt, sampling)
        assert output.tokens == tokens, sampling
        assert output.score == pytest.approx(score, abs=1e-3)
    assert len({tuple(output.tokens) for output in outputs}) > 4, "the settings matter"
    assert max(output.pieces for output in outputs) > 4, "tokens come out as they are chosen"
