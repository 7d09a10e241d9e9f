"""Picture of word vectors in two dimensions, by their principal components."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from jaxformer.errors import ConfigError
from jaxformer.report.pictures import style


def principal_components(vectors: Float[np.ndarray, "n D"], count: int = 2) -> tuple[Float[np.ndarray, "n _"], float]:
    """Coordinates of the centred vectors along the directions of largest variance, and the share of variance they hold.

    Each direction has the sign that makes the entry of its largest magnitude positive.
    """
    centred = np.asarray(vectors, np.float64) - np.mean(vectors, axis=0, dtype=np.float64)
    _, sizes, directions = np.linalg.svd(centred, full_matrices=False)
    largest = np.argmax(np.abs(directions), axis=1)
    directions *= np.sign(directions[np.arange(len(directions)), largest])[:, None]
    total = float(np.sum(sizes**2))
    return centred @ directions[:count].T, float(np.sum(sizes[:count] ** 2)) / total if total else 0.0


SIZE = (7.0, 5.6)
"""Width and height of a picture in inches."""
LABEL_POINTS = 8
"""Size of a word's letters."""
SIDES = (
    ((5, 4), "left"),
    ((-5, 4), "right"),
    ((5, -4), "left"),
    ((-5, -4), "right"),
    ((0, 8), "center"),
    ((0, -8), "center"),
)
"""Places of a word beside its point, in points, and its alignment; the first is taken where nothing is in the way."""


def label_places(
    size: tuple[float, float], places: Float[np.ndarray, "n _"], words: Sequence[str]
) -> list[tuple[tuple[int, int], str]]:
    """For each word the place of `SIDES` at which it covers least of the words before it and of all points.

    Args:
      size: width and height of the figure in inches.
    """
    # Points of print per unit of the axes, which nearly fill the figure.
    low, high = places.min(axis=0), places.max(axis=0)
    scale = 0.78 * 72 * np.asarray(size) / np.maximum(high - low, 1e-12)
    centres = (places - low) * scale
    chosen, boxes = [], [np.concatenate([centre - 3, centre + 3]) for centre in centres]
    for centre, word in zip(centres, words, strict=True):
        width = 0.62 * LABEL_POINTS * len(word)
        candidates = []
        for offset, side in SIDES:
            left = centre[0] + offset[0] - {"left": 0.0, "right": width, "center": width / 2}[side]
            bottom = centre[1] + offset[1] - LABEL_POINTS / 2
            candidates.append(np.array([left, bottom, left + width, bottom + LABEL_POINTS]))
        costs = [sum(_overlap(candidate, box) for box in boxes) for candidate in candidates]
        best = int(np.argmin(costs))
        chosen.append(SIDES[best])
        boxes.append(candidates[best])
    return chosen


def _overlap(a: np.ndarray, b: np.ndarray) -> float:
    """Area that two boxes (left, bottom, right, top) share."""
    width, height = np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2])
    return float(max(width, 0.0) * max(height, 0.0))


def word_map(vectors: Float[np.ndarray, "n D"], words: Sequence[str], ink: str = style.INK) -> Figure:
    """Each word at the first two principal components of its vector.

        words = ["king", "queen", "man", "woman"]
        figure = word_map(model.embed(words), words)
        figure.savefig("words.png")

    Raises:
      ConfigError: there are fewer than three words, or another number of vectors.
    """
    if len(vectors) != len(words) or len(words) < 3 or vectors.shape[1] < 2:
        got = f"vectors of shape {vectors.shape} for {len(words)} words"
        raise ConfigError(f"word_map: got {got}, expected one of two or more entries for each of three or more words")
    places, share = principal_components(vectors)
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    axes.scatter(*places.T, s=12, color=style.COLOURS[0])
    axes.margins(0.12)
    for place, word, (offset, side) in zip(places, words, label_places(SIZE, places, words), strict=True):
        label = style.escape_label(word)
        axes.annotate(
            label, place, offset, textcoords="offset points", fontsize=LABEL_POINTS, color=ink, ha=side, va="center"
        )
    axes.set_xlabel("first principal component", color=ink)
    axes.set_ylabel("second principal component", color=ink)
    axes.set_title(f"{len(words)} word vectors: {share:.0%} of their variance", color=ink)
    axes.tick_params(colors=ink, labelsize=9)
    return figure
