"""The HTTP side of serving: routes, keys, errors as JSON, streams of events, and a stop that waits for the rest."""

from __future__ import annotations

import contextlib
import hmac
import json
import select
import socket
import sys
import threading
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.model import Model
from jaxformer.runtime.local_server import ADDRESS, LocalHandler, LocalServer, in_one_line
from jaxformer.serving import answers
from jaxformer.serving.answers import Answer
from jaxformer.serving.api import Api, ClientGone
from jaxformer.serving.limits import Limits
from jaxformer.serving.refusal import Refusal

LEFT = 499
"""Status in /metrics of a request whose client has left."""
MAX_RETRY_SECONDS = 30
SPARE_CONNECTIONS = 16
"""Connections beside those of requests that run or wait, for /health and refusals."""


class Server(LocalServer):
    """A model behind HTTP. It answers from `start` on until `stop`; as a context manager it does both.

        with Server(model, "name", port=0) as server:
            urllib.request.urlopen(server.url + "v1/models")

    Attributes:
      api: what it answers.
      limits: what it refuses.
    """

    request_queue_size = 128

    def __init__(
        self,
        model: Model,
        name: str,
        port: int = 0,
        limits: Limits | None = None,
        rows: int | None = None,
        address: str = ADDRESS,
        key: str | None = None,
    ) -> None:
        """Binds the port; 0: any that is free.

        Args:
          rows: outputs that are decoded together; None: as the run's `decode.batch`.
          address: 127.0.0.1, or one that other machines reach.
          key: requests need the header "Authorization: Bearer KEY"; None: they need none.

        Raises:
          ConfigError: the port is taken, or the model cannot be served.
        """
        self.limits = limits or Limits()
        rows = model.config.decode.batch if rows is None else rows
        self.api, self._key = Api(model, name, self.limits, rows), key
        self._open, self._idle = 0, threading.Condition()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), name="http", daemon=True)
        super().__init__(port, Handler, address, rows + self.limits.max_queue + SPARE_CONNECTIONS)

    def start(self) -> Server:
        """Begins to answer, if it has not begun."""
        if self._thread.ident is None:
            self.api.worker.start()
            self._thread.start()
        return self

    def stop(self, seconds: float | None = None) -> None:
        """Takes no new requests, and returns when the running ones have ended, or were ended after so many seconds.

        Args:
          seconds: None: as `limits.grace`.
        """
        deadline = time.monotonic() + (self.limits.grace if seconds is None else seconds)
        if self._thread.is_alive():
            self.shutdown()
        self.server_close()
        self.api.worker.stop(max(deadline - time.monotonic(), 0))
        with self._idle:  # the last bytes of answers: a moment more, if the time was over
            self._idle.wait_for(lambda: self._open == 0, max(deadline - time.monotonic(), 1.0))

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handles a connection, and counts it while it is open."""
        with self._idle:
            self._open += 1
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._idle:
                self._open -= 1
                self._idle.notify_all()

    def accepts_key(self, header: str | None) -> bool:
        """True if the header has the server's key, or it needs none."""
        expected = f"Bearer {self._key}".encode()
        return self._key is None or hmac.compare_digest((header or "").encode("utf-8", "replace"), expected)


class Handler(LocalHandler):
    """Answers one request."""

    server: Server  # ty: ignore[incompatible-mutable-override]

    def do_GET(self) -> None:
        """/health, /v1/models, /metrics."""
        self._begin()
        if not self._is_allowed():
            return
        api = self.server.api
        if self.route == "/health":
            is_alive = api.worker.is_alive
            status = HTTPStatus.OK if is_alive else HTTPStatus.SERVICE_UNAVAILABLE
            self._send({"status": "ok" if is_alive else "stopping", "model": api.name}, status)
        elif self.route == "/v1/models":
            entry = {"id": api.name, "object": "model", "created": api.created, "owned_by": "jaxformer"}
            self._send({"object": "list", "data": [{**entry, "routes": list(api.routes)}]})
        elif self.route == "/metrics":
            gauges = {"queue_requests": api.worker.waiting, "active_requests": api.worker.active}
            self.send_text(HTTPStatus.OK, "text/plain; version=0.0.4", api.counters.text(gauges))
        else:
            self._refuse(self._not_found())

    def do_POST(self) -> None:
        """The routes of the model."""
        self._begin()
        if not self._is_allowed():
            return
        if self.route not in self.server.api.routes:
            self._refuse(self._not_found())
            return
        body = self.read_object()
        if body is None:
            return
        try:
            self._answer(body)
        except (ClientGone, ConnectionError, TimeoutError):
            self._count(LEFT)
        except Exception as error:  # the next request may be a better one
            self._refuse(_refusal_of(error))

    def _answer(self, body: Mapping[str, Any]) -> None:
        """The answer to a request with a body."""
        api = self.server.api
        if self.route == "/v1/embeddings":
            self._send(api.embeddings(body, self._is_connected))
        elif self.route in ("/translate", "/classify"):
            self._send(api.lines(self.route, body, self._is_connected))
        else:
            request, running = api.generation(self.route, body)
            answer, pieces = Answer(request, running, api.name), running.pieces(self._is_connected)
            if request.stream:
                self._stream(answer, pieces)
                return
            for _ in pieces:
                pass
            self._send(answer.whole())

    def _stream(self, answer: Answer, pieces: Any) -> None:
        """Sends pieces as events. What goes wrong before the first is an answer of its own; later, the last event."""
        first = next(pieces, None)
        self.send_response(HTTPStatus.OK)
        for name, value in (("Content-Type", "text/event-stream; charset=utf-8"), ("Cache-Control", "no-store")):
            self.send_header(name, value)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        status = int(HTTPStatus.OK)
        try:
            self._events(answer.opening())
            if first is not None:
                self._events(answer.piece(*first))
            for index, text in pieces:
                self._events(answer.piece(index, text))
            self._events(answer.closing())
            self.wfile.write(answers.DONE)
        except (ClientGone, ConnectionError, TimeoutError):
            status = LEFT
        except Exception as error:
            status = self._last_event(error)
        finally:
            pieces.close()
            self._count(status)

    def _last_event(self, error: Exception) -> int:
        """Ends a stream with an error; its status."""
        shown = _refusal_of(error)
        with contextlib.suppress(OSError):
            self._events([shown.body()])
        return int(shown.status)

    def _events(self, values: Any) -> None:
        for value in values:
            self.wfile.write(answers.event(value))

    # What every request goes through.

    def _begin(self) -> None:
        self.begun, self.route = time.monotonic(), self.path.partition("?")[0]
        self.max_request_bytes = self.server.limits.max_body

    def _is_allowed(self) -> bool:
        """True if the request names this server and has its key; else it is refused."""
        if self.server.address == ADDRESS and not self.names_this_server():
            return False
        if self.route == "/health" or self.server.accepts_key(self.headers.get("Authorization")):
            return True
        got = "Authorization: got no valid key, expected the server's; send the header Authorization: Bearer KEY"
        self._refuse(Refusal(got, HTTPStatus.UNAUTHORIZED, code="invalid_api_key"))
        return False

    def _not_found(self) -> Refusal:
        known = [f"POST {route}" for route in self.server.api.routes]
        expected = ", ".join(["GET /health", "GET /v1/models", "GET /metrics", *known])
        got = f"{self.command} {self.route[:100]}"
        return Refusal(f"{got}: not a route of this model, expected one of {expected}", HTTPStatus.NOT_FOUND)

    def _is_connected(self) -> bool:
        """False if the client has closed its side: it waits for nothing."""
        try:
            readable = select.select([self.connection], [], [], 0)[0]
            return not readable or self.connection.recv(1, socket.MSG_PEEK) != b""
        except (OSError, ValueError):
            return False

    def refuse(self, status: HTTPStatus, line: str) -> None:
        """Sends an error as one line of JSON."""
        self._refuse(Refusal(line, status))

    def _refuse(self, error: Refusal) -> None:
        self.retry = min(1 + self.server.api.worker.waiting // 8, MAX_RETRY_SECONDS)
        self._send(error.body(), error.status)

    def end_headers(self) -> None:
        """Ends the headers; those of a refusal for lack of room say when to come again."""
        if self.status == HTTPStatus.TOO_MANY_REQUESTS:
            self.send_header("Retry-After", str(self.retry))
        super().end_headers()

    def send_response(self, code: int, message: str | None = None) -> None:
        """Begins an answer."""
        self.status = code
        super().send_response(code, message)

    def _send(self, value: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        text = json.dumps(value, allow_nan=False)
        try:
            self.send_text(status, "application/json", text)
        finally:
            self._count(int(status))

    def _count(self, status: int) -> None:
        known = {*self.server.api.routes, "/health", "/v1/models"}
        route = self.route if self.route in known else "other"
        self.server.api.counters.request(route, status, time.monotonic() - self.begun)


def _refusal_of(error: Exception) -> Refusal:
    """What the client hears of an error. One that is not the client's fault is said on stderr, too."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, ConfigError):
        return Refusal(str(error))
    print(f"warning: {in_one_line(error)}", file=sys.stderr)
    return Refusal(in_one_line(error), HTTPStatus.INTERNAL_SERVER_ERROR)
