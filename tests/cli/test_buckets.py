"""Commands that read a run in a bucket: which checkpoints of it they ask for."""

import contextlib
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from jaxformer import storage
from jaxformer.cli import buckets, decode, export_checkpoint, report
from jaxformer.errors import ConfigError
from jaxformer.runtime.object_store import Store

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "storage"))
import fake_bucket

URL = "gs://bucket/run"


@pytest.mark.parametrize(
    ("command", "given", "which"),
    [
        (report.COMMAND, {"workdir": [URL], "serve": False}, storage.NONE),  # a page shows no parameters
        (decode.COMMAND, {"workdir": URL, "checkpoint": "best"}, "best"),
        (export_checkpoint.COMMAND, {"workdir": URL}, None),  # all: the command chooses by itself
    ],
    ids=["report", "decode", "export"],
)
def test_a_command_fetches_the_checkpoints_that_it_reads(command, given, which, tmp_path, monkeypatch):
    asked = []

    @contextlib.contextmanager
    def opened(url, what, which):
        asked.append((url, what, which))
        yield tmp_path

    monkeypatch.setattr(storage, "opened", opened)
    fake_bucket.install(monkeypatch, tmp_path)
    Store(URL).write("config.json", b"{}")
    arguments = Namespace(**{name: "" for name in command.flags} | given)
    with buckets.local_copies(command, arguments):
        assert arguments.workdir == (str(tmp_path) if isinstance(given["workdir"], str) else [str(tmp_path)])
    assert asked == [(URL, "--workdir", which)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workdir": [URL], "serve": True}, "with --serve, expected a folder"),
        ({"workdir": [URL, "runs/other"], "serve": False}, "without --output, expected --output=FILE.html"),
    ],
)
def test_a_page_that_a_copy_cannot_have_is_refused(given, message, monkeypatch):
    monkeypatch.setattr(storage, "opened", None)  # nothing is fetched first
    arguments = Namespace(**{name: "" for name in report.COMMAND.flags} | given)
    with pytest.raises(ConfigError, match=message), buckets.local_copies(report.COMMAND, arguments):
        pass
