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
    return jax.jit(lambda batch, lengths, indices, key: decode(MODEL, batch, config, eos, PAD, lengths, indices, key))


def run(batch, config, max_lengths=None, row_indices=None, eos=EOS, seed=0):
    return jax.device_get(compiled(config, eos)(batch, max_lengths, row_indices, jax.random.key(seed)))


def by_hand(prompt, length, eos=EOS):
    out = []
    while len(out) < length and not (out and out[-1] in eos):
        out.append(int(MODEL.log_probs(prompt, [*out, 0])[-1].argmax()))
    return out


def test_greedy_takes_the_most_probable_token_each_time():
    result = run(batch_of(*PROMPTS), GREEDY)
    for row, prompt in enumerate(PROMPTS):
        expected = by_hand(prompt, 8)
        assert result.lengths[row, 0] == len(expected)
        assert result.tokens[row, 0].tolist() == expected + [PAD] * (8 - len(expected))
        assert result.scores[row, 0] == pytest.approx(MODEL.score(prompt, expected), abs=1e-4)
    assert len(set(result.lengths[:, 0])) > 1  # some rows end early


def test_ties_go_to_the_lowest_id():
    class Flat(PrefixModel):
        def __init__(self):
            super().__init__(vocab=5)
            self.table = jnp.zeros_like(self.table)

    result = decode(Flat(), batch_of([1]), GREEDY, (4,), PAD)
    assert result.tokens[0, 0].tolist() == [0] * 8


def test_maximum_lengths_are_per_row_and_an_empty_row_gets_no_tokens():
    result = run(batch_of([1], [1], [1], [1]), GREEDY, max_lengths=jnp.array([0, 1, 3, 99]), eos=())
    assert result.lengths[:, 0].tolist() == [0, 1, 3, 8]
    for row in range(4):
        size = result.lengths[row, 0]
        assert result.tokens[row, 0, :size].tolist() == result.tokens[3, 0, :size].tolist()
        assert (result.tokens[row, 0, size:] == PAD).all()
    assert result.scores[0, 0] == 0.0


def test_any_of_several_end_tokens_ends_a_row():
    result = run(batch_of([1], [2, 3], [3]), GREEDY, eos=(0, 2))
    for row, prompt in enumerate(([1], [2, 3], [3])):
        expected = by_hand(prompt, 8, eos=(0, 2))
        assert result.tokens[row, 0, : result.lengths[row, 0]].tolist() == expected


def test_draws_follow_the_distribution():
    config = dataclasses.replace(SAMPLE, max_length=1, hypotheses=4000)
    result = run(batch_of([1], [2, 3]), config)
    for row, prompt in enumerate(([1], [2, 3])):
        probs = np.exp(MODEL.log_probs(prompt, [0])[0])
        counts = np.bincount(result.tokens[row, :, 0], minlength=5)
        chi_square = ((counts - 4000 * probs) ** 2 / (4000 * probs)).sum()
        assert chi_square < 18.5  # 4 degrees of freedom: exceeded once in a thousand
        scores = np.log(probs)[result.tokens[row, :, 0]]
        np.testing.assert_allclose(result.scores[row], scores, atol=1e-4)


def test_steps_draw_independently():
    uniform = PrefixModel(vocab=5)
    uniform.table = jnp.zeros_like(uniform.table)
    result = decode(uniform, batch_of([1]), dataclasses.replace(SAMPLE, max_length=2, hypotheses=2000), (), PAD)
    assert np.mean(result.tokens[0, :, 0] == result.tokens[0, :, 1]) == pytest.approx(1 / 5, abs=0.04)


def test_draws_follow_the_truncated_distribution_but_are_scored_by_the_model():
    config = dataclasses.replace(SAMPLE, max_length=1, hypotheses=4000, temperature=0.7, top_k=3)
    result = run(batch_of([1]), config)
    log_probs = MODEL.log_probs([1], [0])[0]
    order = np.argsort(-log_probs)[:3]
    probs = np.exp(log_probs[order] / 0.7)
    probs /= probs.sum()
    counts = np.bincount(result.tokens[0, :, 0], minlength=5)
    assert counts.sum() == counts[order].sum()
    chi_square = ((counts[order] - 4000 * probs) ** 2 / (4000 * probs)).sum()
    assert chi_square < 13.8  # 2 degrees of freedom
    np.testing.assert_allclose(result.scores[0], log_probs[result.tokens[0, :, 0]], atol=1e-4)


def test_a_draw_does_not_depend_on_the_batch():
    prompts = PROMPTS
    together = run(batch_of(*prompts), SAMPLE, row_indices=jnp.array([10, 11, 12, 13]))
    shuffled = run(batch_of(*(prompts[i] for i in (3, 1, 0, 2))), SAMPLE, row_indices=jnp.array([13, 11, 10, 12]))
    alone = run(batch_of(prompts[2]), SAMPLE, row_indices=jnp.array([12]))
    padded = run(batch_of(prompts[2], rows=4, buckets=(5,)), SAMPLE, row_indices=jnp.array([12, 0, 0, 0]))
    for row, i in enumerate((3, 1, 0, 2)):
        assert shuffled.tokens[row].tolist() == together.tokens[i].tolist()
    for result in (alone, padded):
        assert result.tokens[0].tolist() == together.tokens[2].tolist()
        assert result.scores[0] == pytest.approx(together.scores[2])
    renamed = run(batch_of(*prompts), SAMPLE, row_indices=jnp.array([20, 21, 22, 23]))
    reseeded = run(batch_of(*prompts), SAMPLE, row_indices=jnp.array([10, 11, 12, 13]), seed=1)
    assert renamed.tokens.tolist() != together.tokens.tolist()
    assert reseeded.tokens.tolist() != together.tokens.tolist()


def test_more_draws_keep_the_first_ones():
    indices = jnp.arange(4)
    one = run(batch_of(*PROMPTS), SAMPLE, row_indices=indices)
    four = run(batch_of(*PROMPTS), dataclasses.replace(SAMPLE, hypotheses=4), row_indices=indices)
    assert four.tokens.shape == (4, 4, 6)
    assert four.tokens[:, 0].tolist() == one.tokens[:, 0].tolist()
    assert len({tuple(tokens) for tokens in four.tokens[0].tolist()}) > 1


def test_a_strong_repetition_penalty_forbids_tokens_of_prompt_and_output():
    positive = PrefixModel(vocab=5, seed=3)
    positive.table = jnp.abs(positive.table) + 1.0
    config = dataclasses.replace(GREEDY, repetition_penalty=1e6, max_length=3)
    result = decode(positive, batch_of([1, 4]), config, (), PAD)
    assert sorted(result.tokens[0, 0].tolist()) == [0, 2, 3]


def test_nearly_zero_temperature_is_greedy():
    cold = run(batch_of(*PROMPTS), dataclasses.replace(GREEDY, method="sample", temperature=1e-4))
    greedy = run(batch_of(*PROMPTS), GREEDY)
    assert cold.tokens.tolist() == greedy.tokens.tolist()
    np.testing.assert_allclose(cold.scores, greedy.scores, rtol=1e-6)
