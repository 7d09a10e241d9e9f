"""Templates of text: `"premise: {text} hypothesis: {pair}"`, with the fields of an example in braces."""

from __future__ import annotations

import string
from typing import NamedTuple


class Piece(NamedTuple):
    """A stretch of a template: literal text, and the field after it.

    Attributes:
      text: the literal text; a doubled brace stands for one.
      field: name of the field; None at the end of a template.
      form: how a number is written, as ".1f" in `{score:.1f}`.
    """

    text: str
    field: str | None
    form: str


def pieces(template: str) -> list[Piece]:
    """The pieces of a template, in order.

    Raises:
      ValueError: a brace is not closed or not opened, or something else than a name stands in braces.
    """
    found = []
    for text, field, form, conversion in string.Formatter().parse(template):
        if field is not None and (not field.isidentifier() or conversion is not None or "{" in (form or "")):
            raise ValueError(f"{{{field}{'!' + conversion if conversion else ''}}} is no name of a field")
        found.append(Piece(text, field, form or ""))
    return found


def fields(template: str) -> tuple[str, ...]:
    """Names of the fields of a template, each once, in order."""
    return tuple(dict.fromkeys(piece.field for piece in pieces(template) if piece.field is not None))
