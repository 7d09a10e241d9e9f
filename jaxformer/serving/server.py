"""The HTTP side of serving: routes, errors as JSON, streams of events, and a stop that waits for the rest."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.model import Model
from jaxformer.runtime.local_server import LocalHandler, LocalServer, in_one_line
from jaxformer.serving import answers
from jaxformer.serving.answers import Answer
from jaxformer.serving.api import LINE_ROUTES, Api
from jaxformer.serving.limits import Limits
from jaxformer.serving.refusal import Refusal
from jaxformer.serving.running import ClientGone

SPARE_CONNECTIONS = 32
"""Connections beside those of requests that run or wait, for /health and refusals."""
MAX_DRAINED_BYTES = 2**26
"""A body that is too large is read to its end up to this size: a client that still sends would not see the refusal."""
GONE = (ClientGone, ConnectionError, TimeoutError)
"""Errors that say that nobody waits for the answer any more."""


class Server(LocalServer):
    """A model behind HTTP, on the loopback address. It answers from `start` on until `stop`; `with` does both.

        with Server(model, "name") as server:
            urllib.request.urlopen(server.url + "v1/models")

    Attributes:
      api: what it answers.
      limits: what it refuses.
    """

    request_queue_size = 128

    def __init__(self, model: Model, name: str, port: int = 0, limits: Limits | None = None) -> None:
        """Binds the port; 0: any that is free.

        Raises:
          ConfigError: the port is taken, or the model cannot be served.
        """
        self.limits = limits or Limits()
        self.api = Api(model, name, self.limits)
        self._open, self._idle = 0, threading.Condition()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), name="http", daemon=True)
        super().__init__(port, Handler, self.limits.rows + self.limits.max_queue + SPARE_CONNECTIONS)

    def start(self) -> Server:
        """Begins to answer, if it has not begun."""
        if self._thread.ident is None:
            self.api.worker.start()
            self._thread.start()
        return self

    def stop(self, seconds: float | None = None) -> None:
        """Refuses new requests (503), and returns when the others have ended, or were given up after so many seconds.

        Args:
          seconds: None: the time that a request may take.
        """
        deadline = time.monotonic() + (self.limits.request_timeout if seconds is None else seconds)
        if self._thread.is_alive():
            self.api.worker.stop(max(deadline - time.monotonic(), 0))
            with self._idle:  # the last bytes of answers: a moment more, if the time was over
                self._idle.wait_for(lambda: self._open == 0, max(deadline - time.monotonic(), 1.0))
            self.shutdown()
        self.server_close()

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
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


class Handler(LocalHandler):
    """One request."""

    server: Server  # ty: ignore[incompatible-mutable-override]

    @property
    def route(self) -> str:
        """The path without its query."""
        return self.path.partition("?")[0]

    def do_GET(self) -> None:
        """The server's state, and its model."""
        if not self.names_this_server():
            return
        api = self.server.api
        if self.route == "/health":
            is_alive = api.worker.is_alive
            state = {"status": "ok" if is_alive else "stopping", "model": api.name}
            status = HTTPStatus.OK if is_alive else HTTPStatus.SERVICE_UNAVAILABLE
            self._send({**state, "active": api.worker.active, "waiting": api.worker.waiting}, status)
        elif self.route == "/v1/models":
            entry = {"id": api.name, "object": "model", "created": api.created, "owned_by": "jaxformer"}
            self._send({"object": "list", "data": [entry]})
        else:
            self._refuse(self._not_found())

    def do_POST(self) -> None:
        """The routes of the model."""
        self.max_request_bytes = self.server.limits.max_body
        if not self.names_this_server():
            return
        if self.route not in self.server.api.routes:
            self._refuse(self._not_found())
            return
        try:
            body = self.read_object()
            if body is not None:
                self._answer(body)
        except GONE:
            return
        except Exception as error:  # the next request may be a better one
            self._refuse(_refusal_of(error))

    def _answer(self, body: Mapping[str, Any]) -> None:
        """The answer to a request with a body."""
        api = self.server.api
        if self.route in LINE_ROUTES.values():
            self._send(api.lines(body, self._is_connected))
            return
        request, running = api.generation(self.route, body)
        answer, pieces = Answer(request, running, api.name), running.pieces(self._is_connected)
        with contextlib.closing(pieces):
            if request.stream:
                self._stream(answer, pieces)
                return
            for _ in pieces:
                pass
        self._send(answer.whole())

    def _stream(self, answer: Answer, pieces: Iterator[tuple[int, str]]) -> None:
        """Sends pieces as events. What goes wrong before the first is an answer of its own; later, the last event."""
        first = next(pieces)
        self.send_response(HTTPStatus.OK)
        for name, value in (
            ("Content-Type", "text/event-stream; charset=utf-8"),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.send_header(name, value)
        self.end_headers()
        try:
            self._events(answer.opening())
            self._events(answer.piece(*first))
            for index, text in pieces:
                self._events(answer.piece(index, text))
            self._events(answer.closing())
            self.wfile.write(answers.DONE)
        except GONE:
            return
        except Exception as error:
            with contextlib.suppress(OSError):
                self._events([_refusal_of(error).body()])

    def _events(self, values: Iterable[Any]) -> None:
        for value in values:
            self.wfile.write(answers.event(value))

    def _not_found(self) -> Refusal:
        known = [f"POST {route}" for route in self.server.api.routes]
        expected = ", ".join(["GET /health", "GET /v1/models", *known])
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

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Sends an error that the standard library has found in a request."""
        self.refuse(HTTPStatus(code), message or HTTPStatus(code).phrase)

    def _refuse(self, error: Refusal) -> None:
        if error.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            self._drain()
        self._send(error.body(), error.status)

    def _drain(self) -> None:
        left = min(int(self.headers["Content-Length"]), MAX_DRAINED_BYTES)
        while left > 0 and (piece := self.rfile.read(min(left, 2**16))):
            left -= len(piece)

    def _send(self, value: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        with contextlib.suppress(ConnectionError):
            self.send_text(status, "application/json", json.dumps(value, allow_nan=False))


def _refusal_of(error: Exception) -> Refusal:
    """The refusal that a client gets for an error. One that is not the client's fault goes to stderr, too."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, ConfigError):
        return Refusal(str(error))
    print(f"warning: {in_one_line(error)}", file=sys.stderr)
    return Refusal(in_one_line(error), HTTPStatus.INTERNAL_SERVER_ERROR)
