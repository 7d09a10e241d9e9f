"""Tables inside pages of docs/, between `<!-- NAME: begin -->` and `<!-- NAME: end -->`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def put(page: Path, name: str, lines: Sequence[str]) -> None:
    """Writes `lines` in place of what stands between the marks of `name`."""
    begin, end = (f"<!-- {name}: {which} -->" for which in ("begin", "end"))
    before, rest = page.read_text(encoding="utf-8").split(begin)
    after = rest.split(end)[1]
    page.write_text(f"{before}{begin}\n\n" + "\n".join(lines) + f"\n\n{end}{after}", encoding="utf-8")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return ["| " + " | ".join(line) + " |" for line in (columns, ["---"] * len(columns), *rows)]
