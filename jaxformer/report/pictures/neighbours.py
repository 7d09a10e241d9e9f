"""Tokens at the first two principal components of their vectors, with lines to their nearest neighbours."""

from __future__ import annotations

from matplotlib.figure import Figure

from jaxformer.analysis.draw.panels import Neighbourhood
from jaxformer.report import word_map
from jaxformer.report.pictures.style import COLOURS, INK


def figure(found: Neighbourhood) -> Figure:
    """The map of the tokens: those asked for in blue, their neighbours in orange, a line from each to its nearest."""
    result = word_map.word_map(found.vectors, found.tokens, INK)
    axes = result.axes[0]
    axes.collections[0].set_visible(False)
    places, share = word_map.principal_components(found.vectors)
    has_others = found.asked < len(found.tokens)
    for number, near in enumerate(found.neighbours):
        for index, cosine in near if has_others else near[:1]:  # among themselves all lines would be a tangle
            (x, y), (other_x, other_y) = places[number], places[index]
            width = 0.4 + 1.2 * max(cosine, 0.0)
            axes.plot([x, other_x], [y, other_y], color=COLOURS[7], linewidth=width, alpha=0.45, zorder=0)
    axes.scatter(*places[found.asked :].T, s=14, color=COLOURS[1], marker="s", zorder=2)
    axes.scatter(*places[: found.asked].T, s=18, color=COLOURS[0], zorder=2)
    axes.set_title(f"{found.title}: {len(found.tokens)} tokens, {share:.0%} of their variance", color=INK)
    return result


def lines(found: Neighbourhood) -> list[str]:
    """A line for each token that was asked for: its neighbours with their cosines."""
    width = max(len(token) for token in found.tokens[: found.asked])
    return [
        f"{token:<{width}}  " + "  ".join(f"{found.tokens[index]} {cosine:.2f}" for index, cosine in near)
        for token, near in zip(found.tokens, found.neighbours, strict=False)
    ]
