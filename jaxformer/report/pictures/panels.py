"""Heat maps, curves and bars of a `Picture`."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

from jaxformer.analysis.draw.panels import Bars, Curves, Heat, Panel, Picture
from jaxformer.report.pictures.style import COLOURS, DASHES, INK, escape_label

MASK_COLOURS = ("#e9ecef", "#0072b2")
"""Hidden and visible pairs of a mask."""

BOUNDARY = "#d55e00"
"""Colour of the line at which another text begins."""

MAX_TITLE = 46
"""Characters of a line of a panel's title."""

MAX_GRID = 40
"""Up to this many slots, lines between the cells of a mask are drawn."""


def figure(picture: Picture) -> Figure:
    """The figure of a picture: a grid of panels, a row for each of its rows."""
    columns = max(len(row) for row in picture.rows)
    heights = [_height(row) for row in picture.rows]
    height = sum(heights) + 0.5
    result = Figure(figsize=(max(4.4 * columns, 5.0), height))
    # Below the title there is a little more space than the layout leaves.
    result.set_layout_engine(ConstrainedLayoutEngine(rect=(0, 0, 1, 1 - 0.2 / height), w_pad=0.06, h_pad=0.08))
    grid = result.subplots(len(picture.rows), columns, squeeze=False, height_ratios=heights)
    for row, axes_row in zip(picture.rows, grid, strict=True):
        for axes in axes_row[len(row) :]:
            axes.set_axis_off()
        for panel, axes in zip(row, axes_row, strict=False):
            _draw(panel, axes, result)
    result.suptitle(escape_label(picture.title), color=INK, fontsize=12)
    has_masks = any(isinstance(panel, Heat) and panel.scale == "mask" for row in picture.rows for panel in row)
    if has_masks:
        handles: list[Any] = [Patch(facecolor=colour) for colour in MASK_COLOURS[::-1]]
        names = ["visible", "hidden"]
        if any(isinstance(panel, Heat) and any(panel.boundaries) for row in picture.rows for panel in row):
            handles.append(Line2D([], [], color=BOUNDARY))
            names.append("another text, or padding, begins")
        result.legend(handles, names, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return result


def _height(row: list[Panel]) -> float:
    """Inches that a row of panels needs."""
    if isinstance(row[0], Bars):
        return 0.33 * len(row[0].values) + 1.3
    return 4.0 if any(isinstance(panel, Heat) for panel in row) else 3.4


def _draw(panel: Panel, axes: Axes, result: Figure) -> None:
    if isinstance(panel, Heat):
        _draw_heat(panel, axes, result)
    elif isinstance(panel, Curves):
        _draw_curves(panel, axes)
    else:
        _draw_bars(panel, axes)
    axes.set_title(textwrap.fill(escape_label(panel.title), MAX_TITLE), color=INK, fontsize=10)
    axes.tick_params(colors=INK, labelsize=8)
    axes.xaxis.label.set(color=INK, fontsize=9)
    axes.yaxis.label.set(color=INK, fontsize=9)
    for spine in axes.spines.values():
        spine.set_color(INK)


def _draw_heat(panel: Heat, axes: Axes, result: Figure) -> None:
    rows, columns = panel.values.shape
    left, top = panel.first_column - 0.5, panel.first_row - 0.5
    options: dict[str, Any] = {
        "extent": (left, left + columns, top + rows, top),
        "interpolation": "nearest" if panel.scale in ("mask", "bucket") else "auto",
        "aspect": "equal" if rows == columns else "auto",
    }
    image = axes.imshow(panel.values.astype(float), **options, **_colours(panel))
    axes.set_xlabel(panel.columns)
    axes.set_ylabel(panel.rows)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(7, integer=True))
    if panel.scale != "mask":
        bar = result.colorbar(image, ax=axes, shrink=0.85, pad=0.02)
        bar.set_label(panel.meaning, color=INK, fontsize=8)
        bar.ax.tick_params(colors=INK, labelsize=7)
        bar.minorticks_off()
        if panel.scale == "bucket":
            bar.ax.yaxis.set_major_locator(MaxNLocator(8, integer=True))
        return
    if max(rows, columns) <= MAX_GRID:
        axes.set_xticks(np.arange(left, left + columns + 1), minor=True)
        axes.set_yticks(np.arange(top, top + rows + 1), minor=True)
        axes.grid(which="minor", color="white", linewidth=0.8)
        axes.tick_params(which="minor", length=0)
    for place in panel.boundaries[0]:
        axes.axhline(top + place, color=BOUNDARY, linewidth=1.3)
    for place in panel.boundaries[1]:
        axes.axvline(left + place, color=BOUNDARY, linewidth=1.3)


def _colours(panel: Heat) -> dict[str, Any]:
    """Colour map and its range."""
    values = panel.values
    if panel.scale == "mask":
        return {"cmap": ListedColormap(MASK_COLOURS), "vmin": 0, "vmax": 1}
    if panel.scale == "bucket":
        edges = np.arange(int(values.min()), int(values.max()) + 2) - 0.5
        return {"cmap": "viridis", "norm": BoundaryNorm(edges, 256, extend="neither")}
    low, high = float(np.min(values)), float(np.max(values))
    if panel.scale == "positive" or low >= 0:
        return {"cmap": "viridis", "vmin": min(low, 0.0), "vmax": high or 1.0}
    limit = max(-low, high) or 1.0
    if high <= 0.1 * limit or -low <= 0.1 * limit:  # one side only: the other half of the colours says nothing
        return {"cmap": "viridis", "vmin": low, "vmax": high}
    return {"cmap": "RdBu_r", "norm": TwoSlopeNorm(0.0, -limit, limit)}


def _draw_curves(panel: Curves, axes: Axes) -> None:
    for number, (label, values) in enumerate(panel.curves.items()):
        style: dict[str, Any] = {
            "color": COLOURS[number % len(COLOURS)],
            "linestyle": DASHES[number % len(DASHES)],
            "drawstyle": "steps-mid" if panel.steps else "default",
        }
        axes.plot(panel.x, values, label=label or None, linewidth=1.5, **style)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    if panel.log_x:
        axes.set_xscale("log")
    if panel.log_y:
        axes.set_yscale("log")
    if not panel.log_x:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.grid(True, color=INK, alpha=0.15, linewidth=0.7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for place, text in panel.marks:
        axes.axvline(place, color=INK, alpha=0.5, linewidth=0.9, linestyle=":")
        middle = (axes.get_xlim()[0] + axes.get_xlim()[1]) / 2
        side = "left" if place < middle else "right"
        offset = 4 if side == "left" else -4
        axes.annotate(
            text, (place, 0.03), xycoords=axes.get_xaxis_transform(), xytext=(offset, 0), textcoords="offset points",
            ha=side, fontsize=8, color=INK,
        )  # fmt: skip
    if any(panel.curves):
        axes.legend(frameon=False, labelcolor=INK, fontsize=8, ncols=1 + (len(panel.curves) > 4))


def _draw_bars(panel: Bars, axes: Axes) -> None:
    total = sum(panel.values.values())
    names, values = list(panel.values), list(panel.values.values())
    axes.barh(range(len(names)), values, color=COLOURS[0], height=0.7)
    axes.set_yticks(range(len(names)), [escape_label(name) for name in names])
    axes.invert_yaxis()
    axes.set_xlim(0, max(values) * 1.22 if values else 1)
    axes.set_xlabel(panel.meaning)
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    for number, value in enumerate(values):
        axes.annotate(
            f"{value / total:.1%}" if total else "0 %", (value, number), (3, 0), textcoords="offset points",
            va="center", fontsize=8, color=INK,
        )  # fmt: skip
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
