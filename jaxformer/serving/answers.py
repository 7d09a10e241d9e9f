"""Answers in OpenAI's public schema: whole ones, and the pieces of a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from typing import Any

from jaxformer.serving.requests import Generation
from jaxformer.serving.running import Running


class Answer:
    """Writer of the outputs of one request.

    Attributes:
      request: the request.
      model: the model's name.
    """

    def __init__(self, request: Generation, running: Running, model: str) -> None:
        self.request, self.running, self.model = request, running, model
        self._id = ("chatcmpl-" if request.is_chat else "cmpl-") + uuid.uuid4().hex
        self._created = int(time.time())

    def whole(self) -> dict[str, Any]:
        """The answer, once all outputs have ended."""
        choices = []
        for index, choice in enumerate(self.running.choices):
            message = {"message": {"role": "assistant", "content": choice.text}}
            text = message if self.request.is_chat else {"text": choice.text}
            choices.append({"index": index, **text, "logprobs": None, "finish_reason": choice.reason})
        return {**self._head(""), "choices": choices, "usage": self._usage()}

    def opening(self) -> Iterator[dict[str, Any]]:
        """The first pieces of a stream: of a chat, whose role each output has."""
        if self.request.is_chat:
            for index in range(len(self.running.choices)):
                yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}})

    def piece(self, index: int, text: str) -> Iterator[dict[str, Any]]:
        """The pieces of a stream for a piece of an output's text, which may be its last."""
        if text:
            yield self._chunk(index, {"delta": {"content": text}} if self.request.is_chat else {"text": text})
        reason = self.running.choices[index].reason
        if reason is not None:
            yield self._chunk(index, {"delta": {}} if self.request.is_chat else {"text": ""}, reason)

    def closing(self) -> Iterator[dict[str, Any]]:
        """The last piece of a stream, if the request asks for the numbers of tokens."""
        if self.request.usage:
            yield {**self._head(".chunk"), "choices": [], "usage": self._usage()}

    def _chunk(self, index: int, content: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, **content, "logprobs": None, "finish_reason": reason}
        return {**self._head(".chunk"), "choices": [choice], **({"usage": None} if self.request.usage else {})}

    def _head(self, suffix: str) -> dict[str, Any]:
        kind = f"chat.completion{suffix}" if self.request.is_chat else "text_completion"
        return {"id": self._id, "object": kind, "created": self._created, "model": self.model}

    def _usage(self) -> dict[str, int]:
        read, written = self.running.prompt_tokens, self.running.completion_tokens
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def event(value: Any) -> bytes:
    """A value as a server-sent event."""
    text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
    return f"data: {text}\n\n".encode()


DONE = event("[DONE]")
"""The end of a stream that has not failed."""
