"""Parts of a page as values: tables, pictures, text. The template `templates/page.html` shows each of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from jaxformer.report.charts import Chart

ABSENT = "-"
"""Cell of a value that does not exist."""

MAX_CHARACTERS = 1500
"""Longer cells are truncated, and say so."""


@dataclass(frozen=True)
class Table:
    """A table whose first column names the rows.

    Attributes:
      head: names of the columns.
      rows: cells as text.
      is_numeric: columns of numbers, which are aligned on the right.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    is_numeric: tuple[bool, ...]
    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class Details:
    """A part that can be folded."""

    summary: str
    body: Table | Preformatted
    is_open: bool = False
    kind: ClassVar[str] = "details"


@dataclass(frozen=True)
class Heading:
    """A heading within a section."""

    text: str
    kind: ClassVar[str] = "heading"


@dataclass(frozen=True)
class Paragraph:
    """A sentence; `is_soft` if it is a remark."""

    text: str
    is_soft: bool = False
    kind: ClassVar[str] = "paragraph"


@dataclass(frozen=True)
class Preformatted:
    """Text whose lines and spaces are kept."""

    text: str
    kind: ClassVar[str] = "preformatted"


@dataclass(frozen=True)
class Figure:
    """A chart of `charts`."""

    chart: Chart
    kind: ClassVar[str] = "figure"


@dataclass(frozen=True)
class Figures:
    """Charts side by side where there is room."""

    charts: tuple[Chart, ...]
    kind: ClassVar[str] = "figures"


@dataclass(frozen=True)
class Card:
    """A number that is seen first: what it is, its value, and what is to be known about it."""

    title: str
    value: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cards:
    """Cards side by side."""

    cards: tuple[Card, ...]
    kind: ClassVar[str] = "cards"


@dataclass(frozen=True)
class CurveControls:
    """The form that sets axes and smoothing of all curves of a page."""

    kind: ClassVar[str] = "controls"


Block = Table | Details | Heading | Paragraph | Preformatted | Figure | Figures | Cards | CurveControls


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """A table of JSON values, None for those that do not exist."""
    rows = [list(row) for row in rows]
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(head)
    return Table(
        tuple(truncate(name) for name in head),
        tuple(tuple(ABSENT if value is None else truncate(format_value(value)) for value in row) for row in rows),
        tuple(bool(column) and all(value is None or _is_number(value) for value in column) for column in columns),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def format_value(value: Any) -> str:
    """A number with four digits, thousands grouped; text unchanged; other JSON values as JSON."""
    if not _is_number(value):
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1e5 <= abs(value) < 1e15 else f"{value:.4g}"


def truncate(text: str) -> str:
    """`text` without what exceeds `MAX_CHARACTERS`."""
    excess = len(text) - MAX_CHARACTERS
    return text if excess <= 0 else f"{text[:MAX_CHARACTERS]} […{excess:,} more letters]"
