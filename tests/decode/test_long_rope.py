"""Decoding under LongRoPE is the whole pass; a text that would change its list of divisors is refused."""

import dataclasses

import jax
import numpy as np
import pytest
from builders import decoder, make
from test_generate import VOCABULARY

from jaxformer.config import AttentionConfig, ConfigError, DecodeConfig, EncodingConfig, RopeScalingConfig
from jaxformer.decode.batching import pad_batch
from jaxformer.decode.engine import Engine, Sampling
from jaxformer.decode.runner import Runner
from jaxformer.models import build

ORIGINAL = 8
SCALING = RopeScalingConfig("longrope", factor=4.0, original=ORIGINAL, short=(1.0, 2.5), long=(3.0, 40.0))


def config(**fields):
    encoding = EncodingConfig("rope", scaling=dataclasses.replace(SCALING, **fields))
    return decoder(layers=1, width=8, attention=AttentionConfig(heads=2, head_width=4), encoding=encoding)


@pytest.fixture(scope="module")
def runner():
    return Runner(*make(config()), dataclasses.replace(VOCABULARY, eos=()))


def prompt(size: int) -> dict[str, np.ndarray]:
    return {"target": np.random.default_rng(size).integers(3, 13, size).astype(np.int32)}


def test_steps_are_the_whole_pass_on_either_side_of_the_original_length(runner):
    """Rows of both kinds in one batch: 3 + 6 tokens, of which 8 are read, beside 9 + 6."""
    prompts = [prompt(3), prompt(ORIGINAL + 1)]
    found = [out[0] for out in runner.generate(prompts, DecodeConfig(max_length=6, batch=2))]
    texts = [np.concatenate([a["target"], b.tokens])[:-1] for a, b in zip(prompts, found, strict=True)]
    assert [len(text) for text in texts] == [ORIGINAL, ORIGINAL + 6]
    batch = pad_batch([{"target": text} for text in texts], 2, (0, 0))
    # The list of a row's own length alone decides: a model that has it at every length computes the same.
    same = ({}, {"long": SCALING.short}, {"short": SCALING.long})
    modules = [build.build(config(**fields)) for fields in same]
    logits = [np.asarray(jax.jit(module.apply)(runner.variables, batch)) for module in modules]
    for row, (text, out) in enumerate(zip(texts, found, strict=True)):
        whole, own, other = (logits[i][row, : len(text)] for i in (0, 1 + row, 2 - row))
        np.testing.assert_array_equal(whole, own)
        assert not np.allclose(whole, other, atol=1e-3)
        scores = np.asarray(jax.nn.log_softmax(whole[-6:, : VOCABULARY.size]))
        chosen = np.take_along_axis(scores, out.tokens[:, None], axis=1)
        np.testing.assert_array_equal(scores.max(axis=-1), chosen[:, 0])
        assert float(chosen.sum()) == pytest.approx(out.score, abs=1e-4)


CROSSINGS = [(3, 7, True), (8, 2, True), (3, 6, False), (8, 1, False), (9, 9, False)]


@pytest.mark.parametrize(("size", "new", "refused"), CROSSINGS)
def test_a_text_that_passes_the_original_length_is_refused(runner, size, new, refused):
    engine = Engine(runner, DecodeConfig(max_length=new), 9, 20)
    if not refused:
        assert engine.job(prompt(size), Sampling(), new, print).max_new == new
        return
    message = rf"{size} tokens with up to {new} new ones, .* LongRoPE's 8 .* at most {9 - size} new tokens"
    with pytest.raises(ConfigError, match=message):
        engine.job(prompt(size), Sampling(), new, print)
    for method in ("greedy", "beam"):
        with pytest.raises(ConfigError, match=message):
            runner.generate([prompt(12), prompt(size)], DecodeConfig(method=method, max_length=new))


def test_speculation_is_refused(runner):
    with pytest.raises(ConfigError, match="got longrope scaling of the encoding"):
        runner.generate([prompt(9)], DecodeConfig(max_length=4, speculate=2))
