"""A page with questions that it may ask, served on this machine: what `jaxformer explore --serve` starts.

One question is answered at a time. See `runtime/local_server.py` for what a server refuses.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.runtime.local_server import LocalHandler, LocalServer, in_one_line

Answer = Callable[[Mapping[str, Any]], Any]
"""From a question, a JSON object, to a value that JSON can hold. A ConfigError is the client's fault."""


@dataclass(frozen=True)
class Site:
    """Contents of a server.

    Attributes:
      page: makes the page at "/".
      answers: by path, such as "/api/sentence".
    """

    page: Callable[[], str]
    answers: Mapping[str, Answer]


class Server(LocalServer):
    """A server of a site."""

    def __init__(self, site: Site, port: int) -> None:
        self.site, self.lock = site, threading.Lock()
        super().__init__(port, Handler)


class Handler(LocalHandler):
    """Answers the page and its questions."""

    server: Server  # ty: ignore[incompatible-mutable-override]

    def do_GET(self) -> None:
        """The page."""
        if not self.names_this_server():
            return
        if self.path.partition("?")[0] != "/":
            self.refuse(HTTPStatus.NOT_FOUND, "not found; the page is at /")
            return
        self.send_text(HTTPStatus.OK, "text/html", self.server.site.page())

    def do_POST(self) -> None:
        """The answer to a question."""
        if not self.names_this_server():
            return
        answer = self.server.site.answers.get(self.path)
        if answer is None:
            self.refuse(HTTPStatus.NOT_FOUND, f"not found; expected one of {', '.join(self.server.site.answers)}")
            return
        question = self.read_object()
        if question is None:
            return
        try:
            with self.server.lock:
                value = answer(question)
            self.send_text(HTTPStatus.OK, "application/json", json.dumps(value, allow_nan=False))
        except ConfigError as error:
            self.refuse(HTTPStatus.BAD_REQUEST, str(error))
        except Exception as error:  # the next question may be a better one
            print(f"warning: {in_one_line(error)}", file=sys.stderr)
            self.refuse(HTTPStatus.INTERNAL_SERVER_ERROR, in_one_line(error))


def serve(site: Site, port: int, what: str) -> int:
    """Serves until it is interrupted, and returns the exit code 0. Prints `what` and the address.

    Raises:
      ConfigError: the port is taken.
    """
    with Server(site, port) as server:
        return server.run(f"{what} at {server.url} (Ctrl-C ends it)")
