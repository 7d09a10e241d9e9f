"""Questions with answers in a context, in the JSON format of SQuAD 1.1 and 2.0 (Rajpurkar et al. 2016, 2018).

    config.splits = {"train": ("train-v2.0.json",), "validation": ("dev-v2.0.json",)}
    config.splits = {"train": ("train-v1.1.json[:95%]",), "validation": ("train-v1.1.json[95%:]",)}   slices of articles
    config.splits = {"train": ("all.json[split.tsv=train]",), "test": ("all.json[split.tsv=test]",)}

The last form takes the articles that a table (TSV with the columns title and split) assigns to a split; a slice may
follow. Files are plain or .gz. An example has a "question", its "context", the "answers" (2.0: empty if the context has
none), their "starts", and the "id". `"start_inferred": true` marks an answer whose position no annotator has given:
scores accept it, and its start is -1. Training leaves out questions that have only such answers.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxformer.config import DataConfig
from jaxformer.data import cache
from jaxformer.data.sources import Dataset, _files
from jaxformer.data.sources._files import FileSlice, parse_slice
from jaxformer.errors import ConfigError

UNKNOWN = -1
"""Start of an answer whose position was not annotated."""

logger = logging.getLogger(__name__)


class Articles(NamedTuple):
    """A slice of the articles of a file; with a `table`, only of those that it assigns to the split `name`."""

    part: FileSlice
    table: Path | None
    name: str

    @property
    def files(self) -> list[Path]:
        return [self.part.path] if self.table is None else [self.part.path, self.table]


def build(config: DataConfig) -> Dataset:
    """The questions of `config.splits`.

    Raises:
      ConfigError: a file is missing, empty, damaged or not UTF-8; the JSON has another form (names file and path); an
        answer is not at its stated start; a question id occurs twice in a split; a table lacks the split, or names an
        article that the file does not have.
    """
    folder = _files.data_directory(config)
    splits = {split: [_articles(folder, name) for name in names] for split, names in config.splits.items()}

    def parse() -> tuple[dict[str, Any], dict[str, cache.ParsedRows]]:
        import numpy as np
        import tensorflow_datasets as tfds

        features: dict[str, Any] = {role: tfds.features.Text() for role in ("id", "question", "context")}
        features["answers"] = tfds.features.Sequence(tfds.features.Text())
        features["starts"] = tfds.features.Sequence(tfds.features.Scalar(np.int32))
        return features, {split: _chosen(split, _questions(parts)) for split, parts in splits.items()}

    paths = [path for parts in splits.values() for each in parts for path in each.files]
    settings = {
        split: [(each.name, len(each.files), each.part.start, each.part.stop) for each in parts]
        for split, parts in splits.items()
    }
    return _files.prepared_dataset(config, "squad", paths, settings, parse)


def _articles(folder: Path, name: str) -> Articles:
    """The articles that an entry of `data.splits` names."""
    name, start, stop = parse_slice(name)
    file, bracket, rest = name.removesuffix("]").partition("[")
    table, equals, split = rest.partition("=")
    if not bracket:
        return Articles(FileSlice(_files.find_file(folder / name), start, stop), None, "")
    if not (name.endswith("]") and table and equals and split):
        raise ConfigError(f"data.splits: got {name!r}, expected FILE, FILE[:90%] or FILE[TABLE.tsv=SPLIT]")
    return Articles(FileSlice(_files.find_file(folder / file), start, stop), _files.find_file(folder / table), split)


def _titles(table: Path, name: str) -> dict[str, int]:
    """The titles of a split in a table, and their line numbers."""
    rows = ((number, line.split("\t")) for number, line in _files.read_lines(table) if line.strip())
    number, header = next(rows, (1, []))
    if not {"title", "split"} <= set(header):
        raise ConfigError(f"{table}:{number}: got columns {', '.join(header)}, expected title and split among them")
    titles, known = {}, set()
    for number, cells in rows:
        if len(cells) != len(header):
            raise ConfigError(f"{table}:{number}: got {len(cells)} cells, expected {len(header)}; a tab separates them")
        row = dict(zip(header, cells, strict=True))
        known.add(row["split"])
        if row["split"] == name:
            titles[row["title"]] = number
    if not titles:
        raise ConfigError(f"{table}: got no article of split {name!r}, expected one of {', '.join(sorted(known))}")
    return titles


def _questions(parts: Iterable[Articles]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file and path, example) of every question of these articles."""
    seen: dict[str, str] = {}
    for where, row in itertools.chain.from_iterable(map(_questions_of_part, parts)):
        first = seen.setdefault(row["id"], where)
        if first != where:
            raise ConfigError(f"{where}: got id {row['id']!r} a second time (first at {first}), expected others")
        yield where, row


def _questions_of_part(selection: Articles) -> Iterator[tuple[str, dict[str, Any]]]:
    path = selection.part.path
    articles = list(enumerate(_field(_json(path), "data", list, f"{path}: ")))
    if selection.table is not None:
        titles = _titles(selection.table, selection.name)
        articles = [(n, a) for n, a in articles if _field(a, "title", str, f"{path}: data[{n}].") in titles]
        missing = titles.keys() - {article["title"] for _, article in articles}
        if missing:
            title = min(missing, key=titles.__getitem__)
            what = f"{selection.table}:{titles[title]}: got the title {title!r}"
            raise ConfigError(f"{what}, expected one that an article of {path} has")
    for number, article in _files.sliced_items(selection.part, articles, "articles"):
        yield from _questions_of_article(article, f"{path}: data[{number}].")


def _questions_of_article(article: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for p, paragraph in enumerate(_field(article, "paragraphs", list, where)):
        prefix = f"{where}paragraphs[{p}]."
        context = _text(paragraph, "context", prefix)
        for q, question in enumerate(_field(paragraph, "qas", list, prefix)):
            position = f"{prefix}qas[{q}]."
            answers, starts = _answers(question, context, position)
            yield (
                position.removesuffix("."),
                {
                    "id": _text(question, "id", position),
                    "question": _text(question, "question", position),
                    "context": context,
                    "answers": answers,
                    "starts": starts,
                },
            )


def _answers(question: Any, context: str, where: str) -> tuple[list[str], list[int]]:
    """The answers of a question, and the start of each in the context."""
    annotated = _field(question, "answers", list, where)
    impossible = question.get("is_impossible", False)
    if bool(annotated) == (impossible is True):
        got = f"{len(annotated)} answers and is_impossible {impossible}"
        raise ConfigError(f"{where}answers: got {got}, expected answers, or none and is_impossible true")
    texts, starts = [], []
    for number, answer in enumerate(annotated):
        prefix = f"{where}answers[{number}]."
        text, start = _text(answer, "text", prefix), _field(answer, "answer_start", int, prefix)
        actual = context[max(start, 0) : max(start, 0) + len(text)]
        if start < 0 or actual != text:
            raise ConfigError(f"{prefix}answer_start: got {start}, where the context has {actual!r}, expected {text!r}")
        texts.append(text)
        starts.append(UNKNOWN if answer.get("start_inferred", False) else start)
    return texts, starts


def _chosen(split: str, questions: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Leaves questions without an annotated answer position out of training. Other splits keep all questions."""
    dropped = 0
    for _, row in questions:
        if split == "train" and row["answers"] and max(row["starts"]) == UNKNOWN:
            dropped += 1
        else:
            yield row
    if dropped:
        logger.warning("dropped %d training questions, the places of whose answers are all inferred", dropped)


def _json(path: Path) -> Any:
    try:
        return json.loads(_files.read_text(path))
    except RecursionError as error:
        raise ConfigError(f"{path}: got JSON of too many levels, expected SQuAD's form") from error
    except json.JSONDecodeError as error:
        what = f"{path}:{error.lineno}: got malformed JSON ({error.msg}, column {error.colno})"
        raise ConfigError(f"{what}, expected SQuAD's form") from error


def _field(part: Any, name: str, kind: type, where: str) -> Any:
    """The field `name` of a JSON object, which must have this type."""
    if not isinstance(part, dict) or name not in part:
        got = f"an object without {name!r}" if isinstance(part, dict) else type(part).__name__
        raise ConfigError(f"{where.rstrip('.: ')}: got {got}, expected an object with {name!r}, as SQuAD's files have")
    value = part[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ConfigError(f"{where}{name}: got {type(value).__name__}, expected {kind.__name__}")
    return value


def _text(part: Any, name: str, where: str) -> str:
    """The text field `name` of a JSON object, which must not be empty."""
    text = _field(part, name, str, where)
    if not text.strip():
        raise ConfigError(f"{where}{name}: got an empty text, expected some; mend or remove it")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON's escapes can name half a surrogate pair
        got = ascii(text[error.start])
        raise ConfigError(f"{where}{name}: got {got}, expected text that UTF-8 can hold") from error
    return text


SOURCE = build
