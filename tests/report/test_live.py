"""The server of live pages: this machine only, and no client can stop it."""

import http.client
import json
import os
import socket
import threading
import time

import pytest

from jaxformer import cli
from jaxformer.config import Config, ConfigError, overrides
from jaxformer.report import live
from jaxformer.runtime import local_server
from jaxformer.train.reporting import MetricsFile


def row(step, **values):
    return json.dumps({"step": step, "wall_time": 1e9, "split": "train", "loss": 1.0 / step, **values}) + "\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(overrides.to_json(Config()))
    (tmp_path / "run" / "metrics.jsonl").write_text(row(10) + row(20))
    return tmp_path / "run"


@pytest.fixture
def server(folder, monkeypatch):
    monkeypatch.setattr(live, "REST_FACTOR", 0.0)
    monkeypatch.setattr(live.Handler, "timeout", 0.2)
    monkeypatch.setattr(local_server, "MAX_CONNECTIONS", 4)
    server = live.Server(live.State([folder]), 0)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def get(server, path, host=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def data(server, version=""):
    return json.loads(get(server, f"/data?version={version}")[1])


def steps(news):
    return news["data"]["loss"]["step"]


def test_what_is_new_is_told_whole_and_once(server, folder):
    first = data(server)
    assert steps(first) == [10, 20] and "step 20" in first["status"]
    assert data(server, first["version"]) == {"page": first["page"], "version": first["version"]}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(row(30) + row(40)[:-9])  # the last line is being written
    second = data(server, first["version"])
    assert steps(second) == [10, 20, 30] and second["page"] == first["page"]
    MetricsFile(folder / "metrics.jsonl", first_step=10).close()  # a resumed run cuts the file
    third = data(server, second["version"])
    assert steps(third) == [10]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(row(20, loss=7.0) + row(20, loss=8.0))
    last = data(server, third["version"])
    assert steps(last) == [10, 20] and last["data"]["loss"]["value"] == [0.1, 8.0]
    # A file of the same length and time that replaced another is another.
    facts = os.stat(folder / "metrics.jsonl")
    text = (folder / "metrics.jsonl").read_text().replace("8.0", "9.0")
    (folder / "new").write_text(text)
    os.utime(folder / "new", ns=(facts.st_atime_ns, facts.st_mtime_ns))
    os.replace(folder / "new", folder / "metrics.jsonl")
    assert data(server, last["version"])["data"]["loss"]["value"] == [0.1, 9.0]


def test_a_page_has_to_be_loaded_again_if_more_than_points_is_new(server, folder):
    first = data(server)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(row(30, gradient_norm=2.0))
    second = data(server, first["version"])
    assert second["page"] != first["page"]
    (folder / "eval-test.json").write_text(json.dumps({"split": "test", "bleu": 3.0}))
    assert data(server, second["version"])["page"] != second["page"]
    status, html = get(server, "/")
    assert status == 200 and "connect-src &#39;self&#39;" in html


def test_strangers_and_wrong_paths_are_refused(server):
    port = server.server_address[1]
    assert server.server_address[0] == "127.0.0.1"
    assert get(server, "/", f"localhost:{port}")[0] == 200
    assert get(server, "/", f"evil.example:{port}")[0] == 403
    assert get(server, "/", f"localhost:{port + 1}")[0] == 403
    assert get(server, "/../config.json")[0] == 404
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", "/data", b"x")
    assert connection.getresponse().status == 501


def test_slow_and_vanished_clients_do_not_stop_it(server, capsys):
    slow = [socket.create_connection(server.server_address) for _ in range(12)]
    for each in slow:
        each.sendall(b"GET / HT")
    gone = socket.create_connection(server.server_address)
    gone.sendall(b"GET / HTTP/1.0\r\nHost: localhost:1\r\n\r\n")
    gone.close()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            assert steps(data(server)) == [10, 20]
            break
        except (OSError, http.client.HTTPException):  # too many connections, until the slow ones are dropped
            time.sleep(0.05)
    else:
        pytest.fail("no answer")
    for each in slow:
        each.close()
    assert "warning" not in capsys.readouterr().err


def test_a_run_that_was_deleted_is_said_and_may_come_back(server, folder):
    before = data(server)
    folder.rename(folder.parent / "moved")
    status, text = get(server, "/data?version=")
    assert status == 503 and "nothing there" in text and text.count("\n") == 1
    (folder.parent / "moved").rename(folder)
    assert data(server, "") == before


def test_wrong_uses_end_with_code_2(folder, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="--port: got .* in use.*, expected a free port"):
            live.serve([folder], taken.getsockname()[1])
    for flags in (["--port=1"], ["--serve", "--output=a.html"], ["--serve", "--figures=a"], ["--serve", "--port=x"]):
        assert cli.main(["report", f"--workdir={folder}", *flags]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
