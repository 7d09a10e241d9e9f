"""HTTP servers for this machine, as pages and models have them, on the standard library's.

A server listens on the loopback address and answers requests that name it as their host, so that no page of a stranger
reaches it. Questions are JSON objects of bounded size. Errors are one line of JSON.
"""

from __future__ import annotations

import http.server
import json
import sys
import threading
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.runtime import secrets

ADDRESS = "127.0.0.1"
"""Nobody on another machine reaches a server at it."""
MAX_REQUEST_BYTES = 2**16
"""A longer question is refused unread."""
MAX_CONNECTIONS = 32
"""More connections at a time are closed at once."""
TIMEOUT_SECONDS = 30.0
"""A client that sends or takes nothing for so long is dropped."""


class LocalServer(http.server.ThreadingHTTPServer):
    """A server on the loopback address; `url` is the address of its page.

    Args:
      connections: most connections at a time; None: `MAX_CONNECTIONS`.

    Raises:
      ConfigError: the port is taken.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int, handler: type[LocalHandler], connections: int | None = None) -> None:
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS if connections is None else connections)
        try:
            super().__init__((ADDRESS, port), handler)
        except (OSError, OverflowError) as error:
            got = f"--port: got {port} ({getattr(error, 'strerror', None) or error})"
            raise ConfigError(f"{got}, expected a free port; give another, or 0 for any") from error

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{ADDRESS}:{self.server_address[1]}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handles a connection in a thread of its own, or closes it if there are too many."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handles a connection, and makes room for another."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says what went wrong in one line; that a client left or was too slow is nothing wrong."""
        error = sys.exc_info()[1]
        if not isinstance(error, (ConnectionError, TimeoutError)):
            print(f"warning: no answer ({in_one_line(error)})", file=sys.stderr)

    def run(self, line: str) -> int:
        """Prints a line, serves until it is interrupted, and returns the exit code 0."""
        print(line, flush=True)
        try:
            self.serve_forever()
        except KeyboardInterrupt:
            print(file=sys.stderr)
        return 0


class LocalHandler(http.server.BaseHTTPRequestHandler):
    """Sends answers that are not cached, and whose content type a browser does not guess."""

    server: LocalServer  # ty: ignore[incompatible-mutable-override]
    timeout = TIMEOUT_SECONDS
    max_request_bytes = MAX_REQUEST_BYTES
    server_version, sys_version = "jaxformer", ""

    def names_this_server(self) -> bool:
        """True if a request names this server as its host, and comes from its page or from none; else it is refused.

        A page of a stranger reaches this address, too, if a name server points the stranger's name at it. The request
        then names the stranger.
        """
        hosts = tuple(f"{name}:{self.server.server_address[1]}" for name in (ADDRESS, "localhost"))
        origin = self.headers.get("Origin")
        if self.headers.get("Host") in hosts and (origin is None or origin.removeprefix("http://") in hosts):
            return True
        self.refuse(HTTPStatus.FORBIDDEN, f"this address only: {self.server.url}")
        return False

    def refuse(self, status: HTTPStatus, line: str) -> None:
        """Sends an error as one line of JSON."""
        self.send_text(status, "application/json", json.dumps({"error": secrets.redact(" ".join(line.split()))}))

    def send_text(self, status: HTTPStatus, kind: str, text: str) -> None:
        """The whole answer: a text of a type such as "text/html"."""
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        for name, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def read_object(self) -> Mapping[str, Any] | None:
        """The JSON object of a request; None: it was refused."""
        size = self.headers.get("Content-Length", "")
        if not size.isdecimal() or not self.headers.get("Content-Type", "").startswith("application/json"):
            self.refuse(HTTPStatus.BAD_REQUEST, "got a request without its length and type, expected application/json")
            return None
        if int(size) > self.max_request_bytes:
            self.close_connection = True
            got = f"got {int(size):,} bytes, expected at most {self.max_request_bytes:,}"
            self.refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, got)
            return None
        try:
            question = json.loads(self.rfile.read(int(size)).decode("utf-8"))
        except (ValueError, RecursionError) as error:
            self.refuse(HTTPStatus.BAD_REQUEST, f"got no JSON ({in_one_line(error)}), expected an object")
            return None
        if not isinstance(question, dict):
            self.refuse(HTTPStatus.BAD_REQUEST, f"got a {type(question).__name__}, expected a JSON object")
            return None
        return question

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line for every request helps nobody, and errors are said elsewhere."""


def in_one_line(error: BaseException | None) -> str:
    """Kind and message of an error, without secrets."""
    return secrets.redact(f"{type(error).__name__}: {' '.join(str(error).split())}")
