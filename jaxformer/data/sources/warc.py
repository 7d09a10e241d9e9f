"""Text of web archives (WARC), plain or .gz, as Common Crawl has them. Needs pip install 'jaxformer[warc]'.

    config.splits = {"train": ("*.warc.wet.gz",)}            text that was extracted already: records "conversion"
    config.splits = {"train": ("CC-*.warc.gz[:90%]",), ...}  a slice counts documents

An example is the text of a record: of a "conversion" (WET files) its content, of a "response" with status 200 and HTML
the visible main text of the page (`resiliparse`), of one with plain text its body. Other records hold no document.
Documents without text are left out and counted. Role: text.
"""

from __future__ import annotations

import functools
import gzip
import importlib
import itertools
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxformer.config import DataConfig
from jaxformer.data import cache
from jaxformer.data.sources import Dataset, _files
from jaxformer.errors import ConfigError

HTML = ("text/html", "application/xhtml+xml")

logger = logging.getLogger(__name__)


def check(config: DataConfig) -> None:
    """Raises a ConfigError if `config.columns` names anything, or `fastwarc` or `resiliparse` is not installed."""
    if config.columns:
        got = ", ".join(f"{role}={column}" for role, column in config.columns.items())
        raise ConfigError(f"data.columns: got {got}, expected nothing for source warc: its role is text; remove it")
    for name in ("fastwarc.warc", "resiliparse.extract.html2text"):
        _module(name)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        what = f"data.source: got warc, which needs {name.split('.')[0]}, expected it to be installed"
        raise ConfigError(f"{what}; pip install 'jaxformer[warc]'") from None


def documents(path: Path) -> Iterator[str]:
    """The text of every document of a file, "" for one without text.

    Raises:
      ConfigError: the file is no WARC file, is damaged or cut off, or extracted text is not UTF-8 (with the record).
    """
    library, found = _module("fastwarc.warc"), False
    with _files._open(path) as file:
        # Python's gzip checks sums and the end of the file; the library's own decompression accepts a file cut off.
        records = iter(library.ArchiveIterator(file, parse_http=False, stream_detect=False, fsspec_args=False))
        read: Any = functools.partial(_files._read_checked, path, functools.partial(_next_record, path, records))
        while (record := read()) is not None:
            found = True
            if record.record_type == library.WarcRecordType.conversion:
                yield _utf8(path, record)
            elif record.record_type == library.WarcRecordType.response and record.is_http:
                text = _response_text(record)
                if text is not None:
                    yield text
    if not found:
        raise ConfigError(f"{path}: got a file without records, expected a WARC file; fetch it again")


def _next_record(path: Path, records: Iterator[Any]) -> Any:
    """The next record, whole in memory; None after the last.

    The library ends a record that is cut off where the file ends, so lengths are compared here.
    """
    try:
        record = next(records, None)
        if record is not None:
            record.freeze()
    except gzip.BadGzipFile:  # as EOFError and zlib.error: `_read_checked` reports them
        raise
    except OSError as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(f"{path}: got no readable WARC record ({reason}), expected one; fetch it again") from None
    if record is not None:
        stated = record.headers.get("Content-Length")
        if stated is None or stated.strip() != str(record.content_length):
            got = f"{path}: got {record.content_length} bytes of record {record.record_id}"
            raise ConfigError(f"{got}, expected {stated or 'its length'}: the file is cut off; fetch it again")
    return record


def _utf8(path: Path, record: Any) -> str:
    try:
        return record.reader.read().decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        what = f"{path}: got byte 0x{error.object[error.start]:02x} in record {record.record_id}"
        raise ConfigError(f"{what}, expected UTF-8 text; extract the text again, or leave the file out") from None


def _response_text(record: Any) -> str | None:
    """Text of a response; None if it is no page, and "" if the page has none or cannot be read.

    Pages are what servers sent, so one that is malformed is no damage of the file. Bytes that its encoding does not
    have are replaced, as browsers do.
    """
    extract, encodings = _module("resiliparse.extract.html2text"), _module("resiliparse.parse.encoding")
    try:
        record.parse_http(auto_decode="all")
        kind = (record.http_content_type or "").lower()
        if record.http_headers.status_code != 200 or kind not in (*HTML, "text/plain"):
            return None
        body = record.reader.read()
        encoding = record.http_charset or encodings.detect_encoding(body, from_html_meta=kind in HTML) or "utf-8"
        text = encodings.bytes_to_str(body, encoding, errors="replace")
        return extract.extract_plain_text(text, main_content=True) if kind in HTML else text
    except (OSError, ValueError, RuntimeError):  # malformed headers or content; parser errors are RuntimeErrors
        return ""


def build(config: DataConfig) -> Dataset:
    """The documents of `config.splits`.

    Raises:
      ConfigError: a package or file is missing, a file is damaged, or a slice is empty.
    """
    check(config)
    splits = _files.slices_by_split(config)

    def parse() -> tuple[dict[str, Any], dict[str, cache.ParsedRows]]:
        import tensorflow_datasets as tfds

        return {"text": tfds.features.Text()}, {split: _rows(split, parts) for split, parts in splits.items()}

    paths = [part.path for part in itertools.chain(*splits.values())]
    return _files.prepared_dataset(config, "warc", paths, _files.slices_key(splits), parse)


def _rows(split: str, parts: Iterable[_files.FileSlice]) -> Iterator[dict[str, str]]:
    empty = 0
    for part in parts:
        for text in _files.sliced_items(part, documents(part.path), "documents"):
            empty += not text.strip()
            if text.strip():
                yield {"text": text}
    if empty:
        logger.warning("left out %d documents of %s without text", empty, split)


SOURCE = build
