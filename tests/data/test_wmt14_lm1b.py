"""The page "wmt14 and lm1b from nothing", command by command: tfds' own builders on stand-in archives from loopback."""

import glob
import hashlib
import http.server
import importlib.util
import io
import json
import tarfile
import threading
import types
from typing import Any

import builders
import pytest
import tensorflow_datasets as tfds
import test_docs
from tensorflow_datasets.core.utils import lazy_imports_utils

from jaxformer import cli
from jaxformer.data import prepare as preparation

OLD, NEW = "http://www.statmt.org/", "http://data.statmt.org/"
DEV = f"{NEW}wmt19/translation-task/dev.tgz"
LM1B = "1-billion-word-language-modeling-benchmark-r13output"
WORDS = ["dog", "cat", "house", "tree", "walks", "sees", "red", "green"]


def sentences(count, first=0, upper=False):
    made = [" ".join(WORDS[(n * 3 + k * n) % 8] for k in range(3 + n % 4)) for n in range(first, first + count)]
    return [line.upper() if upper else line for line in made]


def sides(name, count, first=0):
    """Two files of parallel lines, German in capitals."""
    return {f"{name}.{side}": "\n".join(sentences(count, first, side == "de")) for side in ("de", "en")}


def sgm(lines):
    return "".join(f'<seg id="{number}">{line}</seg>\n' for number, line in enumerate(lines, 1))


ARCHIVES = {
    f"{OLD}wmt13/training-parallel-commoncrawl.tgz": sides("commoncrawl.de-en", 40),
    f"{OLD}wmt13/training-parallel-europarl-v7.tgz": sides("training/europarl-v7.de-en", 60, 40),
    f"{OLD}wmt14/training-parallel-nc-v9.tgz": sides("training/news-commentary-v9.de-en", 20, 100),
    DEV: {
        **sides("dev/newstest2013", 20, 7),
        "dev/newstest2014-deen-src.de.sgm": sgm(sentences(16, 3, True)),
        "dev/newstest2014-deen-ref.en.sgm": sgm(sentences(16, 3)),
    },
    f"{OLD}lm-benchmark/{LM1B}.tar.gz": {
        f"{LM1B}/training-monolingual.tokenized.shuffled/news.en-00001-of-00100": "\n".join(sentences(90)),
        f"{LM1B}/training-monolingual.tokenized.shuffled/news.en-00002-of-00100": "\n".join(sentences(60, 90)),
        f"{LM1B}/heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050": "\n".join(sentences(20)),
    },
}


SMALL = [
    "--config.data.tokenizer.kind=word", "--config.data.tokenizer.vocab=50", "--config.data.length=40",
    "--config.data.skip_long=false", "--config.train.steps=1", "--config.model.dtype=float32",
]  # fmt: skip


def archive(contents):
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as file:
        for name, text in contents.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            file.addfile(entry, io.BytesIO(text.encode()))
    return raw.getvalue()


class Proxy(http.server.BaseHTTPRequestHandler):
    """Answers requests for the addresses of `served` itself, as a proxy that keeps copies does."""

    served: dict[str, bytes] = {}  # noqa: RUF012
    requests: list[tuple[str, str]] = []  # noqa: RUF012

    def do_GET(self):
        self.requests.append((self.command, self.path))
        body = self.served.get(self.path)
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body or b"")

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def proxy(monkeypatch):
    """The network of this process is a server on loopback that has the stand-ins; checksums are theirs."""
    Proxy.served = {address: archive(contents) for address, contents in ARCHIVES.items()}
    Proxy.requests = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{server.server_port}")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    info = tfds.core.download.checksums.UrlInfo
    infos = {
        address: info(tfds.core.utils.Size(len(raw)), hashlib.sha256(raw).hexdigest(), address.rpartition("/")[2])
        for address, raw in Proxy.served.items()
    }
    monkeypatch.setattr(tfds.core.DatasetBuilder, "url_infos", infos)
    yield Proxy
    server.shutdown()
    server.server_close()


@pytest.fixture
def tensorflow(monkeypatch):
    """The few functions of TensorFlow by which tfds opens archives, where it is not installed."""
    if importlib.util.find_spec("tensorflow") is None:
        module: Any = types.ModuleType("tensorflow")
        module.io = types.SimpleNamespace(gfile=types.SimpleNamespace(GFile=open, glob=glob.glob))
        module.compat = types.SimpleNamespace(as_text=str)
        # Not in sys.modules: tfds would then ask it for types of arrays.
        monkeypatch.setitem(vars(lazy_imports_utils.tensorflow), "_module", module)
        monkeypatch.setattr(preparation, "_has_tensorflow", lambda: True)


def test_every_command_of_the_page_runs(tmp_path, monkeypatch, capsys, proxy, tensorflow):
    monkeypatch.chdir(tmp_path)
    builders.one_device(monkeypatch)
    builders.drawn_parameters(monkeypatch)
    (tmp_path / "configs").symlink_to(test_docs.ROOT / "configs")
    of_page = [words for page, words in test_docs.commands() if page == "wmt14-lm1b.md"]
    assert [words[0] for words in of_page] == ["data", "data", "train", "evaluate", "train", "data", "train"]
    missing = proxy.served.pop(DEV)  # a download that is stopped
    assert cli.main(of_page[0]) == 2
    assert "got no prepared data in" in capsys.readouterr().err and not list((tmp_path / "DIR").glob("*/*/*/*.json"))
    proxy.served[DEV] = missing
    for words in of_page:
        other = "encoder" if "configs/lm1b.py" in words[1] else "none"  # what the recipe has not
        if words[0] == "train":
            words = [*words, *(word for word in test_docs.TOY if f"model.{other}" not in word), *SMALL]
        elif words[1] == "build":
            words = [word.replace("--workers=8", "--workers=1") for word in words] + SMALL[:2]
        assert cli.main(words) == 0, (words, capsys.readouterr().err)
    got = [address for method, address in proxy.requests if method == "GET"]
    assert sorted(got) == sorted([*ARCHIVES, DEV]), "an archive that is there is not downloaded again"
    assert [method for method, _ in proxy.requests].count("HEAD") == 3, "the network is looked for before"
    assert json.loads((tmp_path / "runs/base/eval-test.json").read_text())["examples"] == 16
    assert json.loads((tmp_path / "corpus/index.json").read_text())["splits"]["train"]["documents"] == 150
