"""Token shards that `jaxformer data build` wrote: a corpus of any size, read by random access.

    config.source = "shards"
    config.dir = "corpus"        the target of the build, a folder or an address in a bucket

The splits are those of the index. Fields that say how the corpus was read (`splits`, `document`, `columns`) are at
their defaults, or what they were when the shards were built, so that one recipe serves for both. The tokenizer comes
with the shards. See `jaxformer.data.token_shards`.
"""

from __future__ import annotations

import dataclasses
import logging
import tempfile
from pathlib import Path
from typing import Any

from jaxformer.config import DataConfig, SourceConfig, TokenizerConfig
from jaxformer.data import shard_copies, token_shards
from jaxformer.data.shard_copies import Room
from jaxformer.data.sources import Dataset
from jaxformer.data.token_shards import Shard, ShardedDocuments
from jaxformer.data.tokenizers import Tokenizer, Tokenizers
from jaxformer.errors import ConfigError
from jaxformer.runtime import directories, object_store, units
from jaxformer.runtime.object_store import Store

LOG = logging.getLogger("jaxformer")

READ_FIELDS = ("splits", "columns", "document", "name", "format", "score_range")
"""Fields of a source that decide how a corpus was read, and nothing once it is shards."""

KEPT_FIELDS = tuple(field.name for field in dataclasses.fields(TokenizerConfig) if field.name != "chat_template")
"""Fields of the tokenizer that decide what the shards hold."""


def read_settings(config: DataConfig) -> dict[str, Any]:
    """The fields of a config that decide how a corpus is read and tokenized, as JSON values: a part of the index."""
    defaults: Any = SourceConfig()
    source = {name: _json(getattr(config, name)) for name in READ_FIELDS}
    changed = {name: value for name, value in source.items() if value != _json(getattr(defaults, name))}
    tokenizer = {name: getattr(config.tokenizer, name) for name in KEPT_FIELDS}
    return {"source": config.source, "fields": changed, "tokenizer": tokenizer}


def build(config: DataConfig) -> Dataset:
    """The splits of the shards in `config.dir`.

    Raises:
      ConfigError: there are no finished shards, or one is missing or of another size; or the config says how to read
        or tokenize a corpus, and the shards were made otherwise.
    """
    if not config.dir:
        raise ConfigError("data.dir: got '', expected the folder that `jaxformer data build --target` wrote; set it")
    where: Path | str
    if object_store.is_url(config.dir):
        where = str(object_store.parse("data.dir", config.dir))
        index, tokenizer = _read_address(where)
    else:
        where = directories.expand_user(config.dir, "data.dir")
        index = token_shards.read_index(where)
        tokenizer = Tokenizers.load(where).target
    _check_same_settings(config, index["settings"])
    if tokenizer.fingerprint != index["tokenizer"]:
        raise ConfigError(
            f"{where}/{Tokenizers.FILE}: got another tokenizer than that of the shards, expected theirs; restore it"
        )
    room = Room(None if config.shard_copies_gb is None else int(config.shard_copies_gb * 1e9))
    splits = {name: ShardedDocuments(where, name, index, tokenizer, room) for name in index["splits"]}
    if isinstance(where, str):
        _warn_without_room(where, room, [shard for split in splits.values() for shard in split.files.shards])
    return Dataset(splits, f"shards-{token_shards.content_key(index)}")


def _read_address(url: str) -> tuple[dict[str, Any], Tokenizer]:
    """Index and tokenizer of shards in a bucket. Nothing else is fetched."""
    store = Store(url, "data.dir")
    found = store.read(token_shards.INDEX)
    index = token_shards.parse_index(None if found is None else found.value, url)
    found = store.read(Tokenizers.FILE)
    if found is None:
        raise ConfigError(f"{url}/{Tokenizers.FILE}: got none, expected the tokenizer of the shards; restore it")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / Tokenizers.FILE).write_bytes(found.value)
        return index, Tokenizers.load(folder).target


def _warn_without_room(where: str, room: Room, shards: list[Shard]) -> None:
    size, available = sum(shard.size for shard in shards), room.available()
    if size > available:
        LOG.warning("data.dir: %s has %s of shards, and this host has room for copies of %s in %s; of the other shards "
                    "records are read one by one (data.shard_copies_gb)", where, units.format_size(size),
                    units.format_size(available), shard_copies.folder())  # fmt: skip


def _check_same_settings(config: DataConfig, built: dict[str, Any]) -> None:
    settings = read_settings(config)
    for name, value in settings["fields"].items():
        if value != built["fields"].get(name):
            expected = (
                f"{built['fields'][name]}, as the shards were built, or its default"
                if name in built["fields"]
                else "its default"
            )
            raise ConfigError(f"data.{name}: got {value} for source shards, expected {expected}; remove it")
    if settings["tokenizer"] == {name: getattr(TokenizerConfig(), name) for name in KEPT_FIELDS}:
        return
    for name, value in settings["tokenizer"].items():
        if value != built["tokenizer"][name]:
            raise ConfigError(
                f"data.tokenizer.{name}: got {value!r} for source shards, expected {built['tokenizer'][name]!r}, as "
                "the shards were built, or all of data.tokenizer at its defaults; the tokenizer comes with the shards"
            )


def _json(value: Any) -> Any:
    """`value` as JSON gives it back: tuples are lists."""
    if isinstance(value, dict):
        return {key: _json(each) for key, each in value.items()}
    return [_json(each) for each in value] if isinstance(value, (tuple, list)) else value


SOURCE = build
