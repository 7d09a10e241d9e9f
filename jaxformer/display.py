"""Small pieces of HTML for notebooks: tables, heat maps, pictures. All text in them is escaped.

Colours are transparent over the notebook's background, so they fit light and dark ones. Nothing is loaded or run.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

POSITIVE = (33, 102, 172)
NEGATIVE = (178, 24, 43)
"""Blue and red of ColorBrewer's RdBu, which people who confuse red and green tell apart."""

MAX_NAMED_TOKENS = 48
"""Heat maps with more rows or columns are pictures without names."""
MAX_CHARACTERS = 200
"""Longer texts are truncated, and say so."""
CELL = "padding:1px 4px;text-align:right;font-variant-numeric:tabular-nums"


def escape(text: object) -> str:
    """Text for HTML, truncated to `MAX_CHARACTERS`."""
    words = str(text)
    excess = len(words) - MAX_CHARACTERS
    return html.escape(words if excess <= 0 else f"{words[:MAX_CHARACTERS]} […{excess:,} more]")


def joined(parts: Iterable[str]) -> str:
    """Pieces below each other."""
    return "<div>" + "".join(parts) + "</div>"


def box(title: str, *parts: str, note: str = "") -> str:
    """Pieces under a title, with a remark."""
    remark = f'<div style="opacity:.7;max-width:60em">{escape_long(note)}</div>' if note else ""
    return (
        '<div style="margin:.5em 0 1em;overflow-x:auto">'
        f'<div style="font-weight:600">{escape(title)}</div>{remark}{"".join(parts)}</div>'
    )


def escape_long(text: str) -> str:
    """Text for HTML, complete."""
    return html.escape(text)


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table of texts and numbers; numbers have four digits."""
    names = "".join(f'<th style="{CELL}">{escape(name)}</th>' for name in head)
    lines = "".join("<tr>" + "".join(_cell(value) for value in row) + "</tr>" for row in rows)
    return f'<table style="border-collapse:collapse;font-size:90%"><tr>{names}</tr>{lines}</table>'


def _cell(value: object) -> str:
    if isinstance(value, (float, np.floating)):
        return f'<td style="{CELL}">{"-" if np.isnan(value) else f"{value:.4g}"}</td>'
    number = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    shown = f"{value:,}" if number else escape(value)
    return f'<td style="{CELL}{"" if number else ";text-align:left"}">{shown}</td>'


def details(summary: str, body: str) -> str:
    """A part that can be unfolded."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def heat_map(
    values: Float[np.ndarray, "T S"],
    rows: Sequence[str],
    columns: Sequence[str],
    cells: Sequence[Sequence[str]] | None = None,
    limit: float | None = None,
) -> str:
    """A table whose cells are coloured by their values, negative ones red; the value is shown when pointed at.

    Args:
      cells: texts of the cells; None: they are empty.
      limit: value of the full colour; None: the largest there is.
    """
    if max(values.shape) > MAX_NAMED_TOKENS:
        return picture(values, "heat map", 480, limit)
    alpha = strength(values, limit)
    head = "".join(
        f'<th style="{CELL};vertical-align:bottom;font-weight:400;writing-mode:vertical-rl">{escape(name)}</th>'
        for name in columns
    )
    lines = []
    for t, name in enumerate(rows):
        boxes = "".join(
            f'<td title="{escape(name)} → {escape(columns[s])}: {values[t, s]:.4g}" style="min-width:1em;'
            f'padding:1px 3px;background:rgba({_rgb(values[t, s])},{alpha[t, s]:.3f})">'
            f"{escape(cells[t][s]) if cells is not None else ''}</td>"
            for s in range(values.shape[1])
        )
        lines.append(f'<tr><th style="{CELL};font-weight:400">{escape(name)}</th>{boxes}</tr>')
    return f'<table style="border-collapse:collapse;font-size:85%"><tr><th></th>{head}</tr>{"".join(lines)}</table>'


def strength(values: np.ndarray, limit: float | None = None) -> np.ndarray:
    """Opacity, 0 to 1, of each value; 0 where it is not a number."""
    size = np.abs(np.nan_to_num(np.asarray(values, np.float64), posinf=0.0, neginf=0.0))
    largest = size.max(initial=0.0) if limit is None else limit
    return np.clip(size / (largest or 1.0), 0.0, 1.0)


def _rgb(value: Any) -> str:
    return ",".join(map(str, NEGATIVE if value < 0 else POSITIVE))


def pixels(values: Float[np.ndarray, "T S"], limit: float | None = None) -> UInt8[np.ndarray, "T S 4"]:
    """Colours of the values, as in `heat_map`, red, green, blue and opacity."""
    colours = np.where((values < 0)[..., None], NEGATIVE, POSITIVE)
    alpha = np.rint(255 * strength(values, limit))[..., None]
    return np.concatenate([colours, alpha], axis=-1).astype(np.uint8)


def picture(values: Float[np.ndarray, "T S"], title: str, width: int, limit: float | None = None) -> str:
    """A heat map without names as a picture `width` pixels wide."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels(values, limit)).save(buffer, "png")
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    height = max(round(width * values.shape[0] / values.shape[1]), 1)
    return (
        f'<img src="data:image/png;base64,{data}" alt="{escape(title)}" title="{escape(title)}" width="{width}" '
        f'height="{height}" style="image-rendering:pixelated;border:1px solid rgba(128,128,128,.4);margin:1px">'
    )
