"""The list of all fields of the config: `jaxformer config --fields`, and docs/config.md.

`python -m jaxformer.fields > docs/config.md` writes the page. Names, types and defaults come from the dataclasses of
`config.py`, and what a field means from the comment beside it there.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxformer.config import Config
from jaxformer.schema import describe, fields, members, part_of

INTRODUCTION = """# Fields of the config

Every field below can be set in a recipe (`config.train.steps = 400`) and on the command line
(`--config.train.steps=400`). `jaxformer config --config=FILE.py` prints all values of a recipe, and
`jaxformer config --fields` prints this list. `python -m jaxformer.fields > docs/config.md` writes the page from
`jaxformer/config.py`, where the words are.

On the command line None, true and false are words, a tuple is `a,b`, and a dict has one flag for each entry:
`--config.data.splits.test=a.en,a.de`. An empty entry removes it: `--config.data.splits.test=`. A section whose default
is None is a part that the recipe adds or leaves out.
"""


class Field(NamedTuple):
    """A field as a reader needs it."""

    name: str
    type: str
    default: str
    meaning: str


class Section(NamedTuple):
    """A dataclass of the schema: where it occurs in a config, what its docstring says, and its fields."""

    name: str
    paths: tuple[str, ...]
    meaning: str
    fields: tuple[Field, ...]


@functools.cache
def sections() -> tuple[Section, ...]:
    """All sections, in the order in which they occur below `config`."""
    paths: dict[type, list[str]] = {}
    for kind, path in _walk(Config, "config"):
        paths.setdefault(kind, []).append(path)
    documented = _documented()
    return tuple(
        Section(kind.__name__, tuple(where), documented[kind.__name__][0], tuple(_fields(kind, documented)))
        for kind, where in paths.items()
    )


def _walk(kind: type, path: str) -> Iterator[tuple[type, str]]:
    yield kind, path
    for name, hint in fields(kind).items():
        part = part_of(hint)
        if part is not None:
            yield from _walk(part, f"{path}.{name}")


def _fields(kind: type, documented: dict[str, tuple[str, dict[str, str]]]) -> Iterator[Field]:
    comments = documented[kind.__name__][1]
    hints = fields(kind)
    for field in dataclasses.fields(kind):
        part, (_, optional) = part_of(hints[field.name]), members(hints[field.name])
        meaning = comments.get(field.name, "")
        if part is not None:
            meaning = meaning or documented[part.__name__][0].split("\n")[0]
            yield Field(field.name, f"{part.__name__}{' or None' if optional else ''}", _default(field), meaning)
        else:
            yield Field(field.name, describe(hints[field.name]), _default(field), meaning)


def _default(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return _shown(field.default)
    made = field.default_factory()
    return "its defaults" if dataclasses.is_dataclass(made) else _shown(made)


def _shown(value: Any) -> str:
    """A default as the command line takes it; an empty text, tuple or dict as Python writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple) and value:
        return ",".join(map(str, value))
    return value if isinstance(value, str) and value else f"{value!r}".replace("''", '""')


@functools.cache
def _documented() -> dict[str, tuple[str, dict[str, str]]]:
    """Class -> its docstring, and of each field the comment at the end of its line and in the lines after it."""
    source = inspect.getsource(inspect.getmodule(Config))
    comments, alone = {}, set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string.lstrip("# ")
            if not token.line[: token.start[1]].strip():
                alone.add(token.start[0])
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            meanings = {}
            for each in node.body:
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    number = each.end_lineno or each.lineno
                    words = [comments[number]] if number in comments else []
                    while (number := number + 1) in alone:
                        words.append(comments[number])
                    meanings[each.target.id] = " ".join(words)
            found[node.name] = ((ast.get_docstring(node) or "").strip(), meanings)
    return found


def text() -> str:
    """The list for a terminal."""
    blocks = []
    for section in sections():
        names = [f"{field.name} = {field.default}" for field in section.fields]
        width = min(max(map(len, names), default=0), 36)
        lines = [", ".join(section.paths), *(section.meaning.split("\n")[:1] if section.meaning else [])]
        for name, field in zip(names, section.fields, strict=True):
            words = f"{field.type}" + (f": {field.meaning}" if field.meaning else "")
            start = f"  {name:<{width}}  "
            wrapped = textwrap.wrap(words, 118 - width - 4, break_on_hyphens=False) or [""]
            lines += [start + wrapped[0], *(" " * (width + 4) + line for line in wrapped[1:])]
        blocks.append("\n".join(textwrap.wrap(lines[0], 118)) + "\n" + "\n".join(lines[1:]))
    return "\n\n".join(blocks)


def page() -> str:
    """docs/config.md."""
    parts = [INTRODUCTION]
    for section in sections():
        where = ", ".join(f"`{path}`" for path in section.paths)
        meaning = " ".join(section.meaning.split())
        rows = ["| field | type | default | meaning |", "| --- | --- | --- | --- |"]
        rows += [
            f"| `{field.name}` | {_cell(field.type)} | `{_cell(field.default)}` | {_cell(field.meaning)} |"
            for field in section.fields
        ]
        parts.append("\n\n".join(filter(None, [f"## {section.name}", where, meaning, "\n".join(rows)])) + "\n")
    return "\n".join(parts)


def _cell(words: str) -> str:
    """Words of a table: bars would end a cell, and angle brackets and stars mean something in Markdown."""
    return words.replace("|", "\\|").replace("<", "&lt;").replace("**", "\\*\\*")


if __name__ == "__main__":
    print(page(), end="")
