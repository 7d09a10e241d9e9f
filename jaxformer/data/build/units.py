"""One unit of a build: the pieces of one shard, read, cleaned, tokenized and written whole or not at all.

A worker does a unit by itself, so the same unit gives the same bytes in any process. Its manifest is written after its
files, and a unit with a manifest is finished.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.data import token_shards
from jaxformer.data.build import deduplication, targets
from jaxformer.data.build.options import Cleaner, Options
from jaxformer.data.build.pieces import Input, Piece
from jaxformer.data.build.targets import WORK, Target
from jaxformer.data.token_shards import COUNTS, TABLE
from jaxformer.data.tokenizers import Tokenizer, Tokenizers
from jaxformer.errors import ConfigError, StorageError

BATCH_CHARACTERS = 2**18
"""Characters that are tokenized at a time."""


@dataclasses.dataclass(frozen=True)
class Unit:
    """The input of one shard.

    Attributes:
      target: where its shard goes: the target of the build, or the folder of a component in it.
      source: the input.
      number: of the shard in its split.
      pieces: what it reads.
      options: the options of the build.
      plan: hash of everything that decides the content of the build but the tokenizer.
    """

    target: Target
    source: Input
    number: int
    pieces: tuple[Piece, ...]
    options: Options
    plan: str

    @property
    def name(self) -> str:
        """Name of the unit: its split and number."""
        return f"{self.source.split}-{self.number:05d}"

    @property
    def manifest(self) -> str:
        """Key of its manifest."""
        return f"{self.name}.json"

    @property
    def keys(self) -> str:
        """Key of the hashes or signatures of its documents."""
        return f"{WORK}/{self.name}.keys.npy"

    @property
    def survivors(self) -> str:
        """Key of which of its documents survive deduplication."""
        return f"{WORK}/{self.name}.survivors.npy"

    def texts(self, dropped: dict[str, int]) -> Iterator[str]:
        """The documents that cleaning keeps. The number of others is added to `dropped`, by reason."""
        cleaner = _cleaner(self.options, self.source.split)
        for piece in self.pieces:
            for text in self.source.documents(piece, dropped):
                reason = cleaner.reason(text)
                if reason:
                    dropped[reason] = dropped.get(reason, 0) + 1
                else:
                    yield text


@functools.lru_cache(maxsize=8)
def _cleaner(options: Options, split: str) -> Cleaner:
    return Cleaner(options, split)


@functools.lru_cache(maxsize=2)
def _tokenizer(target: Target, fingerprint: str) -> Tokenizer:
    del fingerprint  # part of the cache's key: another build in this process may have replaced the file
    return load_tokenizer(target)


def load_tokenizer(target: Target) -> Tokenizer:
    """The tokenizer of the shards in a target.

    Raises:
      ConfigError: it is missing or damaged.
    """
    path = target.copy(Tokenizers.FILE)
    return Tokenizers.load((path or target.local(Tokenizers.FILE)).parent).target


# --- keys of documents ------------------------------------------------------------------------------------------------


def write_keys(unit: Unit) -> None:
    """Writes the keys by which duplicates of the documents of a unit are found, unless they are there."""
    if load_array(unit.target, unit.keys) is not None:
        return
    make = deduplication.exact_keys if unit.options.deduplicate == "exact" else deduplication.signatures
    parts = [make(texts) for texts in _batches(unit.texts({}))] or [make([])]
    save_array(unit.target, unit.keys, np.concatenate(parts))


def save_array(target: Target, key: str, values: np.ndarray) -> None:
    """Writes a .npy file atomically."""
    content = io.BytesIO()
    np.save(content, values)
    target.write(key, content.getvalue())


def load_array(target: Target, key: str) -> np.ndarray | None:
    """A .npy file, mapped into memory; None if there is none that is as long as it says."""
    path = target.copy(key)
    try:
        return None if path is None else np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return None


def _unique() -> str:
    """Part of the name of a temporary file: workers of several machines may be given the same unit."""
    return f"{os.getpid()}-{secrets.token_hex(4)}"


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text) + 1
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


# --- shards -----------------------------------------------------------------------------------------------------------


def make(unit: Unit, fingerprint: str) -> dict[str, Any]:
    """Writes the files of a unit, and returns its manifest.

    Args:
      fingerprint: of the tokenizer in the unit's directory.

    Raises:
      ConfigError: the input is damaged, or a filter fails.
      StorageError: the shard cannot be written. Nothing of it is left behind.
    """
    unit.target.delete(unit.manifest)
    tokenizer = _tokenizer(unit.target, fingerprint)
    names = [unit.source.split, *(["validation"] if unit.options.held_out and unit.source.split == "train" else [])]
    writers = {split: _ShardWriter(unit, split, tokenizer) for split in names}
    dropped: dict[str, int] = {}
    try:
        for texts in _batches(_surviving(unit, dropped)):
            _write_texts(unit, writers, tokenizer, texts)
        shards = {split: writer.close() for split, writer in writers.items()}
        content = {"unit": _identity(unit, fingerprint), "shards": shards, "dropped": dict(sorted(dropped.items()))}
        generations = {writer.key: writer.generation for writer in writers.values() if writer.generation}
        targets.write_json(unit.target, unit.manifest, content | ({"generations": generations} if generations else {}))
        return content
    except OSError as error:
        raise _cannot_write(unit.target.local(unit.manifest), error.strerror or str(error)) from error
    finally:
        for writer in writers.values():
            writer.discard()


def _surviving(unit: Unit, dropped: dict[str, int]) -> Iterator[str]:
    """The documents of a unit that neither cleaning nor deduplication drops."""
    if unit.options.deduplicate == "none" or unit.source.split != "train":
        yield from unit.texts(dropped)
        return
    survives = load_array(unit.target, unit.survivors)
    if survives is None:
        raise StorageError(
            f"{unit.target}/{unit.survivors}: got no list of the documents that survive, expected the one that this "
            "build wrote; run the same command again"
        )
    number = -1
    for number, text in enumerate(unit.texts(dropped)):
        if number < len(survives) and survives[number]:
            yield text
    if number + 1 != len(survives):
        raise ConfigError(
            f"{unit.pieces[0].path}: got other documents than when duplicates were searched, "
            "expected the same; do not change the input or the filters during a build"
        )
    if not survives.all():
        dropped["duplicate"] = int((~survives).sum())


def _write_texts(unit: Unit, writers: dict[str, _ShardWriter], tokenizer: Tokenizer, texts: list[str]) -> None:
    cleaner = _cleaner(unit.options, unit.source.split)
    ends = 1 if unit.source.data.document == "line" else 0  # as `cache.text_size` counts
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        size = len(text.encode()) + ends, len(text.split()), text.count("\n") + ends
        writers[cleaner.output_split(text)].add(ids, *size)


def finished_manifest(unit: Unit, fingerprint: str) -> dict[str, Any] | None:
    """The manifest of a unit if it is finished and its files are whole, else None.

    Reads every byte of the files, but of those in a bucket that have the generation with which they were written.
    """
    try:
        found = targets.read_json(unit.target, unit.manifest)
        if found is None or found["unit"] != _identity(unit, fingerprint):
            return None
        generations = found.get("generations", {})
        for shard in filter(None, found["shards"].values()):
            known = generations.get(shard["file"], "")
            if not unit.target.is_whole(shard["file"], shard["size"], shard["sha256"], known):
                return None
    except (OSError, LookupError, TypeError, AttributeError):
        return None
    return found


def _identity(unit: Unit, fingerprint: str) -> str:
    pieces = [[Path(piece.path).name, piece.begin, piece.end] for piece in unit.pieces]
    content = json.dumps([token_shards.FORMAT, unit.plan, fingerprint, unit.name, pieces])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _cannot_write(path: Path, reason: str) -> StorageError:
    reason = " ".join(reason.split())[:160]
    return StorageError(
        f"{path}: got {reason}, expected to write a shard there; make room, then run the same command: finished shards "
        "are kept"
    )


class _ShardWriter:
    """Writes a shard into a partial file, which `close` publishes. Memory: one record, and the table of documents.

    Attributes:
      key: of the shard in the target.
      generation: of its object in a bucket, once it is written.
    """

    def __init__(self, unit: Unit, split: str, tokenizer: Tokenizer):
        self.key, self.generation = f"{split}-{unit.number:05d}.array_record", ""
        self._target, self._path = unit.target, unit.target.local(self.key)
        self._partial = unit.target.partials / f"{self._path.stem}.{_unique()}.partial"
        self._dtype = token_shards.token_dtype(tokenizer.size)
        self._separator = [] if tokenizer.eos is None else [tokenizer.eos]
        self._writer: Any = None
        self._pending: list[np.ndarray] = []
        self._count = 0
        self._tokens = 0
        self._rows: list[tuple[int, int, int, int]] = []

    def add(self, ids: list[int], size: int, words: int, lines: int) -> None:
        """Adds a document: its ids, and the bytes, words and lines of its text."""
        tokens = np.array(ids + self._separator, self._dtype)
        self._tokens += len(tokens)
        if self._tokens >= 2**32:
            raise ConfigError("--shard-mb: got a shard of more than 4 billion tokens, expected fewer; lower it")
        self._rows.append((self._tokens, size, words, lines))
        self._pending.append(tokens)
        self._count += len(tokens)
        if self._count >= token_shards.RECORD_TOKENS:
            self._flush(self._count // token_shards.RECORD_TOKENS * token_shards.RECORD_TOKENS)

    def _flush(self, count: int) -> None:
        joined = np.concatenate(self._pending)
        for begin in range(0, count, token_shards.RECORD_TOKENS):
            self._write(joined[begin : min(begin + token_shards.RECORD_TOKENS, count)].tobytes())
        self._pending, self._count = [joined[count:]], len(joined) - count

    def _write(self, record: bytes) -> None:
        try:
            if self._writer is None:
                self._partial.parent.mkdir(parents=True, exist_ok=True)
                self._writer = token_shards.array_record().ArrayRecordWriter(
                    str(self._partial), token_shards.WRITER_OPTIONS
                )
            self._writer.write(record)
        except RuntimeError as error:
            raise _cannot_write(self._path, str(error)) from None

    def close(self) -> dict[str, Any] | None:
        """Completes the file, and returns its entry of the index; None, and no file, if it has no document."""
        if not self._rows:
            self._target.delete(self.key)
            return None
        self._flush(self._count)
        table: Any = np.array(self._rows, TABLE)
        for begin in range(0, len(table), token_shards.TABLE_DOCUMENTS):
            self._write(table[begin : begin + token_shards.TABLE_DOCUMENTS].tobytes())
        try:
            self._writer.close()
        except RuntimeError as error:
            raise _cannot_write(self._path, str(error)) from None
        size, sha256, self.generation = self._target.publish(self._partial, self.key)
        sums = {name: int(table[name].sum(dtype=np.int64)) for name in ("bytes", "words", "lines")}
        counts = {"documents": len(table), "tokens": self._tokens, **sums}
        return {"file": self.key, "size": size, "sha256": sha256, **{name: counts[name] for name in COUNTS}}

    def discard(self) -> None:
        """Removes the partial file if `close` has not published it."""
        if self._writer is not None and self._writer.is_open():
            with contextlib.suppress(RuntimeError):
                self._writer.close()
        self._partial.unlink(missing_ok=True)
