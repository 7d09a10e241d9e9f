"""The reference of all config fields: `jaxformer config --fields`, and docs/config.md.

`python -m jaxformer.config.reference > docs/config.md` writes the page. Names, types, allowed values and defaults come
from the dataclasses of `config/schema.py`, and the meaning of a field from the comment beside it.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import io
import sys
import textwrap
import tokenize
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxformer.config.comparison import default_of
from jaxformer.config.constraints import describe_constraint
from jaxformer.config.hints import (
    base_type,
    constraint_of,
    describe,
    entry_section,
    field_types,
    item_constraint,
    section_type,
)
from jaxformer.config.schema import Config

INTRODUCTION = """# Fields of the config

Every field below can be set in a recipe (`config.train.steps = 400`) and on the command line
(`--config.train.steps=400`). `jaxformer config --config=FILE.py` prints all values of a recipe, and
`jaxformer config --fields` prints this list. `python -m jaxformer.config.reference > docs/config.md` writes this page
from `jaxformer/config/schema.py`.

On the command line None, true and false are words, a tuple is `a,b`, and a dict has one flag for each entry:
`--config.data.splits.test=a.en,a.de`. An empty entry removes it: `--config.data.splits.test=`. A section whose default
is None is a part of the run that the recipe adds or leaves out. `NAME` in a path is the name of an entry of a dict of
sections.

`task.name`, `encoding.kind`, `attention.kernel` and `data.source` also take a Python module of yours: see
[extending.md](extending.md).
"""


class Field(NamedTuple):
    """A field's row in the reference.

    Attributes:
      allowed: the allowed values in words; "": every value of the type.
    """

    name: str
    type: str
    allowed: str
    default: str
    meaning: str


class Section(NamedTuple):
    """A dataclass of the schema: its paths in a config, its docstring, and its fields."""

    name: str
    paths: tuple[str, ...]
    meaning: str
    fields: tuple[Field, ...]


@functools.cache
def list_sections() -> tuple[Section, ...]:
    """All sections, in the order in which they occur below `config`."""
    paths: dict[type, list[str]] = {}
    for section, path in _walk(Config, "config"):
        paths.setdefault(section, []).append(path)
    documented = _read_comments()
    return tuple(
        Section(section.__name__, tuple(where), documented[section.__name__][0], tuple(_fields(section, documented)))
        for section, where in paths.items()
    )


def _walk(section: type, path: str) -> Iterator[tuple[type, str]]:
    yield section, path
    for name, hint in field_types(section).items():
        part, entry = section_type(hint), entry_section(hint)
        if part is not None:
            yield from _walk(part, f"{path}.{name}")
        elif entry is not None:
            yield from _walk(entry, f"{path}.{name}.NAME")


def _fields(section: Any, documented: dict[str, tuple[str, dict[str, str]]]) -> Iterator[Field]:
    parents = [documented[parent.__name__][1] for parent in section.__mro__ if parent.__name__ in documented]
    comments = {name: words for comments in reversed(parents) for name, words in comments.items()}
    hints = field_types(section)
    for field in dataclasses.fields(section):
        hint = hints[field.name]
        part, (_, optional) = section_type(hint), base_type(hint)
        meaning, default = comments.get(field.name, ""), _format_default(default_of(field))
        if part is not None:
            meaning = meaning or documented[part.__name__][0].split("\n")[0]
            yield Field(field.name, f"{part.__name__}{' or None' if optional else ''}", "", default, meaning)
        else:
            allowed = describe_constraint(constraint_of(hint) or item_constraint(hint))
            yield Field(field.name, describe(hint), allowed, default, meaning)


def _format_default(value: Any) -> str:
    """A default as the command line takes it. An empty text, tuple or dict is formatted as in Python."""
    if dataclasses.is_dataclass(value):
        return "its defaults"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple) and value:
        return ",".join(map(str, value))
    return value if isinstance(value, str) and value else f"{value!r}".replace("''", '""')


@functools.cache
def _read_comments() -> dict[str, tuple[str, dict[str, str]]]:
    """Class -> its docstring, and field -> the comment at the end of its line and in the lines after it."""
    source = inspect.getsource(sys.modules[Config.__module__])
    comments: dict[int, str] = {}
    comment_lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string.lstrip("# ")
            if not token.line[: token.start[1]].strip():
                comment_lines.add(token.start[0])
    documented = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            meanings = {}
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    line = statement.end_lineno or statement.lineno
                    words = [comments[line]] if line in comments else []
                    while (line := line + 1) in comment_lines:
                        words.append(comments[line])
                    meanings[statement.target.id] = " ".join(words)
            documented[node.name] = ((ast.get_docstring(node) or "").strip(), meanings)
    return documented


def format_text() -> str:
    """The reference as text for a terminal."""
    blocks = []
    for section in list_sections():
        names = [f"{field.name} = {field.default}" for field in section.fields]
        width = min(max(map(len, names), default=0), 36)
        lines = [", ".join(section.paths), *(section.meaning.split("\n")[:1] if section.meaning else [])]
        for name, field in zip(names, section.fields, strict=True):
            words = ", ".join(filter(None, (field.type, field.allowed)))
            words += f": {field.meaning}" if field.meaning else ""
            start = f"  {name:<{width}}  "
            wrapped = textwrap.wrap(words, 118 - width - 4, break_on_hyphens=False) or [""]
            lines += [start + wrapped[0], *(" " * (width + 4) + line for line in wrapped[1:])]
        blocks.append("\n".join(textwrap.wrap(lines[0], 118)) + "\n" + "\n".join(lines[1:]))
    return "\n\n".join(blocks)


def format_page() -> str:
    """The reference as Markdown: docs/config.md."""
    parts = [INTRODUCTION]
    for section in list_sections():
        where = ", ".join(f"`{path}`" for path in section.paths)
        meaning = " ".join(section.meaning.split())
        rows = ["| field | type | allowed values | default | meaning |", "| --- | --- | --- | --- | --- |"]
        rows += [
            f"| `{field.name}` | {_cell(field.type)} | {_cell(field.allowed)} | `{_cell(field.default)}` | "
            f"{_cell(field.meaning)} |"
            for field in section.fields
        ]
        parts.append("\n\n".join(filter(None, [f"## {section.name}", where, meaning, "\n".join(rows)])) + "\n")
    return "\n".join(parts)


def _cell(words: str) -> str:
    """Text for a table cell, with the characters escaped that Markdown would interpret."""
    return words.replace("|", "\\|").replace("<", "&lt;").replace("**", "\\*\\*")


if __name__ == "__main__":
    print(format_page(), end="")
