"""Token shards: a tokenized corpus on disk, read by random access without reading all of it.

    TARGET/index.json               every split and its shards, with counts and checksums; written last
    TARGET/jaxformer_tokenizer.json the tokenizer of all shards
    TARGET/train-00012.array_record one shard: its tokens in records of `RECORD_TOKENS`, then its table of documents

The tokens of a shard are those of its documents, each followed by the end token (`separator`) if the tokenizer has one.
The table has one row a document: where its tokens end in the shard, and the size of its text. Token number n of a
split, and document number i, are found by bisection over the cumulative counts of the shards.

Shards in a bucket are copied one by one, when something of them is read for the first time (`shard_copies`). Until a
large one is copied, and if the disk has no room for it, its records are read one by one (`record_ranges`).

Records are not compressed: a row of a batch is read from one or two of them in about 50 microseconds. array_record
checks a hash of each record as it is read, so damage shows without hashing the corpus when a run starts.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import copy
import dataclasses
import functools
import hashlib
import importlib
import itertools
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.data import record_ranges, shard_copies
from jaxformer.data.encoded_text import EncodedText
from jaxformer.data.record_ranges import RemoteRecords
from jaxformer.data.shard_copies import REBUILD, Room
from jaxformer.data.sources import Dataset, Example
from jaxformer.data.tokenizers import Tokenizer, Tokenizers
from jaxformer.errors import ConfigError
from jaxformer.runtime import files
from jaxformer.runtime.object_store import Store

INDEX = "index.json"
FORMAT = 1
RECORD_TOKENS = 2**13
"""Tokens per record; only the last record of tokens in a shard has fewer."""
TABLE_DOCUMENTS = 2**9
"""Documents per record of the table."""
TABLE = np.dtype([("end", "<u4"), ("bytes", "<u4"), ("words", "<u4"), ("lines", "<u4")])
"""A row of the table: the number of tokens in the shard up to the end of the document, and the size of its text."""
COUNTS = ("documents", "tokens", "bytes", "words", "lines")
"""Counts of a shard, which the index sums up for each split. Tokens include the separators."""
MAX_OPEN_SHARDS = 64
"""Shards that one process keeps open: a corpus may have more of them than a process may have files."""
MAX_AWAITED_BYTES = 16 << 20
"""Larger shards are copied in the background: a batch may have rows of as many shards as it has rows."""
WRITER_OPTIONS = "group_size:1,uncompressed"
READER_OPTIONS = "index_storage_option:in_memory,readahead_buffer_size:0"


def array_record() -> Any:
    """The module of readers and writers, which is compiled: type checkers do not see it."""
    return importlib.import_module("array_record.python.array_record_module")


def token_dtype(vocabulary_size: int) -> np.dtype:
    """Two bytes a token if they suffice, else four."""
    return np.dtype("<u2") if vocabulary_size <= 2**16 else np.dtype("<u4")


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file of a split, as the index lists it."""

    file: str
    size: int
    sha256: str
    documents: int
    tokens: int
    bytes: int
    words: int
    lines: int


def read_index(directory: Path) -> dict[str, Any]:
    """The index of the shards in `directory`, checked for the fields that reading needs.

    Raises:
      ConfigError: there is none, or it is damaged or of another format.
    """
    try:
        content = (directory / INDEX).read_bytes()
    except FileNotFoundError:
        content = None
    except OSError as error:
        got = f"{directory / INDEX}: got an unreadable file ({error.strerror})"
        raise ConfigError(f"{got}, expected the index of shards; restore it") from None
    return parse_index(content, str(directory))


def parse_index(content: bytes | None, where: str) -> dict[str, Any]:
    """The index in the file `index.json` of a folder, which the error calls `where`. See `read_index`."""
    path = f"{where}/{INDEX}"
    if content is None:
        what = f"data.dir: got {where!r} without {INDEX}"
        expected = "expected the target of a finished `jaxformer data build`"
        raise ConfigError(f"{what}, {expected}; run it, or run it again where it was stopped")
    try:
        index = files.parse_json(content.decode())
        if index["format"] != FORMAT:
            raise ConfigError(f"{path}: got format {index['format']}, expected {FORMAT}; build the shards again")
        if index["components"]:
            names = ", ".join(index["components"])
            raise ConfigError(
                f"data.dir: got {where!r}, the shards of a mixture, expected those of one of its components "
                f"({names}); name each as a component of data.mixture with source=shards and dir=NAME"
            )
        _ = index["tokenizer"], index["separator"], index["dtype"], index["settings"]
        for split in index["splits"].values():
            for shard in split["shards"]:
                Shard(**shard)
    except ConfigError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"{path}: got no index of shards ({error}), expected one; build the shards again") from None
    return index


def content_key(index: Mapping[str, Any]) -> str:
    """Hash of the tokens of all splits, and of what they mean."""
    content = [index["tokenizer"], index["separator"], index["dtype"], index["splits"]]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


class _Reader:
    """An open shard. A copy is not deleted until it is closed.

    Raises:
      RuntimeError: it cannot be read.
    """

    def __init__(self, path: Path, is_copy: bool) -> None:
        with contextlib.ExitStack() as stack:
            try:
                if is_copy:
                    stack.enter_context(shard_copies.open_locked(path))
                self.reader = array_record().ArrayRecordReader(str(path), READER_OPTIONS)
            except OSError as error:
                raise RuntimeError(error.strerror) from None
            if not self.reader.ok():
                raise RuntimeError("it is no array_record file")
            self._lock = stack.pop_all()

    def close(self) -> None:
        self.reader.close()
        self._lock.close()

    def __del__(self) -> None:
        if hasattr(self, "_lock"):
            self._lock.close()


def _token_records(begin: int, end: int) -> range:
    """Numbers of the records of a shard that hold its tokens `begin` to `end`."""
    return range(begin // RECORD_TOKENS, -(-end // RECORD_TOKENS))


class ShardFiles:
    """The records of shards in one folder or bucket. A bounded number of files is open at a time.

    Args:
      where: the folder, or its address.
      room: for copies of shards in a bucket.

    Raises:
      ConfigError: a shard is missing, or its size is not the index's.
    """

    def __init__(self, where: Path | str, shards: Sequence[Shard], dtype: np.dtype, room: Room | None = None):
        self.where, self.shards, self.dtype = where, shards, dtype
        self.room = Room() if room is None else room
        if isinstance(where, Path):
            self._check()
        self._start()

    def _check(self) -> None:
        for shard in self.shards:
            path = self._path(shard)
            try:
                size = path.stat().st_size
            except OSError as error:
                raise ConfigError(f"{path}: got no shard ({error.strerror}), {REBUILD}") from None
            if size != shard.size:
                raise ConfigError(f"{path}: got {size:,} bytes, expected {shard.size:,}, {REBUILD}")

    def _start(self) -> None:
        self._open: collections.OrderedDict[int, _Reader] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._store: Store | None = None
        if isinstance(self.where, str):
            self._store = Store(self.where, "data.dir")
            self._remote = RemoteRecords(self._store, array_record(), WRITER_OPTIONS, READER_OPTIONS)
        self._fetched: set[int] = set()
        self._without_copy: set[int] = set()
        self._to_copy: collections.deque[int] = collections.deque()
        self._copier: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._table = functools.lru_cache(maxsize=1024)(self._read_table)

    def __getstate__(self) -> dict[str, Any]:
        return {"where": self.where, "shards": self.shards, "dtype": self.dtype, "room": self.room}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def tokens(self, number: int, begin: int, end: int) -> np.ndarray:
        """Tokens `begin` to `end` of shard `number`, which must have them."""
        if begin >= end:
            return np.zeros(0, self.dtype)
        numbers = _token_records(begin, end)
        parts = [np.frombuffer(record, self.dtype) for record in self._records(number, numbers)]
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
        found = joined[begin - numbers.start * RECORD_TOKENS : end - numbers.start * RECORD_TOKENS]
        if len(found) != end - begin:
            raise self._damage(number, f"{end - begin - len(found)} tokens are missing")
        return found

    def table(self, number: int, part: int) -> np.ndarray:
        """Rows `part * TABLE_DOCUMENTS` on of the table of shard `number`, of type `TABLE`."""
        return self._table(number, part)

    def _read_table(self, number: int, part: int) -> np.ndarray:
        (record,) = self._records(number, self._table_record(number, part))
        return np.frombuffer(record, TABLE)

    def _table_record(self, number: int, part: int) -> range:
        first = -(-self.shards[number].tokens // RECORD_TOKENS)
        return range(first + part, first + part + 1)

    def ends(self, number: int, document: int) -> tuple[int, int]:
        """Where the tokens of a document begin and end in its shard."""
        part, row = divmod(document, TABLE_DOCUMENTS)
        end = int(self.table(number, part)["end"][row])
        if row:
            return int(self.table(number, part)["end"][row - 1]), end
        return (int(self.table(number, part - 1)["end"][-1]) if part else 0), end

    def _records(self, number: int, numbers: range) -> list[bytes]:
        self.fetch([number])
        if number in self._without_copy:
            return self._read_remote([(number, numbers)])
        try:
            return self._read(number, numbers)
        except (RuntimeError, IndexError, ValueError) as error:
            if self._store is None:
                raise self._damage(number, str(error)) from None
        with self._lock:
            self._drop(number)
        self._fetch(number)  # the copy is damaged, or was deleted
        if number in self._without_copy:
            return self._read_remote([(number, numbers)])
        try:
            return self._read(number, numbers)
        except (RuntimeError, IndexError, ValueError) as error:
            raise self._damage(number, str(error)) from None

    def _read(self, number: int, numbers: range) -> list[bytes]:
        with self._lock:  # a reader that is dropped while another thread uses it would be closed under it
            return self._reader(number).read(list(numbers))

    def _read_remote(self, records: Iterable[tuple[int, range]]) -> list[bytes]:
        """Records of shards that have no copies, each given as the number of the shard and those of records."""
        try:
            places = [self._place(number, record) for number, numbers in records for record in numbers]
            return self._remote.read(places)
        except record_ranges.Damaged as error:
            number = next(n for n, shard in enumerate(self.shards) if shard.file == error.key)
            raise self._damage(number, str(error)) from None

    def _place(self, number: int, record: int) -> record_ranges.Place:
        shard, runs = self.shards[number], []
        for total, most, width in ((shard.tokens, RECORD_TOKENS, self.dtype.itemsize),
                                   (shard.documents, TABLE_DOCUMENTS, TABLE.itemsize)):  # fmt: skip
            full, rest = divmod(total, most)
            runs += [(full, most * width), (int(rest > 0), rest * width)]
        return record_ranges.place(shard.file, runs, record)

    def fetch_tokens(self, parts: Iterable[tuple[int, int, int]]) -> None:
        """Fetches what is in a bucket of tokens that will be read: (shard, begin, end) as of `tokens`."""
        if self._store is not None:
            self._fetch_records([(number, _token_records(begin, end)) for number, begin, end in parts if begin < end])

    def fetch_tables(self, places: Iterable[tuple[int, int]]) -> None:
        """Fetches what is in a bucket of what `ends` will read: (shard, document)."""
        if self._store is not None:
            parts = {
                (number, row // TABLE_DOCUMENTS) for number, document in places for row in (document - 1, document)
            }
            self._fetch_records([(number, self._table_record(number, part)) for number, part in parts if part >= 0])

    def _fetch_records(self, records: list[tuple[int, range]]) -> None:
        self.fetch(number for number, _ in records)
        self._read_remote(each for each in records if each[0] in self._without_copy)

    def fetch(self, numbers: Iterable[int]) -> None:
        """Fetches shards in a bucket that this host has no copies of, and room for, several small ones at a time.

        Raises:
          ConfigError: one is missing or damaged.
          StorageError: the storage does not answer.
        """
        if self._store is None:
            return
        if self._failure is not None:
            raise self._failure
        missing = sorted(set(numbers) - self._fetched)
        self._store.for_each(self._fetch_missing, ((number, 0) for number in missing))

    def _fetch_missing(self, number: int) -> None:
        if not self._path(self.shards[number]).is_file():
            if self.shards[number].size > MAX_AWAITED_BYTES:
                self._copy_later(number)
            else:
                self._fetch(number)
        self._fetched.add(number)

    def _copy_later(self, number: int) -> None:
        """Copies a shard in the background. Until that is done its records are read one by one."""
        self._without_copy.add(number)
        with self._lock:
            self._to_copy.append(number)
            if self._copier is None:
                self._copier = threading.Thread(target=self._copy, name="copies of shards", daemon=True)
                self._copier.start()

    def _copy(self) -> None:
        while True:
            with self._lock:
                if not self._to_copy or self._failure is not None:
                    self._copier = None
                    return
                number = self._to_copy.popleft()
            try:
                if self._path(self.shards[number]).is_file() or self._make_copy(number):
                    self._without_copy.discard(number)
            except BaseException as error:
                self._failure = error

    def _fetch(self, number: int) -> None:
        if not self._make_copy(number):
            self._without_copy.add(number)

    def _make_copy(self, number: int) -> bool:
        shard = self.shards[number]
        return self._store is None or self.room.fetch(self._store, shard.file, shard.size, shard.sha256)

    def _path(self, shard: Shard) -> Path:
        """Path of a shard, or of its copy."""
        if isinstance(self.where, Path):
            return self.where / shard.file
        return shard_copies.copy_path(shard.file, shard.sha256)

    def _reader(self, number: int) -> Any:
        reader = self._open.pop(number, None)
        if reader is None:
            reader = _Reader(self._path(self.shards[number]), is_copy=self._store is not None)
            while len(self._open) >= MAX_OPEN_SHARDS:
                self._drop(next(iter(self._open)))
        self._open[number] = reader
        return reader.reader

    def _drop(self, number: int) -> None:
        reader = self._open.pop(number, None)
        if reader is not None:
            reader.close()

    def _damage(self, number: int, reason: str) -> ConfigError:
        reason = " ".join(reason.split())[:120]
        return ConfigError(f"{self.where}/{self.shards[number].file}: got a damaged shard ({reason}), {REBUILD}")


class TokenStream:
    """The running text of a split as one sequence of tokens: `first`, then the documents of all shards.

    Slices `stream[begin:end]` are arrays; nothing else is read. It stands for the array of
    `jaxformer.data.concatenation.token_stream`.

    Attributes:
      files: the shards.
      first: token before the first document.
      length: number of tokens, `first` included.
    """

    def __init__(self, shard_files: ShardFiles, first: int, length: int):
        self.files, self.first, self.length = shard_files, first, length
        self._ends = _cumulative(shard.tokens for shard in shard_files.shards)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> np.ndarray:
        begin, end, _ = part.indices(self.length)
        found = [np.array([self.first], self.files.dtype)] if begin == 0 < end else []
        found += [self.files.tokens(*each) for each in self._parts(begin, end)]
        return np.concatenate(found) if found else np.zeros(0, self.files.dtype)

    def _parts(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The tokens of a slice that are in shards: number of the shard, first and last (not included) in it."""
        position, end = max(begin - 1, 0), end - 1
        number = bisect.bisect_right(self._ends, position)
        while position < end:
            before = self._ends[number - 1] if number else 0
            stop = min(end, self._ends[number])
            yield number, position - before, stop - before
            position, number = stop, number + 1

    def fetch(self, slices: Iterable[tuple[int, int]]) -> None:
        """Fetches what these slices will read (begin, end) together, if it is in a bucket."""
        self.files.fetch_tokens(part for begin, end in slices for part in self._parts(begin, min(end, self.length)))


class ShardedDocuments:
    """The documents of a split, as examples with "text": the decoded text, a string that also carries its token ids.

    Attributes:
      where: target of the build, a folder or an address.
      split: name of the split in the index.
      room: for copies of shards in a bucket.
    """

    def __init__(
        self,
        where: Path | str,
        split: str,
        index: Mapping[str, Any],
        tokenizer: Tokenizer,
        room: Room | None = None,
    ):
        self.where, self.split, self.tokenizer = where, split, tokenizer
        self.separator: int | None = index["separator"]
        shards = [Shard(**shard) for shard in index["splits"][split]["shards"]]
        self.files = ShardFiles(where, shards, np.dtype(index["dtype"]), room)
        self._ends = _cumulative(shard.documents for shard in shards)
        self._has_text = True

    def without_text(self) -> ShardedDocuments:
        """The same documents with empty texts that carry their ids: decoding is most of the time of reading."""
        found = copy.copy(self)
        found._has_text = False
        return found

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """Number of ids of the documents at `indices`, from the tables of the shards."""
        places = [self._find(index) for index in indices]
        self.files.fetch_tables(places)
        found = [self.files.ends(*place) for place in places]
        return [end - begin - (self.separator is not None) for begin, end in found]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        places = [self._find(index) for index in indices if 0 <= index < len(self)]
        self.files.fetch_tables(places)
        self.files.fetch_tokens((number, *self.files.ends(number, document)) for number, document in places)
        return [self[index] for index in indices]

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.split}: got document {index}, expected one of {len(self)}")
        number, document = self._find(index)
        begin, end = self.files.ends(number, document)
        ids = self.files.tokens(number, begin, end - (self.separator is not None)).tolist()
        return {"text": EncodedText(self.tokenizer.decode(ids) if self._has_text else "", ids)}

    def stream(self, count: int, tokenizer: Tokenizer) -> TokenStream:
        """The running text of the first `count` documents.

        Raises:
          ConfigError: the documents have no end token between them.
        """
        if self.separator is None or tokenizer.eos is None:
            what = "data.packing: got concat for shards whose tokenizer has no end token"
            raise ConfigError(f"{what}, expected </s> between documents; use packing none")
        first = tokenizer.eos if tokenizer.bos is None else tokenizer.bos
        tokens = sum(shard.tokens for shard in self.files.shards)
        if count < len(self):
            number, document = self._find(count - 1)
            tokens = sum(shard.tokens for shard in self.files.shards[:number]) + self.files.ends(number, document)[1]
        return TokenStream(self.files, first, tokens + 1)

    def size(self, count: int) -> dict[str, int]:
        """Counts "examples", "lines", "bytes" and "words" of the first `count` documents, from the index.

        Only the table of the shard in which they end is read.
        """
        names = ("lines", "bytes", "words")
        whole = bisect.bisect_right(self._ends, count)
        total = {name: sum(getattr(shard, name) for shard in self.files.shards[:whole]) for name in names}
        left = count - (self._ends[whole - 1] if whole else 0)
        for part in range(-(-left // TABLE_DOCUMENTS)):
            rows = self.files.table(whole, part)[: left - part * TABLE_DOCUMENTS]
            for name in names:
                total[name] += int(rows[name].sum(dtype=np.int64))
        return {"examples": count, **total}

    def _find(self, index: int) -> tuple[int, int]:
        """Number of the shard of document `index`, and of the document in it."""
        number = bisect.bisect_right(self._ends, index)
        return number, index - (self._ends[number - 1] if number else 0)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raises a ConfigError if the tokens of the shards mean other texts to `tokenizer`."""
        same = tokenizer.vocabulary_fingerprint == self.tokenizer.vocabulary_fingerprint
        if same and (self.separator is None or tokenizer.eos == self.separator):
            return
        got = f"data.dir: got shards in {str(self.where)!r} of another tokenizer than the model's"
        raise ConfigError(
            f"{got}, expected the same; build them with config.data.tokenizer.kind=file and the model's tokenizer.json"
        )


def _cumulative(counts: Any) -> list[int]:
    return list(itertools.accumulate(counts))


def shared_tokenizers(dataset: Dataset) -> Tokenizers | None:
    """The tokenizer of the shards of a data set, or of all components of a mixture that are shards; None without any.

    Raises:
      ConfigError: shards of several components have different tokenizers.
    """
    found: dict[str, ShardedDocuments] = {}
    for name, part in dataset.components.items():
        for examples in part.splits.values():
            if isinstance(examples, ShardedDocuments):
                found.setdefault(name, examples)
    if not found:
        return None
    first, *others = found.items()
    for name, documents in others:
        if documents.tokenizer.fingerprint != first[1].tokenizer.fingerprint:
            raise ConfigError(
                f"data.mixture.components.{name}: got shards of another tokenizer than those of {first[0]}, expected "
                "one for all; build them together from a recipe with data.mixture"
            )
    return Tokenizers(first[1].tokenizer, first[1].tokenizer)
