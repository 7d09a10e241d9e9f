"""`jaxformer serve`: starts, says where, answers what docs/serving.md asks, and stops at SIGTERM."""

import os
import re
import signal
import threading
import time

import pytest
from serving_client import Client, curls, events, language_model

from jaxformer import cli
from jaxformer.hf import workdirs
from jaxformer.serving import Limits


class Port:
    """A server of which only the port is known."""

    def __init__(self, number):
        self.server_address = ("127.0.0.1", number)


def test_the_page_and_the_command(monkeypatch, tmp_path, capfd):
    """The requests of the page, to a server that then gets SIGTERM while it answers one more."""
    monkeypatch.setattr(workdirs, "load", lambda path, which: language_model())
    limits, post_init = [], Limits.__post_init__
    monkeypatch.setattr(Limits, "__post_init__", lambda self: limits.append(self) or post_init(self))
    answers, failures = {}, []

    def ask():
        try:
            line = ""
            while "serving" not in line:
                time.sleep(0.02)
                line += capfd.readouterr().out
            assert "serving shakespeare at http://127.0.0.1:" in line and "/v1/chat/completions; Ctrl-C" in line
            client = Client(Port(int(re.search(r":(\d+)/", line).group(1))))
            for path, body in curls():
                if body is not None and path in ("/v1/translate", "/v1/classify"):
                    continue
                if body is not None and body.get("stream"):
                    response = client.open("POST", path, body)
                    answers[path, "stream"] = response.status, events(response.read().decode())
                else:
                    answers[path, ""] = client.get(path) if body is None else client.post(path, body)
        except BaseException as error:
            failures.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=ask)
    thread.start()
    flags = [
        "--name=shakespeare",
        "--port=0",
        "--rows=4",
        "--max-queue=3",
        "--max-tokens=12",
        "--max-prompt=28",
        "--request-timeout=50",
    ]
    assert cli.main(["serve", f"--workdir={tmp_path}", *flags]) == 0
    thread.join()
    if failures:
        raise failures[0]
    assert limits[0] == Limits(rows=4, max_queue=3, max_tokens=12, max_prompt=28, request_timeout=50.0)
    assert {key: answer[0] for key, answer in answers.items()} == dict.fromkeys(answers, 200), answers
    assert {path for path, _ in answers} == {"/health", "/v1/models", "/v1/completions", "/v1/chat/completions"}
    assert ("/v1/chat/completions", "stream") in answers and answers["/v1/chat/completions", "stream"][1][
        -1
    ] == "[DONE]"
    assert "stopping: new requests are refused" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--port=70000", "expected a number from 0 to 65535"),
        ("--rows=0", "--rows"),
        ("--request-timeout=0", "expected seconds above 0"),
        ("--config.model.head.bias=true", "which cannot change"),
        ("--workdir=nowhere", "nowhere: got nothing there"),
    ],
)
def test_wrong_flags_are_refused(flag, message, capsys):
    assert cli.main(["serve", *([] if "workdir" in flag else ["--workdir=x"]), flag]) == 2
    assert message in capsys.readouterr().err
