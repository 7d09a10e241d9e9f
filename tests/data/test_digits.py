"""The digits: patches that put together are the image, splits that share none, and captions that say what is there."""

import builtins

import numpy as np
import pytest

from jaxformer.config import ConfigError, DataConfig
from jaxformer.data import sources
from jaxformer.data.sources import digits

IMAGES = np.random.default_rng(0).integers(0, 17, size=(1797, 8, 8)).astype(float)
LABELS = np.random.default_rng(1).integers(0, 10, size=1797)


@pytest.fixture(autouse=True)
def images(monkeypatch):
    """Random images in place of scikit-learn's, which the tests do not need."""
    monkeypatch.setattr(digits, "_load", lambda: (IMAGES, LABELS))


def build(name=""):
    return sources.build(DataConfig(source="digits", name=name))


@pytest.mark.parametrize("side", [1, 2, 4, 8])
def test_patches_are_squares_row_by_row(side):
    image = IMAGES[0][:8]
    found = digits.cut_image(image, side)
    expected = [
        image[row : row + side, column : column + side].reshape(-1)
        for row in range(0, 8, side)
        for column in range(0, 8, side)
    ]
    np.testing.assert_array_equal(found, expected)


def test_every_image_is_in_one_split():
    data = build("8")
    rows = [tuple(part[i]["values"][0]) for part in data.splits.values() for i in range(len(part))]
    assert sorted(rows) == sorted(tuple(image.reshape(-1)) for image in IMAGES)
    assert [len(data.splits[name]) for name in ("train", "validation", "test")] == [1197, 300, 300]
    assert data.classes == tuple("0123456789")
    pixels = np.array([data.splits["train"][i]["values"][0] for i in range(1197)])
    np.testing.assert_allclose(data.channels.means, pixels.mean(axis=0))


def test_a_caption_names_both_digits_of_its_split():
    pairs, single = build("2/pairs"), build("2")
    seen = set()
    for split in ("train", "test"):
        images = {single.splits[split][i]["values"].tobytes(): single.splits[split][i]["label"] for i in range(300)}
        for i in range(40):
            example = pairs.splits[split][i]
            assert example["values"].shape == (32, 4)
            words = example["target"].split()
            assert (words[2], len(words)) == ("above", 5)
            for half, word in ((example["values"][:16], words[1]), (example["values"][16:], words[4])):
                if half.tobytes() in images:
                    assert digits.WORDS[images[half.tobytes()]] == word
            assert all(words[i] == ("an" if words[i + 1] == "eight" else "a") for i in (0, 3))
            seen.add(example["target"])
    assert len(seen) > 40
    with pytest.raises(IndexError):
        pairs.splits["test"][500]


def test_wrong_names_and_a_missing_package_are_one_line(monkeypatch):
    for name in ("3", "2/words", "pairs"):
        with pytest.raises(ConfigError, match="expected the side of a patch"):
            build(name)
    monkeypatch.undo()
    real = builtins.__import__

    def missing(name, *rest, **more):
        if name.startswith("sklearn"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match="got digits, which reads scikit-learn's; pip install scikit-learn"):
        build()
