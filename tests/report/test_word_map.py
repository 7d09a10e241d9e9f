"""The picture of word vectors."""

from __future__ import annotations

import numpy as np
import pytest

from jaxformer.config import ConfigError
from jaxformer.report import word_map


def test_components_are_the_eigenvectors_of_the_covariance():
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((30, 5)) * [0.1, 3.0, 0.2, 2.0, 0.1] + 7.0
    places, share = word_map.principal_components(vectors)
    values, directions = np.linalg.eigh(np.cov(vectors.T))
    expected = (vectors - vectors.mean(axis=0)) @ directions[:, [-1, -2]]
    np.testing.assert_allclose(np.abs(places), np.abs(expected), atol=1e-9)
    assert share == pytest.approx(values[-2:].sum() / values.sum())
    np.testing.assert_allclose(word_map.principal_components(vectors[::-1])[0][::-1], places, atol=1e-9)


def test_every_word_stands_at_its_place():
    vectors = np.array([[0.0, 0, 0], [4, 0, 0], [0, 2, 0], [4, 2, 0]])
    figure = word_map.word_map(vectors, ["a", "b$", "_c", "d"])
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == ["a", r"b\$", " _c", "d"]
    np.testing.assert_allclose([text.xy for text in axes.texts], [[-2, -1], [2, -1], [-2, 1], [2, 1]], atol=1e-12)
    assert axes.get_title() == "4 word vectors: 100% of their variance"
    with pytest.raises(ConfigError, match=r"got vectors of shape \(4, 3\) for 3 words"):
        word_map.word_map(vectors, ["a", "b", "c"])
