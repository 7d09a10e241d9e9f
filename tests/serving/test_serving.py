"""A language model behind HTTP: what requests get, what is refused, and how it stops."""

import dataclasses
import json
import socket
import threading

import pytest
from serving_client import Client, eventually, gate, text_of, together
from test_model import model

from jaxformer import serving
from jaxformer.data.chat import DEFAULT_TEMPLATE
from jaxformer.decode import engine as engines
from jaxformer.serving import Limits

LIMITS = Limits(max_queue=2, max_tokens=12, max_prompt=28, request_timeout=60.0, max_body=4096, grace=20.0)
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SAMPLED = {"prompt": "ab", "max_tokens": 12, "temperature": 0.8, "top_p": 0.9, "seed": 11}


@pytest.fixture(scope="module")
def lm():
    """A byte language model with 32 positions and a chat template."""
    plain = model("language_modelling")
    tokenizers = dataclasses.replace(plain.tokenizers, chat_template=DEFAULT_TEMPLATE)
    return dataclasses.replace(plain, tokenizers=tokenizers)


@pytest.fixture(scope="module")
def server(lm):
    with (
        pytest.MonkeyPatch.context() as patch,
        serving.serve(lm, name="bytes", limits=LIMITS, rows=4) as running,
    ):
        patch.setattr(engines, "next_steps", lambda steps, seconds: 2)
        yield running


@pytest.fixture(scope="module")
def client(server):
    return Client(server)


def complete(client, **fields):
    status, answer = client.post(COMPLETIONS, fields)
    assert status == 200, answer
    return answer


def test_a_completion_is_what_the_model_generates(client, lm):
    answer = complete(client, model="bytes", prompt="ab")
    (expected,) = lm.outputs(["ab"])[0]
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (expected.text, "length")
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    assert answer["object"] == "text_completion"
    (logged,) = complete(client, prompt="ab", logprobs=0)["choices"]
    assert sum(logged["logprobs"]["token_logprobs"]) == pytest.approx(expected.score, abs=1e-3)


def test_draws_are_those_of_the_model_with_the_same_seed(client, lm):
    options = {"max_length": 12, "temperature": 0.8, "top_p": 0.9, "seed": 11, "hypotheses": 2}
    expected = [output.text for output in lm.outputs(["ab"], **options)[0]]
    assert len(set(expected)) == 2
    answer = complete(client, **SAMPLED, n=2)
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert complete(client, **{**SAMPLED, "seed": None})["choices"] != answer["choices"][:1], "without a seed, another"


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
        eventually(lambda: len(server.api.worker.engine._jobs) == 6)
        for _ in range(200):
            places.release()
        thread.join()
    assert results == alone


def test_a_stream_adds_up_to_the_whole(client):
    for body in ({"prompt": "ab", "max_tokens": 12}, {**SAMPLED, "n": 2}):
        whole = complete(client, **body)
        status, pieces = client.stream(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
        assert status == 200
        for index, choice in enumerate(whole["choices"]):
            assert text_of(pieces, index) == choice["text"]
        assert pieces[-2]["usage"] == whole["usage"] and pieces[-2]["choices"] == []
        assert len(pieces) > 4
        assert len({piece["id"] for piece in pieces[:-1]}) == 1


def test_a_chat_is_what_the_model_replies(client, lm):
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    status, answer = client.post(CHAT, {"messages": messages, "max_completion_tokens": 5, "logprobs": True})
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": lm.chat(messages, max_length=5)}
    assert len(choice["logprobs"]["content"]) == answer["usage"]["completion_tokens"] == 5
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    status, pieces = client.stream(CHAT, {"messages": [messages[0], *parts], "max_tokens": 5})
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
    "bool": (COMPLETIONS, {"prompt": "a", "n": True}, "n", "invalid_value", "n: got True, expected a whole number"),
    "stream": (COMPLETIONS, {"prompt": "a", "stream": 1}, "stream", "invalid_value", "true or false"),
    "penalty": (COMPLETIONS, {"prompt": "a", "presence_penalty": 0.5}, "presence_penalty", "unsupported_parameter", "0"),
    "echo": (COMPLETIONS, {"prompt": "a", "echo": True}, "echo", "unsupported_parameter", "expected False"),
    "bias": (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias", "unsupported_parameter", "got {'5'"),
    "typo": (COMPLETIONS, {"prompt": "a", "temprature": 1}, "temprature", "unknown_parameter", "temperature"),
    "stops": (COMPLETIONS, {"prompt": "a", "stop": ["a"] * 5}, "stop", None, "got 5 strings, expected at most 4"),
    "empty": (COMPLETIONS, {"prompt": "a", "stop": ""}, "stop", "invalid_value", "texts that are not empty"),
    "never": (COMPLETIONS, {"prompt": "a", "n": 7}, "n", None, "got 7 outputs, expected at most 6"),
    "tools": (CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, "tools", "unsupported_parameter", ""),
    "role": (CHAT, {"messages": [{"role": "boss", "content": "a"}]}, None, None, "got role 'boss', expected one of"),
    "turns": (CHAT, {"messages": "hi"}, "messages", "invalid_value", "expected a list of turns"),
    "image": (CHAT, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages", "invalid_value", ""),
    "chat_long": (CHAT, {"messages": [{"role": "user", "content": "x" * 60}]}, "prompt", "context_length_exceeded", ""),
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
    neutral = {"user": "me", "echo": False, "best_of": 1, "presence_penalty": 0, "logit_bias": {}, "suffix": None}
    plain, other = complete(client, prompt="ab"), complete(client, prompt="ab", **neutral)
    assert other["choices"] == plain["choices"]


def test_other_requests_than_its_own_are_refused(client, server):
    assert client.post("/v1/nothing", {})[0] == 404
    assert client.post("/classify", {"text": "a"})[0] == 404
    assert client.post(COMPLETIONS, {"prompt": "a", "model": "gpt"})[1]["error"]["code"] == "model_not_found"
    assert client.post(COMPLETIONS, {"prompt": "x" * 5000})[0] == 413
    assert client.post(COMPLETIONS, b"{}", **{"Content-Type": "text/plain"})[0] == 400
    status, answer = client.post(COMPLETIONS, {"prompt": "a"}, Host="elsewhere.example")
    assert (status, answer["error"]["type"]) == (403, "permission_error")
    assert client.get("/health") == (200, {"status": "ok", "model": "bytes"})
    (entry,) = client.get("/v1/models")[1]["data"]
    assert (entry["id"], entry["routes"]) == ("bytes", [COMPLETIONS, CHAT])


def test_a_full_queue_refuses_and_says_when_to_come_again(client, server):
    with gate(server):
        results = []
        fill = [lambda: results.append(complete(client, prompt="ab")) for _ in range(6)]  # 4 rows and 2 that wait
        thread = threading.Thread(target=together, args=fill)
        thread.start()
        eventually(lambda: len(server.api.worker.engine._jobs) == 6)
        response = client.open("POST", COMPLETIONS, {"prompt": "ab"})
        error = json.loads(response.read())["error"]
        assert (response.status, error["code"], error["type"]) == (429, "queue_full", "rate_limit_error")
        assert int(response.getheader("Retry-After")) >= 1
    thread.join()
    assert len(results) == 6 and len({json.dumps(answer["choices"]) for answer in results}) == 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row(client, server, stream):
    body = json.dumps({"prompt": "ab", "max_tokens": 12, "stream": stream}).encode()
    with gate(server) as places, socket.create_connection(server.server_address) as connection:
        head = f"POST {COMPLETIONS} HTTP/1.0\r\nHost: localhost:{client.port}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        places.release()
        places.release()
        eventually(lambda: server.api.worker.active == 1)
        if stream:
            assert connection.recv(12) == b"HTTP/1.0 200"
        connection.close()
        places.release()
        eventually(lambda: server.api.worker.active == 0)
    eventually(lambda: f'requests_total{{route="{COMPLETIONS}",status="499"}}' in client.get("/metrics")[1])


def test_a_request_that_takes_too_long_ends(client, server, monkeypatch):
    monkeypatch.setattr(server.api, "limits", dataclasses.replace(LIMITS, request_timeout=0.3))
    with gate(server) as places:
        status, answer = client.post(COMPLETIONS, {"prompt": "ab"})
        assert (status, answer["error"]["type"], answer["error"]["code"]) == (504, "timeout_error", "timeout")
        places.release()
        eventually(lambda: server.api.worker.active == 0)
        places.release()
        places.release()
        status, pieces = client.stream(COMPLETIONS, {"prompt": "ab", "max_tokens": 12})
        assert status == 200 and pieces[0]["choices"]
        assert pieces[-1]["error"]["code"] == "timeout", "a stream that has begun ends with the error, and no [DONE]"


def test_an_error_while_decoding_ends_the_requests_and_not_the_server(client, server, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(server.api.worker.engine, "step", lambda: 1 / 0)
        status, answer = client.post(COMPLETIONS, {"prompt": "ab"})
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert complete(client, prompt="ab")


def test_metrics_count_requests_and_tokens(client):
    def read():
        rows = [line.rsplit(" ", 1) for line in client.get("/metrics")[1].splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in rows}

    before = read()
    complete(client, prompt="ab", max_tokens=4)
    after = read()
    changed = {name: after[name] - before.get(name, 0) for name in after}
    assert changed[f'jaxformer_requests_total{{route="{COMPLETIONS}",status="200"}}'] == 1
    assert changed["jaxformer_prompt_tokens_total"] == 3
    assert changed["jaxformer_completion_tokens_total"] == 4
    assert changed["jaxformer_first_token_seconds_count"] == 1
    assert changed['jaxformer_request_seconds_bucket{le="+Inf"}'] == changed["jaxformer_request_seconds_count"] >= 1
    assert after["jaxformer_active_requests"] == after["jaxformer_queue_requests"] == 0


def test_a_key_is_asked_for(lm):
    with serving.Server(lm, "bytes", limits=LIMITS, rows=4, key="secret") as running:
        client = Client(running)
        assert client.get("/health")[0] == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            status, answer = client.get("/v1/models", **headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            assert client.post(COMPLETIONS, {"prompt": "ab"}, **headers)[0] == 401
        assert client.get("/v1/models", Authorization="Bearer secret")[0] == 200


@pytest.mark.parametrize("ends", [True, False])
def test_a_stop_waits_for_streams_and_then_ends_them(lm, ends):
    running = serving.Server(lm, "bytes", limits=LIMITS, rows=4).start()
    client = Client(running)
    with gate(running) as places:
        places.release()
        places.release()
        response = client.open("POST", COMPLETIONS, {"prompt": "ab", "max_tokens": 12, "stream": True})
        stopping = threading.Thread(target=running.stop, args=(20.0 if ends else 0.2,))
        stopping.start()
        eventually(lambda: not running.api.worker.is_alive)
        eventually(lambda: _refuses(client))
        for _ in range(20 if ends else 0):
            places.release()
        text = response.read().decode()
        if ends:
            stopping.join()
    stopping.join()
    assert ("[DONE]" in text) is ends
    assert ('"code": "stopping"' in text) is not ends


def _refuses(client):
    try:
        client.get("/health")
    except OSError:
        return True
    return False
