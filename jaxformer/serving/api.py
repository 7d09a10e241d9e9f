"""The routes of a server without HTTP: requests in, results or pieces of text out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxformer import tasks
from jaxformer.data import chat
from jaxformer.decode.batching import Prompt
from jaxformer.decode.engine import Engine, PromptTooLong
from jaxformer.errors import ConfigError
from jaxformer.model import Model
from jaxformer.serving import refusal, requests
from jaxformer.serving.choice import Choice
from jaxformer.serving.limits import USUAL_MAX_PROMPT, Limits
from jaxformer.serving.refusal import Refusal
from jaxformer.serving.requests import Generation
from jaxformer.serving.running import POLL_SECONDS, ClientGone, Running
from jaxformer.serving.worker import Worker
from jaxformer.tasks import dialogue

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LINE_ROUTES = {
    "translate": "/v1/translate",
    "predict": "/v1/translate",
    "classify": "/v1/classify",
    "tag": "/v1/classify",
}
"""The route that answers lines, by the method of `jaxformer.Model` that a task predicts with."""
WARM_UP_TEXT = "a"


class Api:
    """The routes of one model.

    Attributes:
      name: the model's name in requests and answers.
      routes: the routes that take requests.
      worker: the thread that computes.
      created: when the model was loaded, in seconds of Unix time.
    """

    def __init__(self, model: Model, name: str, limits: Limits) -> None:
        """Prepares the model for its routes.

        Raises:
          ConfigError: the model neither generates text nor translates nor classifies, or it has no tokenizers.
        """
        self.name, self.limits, self.created = name, limits, int(time.time())
        task = tasks.fitting(model.config)
        method = "" if task is None else task.method
        generates = method in ("generate", "chat") and not model.config.model.is_seq2seq
        if not generates and method not in LINE_ROUTES:
            got = f"serve: got a run of the task {model.config.task.name}"
            raise ConfigError(f"{got}, expected one that generates, translates or classifies; use jaxformer decode")
        self.predictor = model.predictor
        self.config, self._task = self.predictor.config, task
        engine = None
        if generates:
            trained = self.predictor.framing.chat_length or USUAL_MAX_PROMPT
            longest = limits.max_prompt or min(trained, USUAL_MAX_PROMPT)
            sizes = limits.max_tokens, longest, limits.rows
            engine = Engine(self.predictor.runner, self.config.decode, *sizes)
        self.worker = Worker(engine, limits.max_queue)
        self.routes = self._routes(method) if generates else (LINE_ROUTES[method],)

    def _routes(self, method: str) -> tuple[str, ...]:
        """Completions of language models; chats of those that have a template to write conversations with."""
        has_template = self.predictor.framing.tokenizers.chat_template is not None
        writes_chats = method == "chat" or self.config.task.name in ("language_modelling", "none")
        completions = (COMPLETIONS,) if method == "generate" else ()
        return (*completions, *((CHAT,) if has_template and writes_chats else ()))

    def warm_up(self) -> str:
        """Compiles programs, so that the first requests do not wait; what was compiled, in words."""
        engine = self.worker.engine
        if engine is None:
            self._predict([WARM_UP_TEXT])
            return "a short line; others compile when they first come"
        if CHAT in self.routes:
            prompt = self._chat_prompt([{"role": "user", "content": WARM_UP_TEXT}], 1)
        else:
            prompt = self.predictor.framing.prompt(WARM_UP_TEXT)
        engine.warm_up(prompt)
        widths = ", ".join(map(str, engine.widths))
        return f"prompts of up to {widths} tokens, {engine.rows} rows, {engine.max_new} new tokens"

    def generation(self, path: str, body: Mapping[str, Any]) -> tuple[Generation, Running]:
        """A request of /v1/completions or /v1/chat/completions, and its outputs in progress.

        Raises:
          Refusal: a field is wrong, or the queue is full.
          ConfigError: the prompt does not fit the model.
        """
        engine = self.worker.engine
        if engine is None:
            raise TypeError(f"{path}: got a model without an engine, expected one that generates text")
        read = requests.chat if path == CHAT else requests.completion
        request = read(body, self.name, self.config.decode, self.limits)
        running = Running(self.worker, self.limits.request_timeout)
        most = engine.rows + self.limits.max_queue
        if len(request.prompts) > most:
            got = f"prompt: got {len(request.prompts)} prompts, expected at most {most} in one request"
            raise Refusal(got, param="prompt")
        if request.is_chat:
            prompts = [self._chat_prompt(request.messages, request.max_tokens or self.config.decode.max_length)]
        else:
            prompts = map(self._prompt, request.prompts)
        tokenizer, ends = self.predictor.framing.tokenizers.target, self.predictor.runner.vocabulary.eos
        for prompt in prompts:
            try:
                job = engine.job(prompt, request.sampling, request.max_tokens, running.receiver())
            except PromptTooLong as error:
                raise _too_long("messages" if request.is_chat else "prompt", str(error)) from error
            prompt_ids = [] if request.is_chat else job.prompt["target"].tolist()
            running.add(Choice(tokenizer, prompt_ids, ends, request.stops), job)
        running.submit()
        return request, running

    def _prompt(self, text: str) -> Prompt:
        """The prompt of a text; framing may have left tokens out."""
        prompt = self.predictor.framing.prompt(text)
        if "cut" in prompt:
            size = len(prompt["target"])
            raise _too_long("prompt", f"prompt: got {size + int(prompt['cut'])} tokens, expected at most {size}")
        return prompt

    def _chat_prompt(self, messages: Sequence[Mapping[str, Any]], max_new: int) -> Prompt:
        """The prompt of a chat. One whose oldest turns `jaxformer chat` would leave out is refused."""
        turns = chat.check_messages(list(messages), "messages", answered=False)
        prompt = dialogue.chat_prompt(self.predictor.framing.tokenizers, turns, None, dated=True).features
        size, limit = len(prompt["target"]), dialogue.prompt_limit(self.predictor.framing.chat_length, max_new)
        if limit is not None and size > limit:
            got = (
                f"messages: got {size} tokens and up to {max_new} new ones, expected at most {limit} tokens beside them"
            )
            raise _too_long("messages", f"{got}; leave out the oldest turns")
        return prompt

    def lines(self, body: Mapping[str, Any], is_connected: Callable[[], bool]) -> dict[str, Any]:
        """The answer of a route that answers lines: the task's result for each of them.

        Raises:
          Refusal: a field is wrong, a line is too long, the queue is full, or the time is over.
          ConfigError: the task refuses a line.
          ClientGone: the client has left.
        """
        found = requests.lines(body, self.name)
        for number, prompt in enumerate(self.predictor.prompts(found), 1):
            if "cut" in prompt:
                got = f"input: got text {number} with {int(prompt['cut'])} tokens more than the model reads"
                raise _too_long("input", f"{got}, expected fewer; shorten it")
        future = self.worker.call(self._predict, found)
        deadline = time.monotonic() + self.limits.request_timeout
        while not future.done():
            left = deadline - time.monotonic()
            if left <= 0:
                future.cancel()
                raise refusal.timed_out(self.limits.request_timeout)
            if not is_connected():
                future.cancel()
                raise ClientGone
            try:
                future.result(min(POLL_SECONDS, left))
            except TimeoutError:
                continue
        return {"object": "list", "model": self.name, "results": list(future.result())}

    def _predict(self, lines: Sequence[str]) -> Sequence[Any]:
        if self._task is None:
            raise TypeError("lines: got a model without a task, expected one that reads lines")
        return self._task.predict(self.predictor, lines, self.config.decode)


def _too_long(param: str, line: str) -> Refusal:
    return Refusal(line, param=param, code="context_length_exceeded")
