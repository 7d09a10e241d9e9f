"""Series as text: tables of numbers with a line for each time step, and the checks of what is read."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxformer import registry
from jaxformer.errors import ConfigError


class Table(NamedTuple):
    """A series with the names of its channels, () if the table has no header. `values` is float64 `[N, C]`."""

    names: tuple[str, ...]
    values: np.ndarray


def read_table(lines: Iterable[tuple[int, str]], where: str, date: str = "") -> Table:
    """The numbers between commas of numbered lines; blank lines are skipped.

    The first line names the columns. A first line of numbers is no header: all columns are channels then.

    Args:
      lines: pairs of line number and line.
      where: file of the lines, for errors.
      date: name of the column that holds the time, which is no channel; "": there is none.

    Raises:
      ConfigError: a line has more or fewer cells than the first; a cell is no number, or NaN or infinite; a name occurs
        twice, or `date` not at all.
    """
    numbered = ((number, next(csv.reader([line]))) for number, line in lines if line.strip())
    first = next(numbered, None)
    if first is None:
        raise ConfigError(f"{where}: got no rows, expected a table of numbers, one line a time step")
    number, header = first[0], [cell.strip() for cell in first[1]]
    has_header = not all(map(_is_number, header))
    if has_header and len(set(header)) < len(header):
        raise ConfigError(f"{where}:{number}: got columns {', '.join(header)}, expected names that differ; rename one")
    if date and has_header and date not in header:
        expected = f"expected one of {', '.join(header)}{registry.nearest(date, header)}"
        raise ConfigError(f"{where}:{number}: got no column {date!r} of dates, {expected}; set data.columns.date")
    kept = [i for i, name in enumerate(header) if not (has_header and date and name == date)]
    names = [header[i] if has_header else f"#{i + 1}" for i in range(len(header))]
    rows = [] if has_header else [_numbers(header, kept, names, f"{where}:{number}")]
    for number, cells in numbered:
        if len(cells) != len(header):
            got = f"{where}:{number}: got {len(cells)} cells"
            raise ConfigError(f"{got}, expected {len(header)} as in the first line; a comma separates cells")
        rows.append(_numbers(cells, kept, names, f"{where}:{number}"))
    values = np.array(rows, np.float64).reshape(len(rows), len(kept))
    return Table(tuple(names[i] for i in kept) if has_header else (), values)


def _numbers(cells: Sequence[str], kept: Sequence[int], names: Sequence[str], where: str) -> list[float]:
    """The numbers of the `kept` cells of a row."""
    numbers = []
    for i in kept:
        try:
            value = float(cells[i])
        except ValueError:
            expected = "expected a number; mend it, or name a column of dates with data.columns.date"
            raise ConfigError(f"{where}: got {cells[i]!a} in column {names[i]}, {expected}") from None
        if not math.isfinite(value):
            expected = "expected a finite number; fill the gap or take the row away"
            raise ConfigError(f"{where}: got {cells[i].strip()} in column {names[i]}, {expected}")
        numbers.append(value)
    return numbers


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def format_table(values: Float[np.ndarray, "T C"], names: Sequence[str] = ()) -> str:
    """A series as lines of numbers with commas between them, after a line of `names` if there are any."""
    rows = [",".join(format(float(value), ".9g") for value in row) for row in values]
    return "\n".join([",".join(names), *rows] if names else rows)


def read_line(line: str) -> Float[np.ndarray, "T C"]:
    """A series in one line: blanks between time steps, commas between channels, as in `0.5,1 0.25,2`.

    Raises:
      ConfigError: a step has more or fewer numbers than the first, or something is no finite number.
    """
    steps = [(1, step) for step in line.split()]
    table = read_table(steps, "series")
    if table.names:
        raise ConfigError(f"series: got {steps[0][1]!a}, expected numbers with commas between them; mend the line")
    return table.values


def format_line(values: Float[np.ndarray, "T C"]) -> str:
    """The line that `read_line` reads."""
    return format_table(values).replace("\n", " ")
