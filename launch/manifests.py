"""Writes nested values as YAML, in the style of people: blocks, and a text of several lines as one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

Value = Mapping[str, "Value"] | Sequence["Value"] | str | int | float | bool | None

PLAIN = re.compile(r"[A-Za-z/][\w./-]*")
"""Texts that mean themselves without quotes, unless they are one of `WORDS`."""

BLOCK = re.compile(r"[!-~][ -~\n]*\n[ -~\n]*[!-~]\n")
"""Texts that can stand as a block: several lines of printable ASCII, one line's end at the end."""

UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
"""Characters that JSON leaves as they are, and YAML refuses or reads as a line's end."""

WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}
"""Texts that some version of YAML reads as something else than a text."""


def dump(value: Value) -> str:
    """The value as a YAML document. Every text is read back as that text."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Value) -> list[str]:
    if isinstance(value, Mapping) and value:
        return [line for key, item in value.items() for line in _entry(f"{_scalar(key)}:", item)]
    if isinstance(value, (list, tuple)) and value:
        lines = []
        for item in value:
            # A block of its own, moved to the right; its first line stands after the dash.
            first, *rest = _lines(item) if isinstance(item, (Mapping, list, tuple)) and item else _text(item)
            lines += [f"- {first}", *(f"  {line}" if line else "" for line in rest)]
        return lines
    return _text(value)


def _entry(head: str, item: Value) -> list[str]:
    if isinstance(item, (Mapping, list, tuple)) and item:
        return [head, *(f"  {line}" if line else "" for line in _lines(item))]
    first, *rest = _text(item)
    return [f"{head} {first}", *rest]


def _text(item: Value) -> list[str]:
    """A scalar on one line, or the lines of a text as a block."""
    if isinstance(item, str) and BLOCK.fullmatch(item):
        return ["|", *(f"  {line}" if line else "" for line in item[:-1].split("\n"))]
    return [_scalar(item)]


def _scalar(value: Value) -> str:
    if isinstance(value, str) and PLAIN.fullmatch(value) and value.lower() not in WORDS:
        return value
    return UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))
