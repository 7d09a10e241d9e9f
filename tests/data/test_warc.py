"""Web archives: the documents of extracted text and of pages, and files that are cut off, damaged or something else."""

import gzip
import sys

import pytest

from jaxformer.config import Config, ConfigError, DataConfig, TokenizerConfig
from jaxformer.data import build as builds
from jaxformer.data import sources
from jaxformer.data.build import Options

PAGE = "<html><head><title>t</title><script>x()</script></head><body><p>Grüße &amp; mehr</p><p>zwei</p></body></html>"


def record(kind, content, number=0, content_type="text/plain"):
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Record-ID: <urn:uuid:{number}>\r\nContent-Type: {content_type}\r\n"
    head += f"WARC-Date: 2026-01-01T00:00:00Z\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content + b"\r\n\r\n"


def response(body, kind="text/html; charset=latin-1", status="200 OK", number=0, headers=""):
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode()
    return record("response", head + body, number, "application/http; msgtype=response")


TEXTS = [f"page {number}\n" + "äöü " * number for number in range(1, 9)]
RECORDS = [
    record("warcinfo", b"software: t\r\n", content_type="application/warc-fields"),
    *(record("conversion", text.encode(), number) for number, text in enumerate(TEXTS)),
    record("conversion", b" \n", 9),
]
PAGES = [
    record("request", b"GET / HTTP/1.1\r\n\r\n", content_type="application/http; msgtype=request"),
    response(PAGE.encode("latin-1")),
    response(gzip.compress(PAGE.encode()), "text/html; charset=utf-8", headers="Content-Encoding: gzip\r\n"),
    response(PAGE.replace("<head>", "<head><meta charset='iso-8859-1'>").encode("latin-1"), "text/html"),
    response(b"nur Text", "text/plain"),
    response(PAGE.encode(), status="404 Not Found"),
    response(b"\x89PNG", "image/png"),
    response(b"<html></html>"),
    record("metadata", b"fetchTimeMs: 3\r\n", content_type="application/warc-fields"),
]
READ_PAGES = ["Grüße & mehr\n\nzwei"] * 3 + ["nur Text"]


def config_of(folder, names, **fields):
    data = {"dir": str(folder), "splits": {"train": names}, "cache": str(folder / "cache"), **fields}
    return DataConfig(source="warc", tokenizer=TokenizerConfig(kind="byte"), **data)


def texts(dataset, split="train"):
    return [dataset.splits[split][index]["text"] for index in range(len(dataset.splits[split]))]


@pytest.fixture
def folder(tmp_path):
    for name in ("fastwarc", "resiliparse"):
        pytest.importorskip(name, reason=f"{name} is not installed (extra [warc])")
    (tmp_path / "a.warc.wet.gz").write_bytes(b"".join(map(gzip.compress, RECORDS)))  # a member for each record
    (tmp_path / "b.warc").write_bytes(b"".join(PAGES))
    return tmp_path


def test_documents_are_extracted_text_and_pages(folder, caplog):
    caplog.set_level("WARNING")
    assert texts(sources.build(config_of(folder, ("*.warc*",)))) == TEXTS + READ_PAGES
    assert "left out 2 documents of train without text" in caplog.text
    sliced = config_of(folder, ("a.warc.wet.gz[:3]",), splits={"train": ("a.warc.wet.gz[:3]",), "test": ("b.warc",)})
    dataset = sources.build(sliced)
    assert texts(dataset) == TEXTS[:3] and texts(dataset, "test") == READ_PAGES


def test_a_build_has_the_same_documents(folder):
    index = builds.build(Config(data=config_of(folder, ("*.warc*",))), folder / "out", options=Options(held_out=0.3))
    shards = sources.build(DataConfig(source="shards", dir=str(folder / "out")))
    assert sorted(texts(shards) + texts(shards, "validation")) == sorted(TEXTS + READ_PAGES)
    assert index["dropped"]["train"] == {"empty": 2}
    builds.build(Config(data=config_of(folder, ("a.warc.wet.gz[2:4]",))), folder / "sliced")
    assert texts(sources.build(DataConfig(source="shards", dir=str(folder / "sliced")))) == TEXTS[2:4]


def flipped(raw):
    return raw[:-40] + bytes([raw[-40] ^ 1]) + raw[-39:]


WHOLE = b"".join(RECORDS)
ZIPPED = gzip.compress(WHOLE)


@pytest.mark.parametrize(("name", "content", "message"), [
    ("x.warc.gz", ZIPPED[:-9], r"x.warc.gz: got .*, expected a whole gzip file; fetch it again"),
    ("x.warc.gz", flipped(ZIPPED), r"x.warc.gz: got .*, expected a whole gzip file|got no readable WARC record"),
    ("x.warc", WHOLE[:-5], r"x.warc: got 1 bytes of record <urn:uuid:9>, expected 2: the file is cut off"),
    ("x.warc", WHOLE[:-30], r"x.warc: got 0 bytes of record <urn:uuid:9>, expected its length: the file is cut off"),
    ("x.warc", b"no archive\n" * 9, r"x.warc: got no readable WARC record \(.*\), expected one"),
    ("x.warc", record("conversion", b"a\xff", 7), r"x.warc: got byte 0xff in record <urn:uuid:7>, expected UTF-8"),
    ("x.warc", RECORDS[0], r"x.warc: got a file without documents, expected some"),
])  # fmt: skip
def test_damage_is_one_line(folder, name, content, message):
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        sources.build(config_of(folder, (name,)))
    assert "\n" not in str(error.value)


def test_columns_and_missing_packages_are_refused(tmp_path, monkeypatch):
    (tmp_path / "x.warc").write_bytes(WHOLE)
    with pytest.raises(ConfigError, match="data.columns: got text=body, expected nothing for source warc"):
        sources.build(config_of(tmp_path, ("x.warc",), columns={"text": "body"}))
    for name in ("fastwarc", "fastwarc.warc"):
        monkeypatch.setitem(sys.modules, name, None)  # what an import then meets is an ImportError
    for build in (sources.build, lambda data: builds.build(Config(data=data), tmp_path / "out")):
        with pytest.raises(ConfigError, match=r"data.source: got warc, which needs fastwarc.*'jaxformer\[warc\]'"):
            build(config_of(tmp_path, ("x.warc",)))
    assert not (tmp_path / "out").exists()
