"""Conversations: JSONL, one a line, plain or .gz.

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}

    config.splits = {"train": ("train.jsonl",), "validation": ("dev.jsonl",)}
    config.splits = {"train": ("all.jsonl[:90%]",), "validation": ("all.jsonl[90%:]",)}    a slice counts conversations

A conversation is perhaps a turn of the system, then turns of the user and the assistant, a reply last. Its key is
"messages", or what `config.columns` names for the role messages; other keys are not read. Blank lines are skipped.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxformer.config import DataConfig
from jaxformer.data import cache, chat
from jaxformer.data.sources import Dataset, _files
from jaxformer.errors import ConfigError

logger = logging.getLogger(__name__)


def build(config: DataConfig) -> Dataset:
    """The conversations of `config.splits`, under the role "messages".

    Raises:
      ConfigError: a file is missing, empty, damaged or not UTF-8; JSON is malformed; a role is unknown or out of order;
        a turn is empty outside of training (the message names file and line).
    """
    if set(config.columns) - {"messages"}:
        got = ", ".join(f"{role}={key}" for role, key in config.columns.items())
        raise ConfigError(f"data.columns: got {got}, expected messages=KEY, or nothing for the key 'messages'")
    key, splits = config.columns.get("messages", "messages"), _files.slices_by_split(config)

    def rows(split: str) -> Iterator[tuple[str, list[dict[str, str]]]]:
        for part in splits[split]:
            yield from _files.sliced_items(part, _read(part.path, key), "conversations")

    def parse() -> tuple[dict[str, Any], dict[str, cache.ParsedRows]]:
        import tensorflow_datasets as tfds

        # JSON, since tfds would give back a list of roles and a list of contents.
        return {"messages": tfds.features.Text()}, {split: _stored(split, rows(split)) for split in splits}

    paths = [part.path for part in itertools.chain(*splits.values())]
    return _files.prepared_dataset(config, "dialogues", paths, (key, _files.slices_key(splits)), parse)


def _read(path: Path, key: str) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """(file and line, turns) of every conversation of a file."""
    for where, record in _files.read_json_lines(path):
        if not isinstance(record, dict) or key not in record:
            got = f"keys {', '.join(map(ascii, record))}" if isinstance(record, dict) else type(record).__name__
            raise ConfigError(f"{where}: got {got}, expected an object with {key!r}; set data.columns.messages=KEY")
        yield where, chat.check_messages(record[key], where, answered=True)


def _stored(split: str, rows: Iterable[tuple[str, list[dict[str, str]]]]) -> Iterator[dict[str, str]]:
    """Conversations as they are stored. Those with an empty turn are left out of training, and refused elsewhere."""
    dropped, first = 0, ""
    for where, turns in rows:
        empty = next((turn["role"] for turn in turns if not turn["content"].strip()), None)
        if empty is None:
            yield {"messages": json.dumps(turns, ensure_ascii=False)}
        elif split == "train":
            dropped, first = dropped + 1, first or where
        else:
            raise ConfigError(
                f"{where}: got an empty turn of the {empty}, expected text; remove it from the {split} files"
            )
    if dropped:
        logger.warning("dropped %d training conversations with an empty turn, the first at %s", dropped, first)


SOURCE = build
