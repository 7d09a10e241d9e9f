"""Limits of a server on the number of requests, their length and their time."""

from __future__ import annotations

from dataclasses import dataclass

from jaxformer.errors import ConfigError

MAX_LINES = 256
"""Lines of one request to a route that answers lines, and prompts of one request for completions."""
USUAL_MAX_PROMPT = 1024
"""Tokens of a prompt, where neither the flag nor the model's length says fewer."""


@dataclass(frozen=True)
class Limits:
    """Limits of a server.

    Attributes:
      rows: outputs that are decoded together.
      max_queue: outputs that wait for a row; further requests are refused (429).
      max_tokens: new tokens of one output.
      max_prompt: tokens of one prompt; None: as many as the model was trained with, up to `USUAL_MAX_PROMPT`.
      request_timeout: seconds that a request may take; what is not done then is given up (504).
      max_body: bytes of a request (413).
    """

    rows: int = 8
    max_queue: int = 64
    max_tokens: int = 256
    max_prompt: int | None = None
    request_timeout: float = 60.0
    max_body: int = 2**20

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("max_queue", 0), ("max_tokens", 1), ("max_prompt", 1), ("max_body", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"--{name.replace('_', '-')}: got {value}, expected at least {least}")
        if not self.request_timeout > 0:
            raise ConfigError(f"--request-timeout: got {self.request_timeout}, expected seconds above 0")
