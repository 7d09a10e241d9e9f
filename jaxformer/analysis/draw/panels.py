"""A picture as values: rows of panels, each a heat map or curves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from jaxtyping import Float32, Num, Shaped


@dataclass(frozen=True)
class Heat:
    """A matrix as colours.

    Attributes:
      title: what it is.
      values: `[rows, columns]`; bool for masks.
      rows, columns: names of the two axes.
      first_row, first_column: numbers of the first row and the first column on the axes.
      meaning: name of the values.
      scale: "signed" around 0, "positive" from 0 on, "bucket" for whole numbers that are names, "mask" for bools.
      boundaries: rows and columns before which a line is drawn, as (rows, columns).
    """

    title: str
    values: Shaped[np.ndarray, "rows columns"]
    rows: str
    columns: str
    meaning: str = ""
    scale: Literal["signed", "positive", "bucket", "mask"] = "signed"
    first_row: int = 0
    first_column: int = 0
    boundaries: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())


@dataclass(frozen=True)
class Curves:
    """Values against a number.

    Attributes:
      title: what they are.
      x: values of the horizontal axis.
      curves: label -> values `[len(x)]`.
      x_label, y_label: names of the axes, with units.
      steps: values are constant between two x.
      log_x, log_y: logarithmic axes.
      marks: places on the horizontal axis with a label.
    """

    title: str
    x: Num[np.ndarray, " n"]
    curves: dict[str, np.ndarray]
    x_label: str
    y_label: str
    steps: bool = False
    log_x: bool = False
    log_y: bool = False
    marks: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True)
class Bars:
    """A value for each of some things, with its share of the total.

    Attributes:
      title: what they are.
      values: label -> value, from top to bottom.
      meaning: name of the values, with their unit.
    """

    title: str
    values: dict[str, float]
    meaning: str


Panel = Heat | Curves | Bars


@dataclass(frozen=True)
class Picture:
    """Panels in rows, and lines of text about them for the terminal."""

    title: str
    rows: list[list[Panel]]
    summary: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Neighbourhood:
    """Tokens of a table.

    Attributes:
      title: name of the run and the table.
      tokens: the tokens that are drawn, those asked for first.
      asked: how many of them were asked for; the others are neighbours.
      vectors: their rows of the table, `[n, D]`.
      neighbours: for each token that was asked for, its nearest ones as (index in `tokens`, cosine), best first.
    """

    title: str
    tokens: list[str]
    asked: int
    vectors: Float32[np.ndarray, "n D"]
    neighbours: list[list[tuple[int, float]]]
