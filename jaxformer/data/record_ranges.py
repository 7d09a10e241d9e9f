"""Single records of a token shard in a bucket, read as byte ranges of its object.

An array_record file that is uncompressed and has groups of one record holds each record as a chunk of Riegeli's format
(https://github.com/google/riegeli/blob/master/doc/riegeli_records_file_format.md), so the sizes of the records before
it say where it begins: neither the index of the file nor anything else of it is read.

    file    blocks of 64 KiB, each after a header of 24 bytes that is left out below
    first   40 bytes, the signature
    chunk   a header of 40 bytes with the hashes of itself and of what follows; type of compression, length of the size,
            size of the record, record

What comes is checked by array_record itself: the chunk is put into a file with one record of that size.
"""

from __future__ import annotations

import collections
import functools
import os
import tempfile
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jaxformer.runtime.object_store import Store

BLOCK_BYTES = 2**16
BLOCK_HEADER_BYTES = 24
USABLE_BYTES = BLOCK_BYTES - BLOCK_HEADER_BYTES
SIGNATURE_BYTES = 40
CHUNK_HEADER_BYTES = 40
DOWNLOADS = 3
"""Attempts at a record that is damaged."""
MAX_KEPT_RECORDS = 2048
"""Records that a process keeps in memory, those of a batch among them: 32 MiB with two bytes a token."""
MAX_CHECKS = 64
"""Sizes of records for which a process keeps a file: all records of a shard have two, but for the last ones."""


class Place(NamedTuple):
    """Where a record is: the key of its shard, the range of its chunk in the file, and its size, in bytes."""

    key: str
    begin: int
    end: int
    size: int


class Damaged(Exception):
    """A record cannot be read, or is not the one that was written. The message says why, and the shard's `key`."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(reason)
        self.key = key


def place(key: str, runs: Sequence[tuple[int, int]], number: int) -> Place:
    """Place of record `number` of a shard.

    Args:
      runs: number and size (bytes) of the records of the shard, in order.

    Raises:
      IndexError: the shard has fewer records.
    """
    begin = 0
    for count, size in runs:
        if number < count:
            begin += number * chunk_bytes(size)
            return Place(key, *file_range(begin, begin + chunk_bytes(size)), size)
        begin, number = begin + count * chunk_bytes(size), number - count
    raise IndexError(f"there is no record {number}")


def chunk_bytes(size: int) -> int:
    """Bytes of the chunk of a record of `size` > 0 bytes, without headers of blocks."""
    return CHUNK_HEADER_BYTES + 2 + -(-size.bit_length() // 7) + size


def file_range(begin: int, end: int) -> tuple[int, int]:
    """Range in the file of the bytes `begin` to `end` of the chunks, which follow the signature."""
    return _offset(SIGNATURE_BYTES + begin), _offset(SIGNATURE_BYTES + end - 1) + 1


def _offset(position: int) -> int:
    """Offset in the file of a byte, given the number of bytes before it that are not of headers of blocks."""
    return position + BLOCK_HEADER_BYTES * (position // USABLE_BYTES + 1)


def without_block_headers(content: bytes, begin: int) -> bytes:
    """Bytes from offset `begin` of a file on without the headers of blocks among them."""
    parts, start = [], 0
    for header in range(-(-begin // BLOCK_BYTES) * BLOCK_BYTES, begin + len(content), BLOCK_BYTES):
        parts.append(content[start : header - begin])
        start = header - begin + BLOCK_HEADER_BYTES
    return b"".join([*parts, content[start:]])


class RemoteRecords:
    """Records of shards in a bucket, of which a process keeps the last in memory.

    Args:
      store: the bucket.
      module: `array_record_module`.
      writer_options, reader_options: those of the shards.
    """

    def __init__(self, store: Store, module: Any, writer_options: str, reader_options: str) -> None:
        self._store = store
        self._kept: collections.OrderedDict[Place, bytes] = collections.OrderedDict()
        self._generations: dict[str, bytes] = {}
        self._lock = threading.Lock()
        check = functools.partial(RecordCheck, module, writer_options=writer_options, reader_options=reader_options)
        self._check = functools.lru_cache(MAX_CHECKS)(check)

    def read(self, places: Iterable[Place]) -> list[bytes]:
        """The records. Those that are not kept are fetched several at a time.

        Raises:
          Damaged: one is missing or damaged, or its shard was written again since this process first read of it.
          StorageError: the storage does not answer.
        """
        places = list(places)
        found: dict[Place, bytes] = {}
        with self._lock:
            for each in places:
                if each in self._kept:
                    self._kept.move_to_end(each)
                    found[each] = self._kept[each]

        def fetch(each: Place) -> None:
            found[each] = self._fetch(each)

        self._store.for_each(fetch, ((each, each.size) for each in dict.fromkeys(places) if each not in found))
        with self._lock:
            self._kept |= found
            while len(self._kept) > MAX_KEPT_RECORDS:
                self._kept.popitem(last=False)
        return [found[each] for each in places]

    def _fetch(self, wanted: Place) -> bytes:
        reason = ""
        for _ in range(DOWNLOADS):
            found = self._store.read_range(wanted.key, wanted.begin, wanted.end)
            if found is None:
                raise Damaged(wanted.key, "it is missing or too short")
            if self._generations.setdefault(wanted.key, found.generation) != found.generation:
                raise Damaged(wanted.key, "it was written again while the run reads it")
            try:
                return self._check(wanted.size).record(without_block_headers(found.value, wanted.begin))
            except (RuntimeError, IndexError, ValueError) as error:
                reason = str(error)
        raise Damaged(wanted.key, reason)


class RecordCheck:
    """Checks chunks of records of one size: a file with one such record, into which each chunk is put.

    The file is in memory where the system can, since the disk may be full.

    Args:
      module: `array_record_module`.
      size: bytes of a record, whose chunk must fit into one block.
      writer_options, reader_options: those of the shards.
    """

    def __init__(self, module: Any, size: int, writer_options: str, reader_options: str) -> None:
        self._module, self._options = module, reader_options
        self._lock = threading.Lock()
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("record")
        else:
            self._file, name = tempfile.mkstemp()
            os.unlink(name)
        self._path = f"/dev/fd/{self._file}"
        writer = module.ArrayRecordWriter(self._path, writer_options)
        writer.write(bytes(size))
        writer.close()
        self._begin, self._end = file_range(0, chunk_bytes(size))

    def __del__(self) -> None:
        os.close(self._file)

    def record(self, chunk: bytes) -> bytes:
        """The record in a chunk.

        Raises:
          RuntimeError, IndexError, ValueError: it is damaged, or no chunk of a record of this size.
        """
        if len(chunk) != self._end - self._begin:
            raise ValueError(f"got {len(chunk)} bytes of a record, not {self._end - self._begin}")
        with self._lock:
            os.pwrite(self._file, chunk, self._begin)
            reader = self._module.ArrayRecordReader(self._path, self._options)
            try:
                if not reader.ok():
                    raise RuntimeError("it is no array_record file")
                (found,) = reader.read([0])
            finally:
                reader.close()
        return found
