import numpy as np
import pytest

from jaxformer.data.markov import Chain


def test_texts_have_the_chain_s_frequencies_and_its_entropies():
    chain = Chain(5, seed=0)
    np.testing.assert_allclose(chain.transitions.sum(axis=1), 1.0)
    np.testing.assert_allclose(chain.stationary @ chain.transitions, chain.stationary, atol=1e-12)
    text = chain.draw(np.random.default_rng(0), 4000, 12)
    assert (text.dtype, text.shape) == (np.int32, (4000, 12))
    first, second = text[:, :-1].ravel(), text[:, 1:].ravel()
    frequencies = [np.bincount(slot, minlength=5) / 4000 for slot in (text[:, 0], text[:, -1])]
    np.testing.assert_allclose(frequencies, [chain.stationary] * 2, atol=0.03)  # from the first token on
    assert np.mean(-np.log(chain.transitions[first, second])) == pytest.approx(chain.entropy_rate, abs=0.02)
    assert np.mean(-np.log(chain.stationary[second])) == pytest.approx(chain.entropy, abs=0.02)
    assert chain.entropy_rate < chain.entropy
    assert not np.allclose(Chain(5, seed=1).transitions, chain.transitions)
