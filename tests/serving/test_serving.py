"""A language model behind HTTP: what requests get, what is refused, and how it stops."""

import dataclasses
import json
import socket
import threading

import pytest
from serving_client import SMALL, Client, eventually, gate, language_model, text_of, together

from jaxformer.decode import engine as engines
from jaxformer.serving import Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SAMPLED = {"prompt": "ab", "max_tokens": 12, "temperature": 0.8, "top_p": 0.9, "seed": 11}


@pytest.fixture(scope="module")
def lm():
    return language_model()


@pytest.fixture(scope="module")
def server(lm):
    with pytest.MonkeyPatch.context() as patch, Server(lm, "bytes", limits=SMALL) as running:
        patch.setattr(engines, "next_steps", lambda steps, seconds: 2)
        yield running


@pytest.fixture(scope="module")
def prompt(client):
    """A prompt whose output begins with whole characters, so that its first tokens are text."""
    bodies = [{"prompt": letter, "max_tokens": 2} for letter in "abcdefghijklmnopqrstuvwxyz"]
    return next(body["prompt"] for body in bodies if complete(client, **body)["choices"][0]["text"].isascii())


@pytest.fixture(scope="module")
def client(server):
    return Client(server)


def requests_of(server):
    """Number of outputs that the server decodes or that wait."""
    worker = server.api.worker
    return worker.active + worker.waiting


def complete(client, **fields):
    status, answer = client.post(COMPLETIONS, fields)
    assert status == 200, answer
    return answer


def test_a_completion_is_what_the_model_generates(client, lm):
    answer = complete(client, model="bytes", prompt=["ab", "x"])
    expected = ["".join(lm.stream(prompt)) for prompt in ("ab", "x")]
    assert [(one["text"], one["finish_reason"]) for one in answer["choices"]] == [(text, "length") for text in expected]
    assert [one["index"] for one in answer["choices"]] == [0, 1]
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17}
    assert answer["object"] == "text_completion"


def test_draws_are_those_of_the_model_with_the_same_seed(client, lm):
    expected = lm.generate(["ab"], max_length=12, temperature=0.8, top_p=0.9, seed=11)
    assert [choice["text"] for choice in complete(client, **SAMPLED)["choices"]] == expected
    free = {"prompt": ["ab"] * 4, "max_tokens": 12, "temperature": 2.0}
    assert len({choice["text"] for choice in complete(client, **free, seed=3)["choices"]}) == 1
    assert len({complete(client, **free)["choices"][0]["text"] for _ in range(4)}) > 1, "without a seed, others"


def test_requests_at_the_same_time_do_not_change_each_other(client, server):
    """Six requests of four kinds on four rows, whose decoding begins when all of them are there."""
    bodies = [
        {"prompt": "ab", "max_tokens": 12},
        SAMPLED,
        {**SAMPLED, "temperature": 1.7, "seed": 12},
        {"prompt": "x" * 9, "max_tokens": 5},
        {"prompt": "c", "max_tokens": 12, "temperature": 1.0, "top_k": 2, "seed": 0},
        {**SAMPLED, "prompt": "zz"},
    ]
    alone = [complete(client, **body)["choices"] for body in bodies]
    with gate(server) as places:
        requests = [lambda body=body: complete(client, **body)["choices"] for body in bodies]
        results = []
        thread = threading.Thread(target=lambda: results.extend(together(*requests)))
        thread.start()
        eventually(lambda: requests_of(server) == 6)
        for _ in range(200):
            places.release()
        thread.join()
    assert results == alone


def test_a_stream_adds_up_to_the_whole(client):
    for body in ({"prompt": ["ab", "c"], "max_tokens": 12}, SAMPLED):
        whole = complete(client, **body)
        status, pieces = client.stream(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
        assert status == 200
        for index, choice in enumerate(whole["choices"]):
            assert text_of(pieces, index) == choice["text"]
        assert pieces[-2]["usage"] == whole["usage"] and pieces[-2]["choices"] == []
        assert len(pieces) > 4
        assert len({piece["id"] for piece in pieces[:-1]}) == 1


def test_a_chat_is_what_the_model_replies(client, lm):
    messages = [{"role": "user", "content": "hi"}]
    status, answer = client.post(CHAT, {"messages": messages, "max_completion_tokens": 5})
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": lm.chat(messages, max_length=5)}
    assert answer["usage"]["completion_tokens"] == 5
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    status, pieces = client.stream(CHAT, {"messages": parts, "max_tokens": 5})
    assert text_of(pieces) == choice["message"]["content"]
    assert pieces[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert pieces[0]["object"] == "chat.completion.chunk"


def test_a_stop_sequence_ends_the_text_and_frees_the_row(client, server):
    text = complete(client, prompt="ab", max_tokens=12)["choices"][0]["text"]
    body = {"prompt": "ab", "max_tokens": 12, "stop": [text[4:6], "never"]}
    answer = complete(client, **body)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(text[4:6])], "stop")
    assert answer["usage"]["completion_tokens"] < 12
    assert text_of(client.stream(COMPLETIONS, body)[1]) == choice["text"]
    eventually(lambda: server.api.worker.active == 0)


WRONG = {
    "no_prompt": (COMPLETIONS, {}, "prompt", None, "prompt: got none"),
    "tokens": (COMPLETIONS, {"prompt": [1, 2]}, "prompt", "invalid_value", "expected a string or a list of strings"),
    "surrogate": (COMPLETIONS, {"prompt": "\ud800"}, "prompt", "invalid_value", "expected text that UTF-8 can hold"),
    "long": (COMPLETIONS, {"prompt": "x" * 40}, "prompt", "context_length_exceeded", "41 tokens, expected at most 28"),
    "many": (COMPLETIONS, {"prompt": "a", "max_tokens": 13}, "max_tokens", "invalid_value", "number from 1 to 12"),
    "hot": (COMPLETIONS, {"prompt": "a", "temperature": 2.1}, "temperature", "invalid_value", "from 0 to 2"),
    "nan": (COMPLETIONS, b'{"prompt": "a", "top_p": NaN}', "top_p", "invalid_value", "a number from 0 to 1"),
    "bool": (COMPLETIONS, {"prompt": "a", "seed": True}, "seed", "invalid_value", "seed: got True, expected a whole"),
    "draws": (COMPLETIONS, {"prompt": "a", "n": 2}, "n", "unsupported_parameter", "n: got 2, expected 1"),
    "logprobs": (
        COMPLETIONS,
        {"prompt": "a", "logprobs": 0},
        "logprobs",
        "unsupported_parameter",
        "got 0, expected none",
    ),
    "user": (COMPLETIONS, {"prompt": "a", "user": "me"}, "user", "unsupported_parameter", "user: got 'me'"),
    "cold": (COMPLETIONS, {"prompt": "a", "top_p": 0.5}, "top_p", "invalid_value", "without temperature"),
    "both": (
        CHAT,
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "max_completion_tokens": 1},
        "max_tokens",
        "invalid_value",
        "expected one of the two",
    ),
    "usage": (COMPLETIONS, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", None, "both"),
    "stream": (COMPLETIONS, {"prompt": "a", "stream": 1}, "stream", "invalid_value", "true or false"),
    "penalty": (
        COMPLETIONS,
        {"prompt": "a", "presence_penalty": 0.5},
        "presence_penalty",
        "unsupported_parameter",
        "0",
    ),
    "echo": (COMPLETIONS, {"prompt": "a", "echo": True}, "echo", "unsupported_parameter", "expected False"),
    "bias": (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias", "unsupported_parameter", "got {'5'"),
    "typo": (COMPLETIONS, {"prompt": "a", "temprature": 1}, "temprature", "unknown_parameter", "temperature"),
    "stops": (COMPLETIONS, {"prompt": "a", "stop": ["a"] * 5}, "stop", None, "got 5 strings, expected at most 4"),
    "empty": (COMPLETIONS, {"prompt": "a", "stop": ""}, "stop", "invalid_value", "texts that are not empty"),
    "never": (COMPLETIONS, {"prompt": ["a"] * 7}, "prompt", None, "got 7 prompts, expected at most 6"),
    "positions": (
        COMPLETIONS,
        {"prompt": "x" * 25, "max_tokens": 12},
        "prompt",
        "context_length_exceeded",
        "got 26 tokens and up to 12 new ones, expected at most 33 together",
    ),
    "tools": (
        CHAT,
        {"messages": [{"role": "user", "content": "a"}], "tools": [{}]},
        "tools",
        "unsupported_parameter",
        "",
    ),
    "role": (CHAT, {"messages": [{"role": "boss", "content": "a"}]}, None, None, "got role 'boss', expected one of"),
    "turns": (CHAT, {"messages": "hi"}, "messages", "invalid_value", "expected a list of turns"),
    "image": (CHAT, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages", "invalid_value", ""),
    "chat_long": (
        CHAT,
        {"messages": [{"role": "user", "content": "x" * 60}]},
        "messages",
        "context_length_exceeded",
        "",
    ),
    "array": (COMPLETIONS, b"[]", None, None, "got a list, expected a JSON object"),
    "json": (COMPLETIONS, b'{"prompt": ', None, None, "got no JSON"),
    "deep": (COMPLETIONS, b'{"prompt": ' + b"[" * 2000, None, None, "got no JSON"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_honoured_is_refused_in_one_line(client, name):
    path, body, param, code, message = WRONG[name]
    status, answer = client.post(path, body)
    error = answer["error"]
    assert (status, error["type"], error["param"], error["code"]) == (400, "invalid_request_error", param, code), error
    assert message in error["message"]
    assert "\n" not in error["message"]


def test_fields_that_change_nothing_are_accepted(client):
    neutral = {"n": 1, "echo": False, "best_of": 1, "presence_penalty": 0, "logit_bias": {}, "suffix": None}
    plain, other = complete(client, prompt="ab"), complete(client, prompt="ab", **neutral)
    assert other["choices"] == plain["choices"]


def test_other_requests_than_its_own_are_refused(client, server):
    assert client.post("/v1/nothing", {})[0] == 404
    assert client.post("/v1/classify", {"input": "a"})[0] == 404
    response = client.open("PUT", COMPLETIONS)
    assert (response.status, json.loads(response.read())["error"]["type"]) == (501, "invalid_request_error")
    assert client.post(COMPLETIONS, {"prompt": "a", "model": "gpt"})[1]["error"]["code"] == "model_not_found"
    assert client.post(COMPLETIONS, {"prompt": "x" * 3_000_000})[0] == 413
    assert client.post(COMPLETIONS, b"{}", **{"Content-Type": "text/plain"})[0] == 400
    status, answer = client.post(COMPLETIONS, {"prompt": "a"}, Host="elsewhere.example")
    assert (status, answer["error"]["type"]) == (403, "permission_error")
    assert client.get("/health") == (200, {"status": "ok", "model": "bytes", "active": 0, "waiting": 0})
    (entry,) = client.get("/v1/models")[1]["data"]
    assert (entry["id"], entry["object"]) == ("bytes", "model")


def test_a_full_queue_refuses_and_says_when_to_come_again(client, server):
    with gate(server):
        results = []
        fill = [lambda: results.append(complete(client, prompt="ab")) for _ in range(6)]  # 4 rows and 2 that wait
        thread = threading.Thread(target=together, args=fill)
        thread.start()
        eventually(lambda: requests_of(server) == 6)
        response = client.open("POST", COMPLETIONS, {"prompt": "ab"})
        error = json.loads(response.read())["error"]
        assert (response.status, error["code"], error["type"]) == (429, "queue_full", "rate_limit_error")
    thread.join()
    assert len(results) == 6 and len({json.dumps(answer["choices"]) for answer in results}) == 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row(client, server, prompt, stream):
    body = json.dumps({"prompt": prompt, "max_tokens": 12, "stream": stream}).encode()
    with gate(server) as places, socket.create_connection(server.server_address) as connection:
        head = f"POST {COMPLETIONS} HTTP/1.0\r\nHost: localhost:{client.port}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        places.release()
        places.release()
        eventually(lambda: server.api.worker.active == 1)
        if stream:
            assert connection.recv(12) == b"HTTP/1.0 200"
        connection.close()
        eventually(lambda: server.api.worker._cancelled or server.api.worker.active == 0)
        places.release()
        eventually(lambda: server.api.worker.active == 0)


def test_a_request_that_takes_too_long_ends(client, server, prompt, monkeypatch):
    monkeypatch.setattr(server.api, "limits", dataclasses.replace(SMALL, request_timeout=0.3))
    with gate(server) as places:
        status, answer = client.post(COMPLETIONS, {"prompt": "ab"})
        assert (status, answer["error"]["type"], answer["error"]["code"]) == (504, "timeout_error", "timeout")
        places.release()
        eventually(lambda: server.api.worker.active == 0)
        places.release()
        places.release()
        status, pieces = client.stream(COMPLETIONS, {"prompt": prompt, "max_tokens": 12})
        assert status == 200 and pieces[0]["choices"]
        assert pieces[-1]["error"]["code"] == "timeout", "a stream that has begun ends with the error, and no [DONE]"


def test_an_error_while_decoding_ends_the_requests_and_not_the_server(client, server, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(server.api.worker.engine, "step", lambda: 1 / 0)
        status, answer = client.post(COMPLETIONS, {"prompt": "ab"})
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert complete(client, prompt="ab")


@pytest.mark.parametrize("ends", [True, False])
def test_a_stop_refuses_new_requests_waits_for_the_others_and_then_ends_them(lm, prompt, ends):
    running = Server(lm, "bytes", limits=SMALL).start()
    client = Client(running)
    with gate(running) as places:
        places.release()
        places.release()
        response = client.open("POST", COMPLETIONS, {"prompt": prompt, "max_tokens": 12, "stream": True})
        stopping = threading.Thread(target=running.stop, args=(20.0 if ends else 0.3,))
        stopping.start()
        eventually(lambda: not running.api.worker.is_alive)
        status, answer = client.post(COMPLETIONS, {"prompt": "ab"})
        assert (status, answer["error"]["code"]) == (503, "stopping")
        status, answer = client.get("/health")
        assert (status, answer["status"]) == (503, "stopping")
        for _ in range(20 if ends else 0):
            places.release()
        eventually(lambda: running.api.worker.active == 0 if ends else running.api.worker._ends)
    text = response.read().decode()
    stopping.join()
    assert ("[DONE]" in text) is ends
    assert ('"code": "stopping"' in text) is not ends
    with pytest.raises(OSError):
        client.get("/health")
