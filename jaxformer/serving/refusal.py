"""Refusals of requests, as OpenAI's interface writes them."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from jaxformer.runtime import secrets

TYPES = {
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.INTERNAL_SERVER_ERROR: "server_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "server_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}
"""Types of errors by status; others are "invalid_request_error"."""


class Refusal(Exception):
    """A request that is not answered.

    Attributes:
      status: HTTP status.
      param: the field that is wrong, or None.
      code: a short name of the reason, or None.
    """

    def __init__(
        self,
        message: str,
        status: HTTPStatus = HTTPStatus.BAD_REQUEST,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(secrets.redact(" ".join(message.split())))
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def queue_full(waiting: int) -> Refusal:
    """The refusal of a request for which the queue has no place."""
    return Refusal(
        f"queue: got a request while {waiting} wait, expected fewer; try again later",
        HTTPStatus.TOO_MANY_REQUESTS,
        code="queue_full",
    )


def stopping() -> Refusal:
    """The refusal of a request to a server that stops."""
    return Refusal(
        "server: stopping, got a request that has not ended", HTTPStatus.SERVICE_UNAVAILABLE, code="stopping"
    )


def timed_out(seconds: float) -> Refusal:
    """The refusal of a request that takes too long."""
    got = f"request: got no end within {seconds:g} seconds, expected one"
    return Refusal(f"{got}; ask for fewer tokens", HTTPStatus.GATEWAY_TIMEOUT, code="timeout")
