import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_toys import PrefixModel, batch_of, decode

from jaxformer.config import DecodeConfig

EOS, PAD = (0,), 5
MODEL = PrefixModel(vocab=5, seed=3)
PROMPTS = ([1], [2, 3], [4, 4, 1], [3, 2])
GREEDY = DecodeConfig(method="greedy", max_length=8)
SAMPLE = DecodeConfig(method="sample", max_length=6, hypotheses=1)


@functools.lru_cache
def compiled(config, eos):
    return jax.jit(lambda batch, limit, rows, key: decode(MODEL, batch, config, eos, PAD, limit, rows, key))


def run(batch, config, limit=None, rows=None, eos=EOS, seed=0):
    return jax.device_get(compiled(config, eos)(batch, limit, rows, jax.random.key(seed)))


def by_hand(prompt, length, eos=EOS):
    out = []
    while len(out) < length and not (out and out[-1] in eos):
        out.append(int(MODEL.log_probs(prompt, [*out, 0])[-1].argmax()))
    return out


def test_greedy_takes_the_most_probable_token_each_time():
    found = run(batch_of(*PROMPTS), GREEDY)
    for row, prompt in enumerate(PROMPTS):
        wanted = by_hand(prompt, 8)
        assert found.lengths[row, 0] == len(wanted)
        assert found.tokens[row, 0].tolist() == wanted + [PAD] * (8 - len(wanted))
        assert found.scores[row, 0] == pytest.approx(MODEL.score(prompt, wanted), abs=1e-4)
    assert len(set(found.lengths[:, 0])) > 1  # otherwise nothing was shown about rows that end early


def test_ties_go_to_the_lowest_id():
    class Flat(PrefixModel):
        def __init__(self):
            super().__init__(vocab=5)
            self.table = jnp.zeros_like(self.table)

    found = decode(Flat(), batch_of([1]), GREEDY, (4,), PAD)
    assert found.tokens[0, 0].tolist() == [0] * 8


def test_limits_are_per_row_and_an_empty_row_gets_nothing():
    found = run(batch_of([1], [1], [1], [1]), GREEDY, limit=jnp.array([0, 1, 3, 99]), eos=())
    assert found.lengths[:, 0].tolist() == [0, 1, 3, 8]
    for row in range(4):
        size = found.lengths[row, 0]
        assert found.tokens[row, 0, :size].tolist() == found.tokens[3, 0, :size].tolist()
        assert (found.tokens[row, 0, size:] == PAD).all()
    assert found.scores[0, 0] == 0.0


def test_any_of_several_end_tokens_ends_a_row():
    found = run(batch_of([1], [2, 3], [3]), GREEDY, eos=(0, 2))
    for row, prompt in enumerate(([1], [2, 3], [3])):
        wanted = by_hand(prompt, 8, eos=(0, 2))
        assert found.tokens[row, 0, : found.lengths[row, 0]].tolist() == wanted


def test_draws_follow_the_distribution():
    config = dataclasses.replace(SAMPLE, max_length=1, hypotheses=4000)
    found = run(batch_of([1], [2, 3]), config)
    for row, prompt in enumerate(([1], [2, 3])):
        probs = np.exp(MODEL.log_probs(prompt, [0])[0])
        counts = np.bincount(found.tokens[row, :, 0], minlength=5)
        chi_square = ((counts - 4000 * probs) ** 2 / (4000 * probs)).sum()
        assert chi_square < 18.5  # 4 degrees of freedom: exceeded once in a thousand
        scores = np.log(probs)[found.tokens[row, :, 0]]
        np.testing.assert_allclose(found.scores[row], scores, atol=1e-4)


def test_every_step_draws_anew():
    level = PrefixModel(vocab=5)
    level.table = jnp.zeros_like(level.table)
    found = decode(level, batch_of([1]), dataclasses.replace(SAMPLE, max_length=2, hypotheses=2000), (), PAD)
    assert np.mean(found.tokens[0, :, 0] == found.tokens[0, :, 1]) == pytest.approx(1 / 5, abs=0.04)


def test_draws_follow_the_warped_distribution_but_are_scored_by_the_model():
    config = dataclasses.replace(SAMPLE, max_length=1, hypotheses=4000, temperature=0.7, top_k=3)
    found = run(batch_of([1]), config)
    log_probs = MODEL.log_probs([1], [0])[0]
    order = np.argsort(-log_probs)[:3]
    probs = np.exp(log_probs[order] / 0.7)
    probs /= probs.sum()
    counts = np.bincount(found.tokens[0, :, 0], minlength=5)
    assert counts.sum() == counts[order].sum()
    chi_square = ((counts[order] - 4000 * probs) ** 2 / (4000 * probs)).sum()
    assert chi_square < 13.8  # 2 degrees of freedom
    np.testing.assert_allclose(found.scores[0], log_probs[found.tokens[0, :, 0]], atol=1e-4)


def test_a_draw_does_not_depend_on_the_batch():
    prompts = PROMPTS
    together = run(batch_of(*prompts), SAMPLE, rows=jnp.array([10, 11, 12, 13]))
    shuffled = run(batch_of(*(prompts[i] for i in (3, 1, 0, 2))), SAMPLE, rows=jnp.array([13, 11, 10, 12]))
    alone = run(batch_of(prompts[2]), SAMPLE, rows=jnp.array([12]))
    padded = run(batch_of(prompts[2], rows=4, buckets=(5,)), SAMPLE, rows=jnp.array([12, 0, 0, 0]))
    for place, i in enumerate((3, 1, 0, 2)):
        assert shuffled.tokens[place].tolist() == together.tokens[i].tolist()
    for other in (alone, padded):
        assert other.tokens[0].tolist() == together.tokens[2].tolist()
        assert other.scores[0] == pytest.approx(together.scores[2])
    renamed = run(batch_of(*prompts), SAMPLE, rows=jnp.array([20, 21, 22, 23]))
    reseeded = run(batch_of(*prompts), SAMPLE, rows=jnp.array([10, 11, 12, 13]), seed=1)
    assert renamed.tokens.tolist() != together.tokens.tolist()
    assert reseeded.tokens.tolist() != together.tokens.tolist()


def test_more_draws_keep_the_first_ones():
    rows = jnp.arange(4)
    one = run(batch_of(*PROMPTS), SAMPLE, rows=rows)
    four = run(batch_of(*PROMPTS), dataclasses.replace(SAMPLE, hypotheses=4), rows=rows)
    assert four.tokens.shape == (4, 4, 6)
    assert four.tokens[:, 0].tolist() == one.tokens[:, 0].tolist()
    assert len({tuple(tokens) for tokens in four.tokens[0].tolist()}) > 1


def test_a_strong_repetition_penalty_forbids_what_was_said_in_prompt_and_output():
    positive = PrefixModel(vocab=5, seed=3)
    positive.table = jnp.abs(positive.table) + 1.0
    config = dataclasses.replace(GREEDY, repetition_penalty=1e6, max_length=3)
    found = decode(positive, batch_of([1, 4]), config, (), PAD)
    assert sorted(found.tokens[0, 0].tolist()) == [0, 2, 3]


def test_nearly_zero_temperature_is_greedy():
    cold = run(batch_of(*PROMPTS), dataclasses.replace(GREEDY, method="sample", temperature=1e-4))
    greedy = run(batch_of(*PROMPTS), GREEDY)
    assert cold.tokens.tolist() == greedy.tokens.tolist()
    np.testing.assert_allclose(cold.scores, greedy.scores, rtol=1e-6)
