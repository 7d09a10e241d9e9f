"""What a server answers, without HTTP: requests in, results or pieces of text out."""

from __future__ import annotations

import dataclasses
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxformer import tasks
from jaxformer.config import DecodeConfig
from jaxformer.decode.batching import Prompt
from jaxformer.decode.engine import Engine, Job, Piece
from jaxformer.errors import ConfigError
from jaxformer.model import Model
from jaxformer.serving import refusal, requests
from jaxformer.serving.choice import Choice
from jaxformer.serving.counters import Counters
from jaxformer.serving.limits import Limits
from jaxformer.serving.refusal import Refusal
from jaxformer.serving.requests import Generation
from jaxformer.serving.worker import Ticket, Worker
from jaxformer.tasks import _embedding, _generation, dialogue

GENERATING = ("generate", "translate", "chat")
"""Methods of `jaxformer.Model` whose tasks write text token by token."""
SEARCHING = ("translate", "predict")
"""Methods of tasks that read a line and write one."""
EMBEDDING_HEADS = ("pooled", "pair", "none")
"""Heads of models that are for vectors of texts."""
POLL_SECONDS = 0.1
"""Seconds between two looks whether a client is still there."""


class ClientGone(Exception):
    """The client has left before the end of its answer."""


class Running:
    """A request whose outputs are being decoded.

    Attributes:
      prompt_tokens: number of tokens of its prompts.
      choices: the outputs, those of one prompt after the other.
    """

    def __init__(self, worker: Worker, seconds: float, counters: Counters) -> None:
        self.choices: list[Choice] = []
        self.prompt_tokens = 0
        self._worker, self._seconds, self._counters = worker, seconds, counters
        self._begun = time.monotonic()
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

    def submit(self) -> None:
        """Hands the outputs to the worker. Errors are those of `Worker.submit`."""
        self._tickets = self._worker.submit(self._jobs)

    def pieces(self, is_alive: Callable[[], bool]) -> Iterator[tuple[int, str]]:
        """Index of a choice and the next piece of its text, until all have ended. The last piece may be empty.

        If the iterator is closed, the rest is cancelled.

        Args:
          is_alive: says whether the client is still there.

        Raises:
          Refusal: the time is over, or the server stops.
          ClientGone: the client has left.
        """
        try:
            while any(choice.reason is None for choice in self.choices):
                index, piece = self._next(is_alive)
                choice = self.choices[index]
                if choice.reason is not None:  # a stop sequence has ended it before the worker heard of it
                    continue
                if not any(one.tokens for one in self.choices):
                    self._counters.first_token(time.monotonic() - self._begun)
                text = choice.add(piece)
                if choice.reason is not None and not piece.finished:
                    self._worker.cancel([self._tickets[index]])
                if text or choice.reason is not None:
                    yield index, text
        finally:
            unfinished = [t for t, choice in zip(self._tickets, self.choices, strict=True) if choice.reason is None]
            if unfinished:
                self._worker.cancel(unfinished)
            self._counters.tokens(self.prompt_tokens, self.completion_tokens)

    @property
    def completion_tokens(self) -> int:
        """Number of tokens of all outputs so far."""
        return sum(len(choice.tokens) for choice in self.choices)

    def _next(self, is_alive: Callable[[], bool]) -> tuple[int, Piece]:
        while True:
            left = self._begun + self._seconds - time.monotonic()
            if left <= 0:
                raise refusal.timed_out(self._seconds)
            try:
                index, piece = self._events.get(timeout=min(POLL_SECONDS, left))
            except queue.Empty:
                if not is_alive():
                    raise ClientGone from None
                continue
            if piece.error is not None:
                raise piece.error
            return index, piece


class Api:
    """The routes of one model.

    Attributes:
      name: the model's name in requests and answers.
      worker: the thread that computes.
      counters: numbers for /metrics.
    """

    def __init__(self, model: Model, name: str, limits: Limits, rows: int) -> None:
        """Prepares the model for its routes.

        Raises:
          ConfigError: the model reads no text, or has no tokenizers.
        """
        if model.config.model.series is not None:
            raise ConfigError("serve: got a model of series, expected one that reads text; use jaxformer decode")
        self.predictor, self.name, self.limits = model.predictor, name, limits
        self.config, self.decode = self.predictor.config, self.predictor.config.decode
        self.task = tasks.fitting(self.config)
        self.method = "embed" if self.task is None else self.task.method
        engine = None
        if self.method in GENERATING:
            engine = Engine(self.predictor.runner, self.decode, limits.max_tokens, rows)
        self.worker, self.counters = Worker(engine, limits.max_queue), Counters()
        self.created = int(time.time())

    @property
    def is_seq2seq(self) -> bool:
        """True if an encoder reads the input."""
        return self.config.model.is_seq2seq

    @property
    def routes(self) -> dict[str, str]:
        """The routes that take requests, with what each does."""
        found = {}
        if self.method in ("generate", "translate"):
            found["/v1/completions"] = "text that goes on from a prompt, or the output for it"
        if self.has_chat:
            found["/v1/chat/completions"] = "the reply in a chat"
        if self.method in SEARCHING:
            found["/translate"] = "the output for each line"
        elif self.task is not None and self.method not in GENERATING:
            found["/classify"] = f"the result of {self.config.task.name} for each line"
        if self.config.model.head.kind in EMBEDDING_HEADS or self.method == "nearest":
            found["/v1/embeddings"] = "a vector of each text"
        return found

    @property
    def has_chat(self) -> bool:
        """True if the model has a chat template to write conversations with."""
        has_template = self.predictor.framing.tokenizers.chat_template is not None
        return has_template and not self.is_seq2seq and self.method in ("generate", "chat")

    def generation(self, path: str, body: Mapping[str, Any]) -> tuple[Generation, Running]:
        """A request of /v1/completions or /v1/chat/completions, and its outputs in progress.

        Raises:
          Refusal: a field is wrong, or the queue is full.
          ConfigError: the prompt does not fit the model.
        """
        read = requests.chat if path == "/v1/chat/completions" else requests.completion
        request = read(body, self.name, self.decode, self.limits)
        self._check_search(request)
        running = Running(self.worker, self.limits.request_timeout, self.counters)
        options = dataclasses.replace(self.decode, max_length=self._max_new(request))
        prompts = [self._chat_prompt(request, options)] if request.is_chat else map(self._prompt, request.prompts)
        engine, tokenizer = self._engine, self.predictor.framing.tokenizers.target
        ends = self.predictor.runner.vocabulary.eos
        for prompt in prompts:
            side = prompt["source" if self.is_seq2seq else "target"]
            self._check_length(len(side))
            running.prompt_tokens += len(side)
            prompt_ids = [] if request.is_chat or self.is_seq2seq else list(map(int, prompt["target"]))
            for draw in range(request.n):
                sampling = request.sampling._replace(draw=draw)
                job = engine.job(prompt, sampling, options.max_length, running.receiver())
                running.add(Choice(tokenizer, prompt_ids, ends, request.stops), job)
        running.submit()
        return request, running

    @property
    def _engine(self) -> Engine:
        if self.worker.engine is None:
            raise Refusal(f"model: got a request to write text, expected one of {', '.join(self.routes)}")
        return self.worker.engine

    def _check_search(self, request: Generation) -> None:
        most = self._engine.max_rows + self.limits.max_queue
        count = request.n * max(len(request.prompts), 1)
        if count > most:
            raise Refusal(f"n: got {count} outputs, expected at most {most} of one request", param="n")
        if self.decode.method == "beam" and not request.is_sampling_given:
            got = "temperature: got none, and this run's decode.method is beam, which is known at the end only"
            raise Refusal(f"{got}; give temperature 0 for greedy search, or use /translate", param="temperature")

    def _max_new(self, request: Generation) -> int:
        return request.max_tokens or min(self.decode.max_length, self.limits.max_tokens)

    def _prompt(self, text: str) -> Prompt:
        """The prompt of a text."""
        if self.is_seq2seq and not text.strip():
            raise Refusal("prompt: got an empty text, expected one for the encoder to read", param="prompt")
        prompt = self.predictor.framing.prompt(text)
        if "cut" in prompt:
            raise _too_long(f"{int(prompt['cut'])} tokens more than the model reads", "a shorter one")
        return prompt

    def _chat_prompt(self, request: Generation, options: DecodeConfig) -> Prompt:
        """The prompt of a chat; its oldest turns are left out where it is too long."""
        prompt = dialogue.history_prompt(self.predictor, list(request.messages), options)
        if prompt.cropped:
            raise _too_long(f"a last turn with {prompt.cropped} tokens too many", "a shorter one")
        return prompt.features

    def _check_length(self, tokens: int) -> None:
        if tokens > self.limits.max_prompt:
            raise _too_long(f"{tokens} tokens", f"at most {self.limits.max_prompt}")

    # Routes that answer lines.

    def lines(self, path: str, body: Mapping[str, Any], is_alive: Callable[[], bool]) -> dict[str, Any]:
        """The answer of /translate or /classify: the task's result for each line, and how many were truncated.

        Raises:
          Refusal: a field is wrong, the queue is full, or the time is over.
          ConfigError: the task refuses a line.
        """
        task = self.task
        if task is None:
            raise Refusal(f"{path}: got a model without a task, expected one of {', '.join(self.routes)}")
        request = requests.task_lines(body, self.name, path == "/translate")
        decode = _generation.decode_options(self.config, None, request.options)
        results = self._results(
            (path, decode), lambda lines: task.predict(self.predictor, lines, decode), request.lines, is_alive
        )
        return {"object": "list", "model": self.name, "results": results, "truncated": self._truncated(request.lines)}

    def embeddings(self, body: Mapping[str, Any], is_alive: Callable[[], bool]) -> dict[str, Any]:
        """The answer of /v1/embeddings. Errors are those of `lines`."""
        request = requests.embedding(body, self.name)
        key = ("/v1/embeddings",)
        vectors = self._results(
            key, lambda lines: _embedding.embed(self.predictor, lines).tolist(), request.lines, is_alive
        )
        data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
        side = self.config.model.input_side
        tokens = sum(len(prompt[side]) for prompt in self.predictor.prompts(request.lines))
        self.counters.tokens(tokens, 0)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        truncated = self._truncated(request.lines)
        return {"object": "list", "model": self.name, "data": data, "usage": usage, "truncated": truncated}

    def _results(
        self,
        key: Any,
        function: Callable[[Sequence[str]], Sequence[Any]],
        lines: list[str],
        is_alive: Callable[[], bool],
    ) -> list[Any]:
        """A result for each line, from the worker."""
        future = self.worker.call(key, function, lines)
        deadline = time.monotonic() + self.limits.request_timeout
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                future.cancel()
                raise refusal.timed_out(self.limits.request_timeout)
            try:
                return list(future.result(min(POLL_SECONDS, left)))
            except TimeoutError:
                if future.done():  # the function's own
                    raise
            if not is_alive():
                future.cancel()
                raise ClientGone

    def _truncated(self, lines: Sequence[str]) -> int:
        return sum("cut" in prompt for prompt in self.predictor.prompts(lines))


def _too_long(got: str, expected: str) -> Refusal:
    return Refusal(f"prompt: got {got}, expected {expected}", param="prompt", code="context_length_exceeded")
