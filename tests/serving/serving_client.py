"""A small model to serve, a client of a server in the same process, and a gate that holds its decoding up."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import re
import shlex
import threading
import time
from pathlib import Path

from test_model import model

from jaxformer.data.chat import DEFAULT_TEMPLATE
from jaxformer.serving import Limits

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"

SMALL = Limits(rows=4, max_queue=2, max_tokens=12, max_prompt=28, max_body=4096)
"""Limits of most tests: programs of other shapes would be compiled for each of them."""


def language_model():
    """A byte language model with 32 positions and a chat template."""
    plain = model("language_modelling")
    tokenizers = dataclasses.replace(plain.tokenizers, chat_template=DEFAULT_TEMPLATE)
    config = dataclasses.replace(plain.config, data=dataclasses.replace(plain.config.data, length=32))
    return dataclasses.replace(plain, config=config, tokenizers=tokenizers)


class Client:
    """Sends requests to a server; `headers` go with each of them."""

    def __init__(self, server, **headers):
        self.port, self.headers = server.server_address[1], headers

    def open(self, method, path, body=None, **headers):
        """The response, unread."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        raw = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        known = {"Content-Type": "application/json"} if raw is not None else {}
        connection.request(method, path, raw, {**known, **self.headers, **headers})
        response = connection.getresponse()
        response.connection = connection
        return response

    def get(self, path, **headers):
        response = self.open("GET", path, **headers)
        text = response.read().decode()
        return response.status, json.loads(text) if text.startswith("{") else text

    def post(self, path, body, **headers):
        """Status and the object that was sent."""
        response = self.open("POST", path, body, **headers)
        return response.status, json.loads(response.read())

    def stream(self, path, body):
        """Status and the list of events; of an answer that is no stream its object."""
        response = self.open("POST", path, {**body, "stream": True})
        text = response.read().decode()
        return response.status, events(text) if "event-stream" in response.getheader("Content-Type") else [text]


def events(text):
    assert text.endswith("\n\n")
    lines = text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) if line != "data: [DONE]" else "[DONE]" for line in lines]


def text_of(pieces, index=0):
    """The text of a choice, from the events of a stream."""
    assert pieces[-1] == "[DONE]"
    choices = [choice for piece in pieces[:-1] for choice in piece["choices"] if choice["index"] == index]
    assert [choice["finish_reason"] is None for choice in choices] == [True] * (len(choices) - 1) + [False]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


@contextlib.contextmanager
def gate(server):
    """Lets the engine take one step for each `release()`, until the end."""
    engine, places, is_open = server.api.worker.engine, threading.Semaphore(0), threading.Event()
    step = engine.step

    def wait():
        while not places.acquire(timeout=0.01):
            if is_open.is_set():
                break
        step()

    engine.step = wait
    try:
        yield places
    finally:
        is_open.set()
        del engine.step


def eventually(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it has not come true"
        time.sleep(0.005)


def together(*functions):
    """The results of functions that run in threads at the same time."""
    results = [None] * len(functions)

    def run(index, function):
        results[index] = function()

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def curls():
    """Path, body and the printed answer of each curl command of the page; body None: a GET."""
    text = PAGE.read_text(encoding="utf-8")
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["curl"]:
                (url,) = (word for word in words if word.startswith("localhost:8000/"))
                body = json.loads(words[words.index("-d") + 1]) if "-d" in words else None
                assert body is None or words[words.index("-H") + 1] == "Content-Type: application/json", line
                yield url.removeprefix("localhost:8000"), body
