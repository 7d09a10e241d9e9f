"""Jobs that arrive at any time get the tokens that each gets alone, whatever else is decoded with it."""

import dataclasses

import jax
import numpy as np
import pytest
from test_generate import VOCABULARY, make_prompts, model

from jaxformer.config import ConfigError, DecodeConfig
from jaxformer.decode import engine as engines
from jaxformer.decode import logits_processors
from jaxformer.decode.compiled import CompiledDecoder
from jaxformer.decode.engine import Engine, Sampling
from jaxformer.decode.runner import Runner
from jaxformer.decode.search.base import RowSampling
from jaxformer.decode.search.per_row import process_rows

GREEDY, WARM, CUT = Sampling(), Sampling(0.7, seed=2**32 - 1), Sampling(1.5, top_k=4, top_p=0.9, min_p=0.01, seed=7)
SETTINGS = [GREEDY, CUT, CUT._replace(seed=8), CUT, GREEDY, CUT]
MAX_NEW, MAX_PROMPT = 8, 7


def runner(name, **fields):
    return Runner(*model(name), VOCABULARY, **fields)


def alone(name, prompts, settings):
    """The tokens of `generate` with the same settings, as if each prompt were the only one."""
    tokens = [[]] * len(prompts)
    for sampling in set(settings):  # the seed is no part of the programs
        method = {"method": "sample", **sampling._asdict()} if sampling.temperature else {}
        found = runner(name).generate(prompts, DecodeConfig(max_length=MAX_NEW, batch=8, **method), [0] * len(prompts))
        for index, one in enumerate(settings):
            tokens[index] = found[index][0].tokens.tolist() if one == sampling else tokens[index]
    return tokens


class Output:
    """The pieces of a job, put together."""

    def __init__(self):
        self.tokens, self.finished, self.pieces = [], False, 0

    def __call__(self, piece):
        assert not self.finished
        self.tokens += piece.tokens.tolist()
        self.finished, self.pieces = piece.finished, self.pieces + 1


def run(engine, prompts, settings, arrivals, cancelled=()):
    """The outputs of jobs that arrive before steps `arrivals`; some are cancelled a step after they got a row."""
    outputs, numbers, step = [Output() for _ in prompts], {}, 0
    while step <= max(arrivals) or engine.has_jobs:
        for index, arrival in enumerate(arrivals):
            if arrival == step:
                numbers[index] = engine.submit(engine.job(prompts[index], settings[index], None, outputs[index]))
        engine.step()
        for index in cancelled:
            if outputs[index].pieces:
                engine.cancel(numbers[index])
        step += 1
        assert step < 500
    assert engine.active == len(engine.waiting) == 0
    return outputs


@pytest.fixture(scope="module", autouse=True)
def _one_token_a_launch():
    """So that jobs arrive in the middle of others, however fast the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "next_steps", lambda steps, seconds: 1)
        yield


@pytest.fixture(scope="module")
def decoder():
    engine = Engine(runner("decoder"), DecodeConfig(max_length=MAX_NEW), MAX_NEW, MAX_PROMPT, rows=3)
    engine.warm_up(make_prompts("decoder", 1)[0])
    return engine


def programs():
    names = ("prefill", "decode_steps", "refill_rows", "grow", "compact", "hypotheses")
    return {name: getattr(CompiledDecoder, name).jitted._cache_size() for name in names}


def test_jobs_with_other_settings_and_arrivals_do_not_change_each_other(decoder):
    """Six jobs on three rows, some of which arrive while others are decoded. What they need has been compiled."""
    prompts, before = make_prompts("decoder"), programs()
    outputs = run(decoder, prompts, SETTINGS, [0, 2, 0, 3, 5, 3])
    assert programs() == before
    found = [output.tokens for output in outputs]
    assert found == alone("decoder", prompts, SETTINGS)
    assert all(output.finished for output in outputs)
    assert len(set(map(tuple, found))) > 4, "the settings matter"
    assert max(output.pieces for output in outputs) > 4, "tokens come out as they are chosen"
    again = run(decoder, prompts[::-1], SETTINGS[::-1], [0] * 6)
    assert [output.tokens for output in again] == found[::-1]


def test_a_cancelled_job_gives_its_row_to_the_next(decoder):
    prompts = make_prompts("decoder")
    outputs = run(decoder, prompts, SETTINGS, [0] * 6, cancelled=[0, 1, 2])
    assert [output.finished for output in outputs] == [False] * 3 + [True] * 3
    expected = alone("decoder", prompts, SETTINGS)
    assert [output.tokens for output in outputs[3:]] == expected[3:]
    run(decoder, prompts[:3], SETTINGS[:3], [0, 1, 3], cancelled=[0, 1, 2])
    assert [output.tokens for output in run(decoder, prompts, SETTINGS, [0] * 6)] == expected, "after none was left"


def test_longer_prompts_get_a_batch_of_their_own(monkeypatch):
    """Widths 2 and 7, and prompts of 1, 3, 5, 7, 2, 4 tokens on a row of each."""
    prompts = make_prompts("decoder")
    monkeypatch.setattr(engines, "MIN_WIDTH", 2)
    engine = Engine(runner("decoder"), DecodeConfig(max_length=MAX_NEW), MAX_NEW, MAX_PROMPT, rows=1)
    assert engine.widths == (2, 7)
    assert [engine.job(prompt, GREEDY, None, print).width for prompt in prompts] == [2, 7, 7, 7, 2, 7]
    outputs = run(engine, prompts, [GREEDY] * 6, [0, 0, 1, 0, 2, 4])
    assert [output.tokens for output in outputs] == alone("decoder", prompts, [GREEDY] * 6)


def test_rows_have_the_processors_that_a_batch_with_their_settings_has():
    logits = np.random.default_rng(1).normal(size=(4, 50), scale=3).astype(np.float32)
    settings = [GREEDY, WARM, CUT, Sampling(2.0, top_p=0.7)]
    rows = RowSampling(*map(np.asarray, zip(*settings, strict=True)))
    configs = [DecodeConfig(method="sample", **sampling._asdict()) for sampling in settings[1:]]

    @jax.jit
    def processed(logits, rows):
        batches = [logits_processors.process_for_sampling(config, logits) for config in configs]
        return process_rows(logits, rows, rows.temperature > 0), batches

    found, batches = jax.device_get(processed(logits, rows))
    for row, batch in enumerate(batches, 1):
        np.testing.assert_array_equal(found[row], batch[row])


def test_prompts_that_do_not_fit_are_refused():
    few = dataclasses.replace(runner("decoder"), max_target_length=6)
    engine = Engine(few, DecodeConfig(max_length=9), 8, 10)
    prompt = {"target": np.ones(5, np.int32)}
    assert engine.max_new == 6
    assert engine.job(prompt, Sampling(), None, print).max_new == 2, "as many as there are positions for"
    assert engine.job(prompt, Sampling(), 2, print).max_new == 2
    with pytest.raises(engines.PromptTooLong, match="got 5 tokens and up to 3 new ones, expected at most 7 together"):
        engine.job(prompt, Sampling(), 3, print)
    with pytest.raises(engines.PromptTooLong, match="got 7 tokens, expected at most 6; shorten it"):
        engine.job({"target": np.ones(7, np.int32)}, Sampling(), None, print)
    with pytest.raises(ConfigError, match="got token 99 to force or ban"):
        Engine(few, DecodeConfig(suppress=(99,)), 8, 10)
