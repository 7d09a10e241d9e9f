"""Preferences: pairs of replies, JSONL, one pair a line, plain or .gz.

    {"prompt": "Hi", "chosen": "Hello.", "rejected": "What?"}
    {"prompt": [{"role": "user", "content": "Hi"}], "chosen": "Hello.", "rejected": "What?"}
    {"chosen": [TURNS, {"role": "assistant", ...}], "rejected": [TURNS, {"role": "assistant", ...}]}

    config.splits = {"train": ("train.jsonl",), "validation": ("dev.jsonl",)}
    config.splits = {"train": ("all.jsonl[:90%]",), "validation": ("all.jsonl[90%:]",)}    a slice counts pairs

A prompt is a turn of the user, or a list of turns as in conversations (`dialogues`), the user's last. A reply is a
text, or a list with one turn of the assistant; without a prompt, a whole conversation, of which all but the last turn
is the same in both. `config.columns` names other keys for prompt, chosen and rejected; further keys are not read.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxformer.config import DataConfig
from jaxformer.data import cache, chat
from jaxformer.data.sources import Dataset, _files
from jaxformer.errors import ConfigError

FIELDS = ("prompt", "chosen", "rejected")

logger = logging.getLogger(__name__)


class Pair(NamedTuple):
    """A conversation that waits for a reply, and two replies to it."""

    messages: list[dict[str, str]]
    chosen: str
    rejected: str


def build(config: DataConfig) -> Dataset:
    """The pairs of `config.splits`, under the roles "messages", "chosen" and "rejected".

    Raises:
      ConfigError: a file is missing, empty, damaged or not UTF-8; JSON is malformed; a field is missing or holds
        something else; outside of training a text is empty, or both replies are the same (the message names file and
        line).
    """
    if set(config.columns) - set(FIELDS):
        got = ", ".join(f"{role}={key}" for role, key in config.columns.items())
        raise ConfigError(f"data.columns: got {got}, expected keys for {', '.join(FIELDS)} alone; leave the others out")
    columns = {name: config.columns.get(name, name) for name in FIELDS}
    splits = _files.slices_by_split(config)

    def rows(split: str) -> Iterator[tuple[str, Pair]]:
        for part in splits[split]:
            yield from _files.sliced_items(part, _read(part.path, columns), "pairs")

    def parse() -> tuple[dict[str, Any], dict[str, cache.ParsedRows]]:
        import tensorflow_datasets as tfds

        features = {name: tfds.features.Text() for name in Pair._fields}  # the turns are JSON, as in `dialogues`
        return features, {split: _stored(split, rows(split)) for split in splits}

    paths = [part.path for part in itertools.chain(*splits.values())]
    key = (json.dumps(columns, sort_keys=True), _files.slices_key(splits))
    return _files.prepared_dataset(config, "preferences", paths, key, parse)


def _read(path: Path, columns: Mapping[str, str]) -> Iterator[tuple[str, Pair]]:
    """(file and line, pair) of every line of a file that is not blank."""
    for where, record in _files.read_json_lines(path):
        missing = [name for name in FIELDS[1:] if not isinstance(record, dict) or columns[name] not in record]
        if missing:
            got = f"keys {', '.join(map(ascii, record))}" if isinstance(record, dict) else type(record).__name__
            expected = f"an object with {columns[missing[0]]!r}, the {missing[0]} reply"
            raise ConfigError(f"{where}: got {got}, expected {expected}; set data.columns.{missing[0]}=KEY")
        yield where, _pair(record, columns, where)


def _pair(record: Mapping[str, Any], columns: Mapping[str, str], where: str) -> Pair:
    """The pair of a line.

    Raises:
      ConfigError: it is none of the three forms above.
    """
    chosen, rejected = (record[columns[name]] for name in FIELDS[1:])
    if columns["prompt"] not in record:
        both = []
        for name, value in (("chosen", chosen), ("rejected", rejected)):
            if isinstance(value, str):
                expected = f"{columns['prompt']!r} beside replies that are texts; set data.columns.prompt=KEY"
                raise ConfigError(f"{where}: got keys {', '.join(map(ascii, record))}, expected {expected}")
            both.append(chat.check_messages(value, f"{where}, {name}", answered=True))
        if both[0][:-1] != both[1][:-1]:
            expected = "the same turns before the last reply"
            raise ConfigError(f"{where}: got chosen and rejected of different conversations, expected {expected}")
        return Pair(both[0][:-1], both[0][-1]["content"], both[1][-1]["content"])
    prompt = record[columns["prompt"]]
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = chat.check_messages(turns, f"{where}, prompt", answered=False)
    return Pair(messages, *(_reply(value, f"{where}, {name}") for name, value in zip(FIELDS[1:], (chosen, rejected))))


def _reply(value: Any, where: str) -> str:
    """The text of a reply: a string, or a list with one turn of the assistant."""
    turn = {"role": "assistant", "content": value} if isinstance(value, str) else None
    if turn is None and isinstance(value, list) and len(value) == 1:
        turn = value[0]
    if turn is None:
        got = f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__
        raise ConfigError(f"{where}: got {got}, expected a text, or a list with one turn of the assistant")
    return chat.check_messages([{"role": "user", "content": "-"}, turn], where, answered=True)[-1]["content"]


def _stored(split: str, rows: Iterable[tuple[str, Pair]]) -> Iterator[dict[str, str]]:
    """Pairs as they are stored. Empty texts and equal replies are left out of training, and refused in other splits."""
    dropped, first = 0, ""
    for where, pair in rows:
        problem = _problem(pair)
        if not problem:
            messages = json.dumps(pair.messages, ensure_ascii=False)
            yield {"messages": messages, "chosen": pair.chosen, "rejected": pair.rejected}
        elif split == "train":
            dropped, first = dropped + 1, first or f"{where} ({problem})"
        else:
            raise ConfigError(f"{where}: got {problem}; remove it from the {split} files")
    if dropped:
        logger.warning("dropped %d training pairs that teach nothing, the first at %s", dropped, first)


def _problem(pair: Pair) -> str:
    """Reason why a pair teaches nothing; "" if it does."""
    if not all(turn["content"].strip() for turn in pair.messages):
        return "an empty turn in the prompt, expected text"
    for name in FIELDS[1:]:
        if not getattr(pair, name).strip():
            return f"an empty {name} reply, expected text"
    same = pair.chosen.strip() == pair.rejected.strip()
    return "equal chosen and rejected replies, expected different ones" if same else ""


SOURCE = build
