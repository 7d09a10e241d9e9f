"""A request whose outputs are being decoded: pieces of text as they come, until all have ended."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Generator

from jaxformer.decode.engine import Job, Piece
from jaxformer.serving import refusal
from jaxformer.serving.choice import Choice
from jaxformer.serving.worker import Ticket, Worker

POLL_SECONDS = 0.1
"""Seconds between two looks whether a client is still there."""


class ClientGone(Exception):
    """The client has left before the end of its answer."""


class Running:
    """A request whose outputs are being decoded, one for each prompt.

    Attributes:
      prompt_tokens: number of tokens of its prompts.
      choices: the outputs.
    """

    def __init__(self, worker: Worker, seconds: float) -> None:
        """Begins the time, after `seconds` of which the request is cancelled."""
        self.choices: list[Choice] = []
        self.prompt_tokens = 0
        self._worker, self._seconds = worker, seconds
        self._deadline = time.monotonic() + seconds
        self._looked = time.monotonic()
        self._events: queue.SimpleQueue[tuple[int, Piece]] = queue.SimpleQueue()
        self._jobs: list[Job] = []
        self._tickets: list[Ticket] = []

    def receiver(self) -> Callable[[Piece], None]:
        """The function that takes the pieces of the next choice."""
        index = len(self.choices)
        return lambda piece: self._events.put((index, piece))

    def add(self, choice: Choice, job: Job) -> None:
        """Adds an output."""
        self.choices.append(choice)
        self._jobs.append(job)
        self.prompt_tokens += len(job.prompt["target"])

    @property
    def completion_tokens(self) -> int:
        """Number of tokens of all outputs so far."""
        return sum(len(choice.tokens) for choice in self.choices)

    def submit(self) -> None:
        """Hands the outputs to the worker. Errors are those of `Worker.submit`."""
        self._tickets = self._worker.submit(self._jobs)

    def pieces(self, is_connected: Callable[[], bool]) -> Generator[tuple[int, str], None, None]:
        """Index of a choice and the next piece of its text, until all have ended. The last piece may be empty.

        If the iterator is closed, the rest is cancelled.

        Args:
          is_connected: says whether the client is still there.

        Raises:
          Refusal: the time is over, or the server stops.
          ClientGone: the client has left.
        """
        try:
            while any(choice.reason is None for choice in self.choices):
                index, piece = self._next(is_connected)
                choice = self.choices[index]
                if choice.reason is not None:  # a stop sequence has ended it before the worker heard of it
                    continue
                text = choice.add(piece)
                if choice.reason is not None and not piece.finished:
                    self._worker.cancel([self._tickets[index]])
                if text or choice.reason is not None:
                    yield index, text
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Frees the rows of outputs that have not ended."""
        unfinished = [t for t, choice in zip(self._tickets, self.choices, strict=True) if choice.reason is None]
        if unfinished:
            self._worker.cancel(unfinished)

    def _next(self, is_connected: Callable[[], bool]) -> tuple[int, Piece]:
        while True:
            now = time.monotonic()
            if now >= self._deadline:
                raise refusal.timed_out(self._seconds)
            if now >= self._looked + POLL_SECONDS:
                self._looked = now
                if not is_connected():
                    raise ClientGone
            try:
                index, piece = self._events.get(timeout=min(POLL_SECONDS, self._deadline - now))
            except queue.Empty:
                continue
            if piece.error is not None:
                raise piece.error
            return index, piece
