"""The model as a figure: columns of boxes from the input at the bottom to the output at the top."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch

from jaxformer.analysis.draw.diagram import Block, Column, Diagram, Layers
from jaxformer.report.pictures.style import INK, escape_label

FILL = {
    "embedding": "#fbe3c4",
    "position": "#fdf3c8",
    "norm": "#eceff1",
    "attention": "#cfe3f4",
    "cross": "#dcd3ee",
    "ffn": "#cdeadd",
    "recurrent": "#cfe3f4",
    "head": "#f6d5de",
}
"""Pale colours of the kinds of blocks; their names stand in them, so that the colours may fail."""

WIDTH, GAP, LINE, PADDING = 3.9, 0.22, 0.165, 0.12
"""Inches: width of a box, space between two boxes, height of a line of text, space around the text."""
LAYER_MARGIN, COLUMN_GAP, ARC = 0.5, 1.0, 0.28
"""Inches: space around the boxes of a layer, between columns, and from a box to the arc around it."""
FONT = 7.5
"""Size of the text in points; names of blocks have one more."""


class Box(NamedTuple):
    """A drawn block: its middle, its lower and its upper edge."""

    x: float
    bottom: float
    top: float


@dataclass
class Drawing:
    """Axes in inches, and what has been drawn that arrows refer to."""

    axes: Axes
    cross: list[Box]
    outputs: list[Box]
    first: list[Box]
    aside: list[Box]


def figure(diagram: Diagram) -> Figure:
    """The figure of a diagram."""
    step = WIDTH + 2 * LAYER_MARGIN + COLUMN_GAP
    width = step * len(diagram.columns) - COLUMN_GAP + 0.5
    result = Figure()
    axes = result.add_axes((0, 0, 1, 1))
    drawing = Drawing(axes, [], [], [], [])
    for number, column in enumerate(diagram.columns):
        _draw_column(drawing, column, 0.25 + LAYER_MARGIN + WIDTH / 2 + number * step)
    if diagram.arrow and len(diagram.columns) == 2:
        _draw_arrow_between(drawing, diagram, step)
    top = max((box.top for box in drawing.outputs), default=1.0) + 0.5
    title = f"{escape_label(diagram.title)}: {diagram.parameters:,} parameters"
    axes.text(width / 2, top, title, ha="center", va="center", fontsize=11, color=INK, weight="bold")
    result.set_size_inches(width, top + 0.3)
    axes.set(xlim=(0, width), ylim=(0, top + 0.3), aspect="equal")
    axes.set_axis_off()
    return result


def _block_height(block: Block) -> float:
    return (1 + len(block.detail)) * LINE + 2 * PADDING


def _draw_column(drawing: Drawing, column: Column, x: float) -> None:
    """Draws a column around the vertical line `x`, from the bottom up."""
    axes, y, below = drawing.axes, 0.55, None
    text = f"{column.title}: {column.parameters:,}"
    axes.text(x, 0.28, text, ha="center", va="center", fontsize=FONT + 2, color=INK, weight="bold")
    for number, block in enumerate(column.before):
        box = _draw_block(axes, block, x, y)
        _connect(axes, below, box)
        if not number:
            drawing.first.append(box)
        y, below = box.top + GAP, box
    for layers in column.layers:
        y, below = _draw_layers(drawing, layers, x, y, below)
    for block in column.after:
        box = _draw_block(axes, block, x, y)
        y = box.top + GAP
        if block.is_aside:
            drawing.aside.append(box)
            continue
        _connect(axes, below, box)
        below = box
    drawing.outputs.append(Box(x, y - GAP, y - GAP) if below is None or (column.layers and not column.after) else below)


def _draw_layers(drawing: Drawing, layers: Layers, x: float, y: float, below: Box | None) -> tuple[float, Box]:
    """One layer in a frame with the number of such. Returns where the next block begins, and the last point."""
    axes, frame = drawing.axes, y
    y += 0.3
    for group in layers.groups:
        start = y
        for number, block in enumerate(group.blocks):
            box = _draw_block(axes, block, x, y)
            _connect(axes, below, box)
            if block.kind == "cross":
                drawing.cross.append(box)
            if not number:
                start = box.bottom
            y, below = box.top + GAP, box
        if group.residual and below is not None:
            below = _draw_residual(axes, x, start - 0.11, below)
            y = below.top + GAP
    top = y - GAP + 0.28
    corner, size = (x - WIDTH / 2 - LAYER_MARGIN + 0.05, frame), (WIDTH + 2 * LAYER_MARGIN - 0.1, top - frame)
    style: dict[str, Any] = {"boxstyle": "round,pad=0,rounding_size=0.12", "facecolor": "none", "edgecolor": "#9aa3ad"}
    axes.add_patch(FancyBboxPatch(corner, *size, **style, linewidth=1.0, linestyle="--", zorder=0))
    shared = ", shared by all" if layers.shares else ""
    words = f"x {layers.count}    {layers.one:,} in a layer{shared}"
    axes.text(corner[0] + 0.1, top - 0.14, words, ha="left", va="center", fontsize=FONT + 0.5, color=INK)
    if below is not None:  # the output leaves the frame
        axes.plot([x, x], [below.top, top], color=INK, linewidth=0.9, zorder=1)
    return top + GAP, Box(x, top, top)


def _draw_residual(axes: Axes, x: float, start: float, last: Box) -> Box:
    """The arc around a sub-layer, and the sum above it."""
    radius, y = 0.09, last.top + 0.24
    left = x - WIDTH / 2 - ARC
    line: dict[str, Any] = {"color": INK, "linewidth": 0.9}
    axes.plot([x, left, left, x - radius], [start, start, y, y], solid_joinstyle="round", **line)
    axes.plot([x, x], [last.top, y - radius], **line)
    axes.add_patch(Circle((x, y), radius, facecolor="white", edgecolor=INK, linewidth=0.9, zorder=3))
    axes.text(x, y - 0.008, "+", ha="center", va="center", fontsize=FONT + 1, color=INK, zorder=4)
    return Box(x, y - radius, y + radius)


def _draw_block(axes: Axes, block: Block, x: float, y: float) -> Box:
    """A box with its name, its number of parameters and its lines of detail."""
    height = _block_height(block)
    style: dict[str, Any] = {
        "boxstyle": "round,pad=0,rounding_size=0.06",
        "facecolor": FILL[block.kind],
        "edgecolor": INK,
    }
    axes.add_patch(FancyBboxPatch((x - WIDTH / 2, y), WIDTH, height, **style, linewidth=0.8, zorder=2))
    left, right, line = x - WIDTH / 2 + 0.1, x + WIDTH / 2 - 0.1, y + height - PADDING - LINE / 2
    options: dict[str, Any] = {"va": "center", "color": INK, "zorder": 3}
    axes.text(left, line, escape_label(block.name), fontsize=FONT + 1, weight="bold", **options)
    axes.text(right, line, f"{block.parameters:,}", ha="right", fontsize=FONT + 1, **options)
    for number, text in enumerate(block.detail, 1):
        axes.text(left, line - number * LINE, escape_label(text), fontsize=FONT, **options)
    return Box(x, y, y + height)


def _connect(axes: Axes, below: Box | None, box: Box) -> None:
    if below is not None:
        _arrow(axes, (below.x, below.top), (box.x, box.bottom))


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    style: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 7, "shrinkA": 0, "shrinkB": 0, "linewidth": 0.9}
    axes.add_patch(FancyArrowPatch(start, end, color=INK, zorder=1, **style))


def _draw_arrow_between(drawing: Drawing, diagram: Diagram, step: float) -> None:
    """The arrow from the output of the first column to what reads it in the second."""
    axes, source = drawing.axes, drawing.outputs[0]
    middle = source.x + step / 2
    if diagram.arrow == "tokens":
        end, label = drawing.first[1], "sampled tokens"
    else:
        label = "keys and values" if drawing.cross else "states"
        end = (drawing.cross or drawing.aside or drawing.first[1:])[0]
    y = (end.bottom + end.top) / 2
    line: dict[str, Any] = {"color": INK, "linewidth": 1.1}
    axes.plot([source.x, source.x, middle, middle], [source.top, source.top + 0.15, source.top + 0.15, y], **line)
    _arrow(axes, (middle, y), (end.x - WIDTH / 2, y))
    axes.text(
        middle - 0.06, (source.top + y) / 2, label, rotation=90, ha="right", va="center", fontsize=FONT, color=INK
    )
