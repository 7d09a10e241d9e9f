"""Picture of word vectors in two dimensions, by their principal components."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from jaxformer.errors import ConfigError
from jaxformer.report import charts


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


def word_map(vectors: Float[np.ndarray, "n D"], words: Sequence[str], ink: str = charts.PRINT_INK) -> Figure:
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
    figure = Figure(figsize=(7.0, 5.6), layout="constrained")
    axes = figure.subplots()
    axes.scatter(*places.T, s=12, color=charts.COLOURS[0])
    for place, word in zip(places, words, strict=True):
        label = _escape_label(word)
        axes.annotate(label, place, (3, 3), textcoords="offset points", fontsize=8, color=ink)
    axes.set_xlabel("first principal component", color=ink)
    axes.set_ylabel("second principal component", color=ink)
    axes.set_title(f"{len(words)} word vectors: {share:.0%} of their variance", color=ink)
    axes.tick_params(colors=ink, labelsize=9)
    return figure


def _escape_label(word: str) -> str:
    """A word for matplotlib, which reads dollars as formulas and hides labels that begin with "_"."""
    word = word.encode("utf-8", "replace").decode().replace("$", r"\$")
    return f" {word}" if word.startswith("_") else word
